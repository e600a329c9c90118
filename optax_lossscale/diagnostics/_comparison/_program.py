"""Run a program with each of its matmuls in float32 or in half precision.

The input is the jaxpr of an autocast function, after any transformations. It is
evaluated eqn by eqn under ``jit``, with all arrays that `autocast` cast to half
precision in float32. Each matmul of `autocast` then looks up its mode in an
array that is an argument of the program: in half precision, it rounds its
operands and its result. So one compiled program serves all runs. Loops,
branches and ``shard_map`` are traced again, with the statistics of the matmuls
inside in their carries and outputs.
"""

from collections.abc import Sequence
import functools
import re
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import (
  _avals,
  _eqns,
  _higher_order,
  _interpret,
  _primitives,
  _provenance,
  _source_info,
  _walk,
)
from optax_lossscale.diagnostics import _dtype_limits


class MatmulSite(NamedTuple):
  """Matmuls of one primitive at one location, reported as one row.

  Attributes:
    primitive: JAX's name of the operation.
    names: the names of the location.
    backward: whether it belongs to a backward pass.
    dtypes: the dtypes that `autocast` chose.
  """

  primitive: str
  names: _provenance.EqnNames
  backward: bool
  dtypes: _provenance.MatmulDtypes


class SiteStats(NamedTuple):
  """Statistics of all executions of one matmul site.

  Vectors of three have an entry for each operand and one for the result.

  Attributes:
    num_executions: the number of executions; float32[].
    amax: the largest magnitude in the operands and the result; float32[].
    num_entries: the numbers of entries; float32[3].
    num_underflows: the numbers of entries that become zero in half precision;
      float32[3].
    num_subnormals: the numbers of entries that become subnormal; float32[3].
  """

  num_executions: Any
  amax: Any
  num_entries: Any
  num_underflows: Any
  num_subnormals: Any


# Primitives that are not run if they return nothing: they would print in each
# of the runs.
_CALLBACK_RE = re.compile("callback|print")
_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN

# Run modes of a matmul: in float32, in half precision, or in float32 with
# operands and result perturbed by a relative 2**-20 at most: the fourth last
# bit of the mantissa is flipped.
EXACT, HALF, PERTURBED = range(3)
_FOURTH_LAST_BIT = 8

# The statistics of each site, by its index in the table.
StatsBySite = list[SiteStats]
# The outputs of an equation, and the statistics after it.
OutsAndStats = tuple[Sequence[Any], StatsBySite]


class MixedPrecisionProgram(NamedTuple):
  """A program with a mode for each matmul, to be called under ``jit``.

  Attributes:
    table: the matmul sites of the program.
    modes: the mode of each site: ``EXACT``, ``HALF`` or ``PERTURBED``;
      int32[sites].
    location: the location of the jaxpr that is evaluated.
  """

  table: "MatmulTable"
  modes: Any
  location: _provenance.EqnLocation = _provenance.EqnLocation()

  def eval_jaxpr(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    inputs: Sequence[Any],
    stats: StatsBySite,
  ) -> OutsAndStats:
    """Evaluate a jaxpr.

    Args:
      closed_jaxpr: the jaxpr.
      inputs: its inputs. Inputs that are in half precision may be float32.
      stats: the statistics so far.

    Returns:
      The outputs, in float32 instead of half precision, and the statistics that
      include the matmuls of this jaxpr.
    """

    def eval_eqn(eqn: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
      nonlocal stats
      outs, stats = self._eval_eqn(eqn, closed_jaxpr.jaxpr, inputs, stats)
      return outs

    lift_const = lambda x, *_: self._upcast(x)
    values = list(map(self._upcast, inputs))
    outs = _interpret.interpret_jaxpr(
      closed_jaxpr, values, eval_eqn, lift_const=lift_const
    )
    return outs, stats

  def _upcast(self, x: Any) -> Any:
    """Cast an array to float32 if it is in half precision."""
    return jnp.asarray(x, jnp.float32) if self._is_half(x) else x

  def _is_half(self, x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype in self.table.dtypes and not _avals.is_ref(x)

  def _eval_eqn(
    self,
    eqn: core.JaxprEqn,
    jaxpr: core.Jaxpr,
    inputs: list[Any],
    stats: StatsBySite,
  ) -> OutsAndStats:
    if is_autocast_matmul(eqn, self.location):
      site_index = self.table.get_site_index(
        eqn, self.location.locate(eqn, jaxpr)
      )
      # No output depends on this matmul, so it has no row.
      if site_index is None:
        return _eqns.eqn_as_fun(_primitives.as_highest_float32(eqn))(
          *inputs
        ), stats
      return self._eval_matmul(eqn, site_index, inputs, stats)
    # Enter only calls and loops that may contain half precision. All others run
    # as one eqn, which is traced faster.
    has_half = any(self._is_half(v.aval) for v in [*eqn.invars, *eqn.outvars])
    call = None
    if has_half or self.table.has_tagged_eqn(eqn):
      call = self.table.get_higher_order(eqn)
    if call is not None:
      inner_program = self._replace(location=self.location.locate(eqn, jaxpr))
      # Trace with the settings that the eqn was traced with, such as its mesh.
      with _eqns.get_eqn_ctx_manager(eqn):
        return inner_program._eval_subjaxprs(call, inputs, stats)
    if not eqn.outvars and _CALLBACK_RE.search(eqn.primitive.name):
      return [], stats
    if has_half:
      return self._eval_half_precision_eqn(eqn, inputs), stats
    return _eqns.eqn_as_fun(eqn)(*inputs), stats

  def _eval_matmul(
    self,
    eqn: core.JaxprEqn,
    site_index: int,
    inputs: list[Any],
    stats: StatsBySite,
  ) -> OutsAndStats:
    dtypes = self.table.sites[site_index].dtypes

    apply_mode = functools.partial(_apply_mode, self.modes[site_index])
    matmul = _eqns.eqn_as_fun(_primitives.as_highest_float32(eqn))
    operands = apply_mode(dtypes.operand, inputs[:2])
    (out,) = apply_mode(dtypes.result, matmul(*operands, *inputs[2:]))
    arrays = [*inputs[:2], out]
    limits = _dtype_limits.get_cast_thresholds(dtypes.operand)
    new_stats = _add_run_stats(stats[site_index], arrays, limits)
    return [out], [*stats[:site_index], new_stats, *stats[site_index + 1 :]]

  def _eval_half_precision_eqn(
    self, eqn: core.JaxprEqn, inputs: list[Any]
  ) -> Sequence[Any]:
    """Evaluate an eqn in half precision that is not a matmul of `autocast`.

    The casts that `autocast` inserted are dropped: each matmul rounds its own
    operands. Eqns that the user wrote in half precision compute in it.
    """
    if _primitives.is_noop_reduce_precision(eqn):
      return inputs  # JAX inserts it before values that a checkpoint saves.
    if is_autocast_eqn(eqn, self.location):
      is_cast = eqn.primitive.name == "convert_element_type"
      return inputs if is_cast else _eqns.eqn_as_fun(eqn)(*inputs)
    # Operands that were half precision are float32 here, so cast them back.
    pairs: Any = zip(inputs, [v.aval for v in eqn.invars], strict=True)
    args = [x.astype(a.dtype) if self._is_half(a) else x for x, a in pairs]
    return list(map(self._upcast, _eqns.eqn_as_fun(eqn)(*args)))

  def _eval_subjaxprs(
    self,
    call: _higher_order.HigherOrderOp,
    inputs: list[Any],
    stats: StatsBySite,
  ) -> OutsAndStats:
    match call:
      case _higher_order.Scan():
        return self._eval_scan(call, inputs, stats)
      case _higher_order.While():
        return self._eval_while(call, inputs, stats)
      case _higher_order.Cond():
        return self._eval_cond(call, inputs, stats)
      case _higher_order.ShardMap():
        return self._eval_shard_map(call, inputs, stats)
      case _:
        return self.eval_jaxpr(call.body, inputs, stats)

  def _eval_scan(
    self, scan: _higher_order.Scan, inputs: list[Any], stats: StatsBySite
  ) -> OutsAndStats:
    consts, init_carry, slices = scan.split(inputs)

    def body_fun(carry: Any, body_slices: Any) -> tuple[Any, Any]:
      carry_values, stats = carry
      body_inputs = [*consts, *carry_values, *body_slices]
      outs, stats = self.eval_jaxpr(scan.body, body_inputs, stats)
      return (outs[: scan.num_carry], stats), outs[scan.num_carry :]

    (final_carry, stats), ys = lax.scan(
      body_fun, (init_carry, stats), slices, scan.length, scan.reverse
    )
    return [*final_carry, *ys], stats

  def _eval_while(
    self, loop: _higher_order.While, inputs: list[Any], stats: StatsBySite
  ) -> OutsAndStats:
    cond_consts, body_consts, init_carry = loop.split(inputs)

    # The cond_fun of a while_loop cannot return statistics. So the body
    # evaluates the condition of the next iteration, and carries the predicate.
    def eval_cond(
      carry_values: Any, stats: StatsBySite
    ) -> tuple[Any, Any, StatsBySite]:
      inputs = [*cond_consts, *carry_values]
      (pred,), stats = self.eval_jaxpr(loop.condition, inputs, stats)
      return pred, carry_values, stats

    def body_fun(carry: Any) -> tuple[Any, Any, StatsBySite]:
      pred, carry_values, stats = carry
      outs, stats = self.eval_jaxpr(
        loop.body, [*body_consts, *carry_values], stats
      )
      # Under ``vmap``, rows that have ended keep their carry.
      if jnp.ndim(pred):
        pairs = zip(outs, carry_values, strict=True)
        outs = [_arrays.select_rows(pred, *pair) for pair in pairs]
      return eval_cond(outs, stats)

    cond_fun = lambda carry: jnp.any(carry[0])
    init_state = eval_cond(init_carry, stats)
    return lax.while_loop(cond_fun, body_fun, init_state)[1:]

  def _eval_cond(
    self, cond: _higher_order.Cond, inputs: list[Any], stats: StatsBySite
  ) -> OutsAndStats:
    index, *operands = inputs
    branches = [
      functools.partial(self.eval_jaxpr, body) for body in cond.branches
    ]
    return lax.switch(index, branches, operands, stats)

  def _eval_shard_map(
    self,
    shard_map: _higher_order.ShardMap,
    inputs: list[Any],
    stats: StatsBySite,
  ) -> OutsAndStats:
    # The order of a set differs among processes, which must run the same
    # program.
    axes = tuple(sorted(shard_map.manual_axes, key=str))

    def body_fun(modes: Any, *args: Any) -> Any:
      # The statistics differ among devices, so their type must vary over all
      # axes.
      make_varying = lambda x: x + 0 * lax.axis_index(axes).astype(jnp.float32)
      empty_stats = jax.tree.map(
        make_varying, [make_empty_stats() for _ in stats]
      )
      inner_program = self._replace(modes=modes)
      outs, new_stats = inner_program.eval_jaxpr(
        shard_map.body, args, empty_stats
      )
      return outs, [psum_stats(n, axes) for n in new_stats]

    replicated = jax.sharding.PartitionSpec()
    in_specs = (replicated, *shard_map.in_specs)
    out_specs = (list(shard_map.out_specs), replicated)
    mapped_fun = shard_map.wrap_fun(body_fun, in_specs, out_specs)
    outs, new_stats = mapped_fun(self.modes, *inputs)
    return outs, list(map(merge_stats, stats, new_stats))


# Each matmul calls the next two functions. They are jitted, so that JAX traces
# them once for each shape instead of once for each matmul.
@functools.partial(jax.jit, static_argnums=1)
def _apply_mode(mode: Any, dtype: np.dtype, arrays: Sequence[Any]) -> list[Any]:
  """Round or perturb the operands or the result of a matmul, by its mode."""
  # A select would be cheaper than a branch, but XLA would fuse, and so repeat,
  # it in each consumer.
  round_all = lambda xs: [_round_to_dtype(x, dtype) for x in xs]
  perturb_all = lambda xs: list(map(_perturb, xs))
  return lax.switch(mode, [list, round_all, perturb_all], arrays)


@functools.partial(jax.jit, static_argnums=2)
def _add_run_stats(
  stats: SiteStats, arrays: Sequence[Any], limits: _dtype_limits.CastThresholds
) -> SiteStats:
  """Add the statistics of one more execution."""
  return merge_stats(stats, measure_run(arrays, limits))


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


def _perturb(x: Any) -> Any:
  """Flip one of the last bits of each entry; 0, inf and NaN stay.

  The perturbation is deterministic, so all readers of an array read equal
  values.
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32) ^ _FOURTH_LAST_BIT
  perturbed = lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where((x == 0) | ~jnp.isfinite(x), x, perturbed)


class MatmulTable:
  """The matmuls that `autocast` casts in a program, by location.

  They have the tag of `autocast` in their name stack, which every
  transformation of JAX keeps. So `autocast` alone decides which matmuls are
  cast.

  Attributes:
    sites: all sites, in the order of the program.
    names: the shortest unique label of each site.
    source_lines: a source line for each site, which distinguishes sites with
      similar names.
    dtypes: the half-precision dtypes of all sites: usually one.
    unanalyzed_names: the names of eqns with tagged matmuls inside that cannot
      be entered.
    get_higher_order: parses an eqn that calls, repeats or selects jaxprs;
      returns None for others and unknown ones.
    has_tagged_eqn: returns whether the jaxprs inside an eqn have tagged eqns.
  """

  def __init__(self, closed_jaxpr: _eqns.ClosedJaxpr) -> None:
    is_tagged = functools.partial(
      is_autocast_eqn, parent_location=_provenance.EqnLocation()
    )
    self.has_tagged_eqn = _walk.EqnSearch(is_tagged, _eqns.subjaxprs).any_inside
    self.get_higher_order = functools.cache(_higher_order.parse_higher_order)
    self.unanalyzed_names: list[str] = []
    self._index_by_site: dict[MatmulSite, int] = {}
    # Only live eqns: a dead matmul would have an effect of zero, and cost a
    # run.
    for visit in _walk.walk(closed_jaxpr, self._get_subjaxprs, only_live=True):
      parent_location = (
        visit.parent.location if visit.parent else _provenance.EqnLocation()
      )
      if is_autocast_matmul(visit.eqn, parent_location):
        self._index_by_site.setdefault(
          _as_site(visit.eqn, visit.location), len(self._index_by_site)
        )
      elif (
        self.has_tagged_eqn(visit.eqn)
        and self.get_higher_order(visit.eqn) is None
      ):
        name = _source_info.get_primitive_name(visit.eqn)
        self.unanalyzed_names.append(
          _provenance.format_location(name, visit.location.label)
        )
    self.sites = list(self._index_by_site)
    names_and_lines = _provenance.make_unique_labels(
      [(x.names, x.backward) for x in self.sites]
    )
    self.names = [name for name, _ in names_and_lines]
    self.source_lines = [source_line for _, source_line in names_and_lines]
    self.dtypes = {dtype for site in self.sites for dtype in site.dtypes}
    self.dtypes -= {np.dtype(np.float32)}

  def get_site_index(
    self, eqn: core.JaxprEqn, location: _provenance.EqnLocation
  ) -> int | None:
    """Return the index of a matmul's site; None if no output depends on it."""
    return self._index_by_site.get(_as_site(eqn, location))

  def group_by_name(self) -> list[list[int]]:
    """Return the indices of the sites of each layer, which share a name."""
    indices_by_name: dict[str, list[int]] = {}
    for i, name in enumerate(self.names):
      indices_by_name.setdefault(name, []).append(i)
    return list(indices_by_name.values())

  def _get_subjaxprs(self, eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
    call = self.get_higher_order(eqn) if self.has_tagged_eqn(eqn) else None
    return _higher_order.get_bodies(call) if call else []


def is_autocast_matmul(
  eqn: core.JaxprEqn, parent_location: _provenance.EqnLocation
) -> bool:
  """Return whether this is a matmul that `autocast` casts."""
  return _primitives.is_matmul(eqn) and is_autocast_eqn(eqn, parent_location)


def is_autocast_eqn(
  eqn: core.JaxprEqn, parent_location: _provenance.EqnLocation
) -> bool:
  """Return whether the eqn, or a call around it, has the tag of `autocast`."""
  return parent_location.push_scope(eqn).matmul_dtypes is not None


def _as_site(
  eqn: core.JaxprEqn, location: _provenance.EqnLocation
) -> MatmulSite:
  name, dtypes = _source_info.get_primitive_name(eqn), location.matmul_dtypes
  assert dtypes is not None  # Only matmuls with a tag have a site.
  return MatmulSite(name, location.names, location.is_backward, dtypes)


def make_empty_stats() -> SiteStats:
  """Return the statistics of a matmul that has not run."""
  scalar, vector = jnp.zeros((), jnp.float32), jnp.zeros(3, jnp.float32)
  return SiteStats(scalar, scalar, vector, vector, vector)


def measure_run(
  arrays: Sequence[Any], limits: _dtype_limits.CastThresholds
) -> SiteStats:
  """Return the statistics of one execution of a matmul.

  Args:
    arrays: the two operands and the result.
    limits: the limits of half precision.

  Returns:
    A :class:`SiteStats`.
  """
  amaxes, num_underflows, num_subnormals = map(
    jnp.stack,
    zip(*(_measure_amax_and_underflow(x, limits) for x in arrays), strict=True),
  )
  num_entries = jnp.array([x.size for x in arrays], jnp.float32)
  return SiteStats(
    jnp.float32(1), jnp.max(amaxes), num_entries, num_underflows, num_subnormals
  )


def _measure_amax_and_underflow(
  x: Any, limits: _dtype_limits.CastThresholds
) -> Any:
  """Return the largest magnitude, and the underflow and subnormal counts."""
  x = jnp.abs(x)
  nan_as_zero = jnp.where(jnp.isnan(x), 0, x)
  is_underflow = ((x > 0) & (x <= limits.underflow_threshold)).astype(jnp.int32)
  is_subnormal = (
    (x > limits.underflow_threshold) & (x < limits.smallest_normal)
  ).astype(jnp.int32)

  # Compute all three in one variadic reduction, since XLA would compile a loop
  # for each of three.
  def combine(lhs: Any, rhs: Any) -> Any:
    (a, b, c), (d, e, f) = lhs, rhs
    return lax.max(a, d), b + e, c + f

  identities = jnp.zeros((), x.dtype), jnp.int32(0), jnp.int32(0)
  axes = tuple(range(x.ndim))
  amax, *counts = lax.reduce(
    (nan_as_zero, is_underflow, is_subnormal), identities, combine, axes
  )
  return amax, *(count.astype(jnp.float32) for count in counts)


def merge_stats(stats: SiteStats, other_stats: SiteStats) -> SiteStats:
  """Merge the statistics of two sets of executions."""
  return SiteStats(
    num_executions=stats.num_executions + other_stats.num_executions,
    amax=jnp.maximum(stats.amax, other_stats.amax),
    num_entries=stats.num_entries + other_stats.num_entries,
    num_underflows=stats.num_underflows + other_stats.num_underflows,
    num_subnormals=stats.num_subnormals + other_stats.num_subnormals,
  )


def psum_stats(stats: SiteStats, axes: tuple[Any, ...]) -> SiteStats:
  """Merge the statistics of all devices along mesh axes."""
  sums = jax.tree.map(lambda x: lax.psum(x, axes), stats)
  return sums._replace(amax=lax.pmax(stats.amax, axes))
