"""``precision_report``: the dtypes in which a function computes, by location.

The function is traced, and its jaxpr is walked without running it. Each matmul
and convolution contributes FLOPs to a pair of dtypes, times the number of its
executions. Each other eqn with a result in the target dtype is checked for
risks: functions that overflow or underflow, long sums, and constants that do
not fit.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import dataclasses
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _transfer_guard
from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _source_info,
  _walk,
)
from optax_lossscale.diagnostics import (
  _collectives,
  _dtype_limits,
  _tracing,
)
from optax_lossscale.diagnostics._precision import _report, _risks

# The jaxpr inside of these primitives only combines two numbers. It is not
# counted as a body that runs.
_REDUCER_PREFIXES = (
  "arg",
  "cum",
  "reduce",
  "scatter",
  "select_and",
  "sort",
  "top_k",
)


class MatmulStats(NamedTuple):
  """The matmuls or convolutions of one eqn.

  Attributes:
    primitive: JAX's name of the operation.
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result.
    flops: the flops of all of them.
    visit: the eqn, with its location and the number of its executions.
  """

  primitive: str
  operand_dtype: str
  result_dtype: str
  flops: int
  visit: _walk.EqnVisit


@_transfer_guard.allow_transfers
def precision_report(
  fun: Callable[..., Any],
  *args: Any,
  dtype: Any = jnp.float16,
  **kwargs: Any,
) -> _report.PrecisionReport:
  """Reports in which dtypes a function computes, and where float16 is a risk.

  The function is traced and not run. Operations count if they lead to a result,
  to a change of an argument, or to the gradients that the ``update`` of
  :func:`~optax_lossscale.with_loss_scaling` receives. If arguments are sharded,
  the function is also compiled, to find the sums over devices that XLA inserts.

  Args:
    fun: any function that ``jax.jit`` could take, such as a training step, or
      ``jax.value_and_grad(loss_fn)``.
    *args: its arguments. Arrays may be ``jax.ShapeDtypeStruct``.
    dtype: the dtype in which the function should compute, a float dtype of at
      most 32 bits. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionReport`. It prints a conclusion and tables. The body of a
    ``scan`` is counted once per iteration, the body of a ``while`` loop once,
    the branch with the most FLOPs of a ``cond``, and the body of a
    ``shard_map`` once per device.

  Raises:
    TypeError: if ``fun`` is not callable, an argument is traced, or ``dtype``
      is not a float dtype of at most 32 bits.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, x):
    ...   return jnp.mean(jnp.exp(x @ w.astype(jnp.float16)))
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((128, 64), jnp.float16)
    >>> report = diagnostics.precision_report(loss_fn, w, x)
    >>> report.total_flops, report.fraction
    (1048576, 1.0)
    >>> [risk.primitive for risk in report.at_risk]
    ['exp']
  """
  target_dtype = _dtype_limits.check_float_dtype(dtype)
  traced = _tracing.trace(
    "precision_report", fun, args, kwargs, allow_abstract=True
  )
  return report_traced(traced, target_dtype)


def report_traced(
  traced: _tracing.TracedFunction, dtype: np.dtype
) -> _report.PrecisionReport:
  """Return the report of a traced function.

  If its arguments are sharded, the function is compiled, since only the
  compiled module has the sums over devices.
  """
  # Only live eqns, since XLA removes the others.
  visits = list(
    _walk.walk(traced.closed_jaxpr, _executed_subjaxprs, only_live=True)
  )
  limitations = _tracing.describe_unreached(traced.unreached_locations)
  limitations += [
    f"whether update runs, in {location}"
    for location in traced.cond_branch_locations
  ]
  limitations += list(filter(None, map(_describe_limitation, visits)))
  report = _build_report(visits, dtype, limitations)
  hlo_text = _collectives.compile_if_sharded(traced)
  device_sums = [
    _report.Risk(
      x.primitive,
      f"sum over devices in {dtype}, which XLA inserts",
      1,
      x.name_scope,
      x.name_scope,
      "",
      "",
      x.backward,
    )
    for x in _collectives.find_device_sums(hlo_text, dtype)
  ]
  return dataclasses.replace(
    report,
    at_risk=(*report.at_risk, *device_sums),
    warnings=tuple(map(str, traced.mistakes)),
  )


def _build_report(
  visits: list[_walk.EqnVisit], dtype: np.dtype, limitations: list[str]
) -> _report.PrecisionReport:
  all_matmuls = _collect_matmuls(visits)
  matmuls = [x for x in all_matmuls if not _is_in_optimizer(x.visit)]
  total_flops = sum(matmul.flops for matmul in matmuls)
  flops_in_dtype = sum(
    p.flops for p in matmuls if not _is_wider(p.operand_dtype, dtype)
  )
  return _report.PrecisionReport(
    dtype=str(dtype),
    total_flops=total_flops,
    fraction=flops_in_dtype / total_flops if total_flops else 1.0,
    flops=_merge_with_fractions(
      (
        _report.Flops(p.operand_dtype, p.result_dtype, p.flops, 0.0)
        for p in matmuls
      ),
      total_flops,
    ),
    unconverted=_merge_with_fractions(
      _build_unconverted_rows(matmuls, dtype), total_flops
    ),
    at_risk=tuple(_group_rows(_build_risk_rows(visits, dtype))),
    limitations=tuple(dict.fromkeys(limitations)),
    optimizer_flops=sum(x.flops for x in all_matmuls) - total_flops,
  )


def _is_in_optimizer(visit: _walk.EqnVisit) -> bool:
  """Return whether the optimizer that `with_loss_scaling` wraps runs an eqn."""
  return any(
    _provenance.has_scope(x.eqn, _provenance.OPTIMIZER_SCOPE)
    for x in visit.self_and_ancestors
  )


def _is_wider(operand_dtype: str, dtype: np.dtype) -> bool:
  np_dtype = jnp.dtype(operand_dtype)
  if jnp.issubdtype(np_dtype, jnp.inexact):
    bits = jnp.finfo(np_dtype).bits
  else:  # finfo does not know integers and booleans.
    bits = 8 * np_dtype.itemsize
  return bits > jnp.finfo(dtype).bits


def _build_unconverted_rows(
  matmuls: list[MatmulStats], dtype: np.dtype
) -> Iterator[_report.UnconvertedMatmul]:
  locations = [p.visit.location for p in matmuls]
  names_and_lines = _provenance.make_unique_labels(
    [(x.names, x.is_backward) for x in locations]
  )
  for p, location, (name, source_line) in zip(
    matmuls, locations, names_and_lines, strict=True
  ):
    if _is_wider(p.operand_dtype, dtype):
      # Without a parameter path, several layers may share a scope, so the name
      # includes the line.
      name_with_line = _provenance.format_location(
        location.names.candidate_labels()[0], source_line
      )
      has_line = name.endswith(source_line)
      layer_name = name if location.param_path or has_line else name_with_line
      yield _report.UnconvertedMatmul(
        p.primitive,
        p.operand_dtype,
        p.result_dtype,
        p.flops,
        0.0,
        p.visit.num_executions,
        *_get_location_fields(location, layer_name),
      )


def _build_risk_rows(
  visits: list[_walk.EqnVisit], dtype: np.dtype
) -> Iterator[_report.Risk]:
  constants, parents = (
    _risks.ConstantPropagation(),
    {visit.parent for visit in visits},
  )
  for visit in visits:
    if visit in parents:  # The eqns inside of it are visited, too.
      continue
    for reason in _risks.find_risks(visit, dtype, constants):
      yield _report.Risk(
        _source_info.get_primitive_name(visit.eqn),
        reason,
        visit.num_executions,
        *_get_location_fields(visit.location, visit.location.label),
      )


def _get_location_fields(
  location: _provenance.EqnLocation, name: str
) -> tuple[str, str, str, str, bool]:
  names = location.names
  return (
    name,
    names.name_scope,
    names.param_path,
    location.source_line,
    location.is_backward,
  )


def _merge_with_fractions(
  rows: Iterable[Any], total_flops: int
) -> tuple[Any, ...]:
  """Merge equal rows, and set their fractions of the FLOPs, largest first."""
  grouped_rows = sorted(
    _group_rows(rows), key=lambda row: row.flops, reverse=True
  )
  return tuple(
    x._replace(fraction=x.flops / total_flops if total_flops else 1.0)
    for x in grouped_rows
  )


def _group_rows(rows: Iterable[Any]) -> Iterator[Any]:
  """Merge rows that differ only in integers, and add up the integers."""
  counts_by_key: dict[Any, collections.Counter[str]] = {}
  for row in rows:
    # Not isinstance: a bool, such as `backward`, is part of the key.
    counts = {x: v for x, v in row._asdict().items() if type(v) is int}
    key = row._replace(**dict.fromkeys(counts, 0))
    counts_by_key.setdefault(key, collections.Counter()).update(counts)
  return (key._replace(**counts) for key, counts in counts_by_key.items())


def _collect_matmuls(visits: list[_walk.EqnVisit]) -> list[MatmulStats]:
  """Return all matmuls, from each ``cond`` only those of its largest branch."""
  matmuls = [
    _as_matmul_stats(visit, flops * visit.num_executions)
    for visit in visits
    if (flops := _primitives.count_flops(visit.eqn)) is not None
  ]
  flops_by_branch: collections.Counter[Any] = collections.Counter()
  for matmul in matmuls:
    for branch in matmul.visit.cond_branches:
      flops_by_branch[branch] += matmul.flops
  # Maps each cond to its branch with the most FLOPs: in ascending order, the
  # last branch of a cond overwrites the others.
  largest_branches = dict(
    sorted(flops_by_branch, key=lambda branch: flops_by_branch[branch])
  )
  return [
    matmul
    for matmul in matmuls
    if all(
      largest_branches[cond] == i for cond, i in matmul.visit.cond_branches
    )
  ]


def _as_matmul_stats(visit: _walk.EqnVisit, flops: int) -> MatmulStats:
  # A ragged_dot has a third input, the sizes of the groups.
  operand_avals: list[Any] = [v.aval for v in visit.eqn.invars[:2]]
  widest_dtype = max(operand_avals, key=lambda aval: aval.dtype.itemsize).dtype
  result_dtype = _primitives.get_result_dtype(visit.eqn)
  name = _source_info.get_primitive_name(visit.eqn)
  return MatmulStats(name, str(widest_dtype), str(result_dtype), flops, visit)


def _executed_subjaxprs(eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
  """Return the jaxprs that an equation runs."""
  call = _higher_order.parse_higher_order(eqn)
  return (
    _non_reducer_subjaxprs(eqn)
    if call is None
    else _higher_order.get_bodies(call)
  )


def _non_reducer_subjaxprs(eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
  """Return the jaxprs in an equation, except those that combine two numbers."""
  is_reducer = _source_info.get_primitive_name(eqn).startswith(
    _REDUCER_PREFIXES
  )
  return [] if is_reducer else list(_eqns.subjaxprs(eqn))


def _describe_limitation(visit: _walk.EqnVisit) -> str:
  """Return the limitation of counting an equation by shapes, or ``""``."""
  reason = _find_limitation(visit)
  if not reason:
    return ""
  name = _source_info.get_primitive_name(visit.eqn)
  where = _provenance.format_location(name, visit.location.source_line)
  return f"{where}: {reason}"


def _find_limitation(visit: _walk.EqnVisit) -> str:
  if isinstance(visit.hop, _higher_order.While):
    return "only one iteration is counted"
  if visit.hop is not None:
    return ""
  if _non_reducer_subjaxprs(visit.eqn):
    return "its body is counted once"
  if _eqns.get_hi_primitive(visit.eqn) is not None:
    return "it is unknown, and counted as no FLOPs"
  is_counted = _primitives.count_flops(visit.eqn) is not None
  if is_counted or not _primitives.is_matmul(visit.eqn):
    return ""
  return "its FLOPs are not counted"
