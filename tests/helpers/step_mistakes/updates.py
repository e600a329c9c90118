"""Mistakes in how a step applies its updates to the parameters."""

import functools

import jax
from jax import lax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from helpers.train_steps import (
  apply_updates,
  BATCH,
  compute_grads,
  compute_unscaled_grads,
  half_loss_fn,
  make_tx,
  PARAMS,
  POLICY,
  prepare_result,
  prepare_step,
  prepare_two_layers,
  prepare_wrapped,
  scan_steps,
  select_result,
  TWO_LAYERS,
  two_layers_loss_fn,
  TX,
  where,
)
import optax_lossscale as ols

SMALL_SGD = make_tx(optax.sgd(1e-6))
HALF_PARAMS = {"w": np.full((4, 4), 0.75, np.float16)}
_prepare_half = functools.partial(
  prepare_step, params=HALF_PARAMS, loss_fn=half_loss_fn
)


def _round_by_bits(params):
  bits = lax.bitcast_convert_type(params["w"], jnp.uint32)
  return {"w": lax.bitcast_convert_type(bits & ~jnp.uint32(1), jnp.float32)}


def _quantize(params):
  return {"w": jnp.round(params["w"] * 100).astype(jnp.int8)}


def _add_in_half(old, new):
  half = lambda x: x.astype(jnp.float16)
  add = lambda p, new: (half(p) + half(new - p)).astype(jnp.float32)
  return jax.tree.map(add, old[0], new[0]), new[1]


def _keep_head_sometimes(old, new):
  """As a schedule does, which another step does not."""
  is_late = jnp.sum(old[0]["w"]) > 1e9
  head = jnp.where(is_late, new[0]["head"], old[0]["head"])
  return {**new[0], "head": head}, new[1]


_return_old_params = select_result(
  lambda finite, new, old: (where(finite, old[0], new[0]), new[1])
)


def _clip_params(old, new):
  return jax.tree.map(lambda x: jnp.clip(x, -0.1, 0.1), new[0]), new[1]


def _fill_params(num_large):
  """Return float16 parameters of which some are too large for an update."""
  is_large = np.arange(16).reshape(4, 4) < num_large
  return {"w": np.where(is_large, 0.75, 0).astype(np.float16)}


def _make_masters_step():
  """The step keeps copies in float32, which receive the updates."""
  tx = ols.with_loss_scaling(optax.adam(1e-5))

  def step(params, state, masters, batch):
    grads = ols.grad(half_loss_fn, state)(params, batch)
    masters, state = apply_updates(tx, grads, masters, state)
    return optax.tree.cast(masters, jnp.float16), state, masters

  masters = optax.tree.cast(HALF_PARAMS, jnp.float32)
  return step, (HALF_PARAMS, tx.init(masters), masters, BATCH)


def _embedding_loss(params, ids):
  rows = params["table"][ids].astype(jnp.float32)
  return jnp.mean((rows - 1) ** 2)


def _make_crossed_step():
  """Each of two networks gets the updates of the other."""

  def step(params, others, state, other_state, batch):
    new_params, new_state = _update(params, others, state, batch)
    new_others, new_other_state = _update(others, params, other_state, batch)
    return new_params, new_others, new_state, new_other_state

  def _update(own, applied_to, state, batch):
    grads = ols.grad(_two_layers_loss, state)(own, batch)
    return apply_updates(TX, grads, applied_to, state)

  others = jax.tree.map(lambda x: -0.5 * x, TWO_LAYERS)
  states = TX.init(TWO_LAYERS), TX.init(others)
  return step, (TWO_LAYERS, others, *states, BATCH)


def _make_game_step():
  """In a game, the gradient of each player is the number of the other."""

  def step(x, y, x_state, y_state):
    x_grad = ols.grad(lambda x: x * y, x_state)(x)
    y_grad = ols.grad(lambda y: -x * y, y_state)(y)
    x, x_state = apply_updates(TX, x_grad, x, x_state)
    y, y_state = apply_updates(TX, y_grad, y, y_state)
    return x, y, x_state, y_state

  x, y = jnp.float32(0.5), jnp.float32(0.25)
  return step, (x, y, TX.init(x), TX.init(y))


_two_layers_loss = ols.autocast(two_layers_loss_fn)


def _scale_updates(scale_update):
  """Return an ``update`` of which the step changes the updates."""

  def update(tx, grads, params, state):
    updates, new_state = tx.update(grads, state, params)
    scale = state.loss_scale_state.loss_scale
    updates = jax.tree.map(lambda u: scale_update(u, scale), updates)
    return optax.apply_updates(params, updates), new_state

  return update


def _make_logging_step():
  """The gradients, in front of the parameters, have their tree."""

  def step(params, state, batch):
    grads = ols.grad(_two_layers_loss, state)(params, batch)
    return grads, *apply_updates(TX, grads, params, state)

  return step, (TWO_LAYERS, TX.init(TWO_LAYERS), BATCH)


_APPLY = "params = optax.apply_updates(params, updates)"

MISTAKES = {
  ("The updates of two networks are crossed", _APPLY): {
    "crossed updates": _make_crossed_step
  },
  ("The parameters change 0.0625 times as much", _APPLY): {
    "updates times the scale": prepare_two_layers(
      update=_scale_updates(lambda u, scale: u * scale)
    )
  },
  ("The parameters change 16 times as much", _APPLY): {
    "updates divided by the scale": prepare_two_layers(
      update=_scale_updates(lambda u, scale: u / scale)
    )
  },
  ("was rounded to half precision", "Add in float32"): {
    "sum in float16": prepare_result(_add_in_half)
  },
  ("does not return parameters that depend on the updates", _APPLY): {
    "old parameters": prepare_result(lambda old, new: (old[0], new[1])),
    "old parameters, and the norm of the new ones": prepare_result(
      lambda old, new: (old[0], new[1], optax.tree.norm(new[0]))
    ),
    "old parameters after a scan": prepare_wrapped(
      lambda step: (
        lambda params, *args: (params, scan_steps(step)(params, *args)[1])
      )
    ),
    "no parameters": prepare_result(lambda old, new: new[1]),
  },
  ("returns the old parameters, although the updates are not", _APPLY): {
    "wrong branch of the parameters": prepare_step(update=_return_old_params),
    "wrong branch of the parameters, of an unscaled loss": prepare_step(
      compute_unscaled_grads,
      update=_return_old_params,
      loss_fn=half_loss_fn,
      tx=make_tx(policy=1.0),
    ),
  },
}

LOOKALIKES = {
  "game of two numbers": _make_game_step,
  "logged gradients": _make_logging_step,
  "selected parameters": prepare_step(
    update=select_result(
      lambda finite, new, old: (where(finite, new[0], old[0]), new[1])
    )
  ),
  "flat parameters": prepare_result(
    lambda old, new: (jax.flatten_util.ravel_pytree(new[0])[0], new[1])
  ),
  "parameters of an ensemble": prepare_result(lambda old, new: (new, old[0])),
  "parameters that are rounded by their bits": prepare_result(
    lambda old, new: (_round_by_bits(new[0]), new[1])
  ),
  "quantized parameters": prepare_result(
    lambda old, new: (_quantize(new[0]), new[1])
  ),
  "parameters at a bound": prepare_result(
    _clip_params,
    loss_fn=ols.autocast(lambda params, x: jnp.mean(x @ params["w"])),
    params={"w": np.full((4, 4), -0.1, np.float32)},
    batch=BATCH**2,
  ),
  "parameters that wait": prepare_two_layers(make_result=_keep_head_sometimes),
  # Updates that are zero, or much smaller than the parameters.
  "warm-up in float16": _prepare_half(
    tx=make_tx(optax.sgd(optax.linear_schedule(0.0, 0.1, 100)))
  ),
  "first micro-batch in float16": _prepare_half(
    tx=make_tx(optax.MultiSteps(optax.sgd(0.1), 4))
  ),
  "few updates lost": _prepare_half(
    tx=make_tx(optax.adam(1e-4)), params=_fill_params(4)
  ),
  "copies in float32": _make_masters_step,
  **{
    f"master weights of {dtype.__name__}{of}": prepare_step(
      differentiate,
      loss_fn=half_loss_fn,
      params=optax.tree.cast(PARAMS, dtype),
      tx=ols.with_master_weights(make_tx(optax.adam(1e-5), policy)),
    )
    for dtype in (jnp.bfloat16, jnp.float16)
    for of, differentiate, policy in (
      ("", compute_grads, POLICY),
      (", of an unscaled loss", compute_unscaled_grads, 1.0),
    )
  },
  "unused rows of a table": prepare_step(
    loss_fn=_embedding_loss,
    params={"table": np.full((64, 4), 0.75, np.float16)},
    batch=np.array([3, 5]),
    tx=make_tx(optax.sgd(1.0)),
  ),
  "stacked updates of a loop": prepare_wrapped(
    scan_steps,
    _prepare_half(
      tx=make_tx(optax.sgd(1e-3)),
      params={"w": np.array([[0.0] * 4] + [[0.75] * 4] * 3, np.float16)},
    ),
  ),
}

UNCHECKED = {
  "updates that are too small for float32": (
    prepare_step(
      tx=make_tx(optax.sgd(1e-12)),
      params={"w": np.full((4, 4), 0.75, np.float32)},
    ),
    "the updates of this step are zero, or too small for float32",
  ),
  "updates of zero": (
    prepare_step(tx=make_tx(optax.set_to_zero())),
    "the updates of this step are zero, or too small for float32",
  ),
}
