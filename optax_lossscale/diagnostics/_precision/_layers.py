"""The layers of a program that round, and statistics of what they round.

A layer has the operations at one location, in the forward or in the backward
pass: a matmul and its bias, a normalization, a sum. Which equations round is
decided by their types alone. The statistics of a layer show whether the arrays
that it rounds overflow or underflow.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _walk,
)
from optax_lossscale.diagnostics import _dtype_limits, _host_values, _reports

# These return entries of their operands, or exact functions of them, so they do
# not round.
_EXACT = (
  _primitives.DATA_MOVEMENT
  | _primitives.BROADCASTING
  | _primitives.PERMUTING_COLLECTIVES
  | {
    "abs", "all_gather", "clamp", "concatenate", "cummax", "cummin",
    "device_put", "dynamic_slice", "dynamic_update_slice", "gather", "get",
    "max", "min", "neg", "pad", "pmax", "pmin", "reduce_max", "reduce_min",
    "reduce_window_max", "reduce_window_min", "reshard", "scatter", "select_n",
    "sign", "sort", "split", "stop_gradient", "swap", "top_k", "unstack",
  }
)  # fmt: skip


@dataclasses.dataclass
class Layer:
  """The operations at one location, in one pass.

  Attributes:
    visits: the operations, in the order of the program.
    dtype: the dtype of the operands of matmuls, or else of the results.
    name: the shortest unique label of the layer.
    source_line: a line that distinguishes layers of similar names.
  """

  visits: list[_walk.EqnVisit]
  dtype: Any
  name: str = ""
  source_line: str = ""

  @functools.cached_property
  def main_visit(self) -> _walk.EqnVisit:
    """The first matmul or convolution, or else the first operation."""
    matmuls = [x for x in self.visits if _primitives.is_matmul(x.eqn)]
    return [*matmuls, *self.visits][0]

  @property
  def has_matmul(self) -> bool:
    """Whether the layer has a matmul or a convolution."""
    return _primitives.is_matmul(self.main_visit.eqn)

  @property
  def location(self) -> _provenance.EqnLocation:
    """The location of the layer."""
    return self.main_visit.location

  @property
  def in_autocast(self) -> bool:
    """Whether `autocast` casts the operations."""
    return self.location.autocast_dtype is not None

  @functools.cached_property
  def flops(self) -> int:
    """The FLOPs of all matmuls and convolutions."""
    return count_flops(self.visits)

  def as_row(self, **measurements: Any) -> _reports.LayerPrecision:
    """Return the row of a report about this layer."""
    main_eqn, names = self.main_visit.eqn, self.location.names
    return _reports.LayerPrecision(
      primitive=_eqns.get_primitive_name(main_eqn),
      name=self.name,
      name_scope=names.name_scope,
      param_path=names.param_path,
      source_line=self.source_line,
      backward=self.location.is_backward,
      dtype=str(self.dtype),
      in_autocast=self.in_autocast,
      run_count=sum(
        x.num_executions
        for x in self.visits
        if x.eqn.primitive is main_eqn.primitive
      ),
      flops=self.flops,
      **measurements,
    )


def count_flops(visits: Iterable[_walk.EqnVisit]) -> int:
  """Return the FLOPs of all matmuls and convolutions among the equations."""
  return sum(
    (_primitives.count_eqn_flops(x.eqn) or 0) * x.num_executions for x in visits
  )


def group_by_layer(
  visits: Iterable[_walk.EqnVisit], get_dtype: Callable[[core.JaxprEqn], Any]
) -> list[Layer]:
  """Group equations by their location, pass and dtype, and name the groups.

  Args:
    visits: the equations, in the order of the program.
    get_dtype: returns the dtype in which an equation computes.

  Returns:
    The layers, in the order of the program. A layer and its backward pass are
    two entries.
  """
  groups: dict[Any, list[_walk.EqnVisit]] = {}
  for visit in visits:
    location, dtype = visit.location, get_dtype(visit.eqn)
    key = location.names, location.is_backward, location.autocast_dtype, dtype
    groups.setdefault(key, []).append(visit)
  layers = [Layer(group, dtype) for (*_, dtype), group in groups.items()]
  # The names of matmuls of `autocast` select them, whatever else there is.
  for subset in layers, [x for x in layers if x.in_autocast]:
    names_and_lines = _provenance.make_unique_labels(
      [(x.location.names, x.location.is_backward) for x in subset]
    )
    for layer, pair in zip(subset, names_and_lines, strict=True):
      layer.name, layer.source_line = pair
  return layers


def list_rounding_layers(closed_jaxpr: _eqns.ClosedJaxpr) -> list[Layer]:
  """Return the layers that round to half precision, if an output needs them."""
  get_bodies = lambda eqn: _higher_order.get_bodies(
    _higher_order.parse_higher_order(eqn)
  )
  visits = _walk.walk(closed_jaxpr, get_bodies, only_live=True)
  return group_by_layer(filter(_has_own_rounding, visits), _get_half_dtype)


def _get_half_dtype(eqn: core.JaxprEqn) -> Any:
  """Return the dtype of an operand of a matmul, or of a result."""
  is_matmul = _primitives.is_matmul(eqn)
  atoms: Sequence[Any] = eqn.invars if is_matmul else eqn.outvars
  return next(v.aval.dtype for v in atoms if is_half(v.aval))


def _has_own_rounding(visit: _walk.EqnVisit) -> bool:
  """Return whether an equation rounds, other than those that it contains.

  The casts of `autocast` are left out, since its matmuls round their operands.
  """
  return (
    is_rounding(visit.eqn)
    and visit.hop is None
    and (
      _primitives.is_matmul(visit.eqn)
      or visit.stack_location.autocast_dtype is None
    )
  )


def is_half(x: Any) -> bool:
  """Return whether an array, or a type, is in half precision."""
  dtype = getattr(x, "dtype", None)
  return dtype is not None and not _eqns.is_ref(x) and is_half_dtype(dtype)


def is_half_dtype(dtype: Any) -> bool:
  """Return whether a dtype is a float dtype of less than 32 bits."""
  return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def has_half(eqn: core.JaxprEqn) -> bool:
  """Return whether an operand or a result is in half precision."""
  return any(is_half(v.aval) for v in [*eqn.invars, *eqn.outvars])


def is_rounding(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation returns other numbers than in float32.

  An equation that only moves half-precision numbers does not.
  """
  name = eqn.primitive.name
  # JAX allocates an array by "empty", or "empty2".
  is_exact = name in _EXACT or name.startswith("empty")
  if is_exact or not any(is_half(v.aval) for v in eqn.outvars):
    return _primitives.is_matmul(eqn) and has_half(eqn)
  if name == "convert_element_type":
    return not _is_exact_cast(eqn.invars[0].aval, eqn.outvars[0].aval)
  return not _primitives.is_noop_reduce_precision(eqn)


def _is_exact_cast(old: Any, new: Any) -> bool:
  """Return whether a half-precision type holds all numbers of another type."""
  if not is_half(old):
    return old.dtype == bool
  old_info, new_info = jnp.finfo(old.dtype), jnp.finfo(new.dtype)
  return (
    old_info.nmant <= new_info.nmant
    and old_info.max <= new_info.max
    and old_info.smallest_subnormal >= new_info.smallest_subnormal
  )


class LayerStats(NamedTuple):
  """Statistics of the arrays that a layer rounds; float32[] each.

  The fractions are those of the array with the largest fraction.

  Attributes:
    amax: the largest finite magnitude.
    underflow_fraction: the fraction of entries that become zero.
    subnormal_fraction: the fraction of entries that become subnormal.
  """

  amax: Any
  underflow_fraction: Any
  subnormal_fraction: Any


def make_rows(
  layers: Sequence[Layer], stats: Mapping[int, LayerStats]
) -> list[_reports.LayerPrecision]:
  """Return the rows of a report on layers, by their statistics in float32."""
  host_stats, rows = _host_values.to_host(stats), []
  for i, layer in enumerate(layers):
    amax = float(host_stats[i].amax)
    log2_max = math.log2(float(jnp.finfo(layer.dtype).max))
    rows.append(
      layer.as_row(
        log2_headroom=log2_max - math.log2(amax) if amax else math.inf,
        program_index=i,
        **{k: float(x) for k, x in host_stats[i]._asdict().items()},
      )
    )
  return rows


def make_empty_stats() -> LayerStats:
  """Return the statistics of a layer that has not run."""
  return LayerStats(*[jnp.zeros((), jnp.float32)] * len(LayerStats._fields))


# Each operation that rounds calls this function. It is jitted, so that JAX
# traces it once for each shape instead of once for each operation.
@functools.partial(jax.jit, static_argnums=2)
def add_array(
  stats: LayerStats, x: Any, limits: _dtype_limits.CastThresholds
) -> LayerStats:
  """Add an array that is rounded.

  Args:
    stats: the statistics so far.
    x: the array, in float32.
    limits: the limits of its dtype.

  Returns:
    A :class:`LayerStats`.
  """
  magnitudes = jnp.abs(x)
  finite_magnitudes = jnp.where(jnp.isfinite(x), magnitudes, 0)
  underflows = (magnitudes > 0) & (magnitudes <= limits.underflow_threshold)
  subnormals = (magnitudes > limits.underflow_threshold) & (
    magnitudes < limits.smallest_normal
  )

  # Compute all three in one variadic reduction, since XLA would compile a loop
  # for each of three.
  def combine(lhs: Any, rhs: Any) -> Any:
    (a, b, c), (d, e, f) = lhs, rhs
    return lax.max(a, d), b + e, c + f

  operands = (
    finite_magnitudes,
    *(y.astype(jnp.int32) for y in (underflows, subnormals)),
  )
  identities = jnp.zeros((), x.dtype), jnp.int32(0), jnp.int32(0)
  amax, *counts = lax.reduce(
    operands, identities, combine, tuple(range(x.ndim))
  )
  fractions = [count.astype(jnp.float32) / max(x.size, 1) for count in counts]
  return jax.tree.map(jnp.maximum, stats, LayerStats(amax, *fractions))
