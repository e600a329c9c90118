"""Steps with optimizers that do more than to scale gradients."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from helpers.sound_steps import (
  init_mlp,
  jit_step,
  make_batch,
  make_train_step,
  mse_loss_fn,
  train,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def _make_inner_step(inner):
  """Return the step of the README with an inner optimizer."""
  return make_train_step(ols.with_loss_scaling(inner))


def adamw_with_decay_mask():
  """Clipping, a schedule, and no decay of biases."""
  schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 10, 100)
  is_matrix = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
  adamw = optax.adamw(schedule, weight_decay=0.1, mask=is_matrix)
  return _make_inner_step(optax.chain(optax.clip_by_global_norm(1.0), adamw))


def partition_with_frozen_layer():
  return _make_inner_step(
    optax.partition(
      {"trained": ADAM, "frozen": optax.set_to_zero()},
      {"layer_0": "frozen", "layer_1": "trained"},
    )
  )


def masked_clipping():
  """Only the first layer is clipped."""
  clip = optax.clip_by_block_rms(0.01)
  masked = optax.masked(clip, {"layer_0": True, "layer_1": False})
  return _make_inner_step(optax.chain(masked, ADAM))


def schedule_free():
  return _make_inner_step(contrib.schedule_free_adamw(1e-2))


def adafactor():
  return _make_inner_step(optax.adafactor(1e-2, min_dim_size_to_factor=4))


def lion():
  return _make_inner_step(optax.lion(3e-3))


def muon():
  """Newton-Schulz iterations are matmuls in float32."""
  return _make_inner_step(contrib.muon(1e-2))


def noisy_gradients():
  """Noise with its own random key in the state of the optimizer."""
  noise = optax.add_noise(0.01, 0.55, 0)
  return _make_inner_step(optax.chain(noise, optax.sgd(0.1)))


def prodigy():
  """The optimizer estimates its learning rate."""
  return _make_inner_step(contrib.prodigy())


def adaptive_clipping_by_layer():
  clip = optax.adaptive_grad_clip(0.1)
  return _make_inner_step(optax.chain(clip, optax.lamb(1e-2)))


def half_precision_moments():
  """The first moment is stored in bfloat16."""
  return _make_inner_step(optax.adamw(1e-2, mu_dtype=jnp.bfloat16))


def flattened():
  """The optimizer sees one vector."""
  return _make_inner_step(optax.flatten(ADAM))


def _make_extra_args_step(inner, get_extra_args):
  """The optimizer receives more than the gradients."""
  tx = ols.with_loss_scaling(inner)
  loss_fn = ols.autocast(mse_loss_fn)

  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    extra_args = get_extra_args(loss, grads, loss_fn, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    return optax.apply_updates(params, updates), opt_state, loss

  return jit_step(train_step, tx)


def _get_value(loss, *_):
  return {"value": loss}


def reduce_on_plateau():
  plateau = contrib.reduce_on_plateau(patience=2, accumulation_size=2)
  return _make_extra_args_step(optax.chain(ADAM, plateau), _get_value)


def polyak_sgd():
  return _make_extra_args_step(
    optax.polyak_sgd(max_learning_rate=0.1), _get_value
  )


def _get_search_args(loss, grads, loss_fn, opt_state, batch):
  value_fn = lambda params: loss_fn(params, batch)
  return {"value": loss, "grad": grads, "value_fn": value_fn}


def backtracking_line_search():
  search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
  return _make_extra_args_step(
    optax.chain(optax.sgd(1.0), search), _get_search_args
  )


def lbfgs():
  search = optax.scale_by_backtracking_linesearch(5)
  return _make_extra_args_step(
    optax.lbfgs(memory_size=2, linesearch=search), _get_search_args
  )


def sam_inside():
  """Sharpness-aware minimization by Optax, with opaque gradients."""
  ascent = optax.chain(contrib.normalize(), optax.sgd(0.05))
  return _make_extra_args_step(
    contrib.sam(ADAM, ascent, opaque_mode=True),
    lambda loss, grads, loss_fn, opt_state, batch: {
      "grad_fn": lambda p, _: ols.grad(loss_fn, opt_state)(p, batch)
    },
  )


def _make_custom_step(inner, extend, *args):
  """Return a step that does more with the result, and has more arguments."""
  tx = ols.with_loss_scaling(inner)

  @jax.jit
  def train_step(params, opt_state, batch, *args):
    new = train(tx, mse_loss_fn, params, opt_state, batch)
    return extend(tx, new, *args)

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch(), *args)


def inject_hyperparams():
  """The learning rate is a part of the state, and is logged."""

  def extend(tx, new):
    params, opt_state, loss = new
    hyperparams = opt_state.inner_state.hyperparams
    metrics = {"loss": loss, "learning_rate": hyperparams["learning_rate"]}
    return params, opt_state, metrics

  schedule = optax.linear_schedule(1e-2, 1e-3, 100)
  return _make_custom_step(
    optax.inject_hyperparams(optax.adam)(schedule), extend
  )


def ema_of_params():
  """An average of the parameters outside of the optimizer."""

  def extend(tx, new, average):
    params, opt_state, loss = new
    new_average = optax.incremental_update(params, average, 0.01)
    average = ols.select_if_finite(opt_state, new_average, average)
    return params, opt_state, average, loss

  return _make_custom_step(ADAM, extend, init_mlp())


def restarted_moments():
  """The state of Adam, but not the loss scale, restarts now and then."""

  def extend(tx, new, count):
    params, opt_state, loss = new
    inner_state = jax.tree.map(
      lambda new, old: jnp.where(count % 10 == 9, new, old),
      tx.init(params).inner_state,
      opt_state.inner_state,
    )
    opt_state = opt_state._replace(inner_state=inner_state)
    return params, opt_state, count + 1, loss

  return _make_custom_step(ADAM, extend, jnp.int32(9))


def lookahead():
  """Fast and slow parameters, and gradients of the fast ones."""
  tx = ols.with_loss_scaling(optax.lookahead(ADAM, 3, 0.5))

  def train_step(params, opt_state, batch):
    grads = ols.grad(ols.autocast(mse_loss_fn), opt_state)(params.fast, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = optax.LookaheadParams.init_synced(init_mlp())
  return jit_step(train_step, tx, params=params)


def per_example_clipping():
  """Differentially private: the gradient of each example is clipped."""
  aggregate = contrib.differentially_private_aggregate(1.0, 0.1, 0)
  tx = ols.with_loss_scaling(optax.chain(aggregate, optax.sgd(0.1)))

  def train_step(params, opt_state, batch):
    grad_fn = ols.grad(ols.autocast(mse_loss_fn), opt_state)
    grads = jax.vmap(grad_fn, (None, 0))(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return jit_step(train_step, tx)
