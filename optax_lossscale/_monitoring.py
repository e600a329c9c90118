"""What to log of a loss scale, and whether a run is stuck."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks, _host, _policies, _state

# The hyperparameters that keep a scale from coming down.
_FLOORS = "threshold", "min_scale"

_FIND_THE_OPERATION = (
  "Find the operation and its layer:"
  " diagnostics.find_overflow(train_step, params, opt_state, batch)."
)
_LAYER_IN_FLOAT32 = (
  "If the forward pass overflows, compute that layer in float32 or bfloat16:"
  " ols.autocast(loss_fn, keep_float32=...)."
)
_NO_SCALE_HELPS = (
  "If gradients are NaN without an overflow, no loss scale helps: check the"
  " data and the learning rate."
)
_OTHER_STATE = (
  "If there are several optimizers, pass the state of the same optimizer to"
  " ols.value_and_grad: a loss scale that never acts falls to its minimum."
)


@_host.may_transfer
def loss_scale_metrics(
  tree: Any,
  *,
  policy: _policies.PolicyLike | None = None,
  steps: jax.typing.ArrayLike | None = None,
) -> dict[str, jax.Array]:
  """Returns what to log of a loss scale, for any logger.

  Works under ``jit``, and reads nothing back to the host.

  Every step of a run may be skipped without an error. Give ``policy`` to see it
  at a glance: a run whose ``skips_at_min_scale`` stays 1 stands still, since
  the scale cannot come down any further.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one.
    policy: what :func:`with_loss_scaling` was given as ``loss_scale``.
    steps: how often ``update`` was called since ``init``.

  Returns:
    A dict of arrays of shape ``()``: the fields of :class:`LossScaleState` by
    name, except for ``policy_state``, and for plots, all float32:

    * ``log2_loss_scale``;
    * ``step_skipped``, 1 if the last step was skipped and 0 if not, whose mean
      over some steps is their skip rate;
    * ``skip_rate``, the fraction of all steps that were skipped, if ``steps``
      is given;
    * ``skips_at_min_scale``, if ``policy`` is given: 1 if the last step was
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
    count = jnp.maximum(_as_float32(steps), 1)
    metrics["skip_rate"] = _as_float32(metrics["total_notfinite"]) / count
  if policy is not None:
    at_floor = scale <= _floor(_policies.as_policy(policy, "policy"))
    metrics["skips_at_min_scale"] = _as_float32(was_skipped & at_floor)
  return metrics


def _floor(policy: Any) -> jax.Array:
  """The lowest scale of a policy as float32; 0 if it names none."""
  if isinstance(policy, _policies.FixedLossScale):
    return _as_float32(policy.scale)
  floor = _policies.lowest_scale(policy)
  return _as_float32(0.0 if floor is None else floor)


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


@_host.may_transfer
def raise_if_stuck(
  tree: Any,
  max_consecutive_skips: int = 50,
  *,
  policy: _policies.PolicyLike | None = None,
  max_skip_rate: float | None = None,
  steps: int | None = None,
  grads: Any = None,
) -> None:
  """Raises if too many steps were skipped, and says why.

  Nothing in this package raises an error by itself after an overflow. Call this
  function now and then in the training loop, outside ``jit``. It reads three
  scalars back to the host, and looks at the gradients only when it raises.

  Many skips in a row show that a run stands still. Give ``max_skip_rate``
  as well if the gradients of many batches are exactly zero (masked batches,
  sparse rewards, a hinge loss). Such steps are finite at any scale, so that all
  other steps may be skipped without two skips in a row. Early in a run the
  skip rate says little, since the first steps may be skipped to find the scale.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one, such
      as the optimizer state. If the state has a leading axis (``vmap``,
      ``pmap``), the member with the most skips counts.
    max_consecutive_skips: how many skips in a row are too many.
    policy: what :func:`with_loss_scaling` was given as ``loss_scale``. With it,
      the message says whether the scale can still come down.
    max_skip_rate: the largest fraction of the steps that may be skipped, a
      number in [0, 1]. It needs ``steps``.
    steps: how often ``update`` was called since ``init``.
    grads: the gradients of the last step, if you have them. With them, the
      message names the leaves, and tells NaNs of the model from an overflow.

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
  skips = _read_skips(_state.get_loss_scale_state(tree))
  longest = max(skips, key=lambda member: member.in_a_row)
  most = max(skips, key=lambda member: member.in_all)
  if steps is not None and most.in_all > steps:
    raise ValueError(
      "steps must be the number of calls of update since init, got steps ="
      f" {steps} and {most.in_all} skips among them."
    )
  if longest.in_a_row >= max_consecutive_skips:
    nonfinite = _nonfinite(grads)
    summary = f"The last {longest.in_a_row} steps were all skipped."
    summary += f" The loss scale is {longest.scale:g}."
    remedies = _remedies(longest.scale, policy, nonfinite)
  elif (
    max_skip_rate is not None
    and steps is not None
    and most.in_all / int(steps) > max_skip_rate
  ):
    nonfinite = _nonfinite(grads)
    summary = (
      f"{most.in_all} of {steps} steps were skipped, a fraction larger than"
      f" max_skip_rate = {max_skip_rate:g}. The loss scale is"
      f" {most.scale:g}."
    )
    remedies = _remedies_of_many_skips(nonfinite)
  else:
    return
  raise LossScaleError(_message(summary, remedies, nonfinite))


def _message(
  summary: str, remedies: list[str], nonfinite: list[Any] | None
) -> str:
  lines = [summary, "Try, in this order:"]
  lines += [f"  {i}. {remedy}" for i, remedy in enumerate(remedies, 1)]
  if nonfinite:
    lines += ["Gradients that are not finite:"]
    lines += [f"  {leaf}" for leaf in nonfinite]
  elif nonfinite is None:
    lines += ["Pass grads to list those that are not finite."]
  return "\n".join(lines)


class _Skips(NamedTuple):
  """The last skips in a row, all skips and the scale of one member of a state.

  A state that was mapped has several members.
  """

  in_a_row: int
  in_all: int
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


def _read_skips(state: _state.LossScaleState) -> list[_Skips]:
  """The skips of each member of a state."""
  if isinstance(state.notfinite_count, jax.core.Tracer):
    raise TypeError(
      "raise_if_stuck must be called outside jit, since it reads the state, got"
      " a tracer. Return the optimizer state from the jitted function."
    )
  counts = state.notfinite_count, state.total_notfinite, state.loss_scale
  if not all(map(_is_readable_here, counts)):
    raise ValueError(
      "raise_if_stuck must be given a state that this process can read, got one"
      " that is sharded over processes. Gather it in all of them:"
      " jax.experimental.multihost_utils.process_allgather("
      "get_loss_scale_state(opt_state), tiled=True)."
    )
  read = jax.device_get(counts)
  columns = [np.ravel(column).tolist() for column in read]
  return [_Skips(*member) for member in zip(*columns, strict=True)]


def _is_readable_here(x: Any) -> bool:
  """Whether this process holds all of an array, or a copy of it."""
  return getattr(x, "is_fully_addressable", True) or x.is_fully_replicated


def _nonfinite(grads: Any) -> list[Any] | None:
  if grads is None:
    return None
  # Imported here, so that `import optax_lossscale` does not load it.
  from optax_lossscale import diagnostics

  return diagnostics.nonfinite_leaves(grads)


def _remedies(
  scale: float,
  policy: _policies.LossScalePolicy | None,
  nonfinite: list[Any] | None,
) -> list[str]:
  """Returns what to try if steps in a row were skipped.

  Args:
    scale: the loss scale.
    policy: the policy, if it is known.
    nonfinite: the leaves that are not finite; None if there are no gradients.
  """
  if nonfinite == []:
    return [
      "The gradients that you passed are finite. If they are those of the last"
      " step, look at grads_finite=, check_updates=True and other devices."
    ]
  return [
    _FIND_THE_OPERATION,
    _remedy_of_scale(scale, policy),
    _LAYER_IN_FLOAT32,
    _NO_SCALE_HELPS,
    _OTHER_STATE,
  ]


def _remedy_of_scale(
  scale: float, policy: _policies.LossScalePolicy | None
) -> str:
  """Returns how a lower loss scale is possible."""
  floor = _policies.lowest_scale(policy)
  # The floor may be no float32 number, but the scale is.
  if floor is not None and scale <= np.float32(floor):
    named = {name: getattr(policy, name, None) for name in _FLOORS}
    given = {name: x for name, x in named.items() if x is not None}
    values = ", ".join(f"{name} = {float(x):g}" for name, x in given.items())
    names = " and ".join(given)
    return f"The scale is the lowest allowed ({values}): lower {names}."
  if policy is None:
    return "Pass policy to see whether the loss scale can still decrease."
  if isinstance(policy, _policies.FixedLossScale):
    return "The scale is fixed: use DynamicLossScale, or a lower scale."
  return (
    "If the loss scale is still decreasing, start with a lower one, or allow"
    " more skips."
  )


def _remedies_of_many_skips(nonfinite: list[Any] | None) -> list[str]:
  """Returns what to try if many steps were skipped, but not in a row."""
  return [
    "Log the loss scale. If steps are skipped after it grows, it grows too far"
    " or too often: lower max_scale of the policy, or use DynamicLossScale with"
    " a longer growth_interval.",
    "Otherwise, look for batches whose gradients are NaN, or far larger than"
    " those of others.",
    *([] if nonfinite == [] else [_FIND_THE_OPERATION]),
  ]
