"""Detect mistakes in how a training step scales and passes its gradients.

* ``check_hidden_overflow`` and ``check_needless_skip`` read flags of a run:
  ``update`` received each nonfinite gradient that ``value_and_grad``
  returned, and skipped no step with finite gradients.
* ``check_scale_invariance`` runs the step with other loss scales: a gradient
  that is unscaled exactly once stays the same.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _eqns, _walk
from optax_lossscale.diagnostics import (
  _host_values,
  _outputs,
  _reports,
  _step_runs,
  _tracing,
)

_NEVER_UNSCALED = _reports.Problem(
  "update{update} received gradients{names} that were never unscaled: they"
  " halve if the loss scale halves.",
  "Call ols.unscale_grads(grads, opt_state), or create the optimizer with"
  " grads_are_scaled=True.",
)
_UNSCALED_TWICE = _reports.Problem(
  "update{update} received gradients{names} that double if the loss scale"
  " halves: they were unscaled twice, or clipped while they were scaled, as by"
  " a custom derivative, or the scaled loss was divided by its own value.",
  "Drop unscale_grads and grads_are_scaled=True, since ols.value_and_grad and"
  " ols.grad return unscaled gradients. Clip inside of with_loss_scaling, not"
  " in a custom derivative, and scale the loss last.",
)
_DEPENDS_ON_SCALE = _reports.Problem(
  "update{update} received gradients{names} that depend on the loss scale: they"
  " change by a factor of {factor:.3g} if the scale is multiplied by"
  " 2**{log2_scale}. Something is added to, or cut off from, the loss or the"
  " gradients while they are scaled.",
  "Change them after ols.value_and_grad has unscaled them.",
)
UPDATE_NOT_RUN = _reports.Problem(
  "update did not run in this step, since its branch was not taken.",
  "Pass arguments with which the branch is taken. If the branch tests whether"
  " the gradients are finite, call update outside of it, since"
  " with_loss_scaling skips bad steps.",
)
_HIDDEN_OVERFLOW = _reports.Problem(
  "An overflow is hidden from update: value_and_grad returned gradients with"
  " an inf or a NaN, but update received finite ones. Something in between"
  " (nan_to_num, clipping, a mask) replaces them, so bad steps are applied and"
  " the loss scale never decreases.",
  "Pass the gradients to update unchanged.",
)
_NEEDLESS_SKIP = _reports.Problem(
  "update skips this step although its gradients are finite.",
  "If you pass grads_finite= to update, check its value: False skips the step."
  " Otherwise the sum of the gradients exceeds the range of float32.",
)

# The largest relative distance of a measured ratio of gradients from a power of
# two, and of a gradient that is computed without half precision from itself.
_RATIO_TOLERANCE = 0.05
_EXACT_TOLERANCE = 1e-3
# At the default loss scale, a term that is added to the scaled loss is too
# small to be noticed. With these factors its relative size changes the most.
_FAR_LOG2_SCALES = (-16, -8, 8)


# The outputs of a step by their indices: all of them, or some.
Outs = Sequence[Any] | Mapping[int, Any]
RunFn = Callable[[list[Any]], Outs]


def check_hidden_overflow(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> list[_reports.Problem]:
  """Check that no overflow is hidden from the updates that ran in a step.

  Args:
    traced: the step.
    outs: its outputs.

  Returns:
    Mistakes; empty if the step is correct.
  """
  updates = traced.read_updates(outs).values()
  unscaled_grads = traced.select_kind(outs, "unscaled")
  has_overflow = not _host_values.all_finite(unscaled_grads)
  # If any `update` skipped its step, it may have received the overflow. If one
  # did not run, such as behind an accumulation, it may receive the overflow in
  # a later step. So the overflow is only hidden if all updates were applied.
  is_applied = all((x.applied == 1).all() for x in updates)
  return [_HIDDEN_OVERFLOW] if updates and has_overflow and is_applied else []


def check_needless_skip(runs: _step_runs.StepRuns) -> list[_reports.Problem]:
  """Check that no `update` skipped a step whose outputs are finite."""
  is_skipped = any(update.has_skipped for update in runs.updates.values())
  return [_NEEDLESS_SKIP] if is_skipped else []


def check_scale_invariance(
  traced: _tracing.TracedFunction,
  ratios: Mapping[int, float],
  run_step: RunFn,
  outs: Outs,
  *,
  is_exact: bool,
) -> list[_reports.Problem]:
  """Check by measurement that no gradient depends on the loss scale.

  The step runs with a half and with a quarter of each loss scale. Both are
  needed to distinguish a mistake from gradients that underflow. If gradients
  cannot underflow, it also runs with scales that are far away. A further run
  with the same inputs finds gradients that differ without a reason, such as
  rounding noise, or gradients of another batch: they are not judged.

  Args:
    traced: the step.
    ratios: for each gradient to judge, by the index of its output, the factor
      by which a sound gradient changes if the loss scale halves.
    run_step: a function from the inputs of the step to its outputs.
    outs: the outputs of the step.
    is_exact: whether gradients cannot underflow, as in a step without half
      precision. Only then are ratios reported that are not powers of two.

  Returns:
    Mistakes; empty if the step is correct.
  """
  if not ratios or not traced.scale_indices:
    return []
  check = functools.partial(
    _check_invariance, traced, ratios, run_step, outs, is_exact
  )
  # A sum of scaled gradients of earlier calls changes with the loss scale.
  sums = [
    i
    for i in traced.flow.before_gradients - traced.flow.in_loss
    if _arrays.is_inexact(traced.inputs[i])
  ]
  scales = traced.scale_indices
  mistakes = check(scales)
  return check([*scales, *sums]) and mistakes if sums else mistakes


def _check_invariance(
  traced: _tracing.TracedFunction,
  ratios: Mapping[int, float],
  run_step: RunFn,
  outs: Outs,
  is_exact: bool,
  scaled_inputs: Collection[int],
) -> list[_reports.Problem]:
  """Check that gradients stay the same if these inputs are multiplied.

  All other arguments are those of :func:`check_scale_invariance`.
  """
  grad_outputs = [traced.outputs[i] for i in ratios]
  grads = [outs[i] for i in ratios]
  log2_ratios = np.log2(np.array([*ratios.values()]))

  def measure_at(log2_scale: int) -> np.ndarray:
    """Return how much the gradients change: ratio and error of each."""
    inputs = traced.scale_inputs(2.0**log2_scale, scaled_inputs)
    changed_outs = run_step(inputs)
    changed_grads = [changed_outs[i] for i in ratios]
    pairs = zip(grads, changed_grads, strict=True)
    rows = _host_values.to_host([_measure_change(x, y) for x, y in pairs])
    changes = np.array(rows, np.float64)
    # A sound gradient of a scaled loss changes with the loss scale.
    changes[:, 0] *= 2.0 ** (log2_scale * log2_ratios)
    return changes

  is_stable = measure_at(0)[:, 1] < _EXACT_TOLERANCE
  log2_scales = (-1, -2, *(_FAR_LOG2_SCALES if is_exact else ()))
  changes = {
    k: np.where(is_stable, measure_at(k)[:, 0], np.nan) for k in log2_scales
  }
  return list(
    dict.fromkeys(_judge_ratios(traced, grad_outputs, changes, is_exact))
  )


def _judge_ratios(
  traced: _tracing.TracedFunction,
  grad_outputs: list[_outputs.Output],
  ratios: dict[int, np.ndarray],
  is_exact: bool,
) -> Iterable[_reports.Problem]:
  """Yield the mistakes that explain how gradients change with the loss scale.

  Args:
    traced: the step.
    grad_outputs: the gradients.
    ratios: for each log2 of a factor on the loss scale, the factor by which
      each gradient changes, over the expected one; NaN if it is unknown;
      float64[gradients].
    is_exact: see :func:`check_scale_invariance`.
  """
  is_explained = np.zeros(len(grad_outputs), bool)
  for mistake, power in (_NEVER_UNSCALED, 1), (_UNSCALED_TWICE, -1):
    is_affected = is_close(ratios[-1], 2.0**-power) & is_close(
      ratios[-2], 4.0**-power
    )
    is_explained |= is_affected
    yield from _repeat_by_update(traced, mistake, grad_outputs, is_affected)
  for log2_scale, ratio in ratios.items() if is_exact else ():
    is_affected = (np.abs(ratio - 1) > _EXACT_TOLERANCE) & ~is_explained
    is_explained |= is_affected
    yield from _repeat_by_update(
      traced,
      _DEPENDS_ON_SCALE,
      grad_outputs,
      is_affected,
      log2_scale=log2_scale,
      factor=ratio[is_affected].max(initial=0),
    )


@jax.jit
def _measure_change(x: Any, y: Any) -> jax.Array:
  """Return the factor by which a gradient changed, and the relative error.

  The factor is the projection onto the old gradient. Both are NaN for a
  gradient that is zero or not finite.
  """
  # Normalize, so that squares stay in range. A zero gradient gives NaN.
  amax = jnp.max(jnp.abs(x), initial=0)
  x, y = x / amax, y / amax
  norm = jnp.sum(jnp.abs(x) ** 2)
  error = jnp.sqrt(jnp.sum(jnp.abs(y - x) ** 2) / norm)
  return jnp.stack([jnp.sum(jnp.real(x.conj() * y)) / norm, error])


def measure_ratio(x: Any, y: Any) -> np.ndarray:
  """Return the factor by which a gradient changed; float32[]."""
  ratio: np.ndarray = _host_values.to_host(_measure_change(x, y))[0]
  return ratio


def is_close(ratio: Any, factor: float) -> Any:
  """Return whether a ratio is a factor but for rounding errors."""
  return np.abs(ratio / factor - 1) < _RATIO_TOLERANCE


def _repeat_by_update(
  traced: _tracing.TracedFunction,
  mistake: _reports.Problem,
  grads: list[_outputs.Output],
  is_affected: np.ndarray,
  **kwargs: Any,
) -> Iterable[_reports.Problem]:
  """Return the mistake for each `update` that receives affected gradients."""
  for group in dict.fromkeys(out.group for out in grads):
    indices = [i for i, out in enumerate(grads) if out.group == group]
    all_names = [grads[i].name for i in indices]
    names = [grads[i].name for i in indices if is_affected[i]]
    if names:
      update = format_update(traced, group)
      yield _reports.fill_in_names(
        mistake, names, all_names, update=update, **kwargs
      )


def format_update(traced: _tracing.TracedFunction, group: int) -> str:
  """Return the number of an update for a message; empty if there is one."""
  groups = {output.group for output in traced.grad_outputs}
  return f" [{group}]" if len(groups) > 1 else ""


def has_narrow_range_eqn(closed_jaxpr: _eqns.ClosedJaxpr) -> bool:
  """Return whether a program computes in float16 or float8."""
  has_half_output = lambda eqn: any(map(_outputs.is_half_var, eqn.outvars))
  search = _walk.EqnSearch(has_half_output, _eqns.subjaxprs)
  return search.any_in_jaxpr(closed_jaxpr.jaxpr)
