"""Describe the origin of an inf or a NaN by its location and its operands."""

from collections.abc import Iterable, Sequence
import itertools
from typing import Any

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _provenance,
  _regions,
  _source_info,
  _state_threading,
  _walk,
)
from optax_lossscale.diagnostics import _eqn_stats, _host_values, _tracing
from optax_lossscale.diagnostics._overflow import (
  _domains,
  _origins,
  _report,
)


def describe_origin(
  traced: _tracing.TracedFunction, origin: _origins.Origin
) -> _report.Overflow:
  """Return the report on an equation, an argument or a constant."""
  key = origin.key
  if _regions.is_argument(key):
    array = traced.inputs[key[1]]
    return _make_report(
      "argument",
      _provenance.EqnLocation(),
      traced.input_names[key[1]],
      array.dtype,
      _get_kind(array),
    )
  frame, path = _locate_jaxpr(traced.closed_jaxpr, key, origin.iterations)
  if _regions.is_constant(key):
    value, location = _get_constant(frame, key)
    return _make_report(
      "constant",
      location,
      f"{path}constant",
      jnp.result_type(value),
      _get_kind(value),
    )
  return _describe_eqn(
    traced, _get_eqn(frame.closed_jaxpr.jaxpr, key), frame, path, origin
  )


def _describe_eqn(
  traced: _tracing.TracedFunction,
  eqn: core.JaxprEqn,
  frame: _state_threading.Frame,
  path: str,
  origin: _origins.Origin,
) -> _report.Overflow:
  stats = origin.stats or _eqn_stats.make_empty_stats(eqn)
  # If all results were finite, only the program as a whole makes one nonfinite.
  is_float = list(map(_regions.is_inexact, eqn.outvars))
  is_nonfinite = stats.is_nonfinite if stats.is_nonfinite.any() else is_float
  out_index = int(np.argmax(is_nonfinite))
  is_nan = stats.has_nan[out_index] and not (
    stats.is_origin and stats.has_inf[out_index]
  )
  out_aval: Any = eqn.outvars[out_index].aval
  unknown = [None] * len(eqn.invars)
  operands = zip(
    (v.aval for v in eqn.invars),
    stats.operand_is_nonfinite.tolist(),
    stats.operand_amax.tolist() if origin.stats else unknown,
    strict=True,
  )
  primitive = _source_info.get_primitive_name(eqn)
  location = frame.location.locate(eqn, frame.closed_jaxpr.jaxpr)
  return _make_report(
    primitive,
    location,
    f"{path}{primitive}",
    out_aval.dtype,
    "nan" if is_nan else "inf",
    [_eqn_stats.make_operand(*operand) for operand in operands],
    _report.Context(
      is_reproduced=bool(stats.is_nonfinite.any()),
      function=_domains.find_function(traced.closed_jaxpr, eqn, frame),
      after_backward=_is_after_backward(traced, eqn, location),
    ),
  )


def _make_report(
  primitive: str,
  location: _provenance.EqnLocation,
  eqn_path: str,
  dtype: Any,
  kind: str,
  inputs: Sequence[_eqn_stats.Operand] = (),
  context: _report.Context = _report.NO_CONTEXT,
) -> _report.Overflow:
  """Return the report on an operation that returned an inf or a NaN.

  Args:
    primitive: its name.
    location: its location.
    eqn_path: the names of the enclosing equations, and its own.
    dtype: the dtype of its result.
    kind: ``"inf"`` or ``"nan"``.
    inputs: its operands.
    context: what its fix depends on.

  Returns:
    The report.
  """
  return _report.Overflow(
    primitive=primitive,
    dtype=np.dtype(dtype),
    kind=kind,
    name_scope=location.names.name_scope,
    param_path=location.names.param_path,
    name=location.label,
    source_line=location.source_line,
    eqn_path=eqn_path,
    backward=location.is_backward,
    inputs=tuple(inputs),
    in_autocast=location.autocast_dtype is not None,
    _context=context,
  )


def _is_after_backward(
  traced: _tracing.TracedFunction,
  eqn: core.JaxprEqn,
  location: _provenance.EqnLocation,
) -> bool:
  """Return whether an equation belongs to the optimizer, or to clipping."""
  earlier = itertools.takewhile(
    lambda visit: visit.eqn.outvars != eqn.outvars,
    _walk.walk(traced.closed_jaxpr, _eqns.subjaxprs),
  )
  return location.is_in_optimizer or (
    not location.is_differentiated
    and any(visit.location.is_backward for visit in earlier)
  )


def _locate_jaxpr(
  closed_jaxpr: _eqns.ClosedJaxpr,
  key: _regions.Key,
  iterations: Iterable[int],
) -> tuple[_state_threading.Frame, str]:
  """Return the jaxpr that contains a key, and the path of enclosing equations.

  Each part of the path ends with a slash.
  """
  location, path = _provenance.EqnLocation(), ""
  remaining = iter(iterations)
  for i in range(0, len(key) - 2, 2):
    eqn_index, body_index = key[i : i + 2]
    jaxpr = closed_jaxpr.jaxpr
    eqn = jaxpr.eqns[eqn_index]
    hop = _higher_order.parse_higher_order(eqn)
    assert hop is not None  # Otherwise no key is inside.
    label = _source_info.format_call(eqn)
    match hop:
      case _higher_order.Scan():
        index = next(remaining)
        # The backward pass of an iteration has the same index.
        index = hop.length - 1 - index if hop.reverse else index
        label = f"scan[{index}]"
      case _higher_order.While():
        label = f"while[{next(remaining)}]"
      case _higher_order.Cond():
        label = f"cond(branch {body_index})"
    location, path = location.locate(eqn, jaxpr), f"{path}{label}/"
    closed_jaxpr = _higher_order.get_bodies(hop)[body_index]
  return _state_threading.Frame(closed_jaxpr, location=location), path


def _get_eqn(jaxpr: core.Jaxpr, key: _regions.Key) -> core.JaxprEqn:
  """Return the equation of a jaxpr at a position, or that computes a value."""
  eqn_index = key[-1] if len(key) % 2 else key[-2]
  if eqn_index < len(jaxpr.eqns):
    return jaxpr.eqns[eqn_index]
  var = jaxpr.outvars[key[-1] - _regions.OUTPUT]
  return next(eqn for eqn in jaxpr.eqns if var in eqn.outvars)


def _get_constant(
  frame: _state_threading.Frame, key: _regions.Key
) -> tuple[Any, _provenance.EqnLocation]:
  """Return a constant of a jaxpr, or a literal, with its location."""
  jaxpr, location = frame.closed_jaxpr.jaxpr, frame.location
  eqn_index, index = key[-2:]
  if eqn_index == _regions.CONSTANT:
    return frame.closed_jaxpr.consts[index], location
  operands = jaxpr.outvars
  if eqn_index < len(jaxpr.eqns):
    eqn = jaxpr.eqns[eqn_index]
    operands, location = eqn.invars, location.locate(eqn, jaxpr)
  literal: Any = operands[-1 - index]
  return literal.val, location


def _get_kind(array: Any) -> str:
  return "inf" if _host_values.has_inf(array) else "nan"
