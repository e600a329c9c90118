"""The same transformer and residual network as in ``models``, in torch.

They are float32, for ``torch.autocast``. Attention is written out, as there.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


def transformer_loss(heads: int):
  """The loss of the transformer, of unstacked weights."""

  def loss_fn(params: Any, batch: Any):
    tokens = batch["inputs"]
    x = params["embedding"][tokens] + params["positions"]
    for layer in params["layers"]:
      x = x + _attention(_rms_norm(x, layer["norms"][0]), layer, heads)
      hidden = _rms_norm(x, layer["norms"][1]) @ layer["up"]
      x = x + F.gelu(hidden, approximate="tanh") @ layer["down"]
    logits = _rms_norm(x, params["norm"]) @ params["embedding"].T
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), labels)

  return loss_fn


def resnet_loss(strides: list[int]):
  """The loss of the residual network; images are in torch's own layout."""

  def loss_fn(params: Any, batch: Any):
    x = _same_padding(batch["inputs"], 7, 2)
    x = F.relu(_conv(x, params["stem"], 2, padded=True))
    low = torch.finfo(x.dtype).min
    x = F.max_pool2d(_same_padding(x, 3, 2, low), 3, 2)
    for block, stride in zip(params["blocks"], strides, strict=True):
      y = F.relu(_conv(x, block["reduce"]))
      y = F.relu(_conv(y, block["middle"], stride))
      y = _conv(y, block["expand"])
      if "shortcut" in block:
        x = _conv(x, block["shortcut"], stride)
      x = F.relu(x + y)
    x = x.float().mean((2, 3))
    return F.cross_entropy((x @ params["head"]).float(), batch["labels"])

  return loss_fn


def _attention(x, layer, heads):
  batch, length, width = x.shape
  qkv = (x @ layer["qkv"]).view(batch, length, 3, heads, -1)
  q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
  scores = (q @ k.transpose(-1, -2)).float() * (width // heads) ** -0.5
  seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
  share = scores.masked_fill(~seen, -1e9).softmax(-1)
  y = (share @ v).transpose(1, 2).reshape(batch, length, width)
  return y @ layer["out"]


def _rms_norm(x, gain):
  return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def _conv(x, weights, stride=1, padded=False):
  kernel = weights["kernel"]
  if not padded:
    x = _same_padding(x, kernel.shape[-1], stride)
  y = F.conv2d(x, kernel, stride=stride)
  return F.batch_norm(
    y, None, None, weights["gain"], weights["bias"], training=True
  )


def _same_padding(x, kernel, stride, value=0.0):
  """As XLA's "SAME" pads: more at the end, if it is an odd number."""
  lengths = []
  for n in reversed(x.shape[2:]):
    total = max(0, (-(-n // stride) - 1) * stride + kernel - n)
    lengths += [total // 2, total - total // 2]
  return F.pad(x, lengths, value=value) if any(lengths) else x
