"""Detect mistakes in how a training step scales, passes and applies gradients.

There are three checks:

* ``check_dependence`` is a dataflow analysis (``_dependence``): a gradient of a
  scaled loss must depend on the loss scale of the ``update`` that receives it,
  and must not be cast to half precision after it was unscaled.
* ``check_scale_invariance`` runs the step with smaller loss scales: a gradient
  that is unscaled exactly once stays the same if the loss scale halves.
* ``check_applied_flags`` reads flags of a step that was run: ``update`` ran,
  and received each nonfinite gradient that ``value_and_grad`` returned.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _tags
from optax_lossscale._jaxprs import _dependence, _eqns, _provenance, _walk


class Mistake(NamedTuple):
  """A mistake in a training step.

  Attributes:
    cause: the mistake and its consequence.
    fix: the change to make.
  """

  cause: str
  fix: str

  def __str__(self) -> str:
    return f"{self.cause} {self.fix}"


_NOT_SCALED = Mistake(
  "update received gradients of an unscaled loss{names}, so small float16"
  " gradients underflow.",
  "Differentiate with ols.value_and_grad(loss_fn, opt_state).",
)
_OTHER_STATE = Mistake(
  "update received gradients{names} that the state of another optimizer scaled,"
  " so its own loss scale does not act and falls with each overflow of the"
  " other.",
  "Pass the state of the same optimizer to ols.value_and_grad(loss_fn,"
  " opt_state).",
)
_CONSTANT_SCALE = Mistake(
  "update received gradients{names} that a constant loss scale scaled, so the"
  " loss scale of the optimizer does not act and falls with each overflow.",
  "Pass the current opt_state to ols.value_and_grad(loss_fn, opt_state), inside"
  " of the step.",
)
_CAST_TO_HALF = Mistake(
  "update received gradients{names} that were cast to half precision after they"
  " were unscaled, so small ones are zero.",
  "Keep true gradients in float32, and add up micro-batches in float32.",
)
_NEVER_UNSCALED = Mistake(
  "update received gradients{names} that were never unscaled: they halve if the"
  " loss scale halves.",
  "Call ols.unscale_grads(grads, opt_state), or create the optimizer with"
  " grads_are_scaled=True.",
)
_UNSCALED_TWICE = Mistake(
  "update received gradients{names} that double if the loss scale halves: they"
  " were unscaled twice, or clipped while they were scaled.",
  "Drop unscale_grads and grads_are_scaled=True, since ols.value_and_grad and"
  " ols.grad return unscaled gradients. Clip inside of with_loss_scaling.",
)
_DEPENDS_ON_SCALE = Mistake(
  "update received gradients{names} that depend on the loss scale: they change"
  " by a factor of {factor:.3g} if it halves. Something is added to, or cut off"
  " from, the loss or the gradients while they are scaled.",
  "Change them after ols.value_and_grad has unscaled them.",
)
UPDATE_NOT_RUN = Mistake(
  "update did not run in this step, since its branch was not taken.",
  "Pass arguments with which the branch is taken. If the branch tests whether"
  " the gradients are finite, call update outside of it, since"
  " with_loss_scaling skips bad steps.",
)
_HIDDEN_OVERFLOW = Mistake(
  "An overflow is hidden from update: value_and_grad returned gradients with"
  " an inf or a NaN, but update received finite ones. Something in between"
  " (nan_to_num, clipping, a mask) replaces them, so bad steps are applied and"
  " the loss scale never decreases.",
  "Pass the gradients to update unchanged.",
)
# Labels of the dataflow analysis: the value was computed in a backward pass; it
# was computed in half precision in a backward pass; it was unscaled; it was
# cast to half precision after it was unscaled; it depends on a loss scale that
# is not an input.
_BACKWARD, _HALF, _UNSCALED, _ROUNDED, _UNKNOWN_SCALE = (
  1 << i for i in range(5)
)
_NUM_LABELS = 5

# The largest relative distance of a measured ratio of gradients from a power of
# two, and of a gradient that is computed without half precision from itself.
_RATIO_TOLERANCE = 0.05
_EXACT_TOLERANCE = 1e-3


class Output(NamedTuple):
  """An output of a traced function.

  Attributes:
    kind: ``"result"``; ``"argument"``, if it was changed in place; or the kind
      of a tag: ``"grads"``, the gradients that `update` receives;
      ``"updates"``; ``"applied"``, which is 1 or 0, or -1 if `update` did not
      run; ``"unscaled"``, a number that is finite if and only if a gradient
      that `value_and_grad` returns is.
    name: its path, such as ``1/kernel``.
    group: the index of the result, or of the ``update``, that it is part of.
    branches: for each ``cond`` around the tag, the outermost first, an
      identifier of the ``cond`` and the index of the branch.
    expected_ratio: the factor by which a sound gradient changes if the loss
      scale halves; None if it cannot be measured.
  """

  kind: str
  name: str
  group: int
  branches: tuple[tuple[int, int], ...] = ()
  expected_ratio: float | None = None


class ScaleDependence(NamedTuple):
  """The loss scales that gradients depend on.

  Attributes:
    outputs: the outputs, with their ``expected_ratio``.
    relevant_mask: whether each output matters for the step. Unscaled gradients
      that no `update` receives do not.
    scale_indices: the indices of the inputs that are loss scales.
    mistakes: mistakes in how gradients are scaled.
  """

  outputs: list[Output]
  relevant_mask: list[bool]
  scale_indices: frozenset[int]
  mistakes: list[Mistake]


def check_dependence(
  closed_jaxpr: _eqns.ClosedJaxpr,
  input_names: Sequence[str],
  outputs: list[Output],
) -> ScaleDependence:
  """Check by dataflow analysis how the gradients of a step are scaled.

  Args:
    closed_jaxpr: the jaxpr of the step.
    input_names: the names of its inputs.
    outputs: its outputs.

  Returns:
    A :class:`ScaleDependence`.
  """
  pairs = zip(input_names, closed_jaxpr.jaxpr.invars, strict=True)
  candidate_indices = [
    i for i, pair in enumerate(pairs) if _can_be_scale(*pair)
  ]
  # Each input that may be a loss scale has a label. The tags show later which
  # of them are.
  input_labels = [0] * len(input_names)
  for label, i in enumerate(candidate_indices, _NUM_LABELS):
    input_labels[i] = 1 << label
  transfer = _StepTransferFunctions(len(candidate_indices))
  output_labels = _dependence.propagate_labels(
    closed_jaxpr, input_labels, transfer
  )
  # Unscaled gradients matter only if an `update` receives a value that depends
  # on them. Without an `update`, they all matter.
  received_labels = 0
  for grad in transfer.grads:
    received_labels |= grad.labels
  relevant_tag_labels = (
    received_labels & transfer.unscaled_tag_labels
    if transfer.grads
    else transfer.unscaled_tag_labels
  )
  return ScaleDependence(
    [
      out._replace(expected_ratio=transfer.expected_ratio(x))
      if out.kind == "grads"
      else out
      for out, x in zip(outputs, output_labels, strict=True)
    ],
    [
      out.kind != "unscaled" or bool(x & relevant_tag_labels)
      for out, x in zip(outputs, output_labels, strict=True)
    ],
    frozenset(
      i for i in candidate_indices if input_labels[i] & transfer.scale_labels
    ),
    transfer.find_mistakes(),
  )


def _can_be_scale(name: str, var: Any) -> bool:
  """Return whether an input is a loss scale if a tag receives it."""
  is_scalar = not getattr(var.aval, "shape", ())
  # A state under vmap or pmap has an array of scales, which its name
  # identifies.
  is_float32 = getattr(var.aval, "dtype", None) == jnp.float32
  return is_float32 and (is_scalar or "loss_scale" in name)


class _ReceivedGrad(NamedTuple):
  """A gradient that an `update` receives.

  Attributes:
    update_index: the index of the `update`.
    name: the label of the gradient.
    tag_label: the label of its tag.
    labels: the labels of the gradient.
    is_scaled: whether the `update` expects gradients of a scaled loss.
    update_scale_labels: the labels of the loss scale of the `update`; 0 if
      unknown.
    has_fixed_scale: whether this loss scale is fixed.
  """

  update_index: int
  name: str
  tag_label: int
  labels: int
  is_scaled: bool
  update_scale_labels: int
  has_fixed_scale: bool


class _StepTransferFunctions:
  """The transfer functions of the dataflow analysis of a step.

  They compute the labels after each tag and each eqn, and record the gradients
  and scales that have tags. See ``_dependence.propagate_labels``.

  Attributes:
    grads: the gradients that each `update` receives.
    unscaled_tag_labels: the labels of all tags of unscaled gradients.
    scale_labels: the labels of all loss scales.
  """

  def __init__(self, num_candidates: int) -> None:
    self.grads: list[_ReceivedGrad] = []
    self.unscaled_tag_labels = 0
    self.scale_labels = _UNKNOWN_SCALE
    self._next_label = _NUM_LABELS + num_candidates
    self._candidate_labels = (1 << self._next_label) - (1 << _NUM_LABELS)
    self._label_by_eqn: dict[Any, int] = {}
    self._update_index, self._update_scale_labels, self._has_fixed_scale = (
      0,
      0,
      False,
    )

  def transfer_tag(
    self, eqn: Any, name: str, labels: int, is_final: bool
  ) -> int:
    tag = _tags.parse_tag(name)
    if tag is None:
      return labels
    match tag.kind:
      case "scale":
        return labels | self._record_scale(labels)
      case "update_scale" | "fixed_update_scale":
        if is_final:
          self._update_index += 1
          self._update_scale_labels = self._record_scale(labels)
          self._has_fixed_scale = tag.kind.startswith("fixed")
        # The `update` divides by this scale, so its updates must not depend on
        # it.
        return 0
      case "unscaled":
        label = self._get_tag_label(eqn)
        self.unscaled_tag_labels |= label
        return (
          labels & ~(_ROUNDED | self.unscaled_tag_labels) | _UNSCALED | label
        )
      case "grads" | "scaled_grads":
        label = self._get_tag_label(eqn)
        if is_final:
          self.grads.append(
            _ReceivedGrad(
              self._update_index,
              tag.path,
              label,
              labels,
              tag.kind == "scaled_grads",
              self._update_scale_labels,
              self._has_fixed_scale,
            )
          )
        # Drop the labels of this training step: the function may run another
        # one, with the updated parameters.
        return label
    return labels

  def transfer_output(self, aval: Any, labels: int, is_backward: bool) -> int:
    is_half = _arrays.has_narrow_range(aval.dtype)
    if is_backward:
      # The output of a backward eqn is a new gradient, which is not unscaled
      # yet.
      labels &= ~(_UNSCALED | _ROUNDED)
      labels |= _BACKWARD | (_HALF if is_half else 0)
    if is_half and labels & _UNSCALED:
      labels |= _ROUNDED
    return labels

  def expected_ratio(self, labels: int) -> float | None:
    """Return the ratio of a correct gradient if the scale halves, or None.

    It is 0.5 for a gradient that must be scaled, 1.0 for one that must be
    unscaled, and None if the gradient depends on no loss scale, or comes from
    several tags with different ratios.
    """
    ratios = {
      (0.5 if grad.is_scaled else 1.0)
      if grad.labels & self.scale_labels
      else None
      for grad in self.grads
      if grad.tag_label & labels
    }
    return ratios.pop() if len(ratios) == 1 else None

  def find_mistakes(self) -> list[Mistake]:
    """Return the mistakes of all updates."""
    mistakes: dict[Mistake, None] = {}
    for _, grads in itertools.groupby(
      self.grads, lambda grad: grad.update_index
    ):
      mistakes.update(dict.fromkeys(self._find_update_mistakes(list(grads))))
    return list(mistakes)

  def _find_update_mistakes(
    self, grads: list[_ReceivedGrad]
  ) -> Iterable[Mistake]:
    names = [grad.name for grad in grads]
    rounded_grads = [
      x for x in grads if x.labels & _ROUNDED and not x.is_scaled
    ]
    if rounded_grads:
      yield _fill_in_names(
        _CAST_TO_HALF, [x.name for x in rounded_grads], names
      )
    # The user may multiply the loss by a fixed scale as a constant, which has
    # no tag, so a missing dependence is not a mistake then.
    if grads[0].has_fixed_scale or not grads[0].update_scale_labels:
      return
    # Gradients that are arguments of the step have no such label. They are not
    # judged, since the step does not show how they were scaled.
    backward_grads = [x for x in grads if x.labels & _BACKWARD]
    scaled_grads = [x for x in backward_grads if x.labels & self.scale_labels]
    # A gradient that is computed only in float32 does not need a scale.
    unscaled_grads = [
      x
      for x in backward_grads
      if not x.labels & self.scale_labels and x.labels & _HALF
    ]
    if unscaled_grads:
      yield _fill_in_names(_NOT_SCALED, [x.name for x in unscaled_grads], names)
    other_scale_grads = [
      x for x in scaled_grads if not x.labels & x.update_scale_labels
    ]
    constant_scale_grads = [
      x for x in other_scale_grads if x.labels & _UNKNOWN_SCALE
    ]
    if (
      constant_scale_grads and not grads[0].update_scale_labels & _UNKNOWN_SCALE
    ):
      yield _fill_in_names(
        _CONSTANT_SCALE, [x.name for x in constant_scale_grads], names
      )
    other_state_grads = [
      x for x in other_scale_grads if not x.labels & _UNKNOWN_SCALE
    ]
    if other_state_grads and not grads[0].update_scale_labels & _UNKNOWN_SCALE:
      yield _fill_in_names(
        _OTHER_STATE, [x.name for x in other_state_grads], names
      )

  def _record_scale(self, labels: int) -> int:
    """Return the labels of a loss scale, given the labels at its tag."""
    scale_labels = labels & self._candidate_labels or _UNKNOWN_SCALE
    self.scale_labels |= scale_labels
    return scale_labels

  def _get_tag_label(self, eqn: Any) -> int:
    if eqn not in self._label_by_eqn:
      self._label_by_eqn[eqn] = 1 << self._next_label
      self._next_label += 1
    return self._label_by_eqn[eqn]


def _fill_in_names(
  mistake: Mistake, names: list[str], all_names: list[str], **kwargs: Any
) -> Mistake:
  """Insert names into a message; none if all gradients are affected."""
  name_list = f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
  names_text = "" if len(names) == len(all_names) else name_list
  return mistake._replace(
    cause=mistake.cause.format(names=names_text, **kwargs)
  )


def check_applied_flags(
  outputs: list[Output], outs: Sequence[Any]
) -> list[Mistake]:
  """Check that `update` ran in a step, and that no overflow is hidden from it.

  Args:
    outputs: the outputs of the step.
    outs: their values.

  Returns:
    Mistakes; empty if the step is correct.
  """
  pairs = list(zip(outputs, outs, strict=True))
  applied_flags = [
    (out, np.asarray(x)) for out, x in pairs if out.kind == "applied"
  ]
  if not applied_flags:
    return []
  replaced_masks = [
    _compute_replaced_mask(out, flag, applied_flags)
    for out, flag in applied_flags
  ]
  relevant_flags = [
    flag[~is_replaced]
    for (_, flag), is_replaced in zip(
      applied_flags, replaced_masks, strict=True
    )
  ]
  # Flags are negative if `update` did not run, 0 if it skipped the step, 1 if
  # it applied it. An `update` is not missing if another branch replaced it.
  flag_values = np.concatenate(relevant_flags)
  if (flag_values < 0).all():
    return [UPDATE_NOT_RUN]
  nonfinite_indicators = [x for out, x in pairs if out.kind == "unscaled"]
  has_overflow = not all(
    np.isfinite(np.asarray(x)).all() for x in nonfinite_indicators
  )
  # If any `update` skipped its step, it may have received the overflow. If one
  # did not run, such as behind an accumulation, it may receive the overflow in
  # a later step. So the overflow is only hidden if all updates were applied.
  return [_HIDDEN_OVERFLOW] if has_overflow and (flag_values == 1).all() else []


def _compute_replaced_mask(
  output: Output,
  flag: np.ndarray,
  applied_flags: list[tuple[Output, np.ndarray]],
) -> np.ndarray:
  """Return whether an `update` in another branch ran instead of this one."""
  mask = np.zeros(flag.shape, bool)
  for other_output, other_flag in applied_flags:
    branches = dict(other_output.branches)
    if any(branches.get(cond, i) != i for cond, i in output.branches):
      has_run = other_flag >= 0
      mask |= has_run if has_run.shape == flag.shape else has_run.any()
  return mask & (flag < 0)


def check_scale_invariance(
  inputs: Sequence[Any],
  scale_indices: Collection[int],
  outputs: list[Output],
  run_step: Callable[[list[Any]], Sequence[Any]],
  outs: Sequence[Any],
  *,
  is_exact: bool,
) -> list[Mistake]:
  """Check by measurement that no gradient depends on the loss scale.

  The step runs with a half and with a quarter of each loss scale. Both are
  needed to distinguish a mistake from gradients that underflow. A further run
  with the same inputs finds gradients that differ without a reason, such as
  rounding noise, or gradients of another batch: they are not judged.

  Args:
    inputs: the inputs of the step.
    scale_indices: the indices of the inputs that are loss scales.
    outputs: the outputs of the step.
    run_step: a function from the inputs of the step to its outputs.
    outs: the outputs for ``inputs``.
    is_exact: whether gradients cannot underflow, as in a step without half
      precision. Only then are ratios reported that are not powers of two.

  Returns:
    Mistakes; empty if the step is correct.
  """
  measured_indices = [
    i for i, out in enumerate(outputs) if out.expected_ratio is not None
  ]
  if not measured_indices or not scale_indices:
    return []
  grad_outputs = [outputs[i] for i in measured_indices]
  grads = [outs[i] for i in measured_indices]

  def measure_at(factor: float) -> np.ndarray:
    scaled_inputs = [
      # A NumPy factor keeps the array on its devices.
      x * np.asarray(factor, x.dtype) if i in scale_indices else x
      for i, x in enumerate(inputs)
    ]
    changed_outs = run_step(scaled_inputs)
    changed_grads = [changed_outs[i] for i in measured_indices]
    return np.asarray(_measure_changes(grads, changed_grads), np.float64)

  expected_ratios = np.array([out.expected_ratio for out in grad_outputs])
  is_stable = measure_at(1.0)[:, 1] < _EXACT_TOLERANCE
  ratio_at_half = np.where(
    is_stable, measure_at(0.5)[:, 0] / expected_ratios, np.nan
  )
  ratio_at_quarter = measure_at(0.25)[:, 0] / expected_ratios**2
  return _judge_ratios(
    grad_outputs, ratio_at_half, ratio_at_quarter, is_exact=is_exact
  )


def _judge_ratios(
  grad_outputs: list[Output],
  ratio_at_half: np.ndarray,
  ratio_at_quarter: np.ndarray,
  *,
  is_exact: bool,
) -> list[Mistake]:
  """Return the mistakes that explain how gradients change with the loss scale.

  Args:
    grad_outputs: the gradients.
    ratio_at_half: the factor by which each gradient changes with half of the
      scale, over the expected one; NaN if it is unknown; float64[gradients].
    ratio_at_quarter: the same with a quarter of the scale.
    is_exact: see :func:`check_scale_invariance`.
  """
  mistakes: dict[Mistake, None] = {}
  for mistake, factor in (_NEVER_UNSCALED, 0.5), (_UNSCALED_TWICE, 2.0):
    is_affected = _is_close(ratio_at_half, factor) & _is_close(
      ratio_at_quarter, factor**2
    )
    # Do not report these gradients a second time below.
    ratio_at_half = np.where(is_affected, 1.0, ratio_at_half)
    mistakes.update(
      dict.fromkeys(_repeat_by_update(mistake, grad_outputs, is_affected))
    )
  if is_exact:
    is_affected = np.abs(ratio_at_half - 1) > _EXACT_TOLERANCE
    affected_ratios = ratio_at_half[is_affected][:1]
    kwargs = (
      {"factor": float(affected_ratios[0])} if affected_ratios.size else {}
    )
    mistakes.update(
      dict.fromkeys(
        _repeat_by_update(
          _DEPENDS_ON_SCALE, grad_outputs, is_affected, **kwargs
        )
      )
    )
  return list(mistakes)


@jax.jit
def _measure_changes(grads: list[Any], changed_grads: list[Any]) -> list[Any]:
  """Return the factor by which each gradient changed, and the relative error.

  The factor is the projection onto the old gradient. Both are NaN for a
  gradient that is zero or not finite.
  """
  rows = []
  for x, y in zip(grads, changed_grads, strict=True):
    # Normalize, so that squares stay in range. A zero gradient gives NaN.
    amax = jnp.max(jnp.abs(x), initial=0)
    x, y = x / amax, y / amax
    norm = jnp.sum(jnp.abs(x) ** 2)
    error = jnp.sqrt(jnp.sum(jnp.abs(y - x) ** 2) / norm)
    rows.append([jnp.sum(jnp.real(x.conj() * y)) / norm, error])
  return rows


def _is_close(ratio: np.ndarray, factor: float) -> np.ndarray:
  return np.abs(ratio / factor - 1) < _RATIO_TOLERANCE


def _repeat_by_update(
  mistake: Mistake, grads: list[Output], is_affected: np.ndarray, **kwargs: Any
) -> Iterable[Mistake]:
  """Return the mistake for each `update` that receives affected gradients."""
  for group in dict.fromkeys(out.group for out in grads):
    pairs = zip(grads, is_affected, strict=True)
    group_grads = [
      (out.name, bool(x)) for out, x in pairs if out.group == group
    ]
    names = [name for name, x in group_grads if x]
    if names:
      yield _fill_in_names(
        mistake, names, [name for name, _ in group_grads], **kwargs
      )


def has_narrow_range_eqn(
  closed_jaxpr: _eqns.ClosedJaxpr, *, ignore_autocast: bool
) -> bool:
  """Return whether a program computes in float16 or float8.

  Args:
    closed_jaxpr: the jaxpr.
    ignore_autocast: whether to ignore eqns that `autocast` casts.
  """

  def is_half_visit(visit: _walk.EqnVisit) -> bool:
    if not any(map(_is_half_var, visit.eqn.outvars)):
      return False
    location = _provenance.EqnLocation()
    for ancestor in reversed(visit.self_and_ancestors):
      location = location.push_scope(ancestor.eqn)
    return not ignore_autocast or location.autocast_dtype is None

  return any(map(is_half_visit, _walk.walk(closed_jaxpr, _eqns.subjaxprs)))


def _is_half_var(var: Any) -> bool:
  dtype = getattr(var.aval, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
    return False
  return _arrays.has_narrow_range(dtype)
