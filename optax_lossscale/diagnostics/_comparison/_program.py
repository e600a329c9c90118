"""Run a program with its matmuls in float32 or in half precision.

The input is the jaxpr of an autocast function, after any transformations. Three
programs are made from it:

* The program as trained.
* The *exact* program: all arrays that `autocast` cast to half precision are in
  float32. The operands of all matmuls can be perturbed, which shows the arrays
  that are only rounding noise. It costs about as much to compile as the first.
* The *measuring* program: the exact program with statistics of each matmul, and
  with a flag for each of them: if it is set, the matmul rounds its operands and
  its result. So one compiled program serves all runs. XLA takes several times
  as long to compile it.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import (
  _avals,
  _eqns,
  _primitives,
  _state_threading,
)
from optax_lossscale.diagnostics import (
  _compiler_options,
  _dtype_limits,
  _effects,
)
from optax_lossscale.diagnostics._comparison import _matmul_table, _site_stats

_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN
# The fourth last bit of the mantissa: flipping it changes a number by a
# relative 2**-20 at most.
_PERTURBED_BIT = 8


class RunResult(NamedTuple):
  """The result of a run.

  Attributes:
    outs: the outputs, in float32 instead of half precision.
    stats: the statistics of each matmul site, by its index; empty unless the
      program measures them.
  """

  outs: list[Any]
  stats: dict[int, _site_stats.SiteStats]


class ExactProgram:
  """A program that runs in float32, or with some matmuls in half precision.

  Args:
    closed_jaxpr: the jaxpr.
    table: its matmul sites.
    example_inputs: its inputs, whose devices run it.
    has_stats: whether the program measures its matmul sites.
    has_flags: whether single sites can run in half precision.
  """

  def __init__(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    table: _matmul_table.MatmulTable,
    example_inputs: Sequence[Any],
    *,
    has_stats: bool = False,
    has_flags: bool = False,
  ) -> None:
    sites = range(len(table.sites))
    self._num_flags = len(sites) if has_flags else 0

    def run(inputs: Sequence[Any], run_inputs: _RunInputs) -> RunResult:
      measured_sites = list(sites) if has_stats else []
      stats = {i: _site_stats.make_empty_stats() for i in measured_sites}
      evaluator = _ExactEvaluator(table, run_inputs, measured_sites)
      frame = _state_threading.Frame(closed_jaxpr)
      outs = evaluator.eval_jaxpr(
        frame, list(map(evaluator.upcast, inputs)), stats
      )
      return RunResult(outs, stats)

    options = _compiler_options.make_compiler_options(example_inputs)
    self._run = jax.jit(run, compiler_options=options)

  def run(
    self,
    inputs: Sequence[Any],
    half_sites: Sequence[int] = (),
    *,
    is_perturbed: bool = False,
  ) -> RunResult:
    """Run the program.

    Args:
      inputs: the inputs of the jaxpr.
      half_sites: the sites that run in half precision.
      is_perturbed: whether the operands of all other matmuls are perturbed.

    Returns:
      A :class:`RunResult`.
    """
    half_flags = np.zeros(self._num_flags, bool)
    half_flags[list(half_sites)] = True
    flipped_bits = np.uint32(_PERTURBED_BIT if is_perturbed else 0)
    return self._run(inputs, _RunInputs(half_flags, flipped_bits))


class _RunInputs(NamedTuple):
  """The inputs of an exact program that control a run.

  Attributes:
    half_flags: whether each site runs in half precision; bool[sites], or
      bool[0] if none can.
    flipped_bits: the bits that are flipped in the first operand of each matmul;
      uint32[].
  """

  half_flags: Any
  flipped_bits: Any


class _ExactEvaluator(_effects.PrintRemover):
  """Evaluates a program in float32, under a trace.

  The state has the statistics of the sites that are measured, and ``shared`` is
  a :class:`_RunInputs`.
  """

  def __init__(
    self,
    table: _matmul_table.MatmulTable,
    run_inputs: _RunInputs,
    measured_sites: list[int],
  ) -> None:
    super().__init__(run_inputs)
    self.parse_higher_order = table.get_higher_order
    self._table = table
    self._measured_sites = measured_sites

  def select_keys(self, visit: _state_threading.Visit) -> list[Any] | None:
    # Enter only calls and loops that may contain half precision. All others run
    # as one eqn, which is traced faster.
    if self._table.has_tagged_eqn(visit.eqn):
      return self._measured_sites
    return [] if self._has_half(visit.eqn) else super().select_keys(visit)

  def is_unchanged(self, visit: _state_threading.Visit) -> bool:
    is_tagged = _matmul_table.is_autocast_matmul(
      visit.eqn, visit.frame.location
    )
    return not is_tagged and super().is_unchanged(visit)

  def merge_devices(
    self, state: _state_threading.State, device_states: _state_threading.State
  ) -> _state_threading.State:
    return {
      i: _site_stats.merge_devices(state[i], device_states[i]) for i in state
    }

  def lift_const(self, value: Any, atom: _eqns.Atom) -> Any:
    del atom
    return self.upcast(value)

  def eval_eqn(
    self,
    visit: _state_threading.Visit,
    inputs: list[Any],
    state: _state_threading.State,
  ) -> Sequence[Any]:
    eqn, frame = visit.eqn, visit.frame
    if _matmul_table.is_autocast_matmul(eqn, frame.location):
      location = frame.location.locate(eqn, frame.closed_jaxpr.jaxpr)
      site_index = self._table.get_site_index(eqn, location)
      return self._eval_matmul(eqn, site_index, inputs, state)
    is_entered = (
      self.select_keys(visit) is not None
      and self.parse_higher_order(eqn) is not None
    )
    if self._has_half(eqn) and not is_entered:
      return self._eval_half_precision_eqn(eqn, frame, inputs)
    return super().eval_eqn(visit, inputs, state)

  def _eval_matmul(
    self,
    eqn: core.JaxprEqn,
    site_index: int | None,
    inputs: list[Any],
    state: _state_threading.State,
  ) -> list[Any]:
    lhs, rhs, *others = inputs
    matmul = _eqns.eqn_as_fun(_primitives.as_highest_float32(eqn))

    def run_exact(lhs: Any, rhs: Any) -> list[Any]:
      return matmul(_flip_bits(lhs, self.shared.flipped_bits), rhs, *others)

    # If no output depends on a matmul, it has no site.
    if site_index is None:
      return run_exact(lhs, rhs)
    dtypes = self._table.sites[site_index].dtypes

    def run_half(*operands: Any) -> list[Any]:
      rounded = [_round_to_dtype(x, dtypes.operand) for x in operands]
      (out,) = matmul(*rounded, *others)
      return [_round_to_dtype(out, dtypes.result)]

    flags = self.shared.half_flags
    # A select would be cheaper than a branch, but XLA would fuse, and so
    # repeat, it in each consumer.
    (out,) = (
      lax.cond(flags[site_index], run_half, run_exact, lhs, rhs)
      if flags.size
      else run_exact(lhs, rhs)
    )
    if site_index in state:
      limits = _dtype_limits.get_cast_thresholds(dtypes.operand)
      state[site_index] = _site_stats.add_run(
        state[site_index], [lhs, rhs, out], limits
      )
    return [out]

  def _eval_half_precision_eqn(
    self, eqn: core.JaxprEqn, frame: _state_threading.Frame, inputs: list[Any]
  ) -> Sequence[Any]:
    """Evaluate an eqn in half precision that is not a matmul of `autocast`.

    The casts that `autocast` inserted are dropped: each matmul rounds its own
    operands. Eqns that the user wrote in half precision compute in it.
    """
    if _primitives.is_noop_reduce_precision(eqn):
      return inputs  # JAX inserts it before values that a checkpoint saves.
    if _matmul_table.is_autocast_eqn(eqn, frame.location):
      is_cast = eqn.primitive.name == "convert_element_type"
      return inputs if is_cast else _eqns.eqn_as_fun(eqn)(*inputs)
    # Operands that were half precision are float32 here, so cast them back.
    pairs: Any = zip(inputs, [v.aval for v in eqn.invars], strict=True)
    args = [
      x.astype(aval.dtype) if self._is_half(aval) else x for x, aval in pairs
    ]
    return list(map(self.upcast, _eqns.eqn_as_fun(eqn)(*args)))

  def upcast(self, x: Any) -> Any:
    """Cast an array to float32 if it is in half precision."""
    return jnp.asarray(x, jnp.float32) if self._is_half(x) else x

  def _has_half(self, eqn: core.JaxprEqn) -> bool:
    return any(self._is_half(v.aval) for v in [*eqn.invars, *eqn.outvars])

  def _is_half(self, x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype in self._table.dtypes and not _avals.is_ref(x)


# Each matmul calls the next two functions. They are jitted, so that JAX traces
# them once for each shape instead of once for each matmul.
@functools.partial(jax.jit, static_argnums=1)
def _round_to_dtype(x: Any, dtype: np.dtype) -> Any:
  """Round a float32 array to a dtype.

  XLA may drop a conversion to the dtype and back, but never
  ``reduce_precision``.
  """
  info: Any = jnp.finfo(dtype)
  normal_result = lax.reduce_precision(x, info.nexp, info.nmant)
  smallest_normal, smallest_subnormal = (
    float(info.smallest_normal),
    float(info.smallest_subnormal),
  )
  if smallest_normal == jnp.finfo(jnp.float32).smallest_normal:
    return normal_result
  # reduce_precision flushes subnormal numbers to zero, so round them
  # separately.
  subnormal_result = (
    lax.round(x * (1 / smallest_subnormal), _TO_EVEN) * smallest_subnormal
  )
  return jnp.where(
    jnp.abs(x) < smallest_normal, subnormal_result, normal_result
  )


@jax.jit
def _flip_bits(x: Any, flipped_bits: Any) -> Any:
  """Flip bits of each entry; 0, inf and NaN stay.

  It is deterministic, so all readers of an array read equal values.
  """
  is_changeable = (x != 0) & jnp.isfinite(x)
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  bits = bits ^ jnp.where(is_changeable, flipped_bits, jnp.uint32(0))
  return lax.bitcast_convert_type(bits, jnp.float32)
