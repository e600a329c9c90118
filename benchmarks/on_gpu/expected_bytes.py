"""The bytes that the compiler for H100 counts on, by compile_costs.json."""

import functools
import json
import pathlib

FILE = pathlib.Path(__file__).parents[1] / "compilers" / "compile_costs.json"
# The bytes that a step of torch moves, counted by hand for each parameter:
# parameter, gradient and two moments are read, three of them are written.
# `unscale_` and the multiplication of a clip read and write the gradients, a
# norm reads them. The scaler's `step` alone makes it test them by the same
# kernel as `unscale_`. Not fused, the optimizer takes many kernels.
TORCH = {
  "fused": 28,
  "fused, GradScaler": 28 + 8,
  "fused, clipped": 28 + 4 + 8,
  "fused, GradScaler, clipped": 28 + 8 + 4 + 8,
}


def get_bytes_per_parameter(step: str, variant: str) -> float | None:
  """Return the bytes of a step in the tables of the compiler, or None."""
  return _steps().get(step, {}).get(variant, {}).get("bytes")


@functools.cache
def _steps():
  if not FILE.exists():
    return {}
  return json.loads(FILE.read_text())["steps"].get("h100", {})
