"""What a training loop can log of the loss scale."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _state


def loss_scale_metrics(tree: Any) -> dict[str, jax.Array]:
  """Returns what there is to log of a loss scale, for any logger.

  Works under ``jit``, and reads nothing back to the host.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one.

  Returns:
    A dict of arrays of shape ``()``, keyed by the names of the fields of
    :class:`LossScaleState` (all but ``memory``), and ``log2_loss_scale``,
    float32, which is what a plot wants.

  Raises:
    ValueError: if ``tree`` does not hold exactly one loss-scale state.

  Examples:
    >>> import optax_lossscale as ols
    >>> metrics = ols.loss_scale_metrics(ols.DynamicLossScale().init())
    >>> {name: x.item() for name, x in sorted(metrics.items())}
    {'finite_count': 0, 'last_finite': True, 'log2_loss_scale': 15.0,
     'loss_scale': 32768.0, 'notfinite_count': 0, 'total_notfinite': 0}
  """
  metrics = _state.get_loss_scale_state(tree)._asdict()
  del metrics["memory"]
  return metrics | {"log2_loss_scale": _log2(metrics["loss_scale"])}


def _log2(x):
  # XLA's log2 is not exact for powers of two; it is for 1.
  mantissa, exponent = jnp.frexp(x)
  return jnp.log2(2 * mantissa) + (exponent - 1).astype(jnp.float32)
