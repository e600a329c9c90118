"""Which loss scales do the gradients of a step depend on?

``check_dependence`` is a dataflow analysis (``_dependence``) with these rules:
a gradient of a scaled loss must depend on the loss scale of the ``update`` that
receives it, must not be cast to half precision after it was unscaled, and must
not be added to gradients of a loss that was not scaled. The analysis also finds
the outputs that the results of each ``update`` reach.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import functools
import itertools
import operator
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _arrays, _tags
from optax_lossscale._jaxprs import _dependence, _eqns
from optax_lossscale.diagnostics import _problem

_NOT_SCALED = _problem.Problem(
  "update received gradients of an unscaled loss{names}, so small float16"
  " gradients underflow.",
  "Differentiate with ols.value_and_grad(loss_fn, opt_state).",
)
_OTHER_STATE = _problem.Problem(
  "update received gradients{names} that the state of another optimizer scaled,"
  " so its own loss scale does not act and falls with each overflow of the"
  " other.",
  "Pass the state of the same optimizer to ols.value_and_grad(loss_fn,"
  " opt_state).",
)
_CONSTANT_SCALE = _problem.Problem(
  "update received gradients{names} that a constant loss scale scaled, so the"
  " loss scale of the optimizer does not act and falls with each overflow.",
  "Pass the current opt_state to ols.value_and_grad(loss_fn, opt_state), inside"
  " of the step.",
)
_CAST_TO_HALF = _problem.Problem(
  "update received gradients{names} that were cast to half precision after they"
  " were unscaled, so small ones are zero.",
  "Keep true gradients in float32, and add up micro-batches in float32.",
)
_PARTLY_NOT_SCALED = _problem.Problem(
  "update received gradients{names} to which gradients of an unscaled loss were"
  " added, so small float16 gradients of that loss underflow.",
  "Differentiate each loss with ols.value_and_grad(loss_fn, opt_state), or the"
  " sum of the losses.",
)
# In the order in which they are reported.
_GRAD_MISTAKES = (
  _CAST_TO_HALF,
  _PARTLY_NOT_SCALED,
  _NOT_SCALED,
  _CONSTANT_SCALE,
  _OTHER_STATE,
)
_NUM_LABELS = 7
# Labels of the dataflow analysis: the value was computed in a backward pass; it
# was computed in half precision in a backward pass; it was unscaled; it was
# cast to half precision after it was unscaled; gradients of an unscaled loss
# were added to it after it was unscaled; it depends on an input other than a
# loss scale; it depends on a loss scale that is not an input.
_BACKWARD, _HALF, _UNSCALED, _ROUNDED, _MIXED, _INPUT, _UNKNOWN_SCALE = (
  1 << i for i in range(_NUM_LABELS)
)
_ADDITIONS = {"add", "add_any", "sub"}

# The kinds of outputs that are results of the traced function.
RETURNED_KINDS = ("result", "argument")


class Output(NamedTuple):
  """An output of a traced function.

  Attributes:
    kind: ``"result"``; ``"metric"``, a result that is neither a parameter nor a
      state; ``"argument"``, if it was changed in place; or the kind of a
      tag: ``"grads"``, the gradients that `update` receives;
      ``"updates"``; ``"applied"``, which is 1 or 0, or -1 if `update` did not
      run; ``"unscaled"``, a number that is finite if and only if a gradient
      that `value_and_grad` returns is, and ``"loss"``, the same for its loss;
      ``"update_scale"``, the loss scale of an `update`; ``"new_updates"``,
      ``"new_scale"`` and ``"new_skip_count"``, what `update` returns.
      ``"state_scale"`` and ``"state_skip_count"`` are fields of a loss-scale
      state among the results.
    name: its path, such as ``1/kernel``.
    group: the index of the result, or of the ``update``, that it is part of.
    branches: for each ``cond`` around the tag, the outermost first, an
      identifier of the ``cond`` and the index of the branch.
    expected_ratio: the factor by which a sound gradient changes if the loss
      scale halves; None if it cannot be measured.
    is_constant: whether a gradient depends on no input but the loss scale.
    depends_on_update: whether it depends on gradients that an `update`
      receives.
    new_updates: the indices of the updates that reach it.
    new_scales: the indices of the updates whose new loss scales reach it.
  """

  kind: str
  name: str
  group: int
  branches: tuple[tuple[int, int], ...] = ()
  expected_ratio: float | None = None
  is_constant: bool = False
  depends_on_update: bool = False
  new_updates: frozenset[int] = frozenset()
  new_scales: frozenset[int] = frozenset()


class ScaleDependence(NamedTuple):
  """The loss scales that gradients depend on.

  Attributes:
    outputs: the outputs, with the fields that the analysis determines.
    relevant_mask: whether each output matters for the step. Unscaled gradients
      that no `update` receives do not.
    scale_indices: the indices of the inputs that are loss scales.
    lowest_scale: the lowest loss scale that all policies allow; None if it is
      unknown.
    mistakes: mistakes in how gradients are scaled.
  """

  outputs: list[Output]
  relevant_mask: list[bool]
  scale_indices: frozenset[int]
  lowest_scale: float | None
  mistakes: list[_problem.Problem]


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
  input_labels = [_INPUT] * len(input_names)
  for label, i in enumerate(candidate_indices, _NUM_LABELS):
    input_labels[i] = 1 << label
  transfer = _StepTransferFunctions(len(candidate_indices))
  output_labels = _dependence.propagate_labels(
    closed_jaxpr, input_labels, transfer
  )
  # Unscaled gradients matter only if an `update` receives a value that depends
  # on them. Without an `update`, they all matter.
  relevant_tag_labels = transfer.unscaled_tag_labels
  if transfer.grads:
    relevant_tag_labels &= functools.reduce(
      operator.or_, [grad.labels for grad in transfer.grads]
    )
  return ScaleDependence(
    [
      transfer.describe_output(out, x)
      for out, x in zip(outputs, output_labels, strict=True)
    ],
    [
      out.kind != "unscaled" or bool(x & relevant_tag_labels)
      for out, x in zip(outputs, output_labels, strict=True)
    ],
    frozenset(
      i for i in candidate_indices if input_labels[i] & transfer.scale_labels
    ),
    max(transfer.lowest_scales, default=None),
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
    update_scale_labels: the labels of the loss scale of the `update`; 0 if it
      is unknown, or fixed.
  """

  update_index: int
  name: str
  tag_label: int
  labels: int
  is_scaled: bool
  update_scale_labels: int


class _StepTransferFunctions:
  """The transfer functions of the dataflow analysis of a step.

  They compute the labels after each tag and each eqn, and record the gradients
  and scales that have tags. See ``_dependence.propagate_labels``.

  Attributes:
    grads: the gradients that each `update` receives.
    unscaled_tag_labels: the labels of all tags of unscaled gradients.
    scale_labels: the labels of all loss scales.
    lowest_scales: the lowest loss scale of each policy, where it is known.
  """

  def __init__(self, num_candidates: int) -> None:
    self.grads: list[_ReceivedGrad] = []
    self.lowest_scales: list[float] = []
    # For each kind of result of an `update`, the label of each tag, with the
    # index of the `update`.
    self._result_labels: dict[str, list[tuple[int, int]]] = {
      "new_updates": [],
      "new_scale": [],
    }
    self.unscaled_tag_labels = 0
    self.scale_labels = _UNKNOWN_SCALE
    self._candidate_labels = ((1 << num_candidates) - 1) << _NUM_LABELS
    # Each equation of a tag has its own label, after those of the candidates.
    bits = itertools.count(_NUM_LABELS + num_candidates)
    self._tag_labels = collections.defaultdict[Any, int](
      lambda: 1 << next(bits)
    )
    self._update_index = 0
    self._update_scale_labels = 0

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
          scale_labels = self._record_scale(labels)
          # The user may multiply the loss by a fixed scale as a constant, which
          # has no tag, so a missing dependence is not a mistake then.
          is_fixed = tag.kind == "fixed_update_scale"
          self._update_scale_labels = 0 if is_fixed else scale_labels
          with contextlib.suppress(ValueError):  # The lowest scale is unknown.
            self.lowest_scales.append(float(tag.path))
        # The `update` divides by this scale, so its updates must not depend on
        # it.
        return 0
      case "unscaled":
        label = self._tag_labels[eqn]
        self.unscaled_tag_labels |= label
        return (
          labels & ~(_ROUNDED | _MIXED | self.unscaled_tag_labels)
          | _UNSCALED
          | label
        )
      case "grads" | "scaled_grads":
        label = self._tag_labels[eqn]
        if is_final:
          self.grads.append(
            _ReceivedGrad(
              self._update_index,
              tag.path,
              label,
              labels,
              tag.kind == "scaled_grads",
              self._update_scale_labels,
            )
          )
        # Drop the labels of this training step: the function may run another
        # one, with the updated parameters.
        return label
      case "new_updates" | "new_scale":
        label = self._tag_labels[eqn]
        if is_final:
          self._result_labels[tag.kind].append((self._update_index - 1, label))
        return labels | label
    return labels

  def transfer_output(
    self,
    eqn: core.JaxprEqn,
    aval: Any,
    operand_labels: Sequence[int],
    is_backward: bool,
  ) -> int:
    labels = functools.reduce(operator.or_, operand_labels, 0)
    is_half = _arrays.has_narrow_range(aval.dtype)
    if is_backward:
      # The output of a backward eqn is a new gradient, which is not unscaled
      # yet.
      labels &= ~(_UNSCALED | _ROUNDED | _MIXED)
      return labels | _BACKWARD | (_HALF if is_half else 0)
    if is_half and labels & _UNSCALED:
      labels |= _ROUNDED
    if eqn.primitive.name in _ADDITIONS and labels & _UNSCALED:
      is_mixed = any(map(self._is_unscaled_half_grad, operand_labels))
      labels |= _MIXED if is_mixed else 0
    return labels

  def _is_unscaled_half_grad(self, labels: int) -> bool:
    """Return whether a value is a half-precision gradient of a true loss."""
    is_half_grad = labels & _BACKWARD and labels & _HALF
    return bool(is_half_grad) and not labels & (_UNSCALED | self.scale_labels)

  def describe_output(self, output: Output, labels: int) -> Output:
    """Return an output with the fields that its labels determine."""
    grads = [grad for grad in self.grads if grad.tag_label & labels]
    if output.kind == "grads":
      # All inputs but the loss scales.
      input_labels = (self._candidate_labels & ~self.scale_labels) | _INPUT
      return output._replace(
        expected_ratio=self._expected_ratio(grads),
        is_constant=not any(grad.labels & input_labels for grad in grads),
      )
    new_updates, new_scales = (
      frozenset(i for i, label in pairs if label & labels)
      for pairs in self._result_labels.values()
    )
    return output._replace(
      depends_on_update=bool(grads),
      new_updates=new_updates,
      new_scales=new_scales,
    )

  def _expected_ratio(self, grads: list[_ReceivedGrad]) -> float | None:
    """Return the ratio of a correct gradient if the scale halves, or None.

    It is 0.5 for a gradient that must be scaled, 1.0 for one that must be
    unscaled, and None if the gradient depends on no loss scale, or comes from
    several tags with different ratios.
    """
    ratios = {
      (0.5 if grad.is_scaled else 1.0)
      if grad.labels & self.scale_labels
      else None
      for grad in grads
    }
    return ratios.pop() if len(ratios) == 1 else None

  def find_mistakes(self) -> list[_problem.Problem]:
    """Return the mistakes of all updates."""
    mistakes: dict[_problem.Problem, None] = {}
    for _, group in itertools.groupby(
      self.grads, lambda grad: grad.update_index
    ):
      grads = list(group)
      all_names = [grad.name for grad in grads]
      for mistake in _GRAD_MISTAKES:
        names = [x.name for x in grads if mistake in self._judge_grad(x)]
        if names:
          mistakes[_problem.fill_in_names(mistake, names, all_names)] = None
    return list(mistakes)

  def _judge_grad(self, grad: _ReceivedGrad) -> Iterator[_problem.Problem]:
    """Yield the mistakes of a gradient, without names."""
    if grad.labels & _ROUNDED and not grad.is_scaled:
      yield _CAST_TO_HALF
    if grad.labels & _MIXED:
      yield _PARTLY_NOT_SCALED
    # Gradients that are arguments of the step have no such label. They are not
    # judged, since the step does not show how they were scaled.
    if not grad.update_scale_labels or not grad.labels & _BACKWARD:
      return
    if not grad.labels & self.scale_labels:
      # A gradient that is computed only in float32 does not need a scale.
      if grad.labels & _HALF:
        yield _NOT_SCALED
    elif not grad.labels & grad.update_scale_labels:
      if grad.labels & _UNKNOWN_SCALE:
        yield _CONSTANT_SCALE
      elif not grad.update_scale_labels & _UNKNOWN_SCALE:
        yield _OTHER_STATE

  def _record_scale(self, labels: int) -> int:
    """Return the labels of a loss scale, given the labels at its tag."""
    scale_labels = labels & self._candidate_labels or _UNKNOWN_SCALE
    self.scale_labels |= scale_labels
    return scale_labels
