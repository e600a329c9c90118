"""Metrics of a loss scale for logging, and the error of a stuck run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks, _policies, _state


@_arrays.allow_transfers
def loss_scale_metrics(
  state: Any,
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
    state: a :class:`LossScaleState`, or any pytree that holds exactly one.
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
    ValueError: if one is out of range, or ``state`` does not hold exactly one
      loss-scale state.

  Examples:
    >>> import optax_lossscale as ols
    >>> metrics = ols.loss_scale_metrics(ols.DynamicLossScale().init())
    >>> {name: x.item() for name, x in sorted(metrics.items())}
    {'finite_count': 0, 'last_finite': True, 'log2_loss_scale': 15.0,
     'loss_scale': 32768.0, 'notfinite_count': 0, 'step_skipped': 0.0,
     'total_notfinite': 0}
  """
  metrics = _state.get_loss_scale_state(state)._asdict()
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
  lowest_scale, _ = _policies.get_scale_bounds(policy)
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
    ...   print(str(error).partition(" To find")[0])
    The last 1 steps were all skipped. The loss scale is 8.
  """


@_arrays.allow_transfers
def raise_if_stuck(state: Any, *, max_consecutive_skips: int = 50) -> None:
  """Raises if the last steps were all skipped, so that the run is stuck.

  No other function of this package raises an error after an overflow. Call this
  function from time to time in the training loop, outside ``jit``. It reads two
  scalars back to the host.

  The gradients of a batch may be exactly zero (masked batches, sparse rewards,
  a hinge loss). Such a step is finite at any loss scale, and ends a row of
  skips. For these runs, log ``skip_rate`` of :func:`loss_scale_metrics` as
  well.

  Args:
    state: a :class:`LossScaleState`, or any pytree that holds exactly one, such
      as the optimizer state. If the state has a leading axis (``vmap``,
      ``pmap``), the member with the most skips in a row counts.
    max_consecutive_skips: the number of skips in a row that raises the error.

  Raises:
    LossScaleError: if at least the last ``max_consecutive_skips`` steps were
      skipped.
    TypeError: if ``max_consecutive_skips`` is not an integer, or under ``jit``.
    ValueError: if ``max_consecutive_skips`` is less than 1, or if ``state``
      does not hold exactly one loss-scale state, or holds one with a leading
      axis that is sharded over processes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(init_scale=4.0)
    >>> state = policy.init()
    >>> for _ in range(3):
    ...   state = policy.adjust(state, jnp.array(False))
    >>> ols.raise_if_stuck(state)
    >>> ols.raise_if_stuck(state, max_consecutive_skips=3)
    Traceback (most recent call last):
      ...
    optax_lossscale.LossScaleError: The last 3 steps were all skipped. The loss
    scale is 1. To find the cause and its fix, call
    diagnostics.check_step(train_step, params, opt_state, batch).
  """
  _checks.check_count("max_consecutive_skips", max_consecutive_skips)
  skip_counts, scales = _read_skips(_state.get_loss_scale_state(state))
  worst = np.argmax(skip_counts)
  if skip_counts[worst] >= max_consecutive_skips:
    raise LossScaleError(
      f"The last {skip_counts[worst]} steps were all skipped. The loss scale is"
      f" {scales[worst]:g}. To find the cause and its fix, call"
      " diagnostics.check_step(train_step, params, opt_state, batch)."
    )


def _read_skips(state: _state.LossScaleState) -> tuple[np.ndarray, np.ndarray]:
  """Read the skips in a row and the loss scales of all members of a state."""
  arrays = state.notfinite_count, state.loss_scale
  if isinstance(state.notfinite_count, jax.core.Tracer):
    raise TypeError(
      "raise_if_stuck must be called outside jit, since it reads the state, got"
      " a tracer. Return the optimizer state from the jitted function."
    )
  if not all(map(_arrays.is_addressable, arrays)):
    raise ValueError(
      "raise_if_stuck must be given a state that this process can read, got one"
      " that is sharded over processes. Gather it in all of them:"
      " jax.experimental.multihost_utils.process_allgather("
      "get_loss_scale_state(opt_state), tiled=True)."
    )
  skip_counts, scales = map(np.ravel, jax.device_get(arrays))
  return skip_counts, scales
