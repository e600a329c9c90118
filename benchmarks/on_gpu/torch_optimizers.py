"""Measures optimizer steps in torch, with and without its gradient scaler."""

from shared import clock
import torch

from on_gpu import devices
from on_gpu.findings import Findings, share_time, Table
from on_gpu.torch_device import DEVICE, TorchProgram

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 1e-4, 1.0
# By title: whether there are many leaves, and whether the gradients are
# clipped, as with AdamW.
CASES = {
  "Adam": (False, False),
  "AdamW, clipped": (False, True),
  "Adam, many leaves": (True, False),
  "AdamW, clipped, many leaves": (True, True),
}
VARIANTS = ("fused", "fused, GradScaler", "foreach", "foreach, GradScaler")
# The bytes that a step moves, counted by hand for each parameter: parameter,
# gradient and two moments are read, three of them are written. `unscale_` and
# the multiplication of a clip read and write the gradients, a norm reads them.
# The scaler's `step` alone makes it test them by the same kernel as `unscale_`.
# Not fused, the optimizer takes many kernels.
EXPECTED_BYTES = {
  "fused": 28,
  "fused, GradScaler": 28 + 8,
  "fused, clipped": 28 + 4 + 8,
  "fused, GradScaler, clipped": 28 + 8 + 4 + 8,
}


class Optimizer(TorchProgram):
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


class Copy(TorchProgram):
  """Adds one to numbers, in place."""

  def __init__(self, numbers: int):
    self.row = {"bytes": 8 * numbers}
    self._x = torch.ones(numbers, device=DEVICE)

  def step(self, skip):
    self._x.add_(1)


def run(what, size, until: float, findings: Findings, without=()) -> None:
  """Measure each case, and report a table of it."""
  copy = devices.measure_copy(Copy(size.copied), "torch", findings)
  for name, case, case_until in share_time(CASES, until):
    table = Table(findings, "optimizer", f"{name}, torch")
    _run_case(table, *case, size, case_until, copy)
    if DEVICE == "cuda":
      torch.cuda.empty_cache()


def _run_case(table, many, clipped, size, until, copy):
  shapes = [size.small] * size.small_leaves if many else [size.large] * 4
  generator = torch.Generator(DEVICE).manual_seed(0)
  draw = lambda shape: (
    1e-2 * torch.randn(shape, device=DEVICE, generator=generator)
  )
  grads, params = ([draw(shape) for shape in shapes] for _ in range(2))
  steps = size.steps_in_a_row

  def make_program(row):
    program = Optimizer(row, params, grads, clipped=clipped)
    clock.take_first_steps(program, steps + 1)
    return program

  rows = [
    {
      "variant": variant,
      "leaves": len(shapes) if many else None,
      "parameters": sum(p.numel() for p in params),
      "copy": copy,
      "expected_bytes": EXPECTED_BYTES.get(
        f"{variant}, clipped" if clipped else variant
      ),
    }
    for variant in VARIANTS
  ]
  programs = table.measure_each(rows, make_program, lambda row: until)
  table.take_turns(programs, size, steps, until)
