"""Check how a step scales its gradients, and what it returns.

The gradients that ``update`` receives must have been multiplied and divided by
its loss scale (``_scaled_grads``, ``_scaling_mistakes``). A step that returns
the old parameters or the old optimizer state does not train, and one that puts
the old state back after an overflow never decreases its loss scale. The step
runs with other loss scales: with inf, all gradients overflow; with the first
power of two that is too large, only some do; with a smaller one, none do. The
loss scale is an input, so nothing is compiled for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from optax_lossscale.diagnostics import (
  _applied_updates,
  _carried_arrays,
  _host_values,
  _outputs,
  _param_sums,
  _reports,
  _returned_states,
  _scaled_grads,
  _scaling_mistakes,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._overflow import _find_overflow
from optax_lossscale.diagnostics._precision import _compare_precision

_NOTHING_RETURNED = _reports.Problem(
  "The step returns neither new parameters nor a new opt_state, and changes no"
  " argument, so nothing is trained.",
  "Return them: return params, opt_state. With Flax NNX, which changes its"
  " arguments, use nnx.jit and nnx.value_and_grad in place of those of JAX.",
)
_NAN_STATE = _reports.Problem(
  "After an overflow, the result {name} is NaN, and stays so: it is"
  " computed from gradients that update has not seen, such as a momentum, an"
  " average or a norm. If it reaches update, every later step is skipped.",
  "Put it inside of the wrapper, as in"
  " ols.with_loss_scaling(optax.chain(optax.trace(0.9), inner)), or keep its"
  " old value in a skipped step: ols.select_if_applied(opt_state, new, old).",
)
_DIFFERENT_COPIES = _reports.Problem(
  "The copies of the result {name} on different devices are not equal, so the"
  " devices train different models.",
  "Average the gradients over the devices before update:"
  " grads = jax.lax.pmean(grads, axis_name).",
)
_DIFFERENT_SCALES = _reports.Problem(
  "The loss-scale states on different devices are not equal: each device looks"
  " at its own gradients, and skips other steps.",
  "Let the devices decide together:"
  " ols.with_loss_scaling(inner, axis_name=axis_name).",
)

_NO_UPDATE = (
  "loss scaling: the step does not call the update of with_loss_scaling, or"
  " passes no gradients to it"
)
_NOT_FINITE = "whether gradients are unscaled once, since they are not finite"
_UNKNOWN_SCALE = (
  "how the loss is scaled: some gradients do not depend on a loss scale (they"
  " are arguments of the step, or scaled by a constant)"
)

# The range of powers of two by which a loss scale is raised until it is too
# large. Far beyond, all gradients are NaN.
_LOG2_INCREASES = range(3, 34, 3)


class Wiring(NamedTuple):
  """The result of the checks.

  Attributes:
    problems: the mistakes, the most important first.
    limitations: what could not be checked, in sentences.
    passed: what the step returns correctly, in sentences.
    has_run: whether any ``update`` ran, or any gradient was computed.
    knows_scales: whether loss scales multiply all gradients.
  """

  problems: list[_reports.Problem]
  limitations: Sequence[str]
  passed: Sequence[str]
  has_run: bool
  knows_scales: bool


def check_wiring(
  search: _find_overflow.SearchResult,
  comparison: _compare_precision.ComparisonResult | None,
  carried: Sequence[_carried_arrays.Carried],
) -> Wiring:
  """Check how a step scales its gradients, and what it returns.

  Args:
    search: the search for an overflow in the step.
    comparison: its comparison with float32, if it was compared.
    carried: the results that replace arguments.
  """
  traced, runs = search.runs.traced, search.runs
  if not traced.has_update:
    # Gradients of a branch that is not taken are placeholders of zeros.
    has_run = not traced.cond_branch_locations or _host_values.is_any_nonzero(
      traced.select_kind(runs.outs, "grads")
    )
    return Wiring([], [_NO_UPDATE], [], has_run=has_run, knows_scales=False)
  has_overflow = search.origin is not None
  scaled_grads = _scaled_grads.find_scaled_grads(search.finite_runs)
  returned = _check_returned_values(search.finite_runs, runs.outs, carried)
  mistakes = [*returned.mistakes, *scaled_grads.mistakes]
  has_run = any(update.has_run for update in runs.updates.values())
  if has_run:
    mistakes += _scaling_mistakes.check_hidden_overflow(traced, runs.outs)
  elif runs.updates and has_overflow:
    # A step may skip update on purpose, for example to accumulate gradients. It
    # is a problem only together with an overflow: the branch may test for it.
    mistakes.append(_scaling_mistakes.UPDATE_NOT_RUN)
  if not has_overflow:
    mistakes += _scaling_mistakes.check_needless_skip(runs)
  if comparison is not None:
    mistakes += _scaling_mistakes.check_scale_invariance(
      traced,
      scaled_grads.ratios,
      comparison.run,
      comparison.outs,
      is_exact=comparison.is_exact,
    )
  elif not has_overflow:
    mistakes += _scaling_mistakes.check_scale_invariance(
      traced,
      scaled_grads.ratios,
      runs.run,
      runs.outs,
      is_exact=not _scaling_mistakes.has_narrow_range_eqn(traced.closed_jaxpr),
    )
  # The mistakes above explain better what is wrong with the parameters.
  if has_run and not mistakes:
    mistakes += _param_sums.check_unused(search.finite_runs, carried)
    mistakes += _applied_updates.check_crossed(search.finite_runs, carried)
    if scaled_grads.ratios and scaled_grads.is_known:
      mistakes += _applied_updates.check_scaled(search.finite_runs, carried)
  limitations = list(returned.limitations)
  if has_overflow:
    limitations.append(_NOT_FINITE)
  elif not scaled_grads.is_known:
    limitations.append(_UNKNOWN_SCALE)
  return Wiring(
    problems=list(dict.fromkeys(mistakes)),
    limitations=limitations,
    passed=returned.passed,
    has_run=has_run or not runs.updates,
    knows_scales=bool(scaled_grads.ratios) and scaled_grads.is_known,
  )


class _ReturnedValues(NamedTuple):
  """The result of the checks of what a step returns.

  Attributes:
    mistakes: what the step returns wrongly.
    limitations: what could not be checked, in sentences.
    passed: what the step returns correctly, in sentences.
  """

  mistakes: Sequence[_reports.Problem] = ()
  limitations: Sequence[str] = ()
  passed: Sequence[str] = ()


def _check_returned_values(
  runs: _step_runs.StepRuns,
  outs_of_args: Sequence[Any],
  carried: Sequence[_carried_arrays.Carried],
) -> _ReturnedValues:
  """Check what a step returns after an applied and after a skipped step.

  Args:
    runs: the runs of the step, with finite gradients if possible.
    outs_of_args: its outputs for its arguments, whose loss scale may be too
      high.
    carried: the results that replace arguments.
  """
  traced = runs.traced
  ran_indices = [i for i, update in runs.updates.items() if update.has_run]
  if traced.unreached_locations or not ran_indices:
    return _ReturnedValues()
  mistakes = [
    *_returned_states.check_dependence(runs, ran_indices),
    *_applied_updates.check_dependence(runs, ran_indices),
  ]
  if {_returned_states.NO_STATE, _applied_updates.NO_PARAMS} == {*mistakes}:
    mistakes = [_NOTHING_RETURNED]
  if mistakes:
    return _ReturnedValues(mistakes)
  passed = ["the new parameters and the new loss-scale state are returned"]
  subject = "what the step returns after an overflow"
  if not traced.scale_indices:
    reason = "its loss scale is not among its arguments"
    return _ReturnedValues([], [f"{subject}, since {reason}"], passed)
  if runs.skipped_outs is None:
    reason = "it raises an error then"
    return _ReturnedValues([], [f"{subject}, since {reason}"], passed)
  return _check_runs(runs, runs.skipped_outs, outs_of_args, carried, passed)


def _check_runs(
  runs: _step_runs.StepRuns,
  overflow_outs: Sequence[Any],
  outs_of_args: Sequence[Any],
  carried: Sequence[_carried_arrays.Carried],
  passed: Sequence[str],
) -> _ReturnedValues:
  """Check a step by its runs with other loss scales.

  Args:
    runs: the runs of the step.
    overflow_outs: its outputs after an overflow.
    outs_of_args: its outputs for its arguments.
    carried: the results that replace arguments.
    passed: what is said of a step without mistakes.
  """
  findings = [
    *_scaling_mistakes.check_hidden_overflow(runs.traced, overflow_outs),
    *_returned_states.check_after_overflow(runs, overflow_outs),
    *_applied_updates.check_changes(runs, overflow_outs),
    *_param_sums.check_sums(runs, carried),
    *_check_copies(runs.traced, outs_of_args),
    *_check_nan_state(runs, overflow_outs, carried),
  ]
  mistakes = [x for x in findings if isinstance(x, _reports.Problem)]
  # An accumulator around the wrapper causes the other mistakes.
  if _returned_states.MULTI_STEPS in mistakes:
    mistakes = [_returned_states.MULTI_STEPS]
  # Further runs, which are not needed if there is a mistake.
  mistakes = (
    mistakes
    or _returned_states.check_with_lower_scale(runs)
    or _check_larger_scales(runs)
  )
  limitations = [x for x in findings if isinstance(x, str)]
  is_kept = not {
    _applied_updates.KEPT_BACK, _returned_states.WAITS
  }.isdisjoint(limitations)  # fmt: skip
  passed = [] if mistakes or is_kept else passed
  return _ReturnedValues(mistakes, limitations, passed)


def _check_larger_scales(
  runs: _step_runs.StepRuns,
) -> list[_reports.Problem]:
  """Check that `update` skips a step in which a few gradients overflow.

  These are inf, which clipping makes finite. With a loss scale of inf they are
  NaN.
  """
  traced = runs.traced
  unscaled = [
    (i, x.group) for i, x in enumerate(traced.outputs) if x.kind == "unscaled"
  ]
  groups = {group for _, group in unscaled}
  for log2_increase in _LOG2_INCREASES if groups else ():
    outs = runs.run_with_factor(2.0**log2_increase)
    if any(x.has_skipped for x in traced.read_updates(outs).values()):
      break
    indices = _host_values.list_nonfinite([outs[i] for i, _ in unscaled])
    # A step may try again with a smaller scale, so that only the first
    # gradients overflow.
    if {unscaled[i][1] for i in indices} == groups:
      return _scaling_mistakes.check_hidden_overflow(traced, outs)
  return []


def _check_copies(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> list[_reports.Problem]:
  """Check that devices agree on what they have copies of."""
  different = [
    output
    for output, x in zip(traced.outputs, outs, strict=True)
    if output.kind in _outputs.RETURNED_KINDS
    and (output.depends_on_gradients or output.in_scale_state)
    and _host_values.has_different_copies(x)
  ]
  # Parameters that are shards are no copies. Their scale should be one.
  others = [x for x in different if not x.in_scale_state]
  if others:
    return [_reports.fill_in_names(_DIFFERENT_COPIES, name=others[0].name)]
  return [_DIFFERENT_SCALES] if different else []


def _check_nan_state(
  runs: _step_runs.StepRuns,
  overflow_outs: Sequence[Any],
  carried: Sequence[_carried_arrays.Carried],
) -> list[_reports.Problem]:
  """Check that an overflow makes no NaN in the state that a step returns.

  Args:
    runs: the runs of the step.
    overflow_outs: its outputs after an overflow.
    carried: the results that replace arguments.
  """
  outputs = runs.traced.outputs
  states = [
    x.output_index for x in carried if not outputs[x.output_index].new_updates
  ]
  nonfinite = _host_values.list_nonfinite(overflow_outs[i] for i in states)
  # A state may hold inf from the start, such as the best loss so far.
  names = [
    outputs[i].name
    for i in map(states.__getitem__, nonfinite)
    if _host_values.has_nan(overflow_outs[i])
    and not _host_values.has_nan(runs.outs[i])
  ]
  if not names:
    return []
  return [_reports.fill_in_names(_NAN_STATE, name=names[0])]
