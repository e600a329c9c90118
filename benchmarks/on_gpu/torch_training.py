"""Training steps in torch, by its own autocast and gradient scaler."""

import contextlib
import math
import time

from shared import clock, weights
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from on_gpu.findings import Findings, Table
from on_gpu.torch_device import DEVICE, TorchProgram

# Precision: (the dtype of autocast, whether float32 matmuls use TF32, scaled).
PRECISIONS = {
  "TF32": (None, True, False),
  "float16, autocast, GradScaler": (torch.float16, True, True),
  "bfloat16, autocast": (torch.bfloat16, True, False),
  "float32, highest": (None, False, False),
}
# Precision, and whether compiled. Compilation may take a minute, so the rows
# without it are first.
ROWS = [
  *((name, False) for name in PRECISIONS),
  ("float16, autocast, GradScaler", True),
  ("TF32", True),
  ("bfloat16, autocast", True),
  ("float32, highest", True),
]


class Training(TorchProgram):
  """A model in training, by AdamW."""

  def __init__(self, row, loss_fn, params, batches):
    self.row = row
    self._held, _ = _memory(reset=True)
    self._batches, self._taken = batches, 0
    dtype, self._tf32, scaled = PRECISIONS[row["variant"]]
    self._cast = contextlib.nullcontext
    if dtype is not None:
      self._cast = lambda: torch.autocast(DEVICE, dtype)
    self._params = pytree.tree_map(_make_trainable, params)
    self._optimizer = torch.optim.AdamW(
      pytree.tree_leaves(self._params),
      weights.LEARNING_RATE,
      weight_decay=weights.WEIGHT_DECAY,
      fused=True,
    )
    self._scaler = torch.amp.GradScaler(
      DEVICE, init_scale=2.0**15, enabled=scaled
    )
    self._loss_fn = loss_fn
    if row["compiled"]:
      # Inductor needs a compiler for C++ on a CPU, and much time.
      backend = "inductor" if DEVICE == "cuda" else "aot_eager"
      self._loss_fn = torch.compile(loss_fn, backend=backend)

  def prepare(self, skip):
    torch.set_float32_matmul_precision("high" if self._tf32 else "highest")

  def step(self, skip):
    batch = self._batches[self._taken % len(self._batches)]
    self._taken += 1
    with self._cast():
      self.loss = self._loss_fn(self._params, batch)
    self._scaler.scale(self.loss).backward()
    self._scaler.step(self._optimizer)
    self._scaler.update()
    self._optimizer.zero_grad(set_to_none=True)

  def begin(self, steps: int) -> None:
    """Take the first steps, and record time, loss, skipped steps and memory."""
    init_scale = self._scaler.get_scale()
    self.row["compile_seconds"] = clock.take_first_steps(self, steps)
    self.row |= {"loss": float(self.loss.detach()), "steps": steps}
    if self._scaler.is_enabled():
      # Each skipped step halves the scale, and it grows after 2,000 steps.
      halvings = math.log2(init_scale / self._scaler.get_scale())
      self.row["skipped"] = round(halvings)
    if DEVICE == "cuda":
      self.row["peak_bytes"] = _memory()[1] - self._held


def run(name: str, size, until: float, findings: Findings, without=()) -> None:
  """Measure the transformer in as many rows as there is time for."""
  loss_fn = transformer_loss(size.heads)
  params = weights.transformer(size)
  batches = [
    {key: torch.tensor(x, device=DEVICE).long() for key, x in batch.items()}
    for batch in weights.token_batches(size)
  ]
  table = Table(findings, "training", f"{name}, torch")
  now = time.time()
  eager_until = now + 0.3 * (until - now)
  compiled_until = now + 0.8 * (until - now)

  def make_program(row):
    program = Training(row, loss_fn, params, batches)
    program.begin(size.first_steps)
    return program

  programs = table.measure_each(
    [
      {"variant": precision, "compiled": compiled}
      for precision, compiled in ROWS[: size.rows and size.rows + 1]
    ],
    make_program,
    lambda row: compiled_until if row["compiled"] else eager_until,
  )
  table.take_turns(programs, size, 2, until)


def transformer_loss(heads: int):
  """The loss of the transformer of `models`, in float32 for autocast."""

  def loss_fn(params, batch):
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


def _memory(reset=False):
  """Bytes that are held now, and the most since the last reset."""
  if DEVICE != "cuda":
    return 0, 0
  if reset:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
  return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def _make_trainable(value):
  return torch.tensor(value, device=DEVICE).requires_grad_()
