"""Measures optimizer steps in torch, with and without its gradient scaler."""

import time

from shared import clock
import torch

from on_gpu import bandwidth, events, expected_bytes, torch_device
from on_gpu.rows import Rows
from on_gpu.torch_device import DEVICE

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 1e-4, 1.0
# Title: (many leaves, clipped). Those that are clipped are AdamW.
CASES = {
  "Adam": (False, False),
  "AdamW, clipped": (False, True),
  "Adam, many leaves": (True, False),
  "AdamW, clipped, many leaves": (True, True),
}
VARIANTS = ("fused", "fused, GradScaler", "foreach", "foreach, GradScaler")


class Optimizer:
  """An optimizer with its own parameters, and fixed gradients."""

  def __init__(self, row, params, grads, *, clipped):
    implementation = row["variant"].split(",")[0]
    self.row = row
    self.skips = "GradScaler" in row["variant"]
    self._params = [p.clone() for p in params]
    self._grads, self._clipped = grads, clipped
    # A copy for each variant, since `unscale_` and the clip work in place.
    self._own = [torch.empty_like(g) for g in grads]
    make = torch.optim.AdamW if clipped else torch.optim.Adam
    options = {"weight_decay": WEIGHT_DECAY} if clipped else {}
    self._optimizer = make(
      self._params, LEARNING_RATE, **{implementation: True}, **options
    )
    self._scaler = None
    if self.skips:
      self._scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**15)
      self._scaler.scale(torch.zeros((), device=DEVICE))  # It is made here.

  def prepare(self, skip):
    torch._foreach_copy_(self._own, self._grads)
    if skip:
      self._own[-1].flatten()[0] = float("inf")
    for param, grad in zip(self._params, self._own, strict=True):
      param.grad = grad

  def step(self, skip):
    optimizer, scaler = self._optimizer, self._scaler
    if scaler and self._clipped:
      scaler.unscale_(optimizer)
    if self._clipped:
      torch.nn.utils.clip_grad_norm_(self._params, MAX_NORM)
    if scaler:
      scaler.step(optimizer)
      scaler.update()
    else:
      optimizer.step()

  def wait(self):
    torch_device.wait()


def run(what, size, until: float, without=(), finished=None) -> None:
  """Measure each case, and report a table of it."""
  copy = bandwidth.measure(torch_device.Copy(size.copied), "torch")
  for i, (name, (many, clipped)) in enumerate(CASES.items()):
    now = time.time()
    share = (until - now) / (len(CASES) - i)
    if share < 1:
      events.line(f"Left out, since no time is left: {name} in torch")
      continue
    table = Rows("optimizer", f"{name}, torch", finished)
    _run_case(table, many, clipped, size, now + share, copy)
    if DEVICE == "cuda":
      torch.cuda.empty_cache()


def _run_case(table, many, clipped, size, until, copy):
  shapes = [size.small] * size.small_leaves if many else [size.large] * 4
  generator = torch.Generator(DEVICE).manual_seed(0)
  draw = lambda shape: (
    1e-2 * torch.randn(shape, device=DEVICE, generator=generator)
  )
  grads, params = ([draw(shape) for shape in shapes] for _ in range(2))

  def make_program(row):
    program = Optimizer(row, params, grads, clipped=clipped)
    clock.take_first_steps(program, size.steps_in_a_row + 1)
    return program

  rows = [
    {
      "variant": variant,
      "leaves": len(shapes) if many else None,
      "parameters": sum(p.numel() for p in params),
      "copy": copy,
      "expected_bytes": expected_bytes.TORCH.get(
        f"{variant}, clipped" if clipped else variant
      ),
    }
    for variant in VARIANTS
  ]
  programs = table.measure_each(rows, make_program, begin_until=until)
  clock.measure(
    programs, rounds=size.rounds, steps=size.steps_in_a_row, until=until
  )
  table.tell(complete=True)
