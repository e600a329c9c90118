"""Runs a program with each of its products in float32 or in half precision.

The program is what `autocast` made of a function, whatever transformed it
later. It is traced once more, operation by operation, and all that is in half
precision there is kept in float32: operands, results, and what stands between
them. A product then rounds its operands and its result, or does not, as is said
when the program runs. So one compiled program serves all runs. A loop, a branch
and a ``shard_map`` are made anew, and carry along what is noted of the products
inside.
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
from optax_lossscale.diagnostics import _numbers


class MatmulSite(NamedTuple):
  """Products of one kind in one place, which are told of together.

  Attributes:
    primitive: JAX's name of the operation.
    names: the names of its place.
    backward: whether it belongs to a backward pass.
    dtypes: the dtypes that `autocast` chose.
  """

  primitive: str
  names: _provenance.EqnNames
  backward: bool
  dtypes: _provenance.MatmulDtypes


class SiteStats(NamedTuple):
  """What is noted of all runs of one product.

  Attributes:
    num_executions: how often it ran; float32[].
    amax: the largest magnitude of its operands and its result; float32[].
    num_entries: how many entries the operands and the result had; float32[3].
    num_underflows: how many of them become zero in half precision; float32[3].
    num_subnormals: how many become subnormal; float32[3].
  """

  num_executions: Any
  amax: Any
  num_entries: Any
  num_underflows: Any
  num_subnormals: Any


# Of these, what returns nothing is not run: it would print each time.
_CALLBACK_RE = re.compile("callback|print")
_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN

# How a product may run: as in float32, in half precision, or as in float32 with
# numbers that are a little off.
EXACT, HALF, PERTURBED = range(3)
# What is a little off has another fourth last bit, and so another size, by
# 2**-20 of itself at most.
_FOURTH_LAST_BIT = 8

# For each row what was noted of it.
StatsBySite = list[SiteStats]
# What equations return, and what was noted after them.
OutsAndStats = tuple[Sequence[Any], StatsBySite]


class MixedPrecisionProgram(NamedTuple):
  """A program with a choice for each product, to be called while it is traced.

  Attributes:
    table: the products.
    modes: how each row runs: ``EXACT``, ``HALF`` or ``OFF``; int32[rows].
    location: where the walk through it has come to.
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
    """Runs a jaxpr.

    Args:
      closed_jaxpr: the jaxpr.
      inputs: its inputs. What is in half precision there may be float32 here.
      stats: what was noted before.

    Returns:
      Its outputs, none of which is in half precision, and what was noted after
      it.
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
    """An array, in float32 if it is in half precision."""
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
      if site_index is None:
        return _eqns.eqn_as_fun(_primitives.as_highest_float32(eqn))(
          *inputs
        ), stats
      return self._eval_matmul(eqn, site_index, inputs, stats)
    has_half = any(self._is_half(v.aval) for v in [*eqn.invars, *eqn.outvars])
    call = None
    if has_half or self.table.has_tagged_eqn(eqn):
      call = self.table.get_higher_order(eqn)
    if call is not None:
      inner_program = self._replace(location=self.location.locate(eqn, jaxpr))
      with _eqns.get_eqn_ctx_manager(eqn):
        return inner_program._eval_subjaxprs(call, inputs, stats)
    if not eqn.outvars and _CALLBACK_RE.search(eqn.primitive.name):
      return [], stats
    if has_half:
      return self._eval_non_matmul(eqn, inputs), stats
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
    limits = _numbers.get_dtype_limits(dtypes.operand)
    new_stats = _add_run_stats(stats[site_index], arrays, limits)
    return [out], [*stats[:site_index], new_stats, *stats[site_index + 1 :]]

  def _eval_non_matmul(
    self, eqn: core.JaxprEqn, inputs: list[Any]
  ) -> Sequence[Any]:
    """What is in half precision, and no product of `autocast`.

    What `autocast` made is so for the sake of a product, which rounds. All else
    was in half precision before, and computes as it is written.
    """
    if _primitives.is_noop_reduce_precision(eqn):
      return inputs  # JAX writes it in front of what a checkpoint saves.
    if is_autocast_eqn(eqn, self.location):
      is_cast = eqn.primitive.name == "convert_element_type"
      return inputs if is_cast else _eqns.eqn_as_fun(eqn)(*inputs)
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

    # A condition returns no notes. So each iteration asks for the next one.
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
      if jnp.ndim(pred):  # ``vmap`` made many loops of one.
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
    # A set has another order in each process, and all must run one program.
    axes = tuple(sorted(shard_map.manual_axes, key=str))

    def body_fun(modes: Any, *args: Any) -> Any:
      # What is noted differs among the devices, and so its type must say.
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


# A program has as many of the next two as products, most of them of few shapes.
# They are compiled functions, so that JAX traces each shape once.
@functools.partial(jax.jit, static_argnums=1)
def _apply_mode(mode: Any, dtype: np.dtype, arrays: Sequence[Any]) -> list[Any]:
  """The operands or results of a product that runs in this way."""
  # A branch keeps XLA from fusing it, again and again, into all that reads.
  round_all = lambda xs: [_round_to_dtype(x, dtype) for x in xs]
  perturb_all = lambda xs: list(map(_perturb, xs))
  return lax.switch(mode, [list, round_all, perturb_all], arrays)


@functools.partial(jax.jit, static_argnums=2)
def _add_run_stats(
  stats: SiteStats, arrays: Sequence[Any], limits: _numbers.DtypeLimits
) -> SiteStats:
  """What was noted before, and of one more run."""
  return merge_stats(stats, measure_run(arrays, limits))


def _round_to_dtype(x: Any, dtype: np.dtype) -> Any:
  """The array rounded to a dtype. XLA may drop a pair of conversions."""
  info: Any = jnp.finfo(dtype)
  normal_result = lax.reduce_precision(x, info.nexp, info.nmant)
  smallest_normal, smallest_subnormal = (
    float(info.smallest_normal),
    float(info.smallest_subnormal),
  )
  if smallest_normal == jnp.finfo(jnp.float32).smallest_normal:
    return normal_result
  # What is subnormal is flushed to zero there.
  subnormal_result = (
    lax.round(x * (1 / smallest_subnormal), _TO_EVEN) * smallest_subnormal
  )
  return jnp.where(
    jnp.abs(x) < smallest_normal, subnormal_result, normal_result
  )


def _perturb(x: Any) -> Any:
  """The array with other last bits: the same ones wherever it is read."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) ^ _FOURTH_LAST_BIT
  perturbed = lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where((x == 0) | ~jnp.isfinite(x), x, perturbed)


class MatmulTable:
  """The products of a program, by where they stand.

  They are known by the mark of `autocast`, which goes wherever an equation
  goes. So nothing is decided here that was decided there.

  Attributes:
    sites: all of them, in the order of the program.
    names: for each, the shortest name that tells its place from all others.
    source_lines: for each, the line that tells it from others of a like name.
    dtypes: their half precisions: mostly one.
    unanalyzed_names: the names of what holds products and cannot be entered.
    get_higher_order: what an equation calls, repeats or chooses; None if it is
      not known.
    has_tagged_eqn: whether there are marks in the jaxprs that an equation
      holds.
  """

  def __init__(self, closed_jaxpr: _eqns.ClosedJaxpr) -> None:
    is_tagged = functools.partial(
      is_autocast_eqn, parent_location=_provenance.EqnLocation()
    )
    self.has_tagged_eqn = _walk.EqnSearch(is_tagged, _eqns.subjaxprs).any_inside
    self.get_higher_order = functools.cache(_higher_order.parse_higher_order)
    self.unanalyzed_names: list[str] = []
    self._index_by_site: dict[MatmulSite, int] = {}
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
        name = _source_info.get_op_name(visit.eqn)
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
    """The row of a product at this place; None if nothing reads its result."""
    return self._index_by_site.get(_as_site(eqn, location))

  def group_by_name(self) -> list[list[int]]:
    """The numbers of the rows of each place."""
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
  """Whether this is a product that `autocast` runs in half precision."""
  return _primitives.is_matmul(eqn) and is_autocast_eqn(eqn, parent_location)


def is_autocast_eqn(
  eqn: core.JaxprEqn, parent_location: _provenance.EqnLocation
) -> bool:
  """Whether `autocast` made this equation, or what is around it."""
  return parent_location.push_scope(eqn).matmul_dtypes is not None


def _as_site(
  eqn: core.JaxprEqn, location: _provenance.EqnLocation
) -> MatmulSite:
  name, dtypes = _source_info.get_op_name(eqn), location.matmul_dtypes
  assert dtypes is not None  # Only matmuls with a tag have a site.
  return MatmulSite(name, location.names, location.is_backward, dtypes)


def make_empty_stats() -> SiteStats:
  """What is known of a product that has not run."""
  scalar, vector = jnp.zeros((), jnp.float32), jnp.zeros(3, jnp.float32)
  return SiteStats(scalar, scalar, vector, vector, vector)


def measure_run(
  arrays: Sequence[Any], limits: _numbers.DtypeLimits
) -> SiteStats:
  """What is noted of one run of a product.

  Args:
    arrays: the two operands and the result.
    limits: what half precision can hold.

  Returns:
    A :class:`SiteStats`.
  """
  amaxes, num_underflows, num_subnormals = map(
    jnp.stack, zip(*(_measure_array(x, limits) for x in arrays), strict=True)
  )
  num_entries = jnp.array([x.size for x in arrays], jnp.float32)
  return SiteStats(
    jnp.float32(1), jnp.max(amaxes), num_entries, num_underflows, num_subnormals
  )


def _measure_array(x: Any, limits: _numbers.DtypeLimits) -> Any:
  """The largest magnitude, and how many entries are lost and subnormal."""
  x = jnp.abs(x)
  nan_as_zero = jnp.where(jnp.isnan(x), 0, x)
  is_underflow = ((x > 0) & (x <= limits.underflow_threshold)).astype(jnp.int32)
  is_subnormal = (
    (x > limits.underflow_threshold) & (x < limits.smallest_normal)
  ).astype(jnp.int32)

  # One pass for all three: XLA compiles a loop for each reduction.
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
  """What was noted of some runs and of others."""
  return SiteStats(
    num_executions=stats.num_executions + other_stats.num_executions,
    amax=jnp.maximum(stats.amax, other_stats.amax),
    num_entries=stats.num_entries + other_stats.num_entries,
    num_underflows=stats.num_underflows + other_stats.num_underflows,
    num_subnormals=stats.num_subnormals + other_stats.num_subnormals,
  )


def psum_stats(stats: SiteStats, axes: tuple[Any, ...]) -> SiteStats:
  """What was noted on all devices along the axes of a mesh."""
  sums = jax.tree.map(lambda x: lax.psum(x, axes), stats)
  return sums._replace(amax=lax.pmax(stats.amax, axes))
