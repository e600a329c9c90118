"""Measure an equation for a report, on the device."""

from collections.abc import Sequence
import functools
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _avals, _primitives


class EqnStats(NamedTuple):
  """The operands and results of an equation in one execution, as flags.

  Attributes:
    is_origin: whether a result was nonfinite although all operands were finite;
      bool[].
    is_nan_origin: whether a result contained NaN, and an operand inf, but no
      operand NaN; bool[].
    has_inf: whether each result contained inf; bool[results].
    has_nan: whether each result contained NaN; bool[results].
    operand_is_nonfinite: whether each operand was nonfinite; bool[operands].
    operand_amax: the largest finite magnitude of each operand; float[operands].
  """

  is_origin: Any
  is_nan_origin: Any
  has_inf: Any
  has_nan: Any
  operand_is_nonfinite: Any
  operand_amax: Any

  @property
  def is_fault(self) -> Any:
    """Whether this equation is an origin of an inf or a NaN; bool[]."""
    return self.is_origin | self.is_nan_origin

  @property
  def is_nonfinite(self) -> Any:
    """Whether each result was nonfinite; bool[results]."""
    return self.has_inf | self.has_nan


def make_empty_stats(eqn: core.JaxprEqn) -> EqnStats:
  """Return the statistics of an equation that has not run."""
  none = np.zeros((), bool)
  out_flags = np.zeros(len(eqn.outvars), bool)
  operand_flags = np.zeros(len(eqn.invars), bool)
  amax = np.zeros(len(eqn.invars), jnp.result_type(float))
  return EqnStats(none, none, out_flags, out_flags, operand_flags, amax)


def measure_eqn(
  eqn: core.JaxprEqn, inputs: Sequence[Any], outs: Sequence[Any]
) -> EqnStats:
  """Return the statistics of an execution of an equation."""
  has_inf, has_nan, amax = _measure_all(inputs)
  # A collective reads the operands of all devices.
  axes = _primitives.get_collective_axes(eqn) if inputs else ()
  if axes:
    flags = jnp.stack([has_inf, has_nan]).astype(jnp.int32)
    has_inf, has_nan = lax.pmax(flags, axes).astype(bool)
  out_has_inf, out_has_nan, _ = _measure_all(outs)
  is_nonfinite = has_inf | has_nan
  is_origin = (out_has_inf | out_has_nan).any() & ~is_nonfinite.any()
  is_nan_origin = out_has_nan.any() & has_inf.any() & ~has_nan.any()
  return EqnStats(
    is_origin, is_nan_origin, out_has_inf, out_has_nan, is_nonfinite, amax
  )


def _measure_all(values: Sequence[Any]) -> list[Any]:
  """Return whether each value contains inf, and NaN; and its magnitude."""
  dtypes: tuple[Any, ...] = bool, bool, jnp.result_type(float)
  rows = zip(*map(measure, values), strict=True) if values else [()] * 3
  return [jnp.array(row, t) for row, t in zip(rows, dtypes, strict=True)]


def measure(x: Any) -> tuple[Any, Any, Any]:
  """Return whether a value contains inf, and NaN; and its magnitude.

  The magnitude is the largest one of the finite entries.
  """
  aval: Any = jax.typeof(x)
  is_number = hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.number)
  if not is_number or _avals.is_ref(aval):
    return False, False, 0
  return _measure_numbers(x)


@jax.jit
def _measure_numbers(x: Any) -> tuple[Any, Any, Any]:
  dtype = jnp.result_type(float)
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return False, False, jnp.max(jnp.abs(x.astype(dtype)), initial=0)
  x = _arrays.upcast_for_reduction(x)
  magnitudes = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).astype(dtype)

  # Compute all three in one variadic reduction, since XLA would compile a loop
  # for each of three.
  def combine(lhs: Any, rhs: Any) -> Any:
    (a, b, c), (d, e, f) = lhs, rhs
    return a | d, b | e, lax.max(c, f)

  operands = jnp.isinf(x), jnp.isnan(x), magnitudes
  identities = np.False_, np.False_, np.zeros((), dtype)
  return lax.reduce(operands, identities, combine, tuple(range(x.ndim)))


@jax.jit
def is_finite(x: Any) -> Any:
  """Return whether all entries are finite."""
  return jnp.isfinite(_arrays.upcast_for_reduction(x)).all()


def heal(
  eqn: core.JaxprEqn,
  inputs: Sequence[Any],
  outs: Sequence[Any],
  is_healed: Any,
  stats: EqnStats,
  value: Any,
) -> list[Any]:
  """Replace the infs and NaNs that an equation makes of finite operands.

  Args:
    eqn: the equation.
    inputs: its operands.
    outs: its results.
    is_healed: whether to replace anything; bool[].
    stats: the statistics of the equation.
    value: the number that replaces them.

  Returns:
    The results.
  """

  def heal_output(x: Any) -> Any:
    if not _is_float(x):
      return x
    is_own = _find_own_entries(eqn, inputs, x, stats.is_fault)
    mask = is_healed & is_own & ~jnp.isfinite(x)
    return lax.select(mask, jnp.full_like(x, value), x)

  return list(map(heal_output, outs))


def _find_own_entries(
  eqn: core.JaxprEqn, inputs: Sequence[Any], x: Any, is_fault: Any
) -> Any:
  """Return the mask of entries that an equation may have made nonfinite."""
  # A result that is the same on all devices must remain so.
  axes = _avals.get_varying_axes(is_fault) - _avals.get_varying_axes(x)
  if axes:
    names = sorted(axes, key=str)
    is_fault = lax.pmax(is_fault.astype(jnp.int32), names).astype(bool)
  floats = [y for y in inputs if _is_float(y)]
  fits = lambda y: (
    y.ndim in (0, x.ndim)
    and all(n in (1, size) for n, size in zip(y.shape, x.shape, strict=False))
  )
  axes |= {*_primitives.get_collective_axes(eqn)}
  if axes or not floats or not all(map(fits, floats)):
    return is_fault
  # In an elementwise operation, entries have their own operands.
  return functools.reduce(operator.and_, map(jnp.isfinite, floats))


def _is_float(x: Any) -> bool:
  aval = jax.typeof(x)
  return _arrays.is_inexact(aval) and not _avals.is_ref(aval)
