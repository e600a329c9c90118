"""The operations of a program that round to half precision, by layer.

A layer has the operations at one location, in the forward or in the backward
pass: a matmul and its bias, a normalization, a sum. The statistics of a layer
show whether the arrays that it rounds overflow or underflow.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
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
  _source_info,
  _state_threading,
  _walk,
)
from optax_lossscale.diagnostics import _dtype_limits
from optax_lossscale.diagnostics._comparison import _float32_eqns


@dataclasses.dataclass
class Layer:
  """The operations at one location, in one pass.

  Attributes:
    location: the location of the first one, or of the first matmul.
    primitive: JAX's name of this operation.
    dtype: the dtype of its operands, or of its result unless it is a matmul.
    has_matmul: whether it is a matmul or a convolution.
    run_count: the number of times that this operation runs.
    flops: the FLOPs of the matmuls.
    name: the shortest unique label of the layer.
    source_line: a line that distinguishes layers of similar names.
  """

  location: _provenance.EqnLocation
  primitive: str
  dtype: Any
  has_matmul: bool
  run_count: int = 0
  flops: int = 0
  name: str = ""
  source_line: str = ""

  @property
  def in_autocast(self) -> bool:
    """Whether `autocast` casts the operations."""
    return self.location.autocast_dtype is not None


class LayerTable:
  """The layers of a program.

  Attributes:
    layers: all layers, in the order of the program. A layer and its backward
      pass are two entries.
    index_by_path: the index of the layer of each equation that rounds, by the
      position of the equation.
  """

  def __init__(self, closed_jaxpr: _eqns.ClosedJaxpr) -> None:
    self.layers: list[Layer] = []
    self.index_by_path: dict[_state_threading.Path, int] = {}
    index_by_key: dict[Any, int] = {}
    for visit in walk_rounding_eqns(closed_jaxpr):
      location = visit.location
      key = location.names, location.is_backward, location.autocast_dtype
      layer = _make_layer(visit)
      index = index_by_key.setdefault(key, len(self.layers))
      self.index_by_path[visit.path] = index
      if index == len(self.layers):
        self.layers.append(layer)
      elif layer.has_matmul and not self.layers[index].has_matmul:
        self.layers[index] = layer
      if layer.primitive == self.layers[index].primitive:
        flops = _primitives.count_flops(visit.eqn) or 0
        self.layers[index].run_count += visit.num_executions
        self.layers[index].flops += flops * visit.num_executions
    # The names of matmuls of `autocast` select them, whatever else there is.
    for layers in self.layers, [x for x in self.layers if x.in_autocast]:
      names_and_lines = _provenance.make_unique_labels(
        [(x.location.names, x.location.is_backward) for x in layers]
      )
      for layer, pair in zip(layers, names_and_lines, strict=True):
        layer.name, layer.source_line = pair


def _make_layer(visit: _walk.EqnVisit) -> Layer:
  """Return a layer with one equation, which isn't counted yet."""
  eqn = visit.eqn
  is_matmul = _primitives.is_matmul(eqn)
  atoms: Sequence[Any] = eqn.invars if is_matmul else eqn.outvars
  dtypes = [v.aval.dtype for v in atoms if _float32_eqns.is_half(v.aval)]
  name = _source_info.get_primitive_name(eqn)
  return Layer(visit.location, name, dtypes[0], is_matmul)


def find_half_dtypes(closed_jaxpr: _eqns.ClosedJaxpr) -> set[Any]:
  """Return the half-precision dtypes to which a program rounds."""
  avals: Iterator[Any] = (
    v.aval
    for visit in walk_rounding_eqns(closed_jaxpr)
    for v in [*visit.eqn.outvars, *visit.eqn.invars]
  )
  return {aval.dtype for aval in avals if _float32_eqns.is_half(aval)}


def walk_rounding_eqns(
  closed_jaxpr: _eqns.ClosedJaxpr,
) -> Iterator[_walk.EqnVisit]:
  """Visit each equation that rounds, and on which an output depends.

  The casts of `autocast` are left out, since its matmuls round their operands.
  """
  for visit in _walk.walk(closed_jaxpr, _get_bodies, only_live=True):
    is_rounding = _float32_eqns.is_rounding(visit.eqn)
    if not is_rounding or _get_bodies(visit.eqn):
      continue
    is_matmul = _primitives.is_matmul(visit.eqn)
    if is_matmul or visit.stack_location.autocast_dtype is None:
      yield visit


def _get_bodies(eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
  hop = _higher_order.parse_higher_order(eqn)
  return [] if hop is None else _higher_order.get_bodies(hop)


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
