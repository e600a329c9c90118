"""The training step that benchmarks share."""

from collections.abc import Callable
from typing import Any

import optax


def make_step(
  tx: optax.GradientTransformation,
  get_grad_fn: Callable[[Any], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
  """Return ``step((params, opt_state), data) -> ((params, opt_state), loss)``.

  Args:
    tx: the optimizer.
    get_grad_fn: returns a function of params and data, which returns loss and
      gradients, for an optimizer state. Without it, the data are the gradients.
  """

  def step(carry, data):
    params, state = carry
    loss, grads = None, data
    if get_grad_fn is not None:
      loss, grads = get_grad_fn(state)(params, data)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss

  return step
