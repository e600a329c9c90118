"""Steps with optimizers that do more than to scale gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from helpers.sound_steps import (
  init_mlp,
  make_batch,
  make_train_step,
  mse_loss_fn,
  normal,
)
import optax_lossscale as ols


def adamw_with_decay_mask():
  """Clipping, a schedule, and no decay of biases."""
  schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 10, 100)
  is_matrix = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
  inner = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, weight_decay=0.1, mask=is_matrix),
  )
  return make_train_step(ols.with_loss_scaling(inner))


def warmup_from_zero():
  """The learning rate of the first step is zero."""
  schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
  return make_train_step(ols.with_loss_scaling(optax.adamw(schedule)))


def momentum_and_added_decay():
  inner = optax.chain(
    optax.add_decayed_weights(1e-4), optax.sgd(0.1, 0.9, nesterov=True)
  )
  return make_train_step(ols.with_loss_scaling(inner))


def inject_hyperparams():
  """The learning rate is a part of the state, and is logged."""
  inner = optax.inject_hyperparams(optax.adam)(
    optax.linear_schedule(1e-2, 1e-3, 100)
  )
  tx = ols.with_loss_scaling(inner)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    hyperparams = opt_state.inner_state.hyperparams
    metrics = {"loss": loss, "learning_rate": hyperparams["learning_rate"]}
    return optax.apply_updates(params, updates), opt_state, metrics

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def partition():
  """Another optimizer for each layer."""
  inner = optax.partition(
    {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-2)},
    {"layer_0": "slow", "layer_1": "fast"},
  )
  return make_train_step(ols.with_loss_scaling(inner))


def partition_with_frozen_layer():
  inner = optax.partition(
    {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()},
    {"layer_0": "frozen", "layer_1": "trained"},
  )
  return make_train_step(ols.with_loss_scaling(inner))


def masked_clipping():
  """Only the first layer is clipped."""
  inner = optax.chain(
    optax.masked(
      optax.clip_by_block_rms(0.01), {"layer_0": True, "layer_1": False}
    ),
    optax.adam(1e-2),
  )
  return make_train_step(ols.with_loss_scaling(inner))


def _make_value_step(inner):
  """The optimizer receives the loss as well."""
  tx = ols.with_loss_scaling(inner)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def reduce_on_plateau():
  plateau = contrib.reduce_on_plateau(patience=2, accumulation_size=2)
  return _make_value_step(optax.chain(optax.adam(1e-2), plateau))


def polyak_sgd():
  return _make_value_step(optax.polyak_sgd(max_learning_rate=0.1))


def _make_line_search_step(inner):
  tx = ols.with_loss_scaling(inner)
  loss_fn = ols.autocast(mse_loss_fn)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(
      grads,
      opt_state,
      params,
      value=loss,
      grad=grads,
      value_fn=lambda params: loss_fn(params, batch),
    )
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def backtracking_line_search():
  search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
  return _make_line_search_step(optax.chain(optax.sgd(1.0), search))


def lbfgs():
  return _make_line_search_step(
    optax.lbfgs(
      memory_size=2,
      linesearch=optax.scale_by_backtracking_linesearch(5),
    )
  )


def lookahead():
  """Fast and slow parameters, and gradients of the fast ones."""
  tx = ols.with_loss_scaling(optax.lookahead(optax.adam(1e-2), 3, 0.5))

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params.fast, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = optax.LookaheadParams.init_synced(init_mlp())
  return train_step, (params, tx.init(params), make_batch())


def schedule_free():
  tx = ols.with_loss_scaling(contrib.schedule_free_adamw(1e-2))
  return make_train_step(tx)


def adafactor():
  inner = optax.adafactor(1e-2, min_dim_size_to_factor=4)
  return make_train_step(ols.with_loss_scaling(inner))


def lion():
  return make_train_step(ols.with_loss_scaling(optax.lion(3e-3)))


def muon():
  return make_train_step(ols.with_loss_scaling(contrib.muon(1e-2)))


def _orthogonalize(matrix):
  """Newton-Schulz iterations, in float32."""
  is_tall = matrix.shape[0] > matrix.shape[1]
  x = matrix.T if is_tall else matrix
  x = x / (jnp.linalg.norm(x) + 1e-7)
  for _ in range(3):
    gram = x @ x.T
    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
  return x.T if is_tall else x


def muon_by_hand():
  """The gradients are orthogonalized between momentum and weight decay."""
  orthogonalize = optax.stateless(
    lambda updates, _: jax.tree.map(
      lambda u: _orthogonalize(u) if u.ndim == 2 else u, updates
    )
  )
  inner = optax.chain(
    optax.trace(0.9),
    orthogonalize,
    optax.add_decayed_weights(0.01),
    optax.scale(-1e-2),
  )
  return make_train_step(ols.with_loss_scaling(inner))


class PreconditionerState(NamedTuple):
  left: Any
  right: Any


def _map_matrices(fun, params):
  """Map over the matrices; other arrays are None in the result."""
  return jax.tree.map(lambda x: fun(x) if x.ndim == 2 else None, params)


def _inverse_fourth_root(matrix):
  values, vectors = jnp.linalg.eigh(matrix)
  return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T


def _scale_by_shampoo(decay=0.9):
  def init_fn(params):
    return PreconditionerState(
      _map_matrices(lambda p: 1e-3 * jnp.eye(p.shape[0]), params),
      _map_matrices(lambda p: 1e-3 * jnp.eye(p.shape[1]), params),
    )

  def precondition(grad, left, right):
    if left is None:
      return grad
    return _inverse_fourth_root(left) @ grad @ _inverse_fourth_root(right)

  def update_fn(updates, state, params=None):
    del params
    average = lambda new, old: (1 - decay) * new + decay * old
    is_none = lambda x: x is None
    add_left = lambda g, a: None if a is None else average(g @ g.T, a)
    add_right = lambda g, a: None if a is None else average(g.T @ g, a)
    left = jax.tree.map(add_left, updates, state.left, is_leaf=is_none)
    right = jax.tree.map(add_right, updates, state.right, is_leaf=is_none)
    updates = jax.tree.map(precondition, updates, left, right, is_leaf=is_none)
    return updates, PreconditionerState(left, right)

  return optax.GradientTransformation(init_fn, update_fn)


def shampoo_by_hand():
  inner = optax.chain(_scale_by_shampoo(), optax.sgd(1e-2, 0.9))
  return make_train_step(ols.with_loss_scaling(inner))


class SoapState(NamedTuple):
  gram: jax.Array
  mean: jax.Array
  square: jax.Array


def _scale_by_soap(b1=0.9, b2=0.99):
  """Adam in the eigenbasis of the gradients, for a matrix."""

  def init_fn(param):
    gram = 1e-6 * jnp.eye(param.shape[0])
    return SoapState(gram, jnp.zeros_like(param), jnp.zeros_like(param))

  def update_fn(grad, state, param=None):
    del param
    gram = b2 * state.gram + (1 - b2) * grad @ grad.T
    _, basis = jnp.linalg.eigh(gram)
    mean = b1 * state.mean + (1 - b1) * grad
    square = b2 * state.square + (1 - b2) * (basis.T @ grad) ** 2
    update = basis @ ((basis.T @ mean) / (jnp.sqrt(square) + 1e-6))
    return update, SoapState(gram, mean, square)

  return optax.GradientTransformation(init_fn, update_fn)


def soap_by_hand():
  """One matrix, whose gradient is preconditioned on one side."""
  inner = optax.chain(_scale_by_soap(), optax.scale(-1e-2))
  loss_fn = lambda w, batch: jnp.mean((jnp.tanh(batch[0] @ w) - batch[1]) ** 2)
  return make_train_step(
    ols.with_loss_scaling(inner), loss_fn, normal(8, 4, scale=0.3)
  )


def sam_inside():
  """Sharpness-aware minimization by Optax, with opaque gradients."""
  inner = contrib.sam(
    optax.adam(1e-2),
    optax.chain(contrib.normalize(), optax.sgd(0.05)),
    opaque_mode=True,
  )
  tx = ols.with_loss_scaling(inner)
  loss_fn = ols.autocast(mse_loss_fn)

  @jax.jit
  def train_step(params, opt_state, batch):
    grad_fn = lambda params, _: ols.grad(loss_fn, opt_state)(params, batch)
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, grad_fn=grad_fn)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def sam_by_hand():
  """Two gradients, both of the scaled loss; the second is applied."""
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  loss_fn = ols.autocast(mse_loss_fn)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    step_size = 0.05 / (optax.tree.norm(grads) + 1e-12)
    perturbed = jax.tree.map(lambda p, g: p + step_size * g, params, grads)
    grads = ols.grad(loss_fn, opt_state)(perturbed, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def ema_of_params():
  """An average of the parameters outside of the optimizer."""
  tx = ols.with_loss_scaling(optax.adam(1e-2))

  @jax.jit
  def train_step(params, average, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    new_average = optax.incremental_update(params, average, 0.01)
    average = ols.select_if_finite(opt_state, new_average, average)
    return params, average, opt_state, loss

  params = init_mlp()
  return train_step, (params, params, tx.init(params), make_batch())


def noisy_gradients():
  """Noise with its own random key in the state of the optimizer."""
  inner = optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(0.1))
  return make_train_step(ols.with_loss_scaling(inner))


def per_example_clipping():
  """Differentially private: the gradient of each example is clipped."""
  aggregate = contrib.differentially_private_aggregate(1.0, 0.1, 0)
  tx = ols.with_loss_scaling(optax.chain(aggregate, optax.sgd(0.1)))
  loss_fn = ols.autocast(mse_loss_fn)

  @jax.jit
  def train_step(params, opt_state, batch):
    differentiate = ols.value_and_grad(loss_fn, opt_state)
    losses, grads = jax.vmap(differentiate, (None, 0))(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jnp.mean(losses)

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def prodigy():
  """The optimizer estimates its learning rate."""
  return make_train_step(ols.with_loss_scaling(contrib.prodigy()))


def adaptive_clipping_by_layer():
  inner = optax.chain(optax.adaptive_grad_clip(0.1), optax.lamb(1e-2))
  return make_train_step(ols.with_loss_scaling(inner))


def half_precision_moments():
  """The first moment is stored in bfloat16."""
  inner = optax.adamw(1e-2, mu_dtype=jnp.bfloat16)
  return make_train_step(ols.with_loss_scaling(inner))


def flattened():
  """The optimizer sees one vector."""
  return make_train_step(ols.with_loss_scaling(optax.flatten(optax.adam(1e-2))))


def projected_params():
  """The new parameters are clipped to a box, as in the first WGAN."""
  tx = ols.with_loss_scaling(optax.rmsprop(1e-2))
  clip = lambda params: jax.tree.map(lambda p: jnp.clip(p, -0.5, 0.5), params)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    return clip(optax.apply_updates(params, updates)), opt_state, loss

  params = clip(init_mlp())
  return train_step, (params, tx.init(params), make_batch())


def restarted_moments():
  """The state of Adam, but not the loss scale, restarts now and then."""
  tx = ols.with_loss_scaling(optax.adam(1e-2))

  @jax.jit
  def train_step(params, opt_state, count, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    inner_state = jax.tree.map(
      lambda new, old: jnp.where(count % 10 == 9, new, old),
      tx.init(params).inner_state,
      opt_state.inner_state,
    )
    opt_state = opt_state._replace(inner_state=inner_state)
    return params, opt_state, count + 1, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), jnp.int32(9), make_batch())
