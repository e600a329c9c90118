"""Compiler options and side effects of the programs that reports run.

XLA compiles such a program for a few runs. Its side effects are treated as
follows:

* A *print* calls back to Python, and returns nothing. It must appear only once,
  so all runs but the first leave it out.
* A Ref belongs to the program, since the tracer copies the Refs among its
  arguments. So each run may read and write it.
* A callback that returns something is called by each run. It is reported if it
  has an effect, as an ``io_callback`` has.
"""

from collections.abc import Container, Sequence
import re
from typing import Any

import jax
from jax.extend import core

from optax_lossscale._jaxprs import _eqns, _state_threading, _walk

_PRINT_RE = re.compile("callback|print")


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


def is_print(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation calls back to Python and returns nothing."""
  return not eqn.outvars and bool(_PRINT_RE.search(eqn.primitive.name))


def has_callback_with_result(
  jaxpr: core.Jaxpr, names: Container[str] = ("io_callback",)
) -> bool:
  """Return whether a jaxpr calls a callback that returns something.

  Args:
    jaxpr: the jaxpr.
    names: the primitives of the callbacks.
  """
  is_callback = lambda eqn: eqn.primitive.name in names and bool(eqn.outvars)
  return _walk.EqnSearch(is_callback, _eqns.subjaxprs).any_in_jaxpr(jaxpr)


class ReportEvaluator(_state_threading.StateThreader):
  """Evaluates the program of a report, by default without its prints."""

  def __init__(self, shared: Any = ()) -> None:
    super().__init__(shared)
    self._print_search = _walk.EqnSearch(is_print, _eqns.subjaxprs)

  def select_keys(self, visit: _state_threading.Visit) -> list[Any] | None:
    return [] if self._print_search.any_inside(visit.eqn) else None

  def eval_print(self, eqn: core.JaxprEqn, inputs: list[Any]) -> None:
    """Evaluate a print; by default it is left out."""

  def eval_eqn(
    self,
    visit: _state_threading.Visit,
    inputs: list[Any],
    state: _state_threading.State,
  ) -> Sequence[Any]:
    if is_print(visit.eqn):
      self.eval_print(visit.eqn, inputs)
      return []
    return super().eval_eqn(visit, inputs, state)
