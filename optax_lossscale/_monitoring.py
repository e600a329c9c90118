"""Metrics of a loss scale for logging, and the error of a stuck run."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks, _policies, _state, _transfer_guard

# The hyperparameters of policies, those of `interop` included, that bound the
# scale from below.
_MIN_SCALE_FIELDS = "threshold", "min_scale"

_FIND_OVERFLOW_REMEDY = (
  "Find the operation and its layer:"
  " diagnostics.find_overflow(train_step, params, opt_state, batch)."
)
_FLOAT32_LAYER_REMEDY = (
  "If the forward pass overflows, compute that layer in float32 or bfloat16:"
  " ols.autocast(loss_fn, keep_float32=...)."
)
_CHECK_DATA_REMEDY = (
  "If gradients are NaN without an overflow, no loss scale helps: check the"
  " data and the learning rate."
)
_SAME_STATE_REMEDY = (
  "If there are several optimizers, pass the state of the same optimizer to"
  " ols.value_and_grad: a loss scale that never acts falls to its minimum."
)


@_transfer_guard.allow_transfers
def loss_scale_metrics(
  tree: Any,
  *,
  policy: _policies.PolicyLike | None = None,
  steps: jax.typing.ArrayLike | None = None,
) -> dict[str, jax.Array]:
  """Returns the metrics of a loss scale, for any logger.

  Works under ``jit``, and reads nothing back to the host.

  A run may skip every step without an error. Pass ``policy`` to detect this: if
  ``skips_at_min_scale`` stays 1, the run makes no progress, since the scale
  cannot decrease any further.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one.
    policy: the ``loss_scale`` argument of :func:`with_loss_scaling`.
    steps: the number of calls of ``update`` since ``init``.

  Returns:
    A dict of arrays of shape ``()``: the fields of :class:`LossScaleState` by
    name, except for ``policy_state``, and for plots, all float32:

    * ``log2_loss_scale``;
    * ``step_skipped``, 1 if the last step was skipped and 0 if not, whose mean
      over some steps is their skip rate;
    * ``skip_rate``, the fraction of all steps that were skipped, if ``steps``
      is passed;
    * ``skips_at_min_scale``, if ``policy`` is passed: 1 if the last step was
      skipped and the scale is the lowest that the policy allows, or is fixed;
      else 0.

  Raises:
    TypeError: if ``policy`` or ``steps`` is of the wrong type.
    ValueError: if one is out of range, or ``tree`` does not hold exactly one
      loss-scale state.

  Examples:
    >>> import optax_lossscale as ols
    >>> metrics = ols.loss_scale_metrics(ols.DynamicLossScale().init())
    >>> {name: x.item() for name, x in sorted(metrics.items())}
    {'finite_count': 0, 'last_finite': True, 'log2_loss_scale': 15.0,
     'loss_scale': 32768.0, 'notfinite_count': 0, 'step_skipped': 0.0,
     'total_notfinite': 0}
  """
  metrics = _state.get_loss_scale_state(tree)._asdict()
  del metrics["policy_state"]
  scale, was_skipped = metrics["loss_scale"], ~metrics["last_finite"]
  metrics["log2_loss_scale"] = _policies.log2(scale)
  metrics["step_skipped"] = _as_float32(was_skipped)
  if steps is not None:
    _checks.check_number("steps", steps, 0, 2**63 - 1, integer=True)
    # Before the first step the rate is 0, as is the number of skips.
    num_updates = jnp.maximum(_as_float32(steps), 1)
    metrics["skip_rate"] = _as_float32(metrics["total_notfinite"]) / num_updates
  if policy is not None:
    is_at_min_scale = scale <= _get_lowest_scale_as_float32(
      _policies.as_policy(policy, "policy")
    )
    metrics["skips_at_min_scale"] = _as_float32(was_skipped & is_at_min_scale)
  return metrics


def _get_lowest_scale_as_float32(policy: Any) -> jax.Array:
  """Return the lowest scale of a policy as float32; 0 if it has no bound."""
  if isinstance(policy, _policies.FixedLossScale):
    return _as_float32(policy.scale)
  lowest_scale = _policies.get_lowest_scale(policy)
  return _as_float32(0.0 if lowest_scale is None else lowest_scale)


def _as_float32(x: jax.typing.ArrayLike) -> jax.Array:
  return _arrays.cast(x, jnp.float32)


class LossScaleError(RuntimeError):
  """Raised by :func:`raise_if_stuck`, with a message that says what to do.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.FixedLossScale(8.0)
    >>> state = policy.adjust(policy.init(), jnp.array(False))
    >>> try:
    ...   ols.raise_if_stuck(state, max_consecutive_skips=1)
    ... except ols.LossScaleError as error:
    ...   print(str(error).splitlines()[0])
    The last 1 steps were all skipped. The loss scale is 8.
  """


@_transfer_guard.allow_transfers
def raise_if_stuck(
  tree: Any,
  max_consecutive_skips: int = 50,
  *,
  policy: _policies.PolicyLike | None = None,
  max_skip_rate: float | None = None,
  steps: int | None = None,
  grads: Any = None,
) -> None:
  """Raises if too many steps were skipped, and lists what to try.

  No other function of this package raises an error after an overflow. Call this
  function from time to time in the training loop, outside ``jit``. It reads
  three scalars back to the host, and reads the gradients only if it raises.

  Many skips in a row show that a run makes no progress. Pass ``max_skip_rate``
  as well if the gradients of many batches are exactly zero (masked batches,
  sparse rewards, a hinge loss). Steps without gradients are finite at any
  scale, so all other steps may be skipped without two skips in a row. Early in
  a run the skip rate means little, because the policy may skip the first steps
  to find the scale.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one, such
      as the optimizer state. If the state has a leading axis (``vmap``,
      ``pmap``), the member with the most skips counts.
    max_consecutive_skips: how many skips in a row are too many.
    policy: the ``loss_scale`` argument of :func:`with_loss_scaling`. With it,
      the message says whether the scale can still decrease.
    max_skip_rate: the largest fraction of the steps that may be skipped, a
      number in [0, 1]. Requires ``steps``.
    steps: the number of calls of ``update`` since ``init``.
    grads: the gradients of the last step, if you have them. With them, the
      message lists the nonfinite leaves, and distinguishes NaNs of the model
      from an overflow.

  Raises:
    LossScaleError: if ``max_consecutive_skips`` steps or more were skipped in a
      row, or more than ``max_skip_rate`` of all.
    TypeError: if an argument is of the wrong type, or under ``jit``.
    ValueError: if one is out of range, ``max_skip_rate`` and ``steps`` are
      not given together, or ``tree`` does not hold exactly one loss-scale
      state, or holds one with a leading axis that is sharded over processes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(init_scale=4.0)
    >>> state = policy.init()
    >>> for _ in range(3):
    ...   state = policy.adjust(state, jnp.array(False))
    >>> ols.raise_if_stuck(state)
    >>> ols.raise_if_stuck(state, max_consecutive_skips=3, policy=policy)
    Traceback (most recent call last):
      ...
    optax_lossscale.LossScaleError: The last 3 steps were all skipped. The loss
    scale is 1.
    Try, in this order:
      1. Find the operation and its layer:
      diagnostics.find_overflow(train_step, params, opt_state, batch).
      2. The scale is the lowest allowed (min_scale = 1): lower min_scale.
      3. If the forward pass overflows, compute that layer in float32 or
      bfloat16: ols.autocast(loss_fn, keep_float32=...).
      4. If gradients are NaN without an overflow, no loss scale helps: check
      the data and the learning rate.
      5. If there are several optimizers, pass the state of the same optimizer
      to ols.value_and_grad: a loss scale that never acts falls to its minimum.
    Pass grads to list those that are not finite.
    >>> ols.raise_if_stuck(state, max_skip_rate=0.01, steps=1000)
  """
  _check_limits(max_consecutive_skips, max_skip_rate, steps)
  if policy is not None:
    policy = _policies.as_policy(policy, "policy")
  skips = _read_skip_counts(_state.get_loss_scale_state(tree))
  worst_consecutive = max(skips, key=lambda member: member.consecutive)
  worst_total = max(skips, key=lambda member: member.total)
  if steps is not None and worst_total.total > steps:
    raise ValueError(
      "steps must be the number of calls of update since init, got steps ="
      f" {steps} and {worst_total.total} skips among them."
    )
  if worst_consecutive.consecutive >= max_consecutive_skips:
    nonfinite_leaves = _find_nonfinite_leaves(grads)
    summary = (
      f"The last {worst_consecutive.consecutive} steps were all skipped."
    )
    summary += f" The loss scale is {worst_consecutive.scale:g}."
    remedies = _suggest_consecutive_skip_remedies(
      worst_consecutive.scale, policy, nonfinite_leaves
    )
  elif (
    max_skip_rate is not None
    and steps is not None
    and worst_total.total / int(steps) > max_skip_rate
  ):
    nonfinite_leaves = _find_nonfinite_leaves(grads)
    summary = (
      f"{worst_total.total} of {steps} steps were skipped, a fraction"
      " larger than"
      f" max_skip_rate = {max_skip_rate:g}. The loss scale is"
      f" {worst_total.scale:g}."
    )
    remedies = _suggest_skip_rate_remedies(nonfinite_leaves)
  else:
    return
  raise LossScaleError(_format_message(summary, remedies, nonfinite_leaves))


def _format_message(
  summary: str, remedies: list[str], nonfinite_leaves: list[Any] | None
) -> str:
  """Format the message of `LossScaleError`.

  Args:
    summary: the first line.
    remedies: the numbered lines.
    nonfinite_leaves: the leaves to list; None if the caller passed no
      gradients.
  """
  lines = [summary, "Try, in this order:"]
  lines += [f"  {i}. {remedy}" for i, remedy in enumerate(remedies, 1)]
  if nonfinite_leaves:
    lines += ["Gradients that are not finite:"]
    lines += [f"  {leaf}" for leaf in nonfinite_leaves]
  elif nonfinite_leaves is None:
    lines += ["Pass grads to list those that are not finite."]
  return "\n".join(lines)


class _SkipCounts(NamedTuple):
  """The skips and the scale of one member of a state.

  A state from ``vmap`` or ``pmap`` has several members.

  Attributes:
    consecutive: the number of skips in a row up to the last step.
    total: the number of all skips.
    scale: the loss scale.
  """

  consecutive: int
  total: int
  scale: float


def _check_limits(
  max_consecutive_skips: int,
  max_skip_rate: float | None,
  steps: int | None,
) -> None:
  _checks.check_count("max_consecutive_skips", max_consecutive_skips)
  if (max_skip_rate is None) != (steps is None):
    raise ValueError(
      "max_skip_rate and steps must be given together, got"
      f" max_skip_rate = {max_skip_rate!r} and steps = {steps!r}."
      " steps is how often update was called since init."
    )
  if steps is not None:
    _checks.check_number("max_skip_rate", max_skip_rate, 0, 1)
    _checks.check_number("steps", steps, 1, 2**63 - 1, integer=True)


def _read_skip_counts(state: _state.LossScaleState) -> list[_SkipCounts]:
  """Read the counts and the scale of each member of a state to the host."""
  if isinstance(state.notfinite_count, jax.core.Tracer):
    raise TypeError(
      "raise_if_stuck must be called outside jit, since it reads the state, got"
      " a tracer. Return the optimizer state from the jitted function."
    )
  counts = state.notfinite_count, state.total_notfinite, state.loss_scale
  if not all(map(_arrays.is_addressable, counts)):
    raise ValueError(
      "raise_if_stuck must be given a state that this process can read, got one"
      " that is sharded over processes. Gather it in all of them:"
      " jax.experimental.multihost_utils.process_allgather("
      "get_loss_scale_state(opt_state), tiled=True)."
    )
  host_values = jax.device_get(counts)
  columns = [np.ravel(column).tolist() for column in host_values]
  return [_SkipCounts(*member) for member in zip(*columns, strict=True)]


def _find_nonfinite_leaves(grads: Any) -> list[Any] | None:
  """Return the report lines of nonfinite leaves; None without gradients."""
  if grads is None:
    return None
  # Imported only here, because `import optax_lossscale` must stay fast.
  from optax_lossscale import diagnostics

  return diagnostics.nonfinite_leaves(grads)


def _suggest_consecutive_skip_remedies(
  scale: float,
  policy: _policies.LossScalePolicy | None,
  nonfinite_leaves: list[Any] | None,
) -> list[str]:
  """Return the remedies for many skips in a row, in the order to try.

  Args:
    scale: the loss scale.
    policy: the policy, or None if the caller did not pass it.
    nonfinite_leaves: the leaves that are not finite; None if the caller passed
      no gradients.
  """
  if nonfinite_leaves == []:
    return [
      "The gradients that you passed are finite. If they are those of the last"
      " step, look at grads_finite=, check_updates=True and other devices."
    ]
  return [
    _FIND_OVERFLOW_REMEDY,
    _suggest_scale_remedy(scale, policy),
    _FLOAT32_LAYER_REMEDY,
    _CHECK_DATA_REMEDY,
    _SAME_STATE_REMEDY,
  ]


def _suggest_scale_remedy(
  scale: float, policy: _policies.LossScalePolicy | None
) -> str:
  """Return the remedy that makes a lower loss scale possible."""
  lowest_scale = _policies.get_lowest_scale(policy)
  # Round the bound to float32, as the scale is.
  if lowest_scale is not None and scale <= np.float32(lowest_scale):
    candidates = {
      name: getattr(policy, name, None) for name in _MIN_SCALE_FIELDS
    }
    limits = {name: x for name, x in candidates.items() if x is not None}
    values = ", ".join(f"{name} = {float(x):g}" for name, x in limits.items())
    names = " and ".join(limits)
    return f"The scale is the lowest allowed ({values}): lower {names}."
  if policy is None:
    return "Pass policy to see whether the loss scale can still decrease."
  if isinstance(policy, _policies.FixedLossScale):
    return "The scale is fixed: use DynamicLossScale, or a lower scale."
  return (
    "If the loss scale is still decreasing, start with a lower one, or allow"
    " more skips."
  )


def _suggest_skip_rate_remedies(
  nonfinite_leaves: list[Any] | None,
) -> list[str]:
  """Return the remedies for a high skip rate without many skips in a row."""
  return [
    "Log the loss scale. If steps are skipped after it grows, it grows too far"
    " or too often: lower max_scale of the policy, or use DynamicLossScale with"
    " a longer growth_interval.",
    "Otherwise, look for batches whose gradients are NaN, or far larger than"
    " those of others.",
    *([] if nonfinite_leaves == [] else [_FIND_OVERFLOW_REMEDY]),
  ]
