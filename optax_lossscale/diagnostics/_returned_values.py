"""Check that a step returns what ``update`` computes, also after an overflow.

A step that returns the old parameters or the old optimizer state does not
train, and one that puts the old state back after an overflow never decreases
its loss scale. There are two checks:

* A dataflow analysis (``_result_dependence``) finds the results of the step
  that depend on the updates and on the new loss scale.
* The step runs with other loss scales: with inf, all gradients overflow; with
  the first power of two that is too large, only some do; with a smaller one,
  none do. The loss scale is an input, so nothing is compiled for it.
"""

from collections.abc import Callable, Iterator, Sequence
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale._jaxprs import _avals, _eqns, _walk
from optax_lossscale.diagnostics import (
  _applied_updates,
  _array_tests,
  _host_values,
  _problem,
  _result_dependence,
  _scale_dependence,
  _scaling_mistakes,
  _tracing,
)

_STATE_PUT_BACK = _problem.Problem(
  "After an overflow the step returns the old loss-scale state, so the loss"
  " scale never decreases: after the first overflow, every step is skipped.",
  "Return the opt_state that update returns, unchanged, since"
  " with_loss_scaling already keeps the old optimizer state of a skipped step."
  " Select only other state, such as batch statistics, with"
  " ols.select_if_finite.",
)
_CONSTANT_SCALE = _problem.Problem(
  "The step returns a constant loss scale, so it never decreases: if the scale"
  " is too high, every step is skipped.",
  "Call ols.set_loss_scale once, before training, and return the opt_state that"
  " update returns, unchanged.",
)
_UNUSED_STATE = _problem.Problem(
  "update does not use the loss-scale state among the arguments of the step, so"
  " the loss scale never changes.",
  "Call tx.init once, before training, and pass its state to ols.value_and_grad"
  " and update.",
)
_NO_UPDATE_AFTER_OVERFLOW = _problem.Problem(
  "update does not run if the gradients overflow, since a branch tests whether"
  " they are finite. So the loss scale never decreases: after the first"
  " overflow, every step is skipped.",
  "Call update outside of the branch, since with_loss_scaling skips bad steps.",
)
_NAN_STATE = _problem.Problem(
  "After an overflow, the result {name} is NaN, and stays so: it is"
  " computed from gradients that update has not seen, such as a momentum, an"
  " average or a norm. If it reaches update, every later step is skipped.",
  "Put it inside of the wrapper, as in"
  " ols.with_loss_scaling(optax.chain(optax.trace(0.9), inner)), or keep its"
  " old value in a skipped step: ols.select_if_finite(opt_state, new, old).",
)

_DIFFERENT_COPIES = _problem.Problem(
  "The copies of the result {name} on different devices are not equal, so the"
  " devices train different models.",
  "Average the gradients over the devices before update:"
  " grads = jax.lax.pmean(grads, axis_name).",
)

_DIFFERENT_SCALES = _problem.Problem(
  "The loss-scale states on different devices are not equal: each device looks"
  " at its own gradients, and skips other steps.",
  "Let the devices decide together:"
  " ols.with_loss_scaling(inner, axis_name=axis_name).",
)
_ADJUSTED_TWICE = _problem.Problem(
  "After update, the step adjusts the loss-scale state again, so the loss scale"
  " decreases twice as fast.",
  "Drop policy.adjust, since update adjusts the state, and return the opt_state"
  " that update returns.",
)

# The range of powers of two by which a loss scale is raised until it is too
# large. Far beyond, all gradients are NaN.
_LOG2_INCREASES = range(3, 34, 3)
# The power of two with which gradients that do not overflow still don't.
_LOG2_DECREASE = -8


class ReturnedValues(NamedTuple):
  """The result of the checks.

  Attributes:
    mistakes: what the step returns wrongly.
    limitations: what could not be checked, in sentences.
    passed: what the step returns correctly, in sentences.
  """

  mistakes: Sequence[_problem.Problem] = ()
  limitations: Sequence[str] = ()
  passed: Sequence[str] = ()


def check_returned_values(
  traced: _tracing.TracedFunction,
  run_step: Callable[[list[Any]], Sequence[Any]],
  outs: Sequence[Any],
) -> ReturnedValues:
  """Check what a step returns after an applied and after a skipped step.

  Args:
    traced: the step.
    run_step: a function from the inputs of the step to its outputs.
    outs: the outputs of the step.
  """
  subject = "what the step returns"
  flags = _scaling_mistakes.read_applied_flags(traced, outs)
  ran_indices = [i for i, flag in enumerate(flags) if (flag >= 0).any()]
  if traced.unreached_locations or not ran_indices:
    return ReturnedValues()
  if _uses_refs(traced):
    return ReturnedValues(limitations=[f"{subject}, since it uses a Ref"])
  mistakes = _result_dependence.check_dependence(traced, ran_indices)
  if mistakes is None:
    reason = "neither new parameters nor a new opt_state are among its results"
    return ReturnedValues(limitations=[f"{subject}: {reason}"])
  if mistakes == [
    _result_dependence.NO_PARAMS
  ] and _result_dependence.converts_to_integers(traced):
    reason = "it converts floats to integers, which are not followed"
    return ReturnedValues(limitations=[f"{subject}, since {reason}"])
  if mistakes:
    return ReturnedValues(mistakes)
  passed = ["the new parameters and the new loss-scale state are returned"]
  if not traced.scale_indices and any(
    name.endswith("loss_scale") for name in traced.input_names
  ):
    return ReturnedValues([_UNUSED_STATE])
  subject = f"{subject} after an overflow"
  if not traced.scale_indices:
    reason = "its loss scale is not among its arguments"
    return ReturnedValues([], [f"{subject}, since {reason}"], passed)
  run_scaled = lambda factor: run_step(traced.scale_inputs(factor))
  try:
    # Wait for the results, since an error of a callback is raised with them.
    overflow_outs = jax.block_until_ready(run_scaled(math.inf))
  except Exception:  # JAX raises errors of callbacks as several types.
    reason = "it raises an error then"
    return ReturnedValues([], [f"{subject}, since {reason}"], passed)
  overflow_flags = _scaling_mistakes.read_applied_flags(traced, overflow_outs)
  flag_pairs = list(zip(flags, overflow_flags, strict=True))
  findings = list(
    _applied_updates.check_changes(traced, outs, overflow_outs, flag_pairs)
  )
  limitations = [x for x in findings if isinstance(x, str)]
  mistakes = [
    *_find_hidden_overflows(traced, overflow_outs),
    *_check_state_after_overflow(traced, overflow_outs, flag_pairs),
    *(x for x in findings if isinstance(x, _problem.Problem)),
    *_applied_updates.check_sums(traced, outs),
    *_check_copies(traced, outs),
    *_check_nan_state(traced, outs, overflow_outs),
  ]
  # Further runs, which are not needed if there is a mistake.
  mistakes = (
    mistakes
    or _check_scale_is_variable(
      traced, outs, overflow_outs, run_scaled(2.0**_LOG2_DECREASE)
    )
    or _check_larger_scales(traced, run_scaled)
  )
  return ReturnedValues(mistakes, limitations, [] if mistakes else passed)


def _uses_refs(traced: _tracing.TracedFunction) -> bool:
  """Return whether any equation reads or writes a Ref.

  The dataflow analysis does not follow values through a Ref.
  """
  has_ref = lambda eqn: any(_avals.is_ref(v.aval) for v in eqn.invars)
  search = _walk.EqnSearch(has_ref, _eqns.subjaxprs)
  return search.any_in_jaxpr(traced.closed_jaxpr.jaxpr)


def _check_state_after_overflow(
  traced: _tracing.TracedFunction,
  overflow_outs: Sequence[Any],
  flag_pairs: Sequence[tuple[Any, Any]],
) -> Iterator[_problem.Problem]:
  """Yield mistakes in the loss-scale states that come back after an overflow.

  Each must have a count of skipped steps that an `update` returned.

  Args:
    traced: the step.
    overflow_outs: its outputs after an overflow.
    flag_pairs: for each `update`, its flags in the step and after an overflow.
  """
  if any((x >= 0).any() and (y < 0).all() for x, y in flag_pairs):
    yield _NO_UPDATE_AFTER_OVERFLOW
  skipped_indices = {
    i for i, (_, flag) in enumerate(flag_pairs) if (flag == 0).any()
  }
  new_counts = _host_values.to_host(
    traced.select_kind(overflow_outs, "new_skip_count")
  )
  state_counts = _host_values.to_host(
    traced.select_kind(overflow_outs, "state_skip_count")
  )
  is_new: list[tuple[frozenset[int], bool]] = []
  is_adjusted_again = False
  for indices, count in zip(_list_states(traced), state_counts, strict=True):
    if indices and indices <= skipped_indices and new_counts:
      possible_counts = [np.ravel(new_counts[i]) for i in indices]
      is_count = np.isin(count, np.concatenate(possible_counts))
      is_new.append((indices, bool(is_count.all())))
      is_adjusted_again |= bool((count > np.max(possible_counts)).any())
  if _has_update_without(is_new):
    yield _ADJUSTED_TWICE if is_adjusted_again else _STATE_PUT_BACK


def _list_states(traced: _tracing.TracedFunction) -> list[frozenset[int]]:
  """Return the updates that each loss-scale state of the results depends on."""
  return [x.new_scales for x in traced.outputs if x.kind == "state_scale"]


def _has_update_without(flags: Sequence[tuple[frozenset[int], bool]]) -> bool:
  """Return whether no state of an update has a flag.

  A step may return several states of an update, such as that of the best step.

  Args:
    flags: for each state, the updates that it depends on, and its flag.
  """
  updates = {i for indices, _ in flags for i in indices}
  return any(
    not any(flag for indices, flag in flags if i in indices) for i in updates
  )


def _check_scale_is_variable(
  traced: _tracing.TracedFunction,
  outs: Sequence[Any],
  overflow_outs: Sequence[Any],
  decreased_outs: Sequence[Any],
) -> list[_problem.Problem]:
  """Check that a step with another loss scale returns another loss scale.

  So must each `update`, or it uses another state than that of the arguments.
  """
  overflow_scales, decreased_scales = (
    _host_values.to_host(traced.select_kind(x, "state_scale"))
    for x in (overflow_outs, decreased_outs)
  )
  update_scales = (
    _host_values.to_host(traced.select_kind(x, "update_scale"))
    for x in (outs, decreased_outs)
  )
  if any(map(np.array_equal, *update_scales)):
    return [_UNUSED_STATE]
  triples = zip(
    _list_states(traced), overflow_scales, decreased_scales, strict=True
  )
  is_variable = [
    (indices, not np.array_equal(x, y)) for indices, x, y in triples
  ]
  return [_CONSTANT_SCALE] if _has_update_without(is_variable) else []


def _find_hidden_overflows(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> list[_problem.Problem]:
  """Return a mistake if an overflow is hidden from each `update` that ran."""
  mistakes = _scaling_mistakes.check_applied_flags(traced, outs)
  return [x for x in mistakes if x is not _scaling_mistakes.UPDATE_NOT_RUN]


def _check_larger_scales(
  traced: _tracing.TracedFunction,
  run_scaled: Callable[[float], Sequence[Any]],
) -> list[_problem.Problem]:
  """Check that `update` skips a step in which a few gradients overflow.

  These are inf, which clipping makes finite. With a loss scale of inf they are
  NaN.
  """
  unscaled = [
    (i, x.group) for i, x in enumerate(traced.outputs) if x.kind == "unscaled"
  ]
  groups = {group for _, group in unscaled}
  for log2_increase in _LOG2_INCREASES if groups else ():
    outs = run_scaled(2.0**log2_increase)
    flags = _scaling_mistakes.read_applied_flags(traced, outs)
    if any((flag == 0).any() for flag in flags):
      break
    indices = _array_tests.list_nonfinite([outs[i] for i, _ in unscaled])
    # A step may try again with a smaller scale, so that only the first
    # gradients overflow.
    if {unscaled[i][1] for i in indices} == groups:
      return _find_hidden_overflows(traced, outs)
  return []


def _check_copies(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> list[_problem.Problem]:
  """Check that devices agree on what they have copies of."""
  different = [
    output
    for output, x in zip(traced.outputs, outs, strict=True)
    if output.kind in _scale_dependence.RETURNED_KINDS
    and (output.depends_on_update or output.new_scales)
    and _array_tests.has_different_copies(x)
  ]
  # Parameters that are shards are no copies. Their scale should be one.
  others = [x for x in different if not x.new_scales]
  if others:
    return [_problem.fill_in_names(_DIFFERENT_COPIES, name=others[0].name)]
  return [_DIFFERENT_SCALES] if different else []


def _check_nan_state(
  traced: _tracing.TracedFunction,
  outs: Sequence[Any],
  overflow_outs: Sequence[Any],
) -> list[_problem.Problem]:
  """Check that an overflow makes no NaN in the state that a step returns."""
  states = [
    (output.name, x, y)
    for output, x, y in zip(traced.outputs, outs, overflow_outs, strict=True)
    if output.kind in _scale_dependence.RETURNED_KINDS and not output.new_scales
  ]
  nonfinite = _array_tests.list_nonfinite(y for _, _, y in states)
  # A state may hold inf from the start, such as the best loss so far.
  names = [
    name
    for name, x, y in map(states.__getitem__, nonfinite)
    if _array_tests.has_nan(y) and not _array_tests.has_nan(x)
  ]
  if not names:
    return []
  return [_problem.fill_in_names(_NAN_STATE, name=names[0])]
