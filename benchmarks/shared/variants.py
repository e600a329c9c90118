"""The loss scalers to compare, each in the idiom of its users.

A variant is a function from a workload to a pair ``(step, carry)``:
``step(carry, data)`` returns the next carry (parameters and all state, which
are donated) and the loss.

Each peer unscales in the step, as it does in training. "ours" is given true
gradients where a workload gives gradients, since they are what ``update`` takes
after ``ols.value_and_grad``; "ours, scaled grads" unscales in ``update``.

A peer is imported where it is used, so that the others run without it.
"""

from collections.abc import Callable
from functools import partial
import os
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from optax_lossscale import _select
from shared.steps import make_step
from shared.workloads import LEARNING_RATE, MAX_NORM, Workload

INIT_SCALE = 2.0**15

Built = tuple[Callable[..., Any], Any]


def bare(workload: Workload) -> Built:
  """Optax without any loss scaling: the measure of the others."""
  return _make_optax_step(workload, workload.clipping_optimizer())


def ours(workload: Workload) -> Built:
  tx, get_grad_fn = _wrapped(workload), None
  if workload.loss_fn is not None:
    get_grad_fn = partial(ols.value_and_grad, workload.loss_fn)
  step = make_step(tx, get_grad_fn)
  return step, (workload.params, tx.init(workload.params))


def ours_plain_select(workload: Workload) -> Built:
  """Ours, with the selection after the inner update instead of inside it."""
  step, carry = ours(workload)

  def select_after_update(update, finite, grads, state, params, **extra_args):
    updates, new_state = update(grads, state, params, **extra_args)
    return updates, _select.select_state(finite, new_state, state)

  def plain_step(carry, data):
    with mock.patch.object(_select, "update_with_selects", select_after_update):
      return step(carry, data)

  return plain_step, carry


def ours_scaled_grads(workload: Workload) -> Built:
  """Ours, for gradients that are still scaled."""
  tx = _wrapped(workload, grads_are_scaled=True)
  return _make_optax_step(workload, tx, ols.scale_loss)


def flax(workload: Workload) -> Built:
  """``DynamicScale`` in a ``TrainState``, as Flax's ImageNet example has it."""
  from flax.training import dynamic_scale as flax_dynamic_scale
  from flax.training import train_state as flax_train_state

  class TrainState(flax_train_state.TrainState):
    dynamic_scale: flax_dynamic_scale.DynamicScale

  state = TrainState.create(
    apply_fn=None,
    params=workload.params,
    tx=workload.clipping_optimizer(),
    dynamic_scale=flax_dynamic_scale.DynamicScale(scale=INIT_SCALE),
  )
  loss_fn = workload.loss_fn or _given_gradients

  def step(state, data):
    grad_fn = state.dynamic_scale.value_and_grad(loss_fn)
    dynamic_scale, is_finite, loss, grads = grad_fn(state.params, data)
    new_state = state.apply_gradients(grads=grads)
    select = partial(jnp.where, is_finite)
    new_state = new_state.replace(
      opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
      params=jax.tree.map(select, new_state.params, state.params),
      dynamic_scale=dynamic_scale,
    )
    return new_state, None if workload.loss_fn is None else loss

  return step, state


def jmp_(workload: Workload) -> Built:
  """jmp as in Haiku's ImageNet example, on one device."""
  import jmp

  tx = workload.clipping_optimizer()

  def step(carry, data):
    params, state, (value, counter) = carry
    # Put together here: it does not survive ahead-of-time compilation.
    loss_scale = jmp.DynamicLossScale(value, counter)
    loss, grads = _compute_scaled_grads(
      workload, loss_scale.scale, params, data
    )
    grads = loss_scale.unscale(grads)
    updates, new_state = tx.update(grads, state, params)
    new_params = optax.apply_updates(params, updates)
    is_finite = jmp.all_finite(grads)
    loss_scale = loss_scale.adjust(is_finite)
    params, state = jmp.select_tree(
      is_finite, (new_params, new_state), (params, state)
    )
    scale_leaves = loss_scale.loss_scale, loss_scale.counter
    return (params, state, scale_leaves), loss

  scale_leaves = jnp.float32(INIT_SCALE), jnp.int32(0)
  return step, (workload.params, tx.init(workload.params), scale_leaves)


def apply_if_finite(workload: Workload) -> Built:
  """``optax.apply_if_finite``, the loss scaled by a constant by hand."""
  tx = optax.apply_if_finite(
    workload.clipping_optimizer(), max_consecutive_errors=10**6
  )
  # In float32: it raises if float16 gradients meet float32 parameters.
  unscale = lambda g: g.astype(jnp.float32) / INIT_SCALE
  return _make_optax_step(
    workload,
    tx,
    scale=lambda loss, state: loss * INIT_SCALE,
    unscale=lambda grads: jax.tree.map(unscale, grads),
  )


def _wrapped(workload, **options):
  if workload.clip:
    options["max_norm"] = MAX_NORM
  return ols.with_loss_scaling(workload.optimizer(), **options)


def _make_optax_step(
  workload, tx, scale=lambda loss, state: loss, unscale=lambda grads: grads
):
  def get_grad_fn(state):
    def grad_fn(params, data):
      scale_loss = partial(scale, state=state)
      loss, grads = _compute_scaled_grads(workload, scale_loss, params, data)
      return loss, unscale(grads)

    return grad_fn

  step = make_step(tx, get_grad_fn)
  return step, (workload.params, tx.init(workload.params))


def _compute_scaled_grads(workload, scale, params, data):
  """Return the unscaled loss, and the gradients of the scaled loss."""
  if workload.loss_fn is None:
    return None, data

  def scaled_loss(params):
    loss = workload.loss_fn(params, data)
    return scale(loss), loss

  grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
  return loss, grads


@jax.custom_vjp
def _given_gradients(params, grads):
  """A loss whose gradients are known, for those who want to differentiate."""
  del params, grads
  return jnp.float32(0)


def _loss_with_gradients_fwd(params, grads):
  cast = lambda g, p: g.astype(p.dtype)
  return jnp.float32(0), jax.tree.map(cast, grads, params)


def _loss_with_gradients_bwd(grads, cotangent):
  del cotangent
  return grads, None


_given_gradients.defvjp(_loss_with_gradients_fwd, _loss_with_gradients_bwd)


def _make_keras_step(workload, *, is_scaled):
  os.environ["KERAS_BACKEND"] = "jax"  # Read when it is imported.
  import keras

  optimizers = keras.optimizers
  make = optimizers.AdamW if workload.weight_decay else optimizers.Adam
  max_norm = MAX_NORM if workload.clip else None
  optimizer = make(LEARNING_RATE, global_clipnorm=max_norm)
  if is_scaled:
    optimizer = optimizers.LossScaleOptimizer(
      optimizer, initial_scale=INIT_SCALE
    )
  leaves, treedef = jax.tree.flatten(workload.params)
  optimizer.build([keras.Variable(leaf) for leaf in leaves])

  def scale(loss, values):
    # As Keras's own training step for JAX does.
    mapping = list(zip(optimizer.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
      return optimizer.scale_loss(loss)

  def step(carry, data):
    leaves, values = carry
    loss, grads = _compute_scaled_grads(
      workload,
      partial(scale, values=values),
      jax.tree.unflatten(treedef, leaves),
      data,
    )
    new = optimizer.stateless_apply(values, jax.tree.leaves(grads), leaves)
    return tuple(map(list, new)), loss

  return step, (leaves, [v.value for v in optimizer.variables])


# By name: the variant, and the name of the one it is measured against.
VARIANTS = {
  "bare": (bare, "bare"),
  "ours": (ours, "bare"),
  "ours, scaled grads": (ours_scaled_grads, "bare"),
  "ours, plain select": (ours_plain_select, "bare"),
  "Flax DynamicScale": (flax, "bare"),
  "jmp": (jmp_, "bare"),
  "apply_if_finite": (apply_if_finite, "bare"),
  "Keras bare": (partial(_make_keras_step, is_scaled=False), "Keras bare"),
  "Keras LossScaleOptimizer": (
    partial(_make_keras_step, is_scaled=True),
    "Keras bare",
  ),
}
