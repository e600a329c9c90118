"""Check that arrays stored in half precision change as in float32.

A step returns new parameters, moments, averages and counters, which replace
those among its arguments. If an array in bfloat16 is much larger than what is
added to it, it does not change. The step in float32, with the same arguments,
shows by how much it should, and whether a sum that is stored in float32 was
rounded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _entry_flow
from optax_lossscale.diagnostics import (
  _host_values,
  _reports,
  _step_runs,
  _tracing,
)

_CAUSE = (
  "{kind} stored in {dtype} hardly changes ({names}): {kept:.0%} of its change"
  " in float32 remains, since what is added is smaller than the distance to the"
  " next number."
)
_SUM_IN_HALF = _reports.Problem(
  "The new parameters ({name}) are stored in float32, but the sum of parameter"
  " and update was rounded to half precision, so small updates are"
  " lost.",
  "Add in float32: params = optax.apply_updates(params, updates). Cast to half"
  " precision in the model only.",
)
_PARAMETER = "A parameter"
# The fix for each kind of array.
_FIXES = {
  _PARAMETER: (
    "Keep float32 master weights: tx = ols.with_master_weights(tx). Or keep the"
    " parameters in float32, and cast them in the model to the dtype in which"
    " it computes."
  ),
  "An average of parameters": (
    "Keep the average in float32: begin with"
    " optax.tree.cast(params, jnp.float32)."
  ),
  "A moment or a sum of gradients": (
    "Keep it in float32. tx = ols.with_master_weights(tx) gives the optimizer"
    " float32 parameters, and so moments; for the first one,"
    " mu_dtype=jnp.float32 is enough."
  ),
  "A counter or a sum": (
    "Count in integers, jnp.zeros((), jnp.int32), and add up in float32."
  ),
  "A running value": (
    "Keep it in float32, and cast it to half precision where it is read."
  ),
}

# An array that keeps less of its change is reported. Sound ones keep half.
_MIN_KEPT = 0.25
# The largest relative distance of two arrays that compensate each other, and of
# a parameter and its new value.
_TOLERANCE = 0.25
# Two arrays are equal in float32 if they differ by less than this fraction.
_EQUAL = 1e-5


class Changes(NamedTuple):
  """The result of the check.

  Attributes:
    problems: a problem for each kind of arrays that hardly change.
    passed: a sentence on the arrays, if there is no problem.
  """

  problems: Sequence[_reports.Problem] = ()
  passed: Sequence[str] = ()


class Carried(NamedTuple):
  """A result that replaces an argument.

  Attributes:
    output_index: the index of the result among the outputs.
    input_index: the index of the argument among the inputs.
  """

  output_index: int
  input_index: int


def find_carried(run: _step_runs.Run) -> list[Carried]:
  """Find the float results of a step that replace arguments.

  If a result has several candidates, it replaces the one with the nearest
  value. An argument is replaced once.

  Args:
    run: a run of the step.
  """
  rows = [
    (rating, i, candidates)
    for i, output in enumerate(run.traced.outputs)
    for rating, candidates in output.candidates.items()
  ]
  carried: dict[int, int] = {}
  replaced: set[int] = set()
  for _, i, candidates in sorted(rows, key=lambda row: row[0], reverse=True):
    free = sorted({*candidates} - replaced)
    get_distance = lambda k, x=run.outs[i]: _host_values.compute_amax(
      [run.traced.inputs[k] - x]
    )
    if i not in carried and free:
      carried[i] = free[0] if len(free) == 1 else min(free, key=get_distance)
      replaced.add(carried[i])
  return list(map(Carried, carried.keys(), carried.values()))


def select_half(
  run: _step_runs.Run, carried: Sequence[Carried]
) -> list[Carried]:
  """Return the arrays that half precision holds, and others of the same shape.

  Those may be master copies.

  Args:
    run: a run of the step.
    carried: its results that replace arguments.
  """
  shapes = {
    run.outs[x.output_index].shape
    for x in carried
    if _is_half(run.outs[x.output_index]) or _is_rounded(run, x)
  }
  return [x for x in carried if run.outs[x.output_index].shape in shapes]


def _is_rounded(run: _step_runs.Run, carried: Carried) -> bool:
  """Return whether half precision holds the new value of a float32 parameter.

  In a loop that computes gradients, those of the last iteration may be taken
  for parameters.
  """
  old = run.traced.inputs[carried.input_index]
  new = run.outs[carried.output_index]
  return (
    new.dtype == jnp.float32
    and not run.traced.unreached_locations
    and _find_kind(run.traced, carried) == _PARAMETER
    and bool(_is_half_valued(new) & _is_moved(old, new))
  )


def check_changes(
  run: _step_runs.Run,
  carried: Sequence[Carried],
  reference_outs: Mapping[int, Any],
) -> Changes:
  """Check that arrays stored in half precision change as in float32.

  Silent, and right, are stochastic rounding, sums with compensation, and copies
  of what is stored in more bits.

  Args:
    run: a run of the step.
    carried: its results that replace arguments: see :func:`select_half`.
    reference_outs: its outputs in float32, by their indices.

  Returns:
    A :class:`Changes`.
  """
  traced, outs = run.traced, run.outs
  problems = [
    _reports.fill_in_names(_SUM_IN_HALF, name=traced.input_names[x.input_index])
    for x in carried
    if _is_rounded(run, x)
    and not _is_half_valued(reference_outs[x.output_index])
  ][:1]
  kept = _measure_changes(run, carried, reference_outs)
  for kind, fix in _FIXES.items():
    lost = [
      x
      for x, fraction in kept.items()
      if fraction < _MIN_KEPT and _find_kind(traced, x) == kind
    ]
    if lost:
      cause = _CAUSE.format(
        kind=kind,
        dtype=outs[lost[0].output_index].dtype,
        names=_reports.format_names(
          [traced.input_names[x.input_index] for x in lost]
        ),
        kept=max(0.0, min(kept[x] for x in lost)),
      )
      problems.append(_reports.Problem(cause, fix))
  if problems or not kept:
    return Changes(problems)
  least = min(kept, key=lambda x: kept[x])
  sentence = (
    f"arrays stored in {outs[least.output_index].dtype} change as in float32;"
    f" {traced.input_names[least.input_index]} keeps least, {kept[least]:.0%}"
  )
  return Changes((), [sentence])


def _measure_changes(
  run: _step_runs.Run,
  carried: Sequence[Carried],
  reference_outs: Mapping[int, Any],
) -> dict[Carried, float]:
  """Return the part of its change in float32 that each array keeps.

  Arrays whose change is stored elsewhere, too, are left out.
  """
  traced, outs = run.traced, run.outs
  judged = [
    x
    for x in carried
    if _is_half(outs[x.output_index])
    and _entry_flow.RANDOM not in traced.flow.labels[x.output_index]
    and not _has_further_bits(traced, x)
  ]
  kept = _host_values.to_host(
    [
      _measure_kept(traced.inputs[k], outs[i], reference_outs[i])
      for i, k in judged
    ]
  )
  pairs = [(outs[i], reference_outs[i]) for i, _ in carried]
  return {
    x: float(fraction)
    for x, fraction in zip(judged, kept, strict=True)
    if np.isfinite(fraction)
    and (
      fraction >= _MIN_KEPT
      or not _is_compensated(
        outs[x.output_index], reference_outs[x.output_index], pairs
      )
    )
  }


def _has_further_bits(
  traced: _tracing.TracedFunction, carried: Carried
) -> bool:
  """Return whether an integer array of the step holds the remaining bits."""
  size = 8 * traced.inputs[carried.input_index].dtype.itemsize
  integers = {f"int{size}", f"uint{size}"}
  return any(
    traced.inputs[i].dtype.name in integers
    for i in traced.flow.list_arguments(carried.output_index)
  )


def _find_kind(traced: _tracing.TracedFunction, carried: Carried) -> str:
  """Return what an array is, as a key of `_FIXES`."""
  flow, index = traced.flow, carried.input_index
  is_scalar = not traced.inputs[index].shape
  if _entry_flow.AFTER_GRADIENT not in flow.labels[carried.output_index]:
    return "A counter or a sum" if is_scalar else "A running value"
  params = flow.list_arguments(carried.output_index) & flow.in_loss
  # Scalars mix in a norm by which gradients are clipped.
  if params - {index} and not is_scalar:
    return "An average of parameters"
  return _PARAMETER if index in params else "A moment or a sum of gradients"


@_host_values.jit_quickly
def _measure_kept(old: Any, new: Any, reference: Any) -> jax.Array:
  """Return the part of a change that remains; NaN if there is none; float32[].

  Args:
    old: the array in the arguments.
    new: the array in half precision.
    reference: the array in float32.
  """
  old, new, reference = map(_arrays.upcast_for_reduction, (old, new, reference))
  change, expected = new - old, reference - old
  unit = jnp.max(jnp.abs(expected), initial=0)
  change, expected = change / unit, expected / unit
  norm = jnp.sum(expected**2)
  # The gradient may be noise, so that changes differ. They are not lost then.
  size = jnp.sqrt(jnp.sum(change**2) / norm)
  kept = jnp.sum(change * expected) / norm
  return jnp.where(size < 2 * _MIN_KEPT, kept, jnp.maximum(kept, _MIN_KEPT))


def _is_compensated(
  new: Any, reference: Any, others: Sequence[tuple[Any, Any]]
) -> bool:
  """Return whether another array of the step has what an array loses.

  Args:
    new: the array in half precision.
    reference: the array in float32.
    others: the results that replace arguments, each with itself in float32.
  """
  flags = [
    _compensates(new, reference, *other)
    for other in others
    if other[0].shape == new.shape and other[0] is not new
  ]
  return bool(np.any(_host_values.to_host(flags)))


@_host_values.jit_quickly
def _compensates(
  new: Any, reference: Any, other: Any, other_reference: Any
) -> jax.Array:
  """Return whether the second array has what the first loses; bool[].

  It is a master copy, or the compensation of a sum.
  """
  is_copy = jnp.all(other.astype(new.dtype) == new) & (other.dtype != new.dtype)
  new, reference, other, other_reference = map(
    _arrays.upcast_for_reduction, (new, reference, other, other_reference)
  )
  amax = lambda x: jnp.max(jnp.abs(x), initial=0)
  # Zeros are a copy of anything small.
  has_equal_reference = amax(reference - other_reference) <= _EQUAL * amax(
    reference
  )
  lost, gained = reference - new, other - other_reference
  is_opposite = (amax(lost) > 0) & (
    jnp.linalg.norm((lost - gained).ravel())
    <= _TOLERANCE * jnp.linalg.norm(lost.ravel())
  )
  return (is_copy & has_equal_reference) | is_opposite


@_host_values.jit_quickly
def _is_moved(old: Any, new: Any) -> jax.Array:
  """Return whether an array changes by a small part of its norm; bool[].

  The sum of a velocity and a gradient changes by more.
  """
  change = jnp.sum((new - old) ** 2)
  return (change > 0) & (change < _TOLERANCE**2 * jnp.sum(old**2))


@_host_values.jit_quickly
def _is_half_valued(x: Any) -> jax.Array:
  """Return whether a dtype of half precision holds all entries; bool[]."""
  return jnp.all(x == x.astype(jnp.float16)) | jnp.all(
    x == x.astype(jnp.bfloat16)
  )


def _is_half(x: Any) -> bool:
  return _arrays.is_inexact(x) and x.dtype.itemsize < 4
