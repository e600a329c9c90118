"""``precision_report``: the dtypes in which a function computes, by location.

The function is traced, and its jaxpr is walked without running it. Each matmul
and convolution contributes FLOPs to a pair of dtypes, times the number of its
executions. Each other eqn with a result in the target dtype is checked for
risks: functions that overflow or underflow, long sums, and constants that do
not fit.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
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
  _dtype_limits,
  _report_format,
  _tracing,
)

# A sum of more terms than this is long: 256 terms of 256 already overflow
# float16.
_LONG_SUM_TERMS = 256
_LOGARITHMS = {"log", "log2"}
_POWERS = {"integer_pow", "pow", "rsqrt", "square"}
_REDUCING_COLLECTIVES = {"psum", "psum_invariant", "reduce_scatter"}
# A literal of zero or inf in these is suspicious: it was probably another
# number before a cast.
_SUSPICIOUS_LITERAL_PRIMITIVES = {"add", "sub", "div"}


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


class Flops(NamedTuple):
  """The matmuls and convolutions of one pair of dtypes.

  Attributes:
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result. XLA accumulates 16-bit matmuls in
      float32, and rounds the result once.
    flops: the number of floating-point operations.
    fraction: the fraction of all FLOPs.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.dot, *[jnp.eye(8)] * 2)
    >>> report.flops[0].operand_dtype, report.flops[0].flops
    ('float32', 1024)
  """

  operand_dtype: str
  result_dtype: str
  flops: int
  fraction: float


class UnconvertedMatmul(NamedTuple):
  """Matmuls or convolutions of one layer whose operands are in a wider dtype.

  Attributes:
    primitive: JAX's name of the operation.
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result.
    flops: the number of floating-point operations.
    fraction: the fraction of all FLOPs.
    run_count: the number of times that they run.
    name: the name for ``keep_float32=`` of :func:`optax_lossscale.autocast`:
      the path of the weights or the scopes, with the line if they are
      ambiguous.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.dot, jnp.eye(8), jnp.eye(8))
    >>> report.unconverted[0].primitive, report.unconverted[0].operand_dtype
    ('dot_general', 'float32')
  """

  primitive: str
  operand_dtype: str
  result_dtype: str
  flops: int
  fraction: float
  run_count: int
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool


class Risk(NamedTuple):
  """Operations of one line that may overflow or underflow.

  Attributes:
    primitive: JAX's name of the operation.
    reason: how they may overflow or underflow.
    run_count: the number of times that they run.
    name: the name for ``keep_float32=`` of :func:`optax_lossscale.autocast`:
      the path of the weights or the scopes, with the line if they are
      ambiguous.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.exp, jnp.ones(8, jnp.float16))
    >>> report.at_risk[0].reason
    'exp overflows above 11.1'
  """

  primitive: str
  reason: str
  run_count: int
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool


@dataclasses.dataclass(frozen=True)
class PrecisionReport(_report_format.PrintedReport):
  """The report of :func:`precision_report`: how much runs in which dtype.

  Attributes:
    dtype: the dtype in which the function should compute, as a string.
    total_flops: the FLOPs of all matmuls and convolutions.
    fraction: the fraction of them whose operands are in this dtype, or in
      another dtype with as few bits; 1.0 if there are none.
    flops: a :class:`Flops` for each pair of dtypes, the largest first.
    unconverted: a :class:`UnconvertedMatmul` for each layer whose operands are
      in a wider dtype, the largest first.
    at_risk: a :class:`Risk` for each line with an operation in this dtype that
      may overflow or underflow, in the order of the program.
    limitations: the parts of the program that were not analyzed.
    warnings: mistakes in the training step as a whole, in sentences: ``update``
      receives gradients that are not scaled as it expects.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(
    ...   ols.autocast(jnp.dot), jnp.eye(8), jnp.eye(8))
    >>> report.fraction, report.unconverted
    (1.0, ())
  """

  dtype: str
  total_flops: int
  fraction: float
  flops: tuple[Flops, ...]
  unconverted: tuple[UnconvertedMatmul, ...]
  at_risk: tuple[Risk, ...]
  limitations: tuple[str, ...]
  warnings: tuple[str, ...] = ()

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    lists = {
      "limitations": list(self.limitations),
      "warnings": list(self.warnings),
    }
    fields = vars(self) | lists
    for name in ("flops", "unconverted", "at_risk"):
      fields[name] = [row._asdict() for row in fields[name]]
    return fields

  def __str__(self) -> str:
    flops = [
      {
        "operand dtype": row.operand_dtype,
        "result dtype": row.result_dtype,
        "flops": f"{row.flops:.3g}",
        "fraction": f"{row.fraction:.1%}",
      }
      for row in self.flops
    ]
    unconverted = [
      _report_format.format_location_cells(row)
      | {
        "operand dtype": row.operand_dtype,
        "count": str(row.run_count),
        "fraction": f"{row.fraction:.1%}",
      }
      for row in self.unconverted
    ]
    at_risk = [
      _report_format.format_location_cells(row)
      | {"count": str(row.run_count), "reason": row.reason}
      for row in self.at_risk
    ]
    parts = [
      *self.warnings,
      *self._format_conclusion(),
      *(f"Not analyzed: {limitation}" for limitation in self.limitations),
    ]
    for title, rows, num_left_aligned in (
      (f"FLOPs of matmuls and convolutions: {self.total_flops:.3g}", flops, 2),
      (f"Matmuls and convolutions not in {self.dtype}:", unconverted, 3),
      (f"At risk in {self.dtype}:", at_risk, 4),
    ):
      parts += (
        [title, _report_format.format_table(rows, num_left_aligned)]
        if rows
        else []
      )
    return "\n".join(parts)

  def _format_conclusion(self) -> list[str]:
    """Return the fraction that runs in the dtype, and how to raise it."""
    if not self.flops:
      return ["The function has no matmuls and no convolutions."]
    autocast = "ols.autocast(loss_fn)"
    if self.dtype != "float16":
      autocast = f"ols.autocast(loss_fn, jnp.{self.dtype})"
    lines = [
      f"{self.fraction:.1%} of the matmul and convolution FLOPs run in"
      f" {self.dtype}."
    ]
    if self.unconverted:
      lines.append(
        f"Fix: {autocast}, or cast the operands of the layers below. (Ignore"
        " this for layers that you keep in float32.)"
      )
    return lines


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
) -> PrecisionReport:
  """Reports in which dtypes a function computes, and where float16 is a risk.

  The function is traced and not run. Operations count if they lead to a result,
  to a change of an argument, or to the gradients that the ``update`` of
  :func:`~optax_lossscale.with_loss_scaling` receives.

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
) -> PrecisionReport:
  """Return the report of a traced function."""
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
  return dataclasses.replace(report, warnings=tuple(map(str, traced.mistakes)))


def _build_report(
  visits: list[_walk.EqnVisit], dtype: np.dtype, limitations: list[str]
) -> PrecisionReport:
  matmuls = _collect_matmuls(visits)
  total_flops = sum(matmul.flops for matmul in matmuls)
  flops_in_dtype = sum(
    p.flops for p in matmuls if not _is_wider(p.operand_dtype, dtype)
  )
  return PrecisionReport(
    dtype=str(dtype),
    total_flops=total_flops,
    fraction=flops_in_dtype / total_flops if total_flops else 1.0,
    flops=_merge_with_fractions(
      (Flops(p.operand_dtype, p.result_dtype, p.flops, 0.0) for p in matmuls),
      total_flops,
    ),
    unconverted=_merge_with_fractions(
      _build_unconverted_rows(matmuls, dtype), total_flops
    ),
    at_risk=tuple(_group_rows(_build_risk_rows(visits, dtype))),
    limitations=tuple(dict.fromkeys(limitations)),
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
) -> Iterator[UnconvertedMatmul]:
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
      location_fields = _get_location_fields(location, layer_name)
      matmul_fields = p.primitive, p.operand_dtype, p.result_dtype
      count_fields = p.flops, 0.0, p.visit.num_executions
      yield UnconvertedMatmul._make(
        (*matmul_fields, *count_fields, *location_fields)
      )


def _build_risk_rows(
  visits: list[_walk.EqnVisit], dtype: np.dtype
) -> Iterator[Risk]:
  constants, parents = (
    _ConstantPropagation(),
    {visit.parent for visit in visits},
  )
  for visit in visits:
    if visit in parents:  # The eqns inside of it are visited, too.
      continue
    for reason in _find_risks(visit, dtype, constants):
      name = _source_info.get_primitive_name(visit.eqn)
      location_fields = _get_location_fields(
        visit.location, visit.location.label
      )
      yield Risk(name, reason, visit.num_executions, *location_fields)


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


def _find_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "_ConstantPropagation"
) -> Iterator[str]:
  """Yield the risks of an operation, if it has a result in this dtype."""
  out_dtypes = [getattr(v.aval, "dtype", None) for v in visit.eqn.outvars]
  if dtype in out_dtypes:
    yield from _find_function_risks(visit, dtype, constants)
    yield from _find_sum_risks(visit, dtype, constants)
    yield from _find_constant_cast_risks(visit, dtype, constants)


def _find_function_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "_ConstantPropagation"
) -> Iterator[str]:
  name = visit.eqn.primitive.name
  if name in _dtype_limits.OVERFLOW_THRESHOLDS:
    threshold = _dtype_limits.format_overflow_threshold(name, dtype)
    yield f"{name} overflows above {threshold}"
  elif name in _LOGARITHMS:
    yield f"{name} of an underflowed value is -inf"
  elif name in _POWERS:
    yield "power: may overflow or underflow (squaring doubles the exponent)"
  elif name == "div":
    divisor = constants.get_constant(visit, visit.eqn.invars[1])
    # A constant divisor of at least 1 cannot underflow in the cast.
    if divisor is None or not 1 <= abs(divisor) < math.inf:
      yield "division: the divisor may have underflowed to zero"


def _find_sum_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "_ConstantPropagation"
) -> Iterator[str]:
  # jnp.sum of float16 adds up in float32, and then casts. The cast has the
  # risk: its operand is the sum.
  sum_eqn = visit.eqn
  if visit.eqn.primitive.name == "convert_element_type":
    sum_eqn = constants.get_defining_eqn(visit, visit.eqn.invars[0]) or sum_eqn
  num_terms = _primitives.count_summands(sum_eqn)
  if visit.eqn.primitive.name in _REDUCING_COLLECTIVES:
    yield f"sum over devices in {dtype}"
  elif (
    num_terms > _LONG_SUM_TERMS
    and sum_eqn.primitive.name in _primitives.SCATTER_REDUCTIONS
  ):
    yield f"sum by index of up to {num_terms} terms"
  elif num_terms > _LONG_SUM_TERMS:
    yield f"sum of {num_terms} terms"


def _find_constant_cast_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "_ConstantPropagation"
) -> Iterator[str]:
  name = visit.eqn.primitive.name
  for atom in visit.eqn.invars:
    value = constants.get_constant(visit, atom)
    if value is None:
      continue
    with np.errstate(all="ignore"):
      cast_value = float(np.asarray(value).astype(dtype))
    is_zero_or_inf = cast_value == 0 or math.isinf(cast_value)
    if (
      name == "convert_element_type" and cast_value != value and is_zero_or_inf
    ):
      yield f"constant {value:g} becomes {cast_value:g} in {dtype}"
    # JAX has cast the literal before tracing, so its original value is unknown.
    is_literal = isinstance(atom, core.Literal)
    if name in _SUSPICIOUS_LITERAL_PRIMITIVES and is_literal and is_zero_or_inf:
      verb = "underflowed" if cast_value == 0 else "overflowed"
      yield (f"constant is {value:g}; it may have {verb} when cast to {dtype}")


class _ConstantPropagation:
  """Finds the values in a jaxpr that are constant scalars, without running it.

  A value is constant if it is a literal, a constant of the jaxpr, a broadcast
  of a constant, or an input to which the caller passes a constant each time.
  """

  def __init__(self) -> None:
    self._defining_eqns: dict[core.Jaxpr, dict[Any, core.JaxprEqn]] = {}

  def get_constant(self, visit: _walk.EqnVisit, atom: Any) -> float | None:
    """Return the number that all entries of an operand are; None if unknown."""
    if isinstance(atom, core.Literal):
      return _as_float_scalar(atom.val)
    defining_eqn, jaxpr = (
      self.get_defining_eqn(visit, atom),
      visit.closed_jaxpr.jaxpr,
    )
    if defining_eqn is not None:
      is_broadcast = defining_eqn.primitive.name in _primitives.BROADCASTING
      return (
        self.get_constant(visit, defining_eqn.invars[0])
        if is_broadcast
        else None
      )
    if atom in jaxpr.constvars:
      return _as_float_scalar(
        visit.closed_jaxpr.consts[jaxpr.constvars.index(atom)]
      )
    operand_by_var = dict(
      zip(jaxpr.invars, _body_operands(visit), strict=False)
    )
    operand = operand_by_var.get(atom)
    if visit.parent is None or operand is None:
      return None
    return self.get_constant(visit.parent, operand)

  def get_defining_eqn(
    self, visit: _walk.EqnVisit, atom: Any
  ) -> core.JaxprEqn | None:
    """Return the eqn whose first output is this operand, or None."""
    jaxpr = visit.closed_jaxpr.jaxpr
    if jaxpr not in self._defining_eqns:
      defining_eqns = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars[:1]}
      self._defining_eqns[jaxpr] = defining_eqns
    is_literal = isinstance(atom, core.Literal)
    return None if is_literal else self._defining_eqns[jaxpr].get(atom)


def _body_operands(visit: _walk.EqnVisit) -> Sequence[Any]:
  """Return the parent's operand for each input of the jaxpr of a visit.

  It is None for the carry of a loop, which changes. If the parent is unknown,
  the result is empty.
  """
  parent = visit.parent
  if parent is None or parent.hop is None:
    return ()
  operands = _higher_order.mask_carry(parent.hop, parent.eqn.invars)
  bodies = _higher_order.pair_bodies_with_inputs(parent.hop, operands)
  _, body_operands = bodies[visit.body_index]
  return body_operands


def _as_float_scalar(const: Any) -> float | None:
  """Return a real scalar as a Python float; None for other constants."""
  if isinstance(const, jax.core.Tracer):
    return None  # A solver closes over tracers of the surrounding function.
  is_float = jnp.issubdtype(jnp.result_type(const), jnp.floating)
  return float(const) if is_float and jnp.shape(const) == () else None


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
  reason = ""
  if isinstance(visit.hop, _higher_order.While):
    reason = "only one iteration is counted"
  elif visit.hop is not None:
    pass
  elif _non_reducer_subjaxprs(visit.eqn):
    reason = "its body is counted once"
  elif _eqns.get_hi_primitive(visit.eqn) is not None:
    reason = "it is unknown, and counted as no FLOPs"
  elif (
    _primitives.is_matmul(visit.eqn)
    and _primitives.count_flops(visit.eqn) is None
  ):
    reason = "its FLOPs are not counted"
  location_text = (
    f" at {visit.location.source_line}" if visit.location.source_line else ""
  )
  return (
    f"{_source_info.get_primitive_name(visit.eqn)}{location_text}: {reason}"
    if reason
    else ""
  )
