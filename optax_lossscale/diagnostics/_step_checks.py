"""Checks of a training step: are its gradients scaled, seen and applied?

Two simple ideas decide. Dependence: a gradient of a scaled loss depends on the
loss scale of its own `update`. Measurement: a true gradient stays the same if
the loss scale halves.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _named_values
from optax_lossscale._jaxprs import _dependence, _equations, _places, _walk


class Mistake(NamedTuple):
  """A mistake in a training step.

  Attributes:
    cause: what is wrong, and what follows from it.
    fix: what to do.
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
NOT_RUN = Mistake(
  "update did not run in this step, since its branch was not taken.",
  "Pass arguments with which the branch is taken. If the branch tests whether"
  " the gradients are finite, call update outside of it, since"
  " with_loss_scaling skips bad steps.",
)
_HIDDEN = Mistake(
  "An overflow is hidden from update: value_and_grad returned gradients with"
  " an inf or a NaN, but update received finite ones. Something in between"
  " (nan_to_num, clipping, a mask) replaces them, so bad steps are applied and"
  " the loss scale never decreases.",
  "Pass the gradients to update unchanged.",
)
# Labels: the value was computed in a backward pass; in half precision there; it
# was unscaled; it was cast to half precision after that; it depends on a loss
# scale that is no input.
_BACKWARD, _HALF, _UNSCALED, _ROUNDED, _UNKNOWN_SCALE = (
  1 << i for i in range(5)
)
_NUM_LABELS = 5

# A ratio of gradients is taken as a power of two within this distance; and a
# gradient without half precision as unchanged within the smaller one.
_NEAR = 0.05
_EXACT = 1e-3


class Output(NamedTuple):
  """An output of a traced function.

  Attributes:
    kind: a ``"result"``; an ``"argument"`` that was changed in place; or a tag:
      the ``"grads"`` that `update` receives, the ``"updates"``, and whether a
      step is ``"applied"``, as 1, 0, or -1 if `update` did not run; and for
      ``"unscaled"`` gradients a number that is finite if they are.
    name: its path, such as ``1/kernel``.
    group: the number of the result that it is part of, or of the ``update``.
    branches: for each ``cond`` around the tag, the outermost first, an
      identifier of the ``cond`` and the number of the branch.
    halved_ratio: the factor by which a sound gradient changes if the loss scale
      halves; None if it cannot be measured.
  """

  kind: str
  name: str
  group: int
  branches: tuple[tuple[int, int], ...] = ()
  halved_ratio: float | None = None


class Dependence(NamedTuple):
  """The loss scales that gradients depend on.

  Attributes:
    outputs: the outputs, with their ``halved_ratio``.
    is_relevant: whether each output matters for the step. Unscaled gradients
      that no `update` receives do not.
    scales: which inputs are loss scales, by their positions.
    mistakes: mistakes in how gradients are scaled.
  """

  outputs: list[Output]
  is_relevant: list[bool]
  scales: frozenset[int]
  mistakes: list[Mistake]


def check_dependence(
  closed: _equations.ClosedJaxpr, names: Sequence[str], outputs: list[Output]
) -> Dependence:
  """Checks by dependence analysis how the gradients of a step are scaled.

  Args:
    closed: the jaxpr of the step.
    names: the names of its inputs.
    outputs: its outputs.

  Returns:
    A :class:`Dependence`.
  """
  pairs = zip(names, closed.jaxpr.invars, strict=True)
  candidates = [i for i, pair in enumerate(pairs) if _may_be_scale(*pair)]
  inputs = [0] * len(names)
  for label, i in enumerate(candidates, _NUM_LABELS):
    inputs[i] = 1 << label
  rules = _StepLabels(len(candidates))
  labels = _dependence.propagate_labels(closed, inputs, rules)
  received = 0
  for grad in rules.grads:
    received |= grad.labels
  hides = received & rules.unscaled_tags if rules.grads else rules.unscaled_tags
  return Dependence(
    [
      out._replace(halved_ratio=rules.halved_ratio(x))
      if out.kind == "grads"
      else out
      for out, x in zip(outputs, labels, strict=True)
    ],
    [
      out.kind != "unscaled" or bool(x & hides)
      for out, x in zip(outputs, labels, strict=True)
    ],
    frozenset(i for i in candidates if inputs[i] & rules.scales),
    rules.mistakes(),
  )


def _may_be_scale(name: str, var: Any) -> bool:
  """Returns whether an input is a loss scale if a tag receives it."""
  is_scalar = not getattr(var.aval, "shape", ())
  is_float32 = getattr(var.aval, "dtype", None) == jnp.float32
  return is_float32 and (is_scalar or "loss_scale" in name)


class _Grad(NamedTuple):
  """A gradient that an `update` receives.

  Attributes:
    update: the number of the `update`.
    name: the label of the gradient.
    tag: the label of its tag.
    labels: the labels of the gradient.
    is_scaled: whether the `update` expects gradients of a scaled loss.
    own_scale: the labels of the loss scale of the `update`; 0 if unknown.
    is_fixed: whether this loss scale is fixed.
  """

  update: int
  name: str
  tag: int
  labels: int
  is_scaled: bool
  own_scale: int
  is_fixed: bool


class _StepLabels:
  """The rules of the dependence analysis of a step.

  Attributes:
    grads: the gradients that each `update` receives.
    unscaled_tags: the labels of all tags of unscaled gradients.
    scales: the labels of all loss scales.
  """

  def __init__(self, num_candidates: int) -> None:
    self.grads: list[_Grad] = []
    self.unscaled_tags = 0
    self.scales = _UNKNOWN_SCALE
    self._next_label = _NUM_LABELS + num_candidates
    self._candidates = (1 << self._next_label) - (1 << _NUM_LABELS)
    self._label_of: dict[Any, int] = {}
    self._update, self._own_scale, self._is_fixed = 0, 0, False

  def transfer_tag(
    self, eqn: Any, name: str, labels: int, is_final: bool
  ) -> int:
    tag = _named_values.parse_tag(name)
    if tag is None:
      return labels
    match tag.kind:
      case "scale":
        return labels | self._scale_labels(labels)
      case "update_scale" | "fixed_update_scale":
        if is_final:
          self._update += 1
          self._own_scale = self._scale_labels(labels)
          self._is_fixed = tag.kind.startswith("fixed")
        return 0  # The `update` unscales with it, and its updates are true.
      case "unscaled":
        label = self._tag_label(eqn)
        self.unscaled_tags |= label
        return labels & ~(_ROUNDED | self.unscaled_tags) | _UNSCALED | label
      case "grads" | "scaled_grads":
        label = self._tag_label(eqn)
        if is_final:
          self.grads.append(
            _Grad(
              self._update,
              tag.path,
              label,
              labels,
              tag.kind == "scaled_grads",
              self._own_scale,
              self._is_fixed,
            )
          )
        return label  # The next step begins here.
    return labels

  def transfer_output(self, aval: Any, labels: int, is_backward: bool) -> int:
    is_half = _arrays.has_narrow_range(aval.dtype)
    if is_backward:
      # What it computes is another gradient, which was not unscaled yet.
      labels &= ~(_UNSCALED | _ROUNDED)
      labels |= _BACKWARD | (_HALF if is_half else 0)
    if is_half and labels & _UNSCALED:
      labels |= _ROUNDED
    return labels

  def halved_ratio(self, labels: int) -> float | None:
    """Returns how a sound gradient with this tag changes; None if unknown."""
    ratios = {
      (0.5 if grad.is_scaled else 1.0) if grad.labels & self.scales else None
      for grad in self.grads
      if grad.tag & labels
    }
    return ratios.pop() if len(ratios) == 1 else None

  def mistakes(self) -> list[Mistake]:
    """Returns the mistakes of all updates."""
    found: dict[Mistake, None] = {}
    for _, grads in itertools.groupby(self.grads, lambda grad: grad.update):
      found.update(dict.fromkeys(self._mistakes(list(grads))))
    return list(found)

  def _mistakes(self, grads: list[_Grad]) -> Iterable[Mistake]:
    names = [grad.name for grad in grads]
    rounded = [x for x in grads if x.labels & _ROUNDED and not x.is_scaled]
    if rounded:
      yield _fill_in(_CAST_TO_HALF, [x.name for x in rounded], names)
    # Gradients that are arguments of the step are not judged. With a fixed
    # scale, the loss may be multiplied by a constant.
    if grads[0].is_fixed or not grads[0].own_scale:
      return
    computed = [x for x in grads if x.labels & _BACKWARD]
    scaled = [x for x in computed if x.labels & self.scales]
    # A gradient that is computed in float32 needs no scale.
    unscaled = [
      x for x in computed if not x.labels & self.scales and x.labels & _HALF
    ]
    if unscaled:
      yield _fill_in(_NOT_SCALED, [x.name for x in unscaled], names)
    foreign = [x for x in scaled if not x.labels & x.own_scale]
    constant = [x for x in foreign if x.labels & _UNKNOWN_SCALE]
    if constant and not grads[0].own_scale & _UNKNOWN_SCALE:
      yield _fill_in(_CONSTANT_SCALE, [x.name for x in constant], names)
    other = [x for x in foreign if not x.labels & _UNKNOWN_SCALE]
    if other and not grads[0].own_scale & _UNKNOWN_SCALE:
      yield _fill_in(_OTHER_STATE, [x.name for x in other], names)

  def _scale_labels(self, labels: int) -> int:
    """Returns the labels of a loss scale, from those of its tag."""
    found = labels & self._candidates or _UNKNOWN_SCALE
    self.scales |= found
    return found

  def _tag_label(self, eqn: Any) -> int:
    if eqn not in self._label_of:
      self._label_of[eqn] = 1 << self._next_label
      self._next_label += 1
    return self._label_of[eqn]


def _fill_in(
  mistake: Mistake, names: list[str], all_names: list[str], **kwargs: Any
) -> Mistake:
  """Fills in the names, if these are not all gradients."""
  some = f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
  shown = "" if len(names) == len(all_names) else some
  return mistake._replace(cause=mistake.cause.format(names=shown, **kwargs))


def check_flags(outputs: list[Output], outs: Sequence[Any]) -> list[Mistake]:
  """Checks a step that was run: did `update` run, and see each overflow?

  Args:
    outputs: the outputs of the step.
    outs: their values.

  Returns:
    Warnings; none if the step is sound.
  """
  pairs = list(zip(outputs, outs, strict=True))
  flags = [(out, np.asarray(x)) for out, x in pairs if out.kind == "applied"]
  if not flags:
    return []
  excused = [_is_replaced(out, flag, flags) for out, flag in flags]
  cases = [
    flag[~other] for (_, flag), other in zip(flags, excused, strict=True)
  ]
  ran = np.concatenate(cases)
  if (ran < 0).all():
    return [NOT_RUN]
  faults = [x for out, x in pairs if out.kind == "unscaled"]
  overflows = not all(np.isfinite(np.asarray(x)).all() for x in faults)
  # An `update` that skips its step has seen an overflow: maybe all there are.
  # One that waits, such as that of an actor or behind an accumulation, may see
  # it in a later step.
  return [_HIDDEN] if overflows and (ran == 1).all() else []


def _is_replaced(
  out: Output, flag: np.ndarray, flags: list[tuple[Output, np.ndarray]]
) -> np.ndarray:
  """Returns whether the `update` of another branch ran in place of each."""
  replaced = np.zeros(flag.shape, bool)
  for other, its_flag in flags:
    branches = dict(other.branches)
    if any(branches.get(cond, i) != i for cond, i in out.branches):
      ran = its_flag >= 0
      replaced |= ran if ran.shape == flag.shape else ran.any()
  return replaced & (flag < 0)


def check_measurement(
  inputs: Sequence[Any],
  scales: Collection[int],
  outputs: list[Output],
  run: Callable[[list[Any]], Sequence[Any]],
  outs: Sequence[Any],
  *,
  is_exact: bool,
) -> list[Mistake]:
  """Checks by measurement that no gradient depends on the loss scale.

  The step is run with a half and with a quarter of each loss scale. Both are
  needed to tell a mistake from gradients that underflow. One more run changes
  nothing: gradients that differ then are rounding noise, or of another batch.

  Args:
    inputs: the inputs of the step.
    scales: which of them are loss scales.
    outputs: the outputs of the step.
    run: the step, of its inputs.
    outs: what it returns for the inputs.
    is_exact: whether gradients cannot underflow, as in a step without half
      precision. Only then ratios that are no powers of two are reported.

  Returns:
    Mistakes; none if the step is sound.
  """
  judged = [i for i, out in enumerate(outputs) if out.halved_ratio is not None]
  if not judged or not scales:
    return []
  changes = []
  for factor in 1.0, 0.5, 0.25:
    scaled = [
      # It stays where it is, on one device or many.
      x * np.asarray(factor, x.dtype) if i in scales else x
      for i, x in enumerate(inputs)
    ]
    changed = run(scaled)
    changes.append(
      np.asarray(
        _changes([outs[i] for i in judged], [changed[i] for i in judged]),
        np.float64,
      )
    )
  expected = np.array([outputs[i].halved_ratio for i in judged])
  is_stable = changes[0][:, 1] < _EXACT
  half = np.where(is_stable, changes[1][:, 0] / expected, np.nan)
  quarter = changes[2][:, 0] / expected**2
  grads = [outputs[i] for i in judged]
  mistakes: dict[Mistake, None] = {}
  for mistake, factor in (_NEVER_UNSCALED, 0.5), (_UNSCALED_TWICE, 2.0):
    is_such = _is_near(half, factor) & _is_near(quarter, factor**2)
    half = np.where(is_such, 1.0, half)
    mistakes.update(dict.fromkeys(_by_update(mistake, grads, is_such)))
  if is_exact:
    is_such = np.abs(half - 1) > _EXACT
    found = half[is_such][:1]
    kwargs = {"factor": float(found[0])} if found.size else {}
    mistakes.update(
      dict.fromkeys(_by_update(_DEPENDS_ON_SCALE, grads, is_such, **kwargs))
    )
  return list(mistakes)


@jax.jit
def _changes(grads: list[Any], changed: list[Any]) -> list[Any]:
  """Returns the factor by which each gradient changed, and the relative error.

  Both are NaN if it is zero or not finite.
  """
  rows = []
  for x, y in zip(grads, changed, strict=True):
    unit = jnp.max(jnp.abs(x), initial=0)
    x, y = x / unit, y / unit
    norm = jnp.sum(jnp.abs(x) ** 2)
    error = jnp.sqrt(jnp.sum(jnp.abs(y - x) ** 2) / norm)
    rows.append([jnp.sum(jnp.real(x.conj() * y)) / norm, error])
  return rows


def _is_near(ratio: np.ndarray, factor: float) -> np.ndarray:
  return np.abs(ratio / factor - 1) < _NEAR


def _by_update(
  mistake: Mistake, grads: list[Output], is_such: np.ndarray, **kwargs: Any
) -> Iterable[Mistake]:
  """Returns the mistake for each `update` with gradients that are such."""
  for group in dict.fromkeys(out.group for out in grads):
    pairs = zip(grads, is_such, strict=True)
    its = [(out.name, bool(x)) for out, x in pairs if out.group == group]
    names = [name for name, x in its if x]
    if names:
      yield _fill_in(mistake, names, [name for name, _ in its], **kwargs)


def computes_in_half(
  closed: _equations.ClosedJaxpr, *, without_autocast: bool
) -> bool:
  """Returns whether a program computes in float16 or float8.

  Args:
    closed: the jaxpr.
    without_autocast: whether to leave out what `autocast` casts.
  """

  def is_half(visit: _walk.EqnVisit) -> bool:
    if not any(map(_is_half, visit.eqn.outvars)):
      return False
    place = _places.EqnLocation()
    for outer in reversed(visit.ancestors):
      place = place.push_scope(outer.eqn)
    return not without_autocast or place.autocast_dtype is None

  return any(map(is_half, _walk.walk(closed, _equations.subjaxprs)))


def _is_half(var: Any) -> bool:
  dtype = getattr(var.aval, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
    return False
  return _arrays.has_narrow_range(dtype)
