"""Options of XLA for programs that a report compiles and runs a few times."""

from collections.abc import Sequence
from typing import Any

import jax


def make_compiler_options(inputs: Sequence[Any]) -> dict[str, Any]:
  """Return options with which a program is cheap to compile.

  Args:
    inputs: the inputs of the program, whose devices run it.

  Returns:
    The ``compiler_options=`` of ``jax.jit``. With them, XLA keeps each
    conversion to float16 and back, and with it the overflow of the conversion.
  """
  options: dict[str, Any] = {
    "xla_allow_excess_precision": False,
    # On CPU, this halves the time to compile, and runs take 1.4 times as long.
    "xla_backend_optimization_level": 0,
    # XLA would interpret a reduction of a large constant, such as the magnitude
    # of a mask, which takes ten seconds for a million entries.
    "xla_disable_hlo_passes": "constant_folding",
  }
  arrays = [x for x in inputs if isinstance(x, jax.Array)]
  devices = [*arrays[0].devices()] if arrays else jax.devices()
  if devices[0].platform == "gpu":
    # To try several kernels for each matmul takes longer than to run it.
    options["xla_gpu_autotune_level"] = 0
  return options
