"""Check how a step scales its gradients, and what it returns.

The gradients that ``update`` receives must have been multiplied and divided by
its loss scale (``_scaled_grads``, ``_scaling_mistakes``). A step that returns
the old parameters or the old optimizer state does not train, and one that puts
the old state back after an overflow never decreases its loss scale. The step
runs with other loss scales: with inf, all gradients overflow; with the first
power of two that is too large, only some do; with a smaller one, none do. The
loss scale is an input, so nothing is compiled for it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optax_lossscale.diagnostics import (
  _applied_updates,
  _carried_arrays,
  _host_values,
  _outputs,
  _reports,
  _returned_states,
  _scaled_grads,
  _scaling_mistakes,
  _step_runs,
)
from optax_lossscale.diagnostics._overflow import _find_overflow
from optax_lossscale.diagnostics._precision import _compare_runs

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
  limitations: list[str]
  passed: list[str]
  has_run: bool
  knows_scales: bool


def check_wiring(
  search: _find_overflow.SearchResult,
  comparison: _compare_runs.ComparisonResult | None,
  carried: Sequence[_carried_arrays.Carried],
) -> Wiring:
  """Check how a step scales its gradients, and what it returns.

  Args:
    search: the search for an overflow in the step.
    comparison: its comparison with float32, if it was compared.
    carried: the results that replace arguments.
  """
  runs = search.runs
  traced, base = runs.traced, runs.base
  if not traced.has_update:
    # Gradients of a branch that is not taken are placeholders of zeros.
    has_run = not traced.cond_branch_locations or _host_values.is_any_nonzero(
      base.select("grads")
    )
    return Wiring([], [_NO_UPDATE], [], has_run=has_run, knows_scales=False)
  has_overflow = search.origin is not None
  has_run = bool(_list_ran(base))
  finite_runs = search.finite_runs
  findings: list[_reports.Problem | str] = []
  passed: list[str] = []
  if _list_ran(finite_runs.base) and not traced.unreached_locations:
    findings += _check_returned_values(finite_runs, base, carried)
    has_problems = bool(_list_problems(findings))
    if not has_problems and _applied_updates.KEPT_BACK not in findings:
      passed.append(
        "the new parameters and the new loss-scale state are returned"
      )
  scaled_grads = _scaled_grads.find_scaled_grads(finite_runs)
  findings += scaled_grads.mistakes
  if has_run:
    findings += _scaling_mistakes.check_hidden_overflow(base)
  elif base.updates and has_overflow:
    # A step may skip update on purpose, for example to accumulate gradients. It
    # is a problem only together with an overflow: the branch may test for it.
    findings.append(_scaling_mistakes.UPDATE_NOT_RUN)
  if not has_overflow and any(x.has_skipped for x in base.updates.values()):
    findings.append(_scaling_mistakes.NEEDLESS_SKIP)
  scale_runs = _make_scale_runs(search, comparison, scaled_grads.ratios)
  findings += scale_runs.check_invariance()
  # The mistakes above explain better what is wrong.
  if has_run and not _list_problems(findings):
    findings += scale_runs.check_states()
    findings += _applied_updates.check_unused(finite_runs, carried)
    findings += _applied_updates.check_crossed(finite_runs, carried)
    if scaled_grads.ratios and scaled_grads.is_known:
      findings += _applied_updates.check_scaled(finite_runs, carried)
  if has_overflow:
    findings.append(_NOT_FINITE)
  elif not scaled_grads.is_known:
    findings.append(_UNKNOWN_SCALE)
  return Wiring(
    problems=list(dict.fromkeys(_list_problems(findings))),
    limitations=[x for x in findings if isinstance(x, str)],
    passed=passed,
    has_run=has_run or not base.updates,
    knows_scales=bool(scaled_grads.ratios) and scaled_grads.is_known,
  )


def _make_scale_runs(
  search: _find_overflow.SearchResult,
  comparison: _compare_runs.ComparisonResult | None,
  ratios: Mapping[int, float],
) -> _scaling_mistakes.ScaleRuns:
  """Return runs with other loss scales, in float32 if the step has half.

  Args:
    search: the search for an overflow in the step.
    comparison: its comparison with float32, if it was compared.
    ratios: the gradients to judge: see :class:`_scaling_mistakes.ScaleRuns`.
  """
  runs = search.runs
  if comparison is not None:
    return _scaling_mistakes.ScaleRuns(
      runs.traced,
      ratios,
      comparison.run,
      comparison.outs,
      is_exact=comparison.is_exact,
    )
  # Without a comparison, no half precision leads to a gradient.
  return _scaling_mistakes.ScaleRuns(
    runs.traced,
    ratios if search.origin is None else {},
    lambda inputs: runs.run(inputs).outs,
    runs.base.outs,
    is_exact=True,
  )


def _list_problems(
  findings: Sequence[_reports.Problem | str],
) -> list[_reports.Problem]:
  return [x for x in findings if isinstance(x, _reports.Problem)]


def _list_ran(run: _step_runs.Run) -> list[int]:
  """Return the updates that ran."""
  return [i for i, update in run.updates.items() if update.has_run]


def _check_returned_values(
  runs: _step_runs.StepRuns,
  called: _step_runs.Run,
  carried: Sequence[_carried_arrays.Carried],
) -> Sequence[_reports.Problem | str]:
  """Check what a step returns after an applied and after a skipped step.

  Args:
    runs: the runs of the step, with finite gradients if possible.
    called: its run with its arguments, whose loss scale may be too high.
    carried: the results that replace arguments.

  Returns:
    Mistakes, and sentences on what could not be checked.
  """
  ran_indices = _list_ran(runs.base)
  mistakes = [
    *_returned_states.check_dependence(runs, ran_indices),
    *_applied_updates.check_dependence(runs, carried, ran_indices),
  ]
  if {_returned_states.NO_STATE, _applied_updates.NO_PARAMS} == {*mistakes}:
    return [_NOTHING_RETURNED]
  if mistakes:
    return mistakes
  subject = "what the step returns after an overflow"
  if not runs.traced.scale_indices:
    return [f"{subject}, since its loss scale is not among its arguments"]
  if runs.skipped is None:
    return [f"{subject}, since it raises an error then"]
  findings = [
    *_scaling_mistakes.check_hidden_overflow(runs.skipped),
    *_returned_states.check_after_overflow(runs, runs.skipped),
    *_applied_updates.check_changes(runs, carried, runs.skipped),
    *_check_copies(called),
    *_check_nan_state(runs, runs.skipped, carried),
  ]
  # An accumulator around the wrapper causes the other mistakes.
  if _returned_states.MULTI_STEPS in findings:
    return [_returned_states.MULTI_STEPS]
  if _list_problems(findings):
    return findings
  # Further runs, which are not needed if there is a mistake.
  return [
    *findings,
    *(
      _returned_states.check_with_lower_scale(runs)
      or _check_larger_scales(runs)
    ),
  ]


def _check_larger_scales(
  runs: _step_runs.StepRuns,
) -> list[_reports.Problem]:
  """Check that `update` skips a step in which a few gradients overflow.

  These are inf, which clipping makes finite. With a loss scale of inf they are
  NaN.
  """
  groups = [x.group for x in runs.traced.list_outputs("unscaled")]
  for log2_increase in _LOG2_INCREASES if groups else ():
    run = runs.run_with_factor(2.0**log2_increase)
    if any(x.has_skipped for x in run.updates.values()):
      break
    nonfinite = _host_values.list_nonfinite(run.select("unscaled"))
    # A step may try again with a smaller scale, so that only the first
    # gradients overflow.
    if {groups[i] for i in nonfinite} == {*groups}:
      return _scaling_mistakes.check_hidden_overflow(run)
  return []


def _check_copies(run: _step_runs.Run) -> list[_reports.Problem]:
  """Check that devices agree on what they have copies of."""
  different = [
    output
    for output, x in zip(run.traced.outputs, run.outs, strict=True)
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
  skipped: _step_runs.Run,
  carried: Sequence[_carried_arrays.Carried],
) -> list[_reports.Problem]:
  """Check that an overflow makes no NaN in the state that a step returns.

  Args:
    runs: the runs of the step.
    skipped: its run with an overflow.
    carried: the results that replace arguments.
  """
  outputs = runs.traced.outputs
  states = [i for i, _ in carried if not outputs[i].new_updates]
  nonfinite = _host_values.list_nonfinite(skipped.outs[i] for i in states)
  # A state may hold inf from the start, such as the best loss so far.
  names = [
    outputs[i].name
    for i in map(states.__getitem__, nonfinite)
    if _host_values.has_nan(skipped.outs[i])
    and not _host_values.has_nan(runs.base.outs[i])
  ]
  return [_reports.fill_in_names(_NAN_STATE, name=x) for x in names[:1]]
