"""Describe the origin of an inf or a NaN by its location and its operands."""

from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _regions,
  _source_info,
  _walk,
)
from optax_lossscale.diagnostics import _eqn_stats, _host_values, _tracing
from optax_lossscale.diagnostics._overflow import (
  _domains,
  _origins,
  _report,
)


def describe_origins(
  traced: _tracing.TracedFunction, origins: Sequence[_origins.Origin]
) -> list[_report.Overflow]:
  """Return the reports on equations and arguments."""
  visits = traced.regions.visits
  return [
    _describe_argument(traced, origin.key[1])
    if _regions.is_argument(origin.key)
    else _describe_eqn(
      origin,
      visits[_regions.get_eqn_path(origin.key)],
      list(visits.values()),
    )
    for origin in origins
  ]


def _describe_argument(
  traced: _tracing.TracedFunction, index: int
) -> _report.Overflow:
  array = traced.inputs[index]
  return _report.Overflow(
    primitive="argument",
    dtype=np.dtype(array.dtype),
    kind="inf" if _host_values.has_inf(array) else "nan",
    name_scope="",
    param_path="",
    name="",
    source_line="",
    eqn_path=traced.input_names[index],
    backward=False,
    inputs=(),
  )


def _describe_eqn(
  origin: _origins.Origin,
  visit: _walk.EqnVisit,
  visits: Sequence[_walk.EqnVisit],
) -> _report.Overflow:
  eqn, location = visit.eqn, visit.location
  stats = origin.stats or _eqn_stats.make_empty_stats(eqn)
  # If all results were finite, only the program as a whole makes one nonfinite.
  is_float = list(map(_regions.is_inexact, eqn.outvars))
  is_nonfinite = stats.is_nonfinite if stats.is_nonfinite.any() else is_float
  out_index = int(np.argmax(is_nonfinite))
  out_aval: Any = eqn.outvars[out_index].aval
  is_nan = stats.has_nan[out_index] and not (
    stats.is_origin and stats.has_inf[out_index]
  )
  is_reproduced = origin.stats is None or bool(stats.is_nonfinite.any())
  return _report.Overflow(
    primitive=_eqns.get_primitive_name(eqn),
    dtype=np.dtype(out_aval.dtype),
    kind="nan" if is_nan else "inf",
    name_scope=location.names.name_scope,
    param_path=location.names.param_path,
    name=location.label,
    source_line=location.source_line,
    eqn_path=_format_path(visit, origin.iterations),
    backward=location.is_backward,
    inputs=_eqn_stats.list_operands(eqn, stats) if origin.stats else (),
    in_autocast=location.autocast_dtype is not None,
    _context=_report.Context(
      is_reproduced=is_reproduced,
      is_written=is_reproduced and not stats.is_fault,
      function=_domains.find_function(visit, visits),
      after_backward=_is_after_backward(visit, visits),
    ),
  )


def _is_after_backward(
  visit: _walk.EqnVisit, visits: Sequence[_walk.EqnVisit]
) -> bool:
  """Return whether an equation belongs to the optimizer, or to clipping."""
  earlier = itertools.takewhile(lambda x: x is not visit, visits)
  return visit.location.is_in_optimizer or (
    not visit.location.is_differentiated
    and any(x.stack_location.is_backward for x in earlier)
  )


def _format_path(visit: _walk.EqnVisit, iterations: Sequence[int]) -> str:
  """Return the names of the enclosing equations, and that of the equation.

  Args:
    visit: the visit of the equation.
    iterations: the iteration of each loop around it.
  """
  remaining = iter(iterations)
  visits = visit.self_and_ancestors[::-1]
  labels = []
  for outer, inner in itertools.pairwise(visits):
    label = _source_info.format_call(outer.eqn)
    match outer.hop:
      case _higher_order.Scan(length=length, reverse=reverse):
        index = next(remaining)
        # The backward pass of an iteration has the same index.
        label = f"scan[{length - 1 - index if reverse else index}]"
      case _higher_order.While():
        label = f"while[{next(remaining)}]"
      case _higher_order.Cond():
        label = f"cond(branch {inner.body_index})"
    labels.append(label)
  return "/".join([*labels, _eqns.get_primitive_name(visit.eqn)])
