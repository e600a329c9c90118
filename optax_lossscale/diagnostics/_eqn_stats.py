"""The statistics of an equation and its operands, and how to heal its results.

They are measured on the device. To *heal* a result is to replace its infs and
NaNs by a number.
"""

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
from optax_lossscale._jaxprs import _eqns, _primitives

# The number that replaces an inf or a NaN. A zero may be a divisor, and a one
# the operand of a difference.
_HEALED = 0.7


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
    """Whether the equation itself made an inf or a NaN; bool[]."""
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
  measures = [
    measure(x) if _is_array_of(jnp.number, jax.typeof(x)) else (False, False, 0)
    for x in values
  ]
  dtypes: tuple[Any, ...] = bool, bool, jnp.result_type(float)
  return [jnp.array([x[i] for x in measures], t) for i, t in enumerate(dtypes)]


@jax.jit
def measure(x: Any) -> tuple[Any, Any, Any]:
  """Return whether an array contains inf, and NaN; and its magnitude.

  The magnitude is the largest one of the finite entries.
  """
  dtype = jnp.result_type(float)
  is_float = _arrays.is_inexact(x)
  x = _arrays.upcast_for_reduction(x) if is_float else x.astype(dtype)
  magnitudes = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).astype(dtype)

  # Compute all three in one variadic reduction, since XLA would compile a loop
  # for each of three.
  operands = jnp.isinf(x), jnp.isnan(x), magnitudes
  identities = np.False_, np.False_, np.zeros((), dtype)
  combine = functools.partial(jax.tree.map, lax.max)
  return lax.reduce(operands, identities, combine, tuple(range(x.ndim)))


@jax.jit
def is_finite(x: Any) -> Any:
  """Return whether all entries are finite; bool[]."""
  # A checkpoint policy offloads values that were checked where they were made.
  if _is_in_host_memory(jax.typeof(x)):
    return jnp.bool_(True)
  return jnp.isfinite(_arrays.upcast_for_reduction(x)).all()


def _is_array_of(dtype: Any, aval: Any) -> bool:
  """Return whether a type is that of an array of such numbers on a device."""
  is_number = jnp.issubdtype(getattr(aval, "dtype", bool), dtype)
  return is_number and not _eqns.is_ref(aval) and not _is_in_host_memory(aval)


def _is_in_host_memory(aval: Any) -> bool:
  return "host" in str(getattr(aval, "memory_space", "")).lower()


def heal(
  eqn: core.JaxprEqn,
  inputs: Sequence[Any],
  outs: Sequence[Any],
  is_healed: Any,
  stats: EqnStats,
) -> list[Any]:
  """Replace the infs and NaNs that an equation makes of finite operands.

  Args:
    eqn: the equation.
    inputs: its operands.
    outs: its results.
    is_healed: whether to replace anything; bool[].
    stats: the statistics of the equation.

  Returns:
    The results.
  """
  is_float = lambda x: _is_array_of(jnp.inexact, jax.typeof(x))
  floats = list(filter(is_float, inputs))
  return [
    jnp.where(
      is_healed & _find_own_entries(eqn, floats, x, stats.is_fault),
      heal_array(x),
      x,
    )
    if is_float(x)
    else x
    for x in outs
  ]


@jax.jit
def heal_array(x: Any) -> Any:
  """Replace the nonfinite entries of a float array."""
  return jnp.where(jnp.isfinite(x), x, jnp.full_like(x, _HEALED))


def _find_own_entries(
  eqn: core.JaxprEqn, floats: Sequence[Any], x: Any, is_fault: Any
) -> Any:
  """Return the mask of entries that an equation may have made nonfinite."""
  # A result that is the same on all devices must remain so.
  axes = _primitives.get_varying_axes(is_fault) - _primitives.get_varying_axes(
    x
  )
  if axes:
    names = sorted(axes, key=str)
    is_fault = lax.pmax(is_fault.astype(jnp.int32), names).astype(bool)
  fits = lambda shape: (
    len(shape) in (0, x.ndim)
    and all(n in (1, size) for n, size in zip(shape, x.shape, strict=False))
  )
  axes |= {*_primitives.get_collective_axes(eqn)}
  if axes or not floats or not all(map(fits, map(jnp.shape, floats))):
    return is_fault
  # In an elementwise operation, entries have their own operands.
  return functools.reduce(operator.and_, map(jnp.isfinite, floats))


class Operand(NamedTuple):
  """An operand of an operation.

  Attributes:
    shape: the shape, under ``shard_map`` the shape on one device.
    dtype: the dtype.
    amax: the largest finite magnitude; 0.0 if no entry is finite, None if the
      entries are not numbers.
    all_finite: whether all entries are finite.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> hit = diagnostics.find_overflow(jnp.exp, jnp.float16(12))
    >>> hit.inputs[0].amax, hit.inputs[0].all_finite
    (12.0, True)
  """

  shape: tuple[int, ...]
  dtype: Any
  amax: float | None
  all_finite: bool

  def __str__(self) -> str:
    text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
    details = []
    if self.amax is not None:
      details.append(f"max abs {format_number(self.amax)}")
    if not self.all_finite:
      details.append("contains inf or NaN")
    return f"{text} ({', '.join(details)})" if details else text


def list_operands(eqn: core.JaxprEqn, stats: EqnStats) -> tuple[Operand, ...]:
  """Return the operands of an equation."""
  amaxes: list[float] = stats.operand_amax.tolist()
  avals: list[Any] = [atom.aval for atom in eqn.invars]
  has_amax = [
    _is_array_of(jnp.number, aval) and 0 not in aval.shape for aval in avals
  ]
  return tuple(
    Operand(
      tuple(aval.shape),
      aval.dtype,
      amaxes[i] if has_amax[i] else None,
      not (has_amax[i] and stats.operand_is_nonfinite[i]),
    )
    for i, aval in enumerate(avals)
  )


def format_number(number: float) -> str:
  """Format a number: 65504, 9.3e+04, 0.0132."""
  if number == 65504:  # Every reader knows the largest number of float16.
    return "65504"
  return f"{float(f'{number:.3g}'):g}"
