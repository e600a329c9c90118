"""The transformer of ``models`` in torch.

It is float32, for ``torch.autocast``. Attention is written out, as there.
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
