"""Steps with several losses, optimizers or networks."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  FEATURES,
  HIDDEN,
  init_mlp,
  jit_step,
  make_batch,
  make_labeled_batch,
  make_train_step,
  mse,
  mse_loss_fn,
  normal,
  ROWS,
  train,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.adam(1e-2))


_train = functools.partial(train, TX)


def gan():
  """Two optimizers, each with its loss scale."""

  def critic_loss_fn(critic, generator, real, noise):
    fake = apply_mlp(generator, noise)
    fake_loss = jax.nn.softplus(apply_mlp(critic, fake))
    return jnp.mean(fake_loss + jax.nn.softplus(-apply_mlp(critic, real)))

  def generator_loss_fn(generator, critic, noise):
    return jnp.mean(
      jax.nn.softplus(-apply_mlp(critic, apply_mlp(generator, noise)))
    )

  @jax.jit
  def train_step(generator, critic, g_state, c_state, real, noise):
    critic, c_state, c_loss = _train(
      critic_loss_fn, critic, c_state, generator, real, noise
    )
    generator, g_state, g_loss = _train(
      generator_loss_fn, generator, g_state, critic, noise
    )
    return generator, critic, g_state, c_state, (c_loss, g_loss)

  generator = init_mlp((4, HIDDEN, FEATURES))
  critic = init_mlp((FEATURES, HIDDEN, 1), seed=5)
  states = TX.init(generator), TX.init(critic)
  real, noise = normal(ROWS, FEATURES, seed=1), normal(ROWS, 4, seed=2)
  return train_step, (generator, critic, *states, real, noise)


def dqn():
  """The target network follows slowly, and has no gradient."""

  def loss_fn(params, target_params, batch):
    state, action, reward, next_state, is_last = batch
    next_value = jnp.max(apply_mlp(target_params, next_state), -1)
    target = reward + 0.9 * jnp.where(is_last, 0, next_value)
    values = apply_mlp(params, state)
    value = jnp.take_along_axis(values, action[:, None], 1)[:, 0]
    return jnp.mean(optax.huber_loss(value, lax.stop_gradient(target)))

  @jax.jit
  def train_step(params, target_params, opt_state, batch):
    params, opt_state, loss = _train(
      loss_fn, params, opt_state, target_params, batch
    )
    new_target_params = optax.incremental_update(params, target_params, 0.05)
    target_params = ols.select_if_finite(
      opt_state, new_target_params, target_params
    )
    return params, target_params, opt_state, loss

  params = init_mlp()
  state, action = make_labeled_batch()
  next_state = normal(ROWS, FEATURES, seed=2)
  is_last = jnp.arange(ROWS) == 3
  batch = state, action, normal(ROWS, seed=3), next_state, is_last
  return train_step, (params, params, TX.init(params), batch)


def a_state_for_each_loss():
  """Two loss-scale states next to the optimizer, which only skips."""
  policy = ols.DynamicLossScale()
  tx = ols.with_loss_scaling(optax.adam(1e-2), 1.0)

  @jax.jit
  def train_step(params, opt_state, scale_states, batches):
    all_grads = [
      ols.grad(ols.autocast(mse_loss_fn), state)(params, batch)
      for state, batch in zip(scale_states, batches, strict=True)
    ]
    scale_states = [
      policy.adjust(state, ols.all_finite(grads))
      for state, grads in zip(scale_states, all_grads, strict=True)
    ]
    grads = optax.tree.add(*all_grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, scale_states

  params = init_mlp()
  scale_states = [policy.init(), policy.init()]
  x, y = make_batch()
  batches = [(x, y), (y @ y.T, -y)]
  return train_step, (params, tx.init(params), scale_states, batches)


def mean_teacher():
  """Self-supervision against an average of the student (BYOL)."""

  def normalize(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

  def loss_fn(student, teacher, views):
    target = normalize(apply_mlp(teacher, views[1]))
    predicted = normalize(apply_mlp(student, views[0]))
    return jnp.mean(jnp.sum((predicted - lax.stop_gradient(target)) ** 2, -1))

  @jax.jit
  def train_step(student, teacher, opt_state, views):
    student, opt_state, loss = _train(
      loss_fn, student, opt_state, teacher, views
    )
    new_teacher = optax.incremental_update(student, teacher, 0.01)
    teacher = ols.select_if_finite(opt_state, new_teacher, teacher)
    return student, teacher, opt_state, loss

  student, teacher = init_mlp(), init_mlp(seed=5)
  x = normal(ROWS, FEATURES, seed=1)
  views = x + normal(*x.shape, seed=2, scale=0.1), x
  return train_step, (student, teacher, TX.init(student), views)


def maml():
  """The loss after one inner step of gradient descent, for each task."""

  def loss_fn(params, tasks):
    def task_loss(support, query):
      grads = jax.grad(mse_loss_fn)(params, support)
      adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
      return mse_loss_fn(adapted, query)

    return jnp.mean(jax.vmap(task_loss)(*tasks))

  x, y = (a.reshape(2, 2, 4, -1) for a in make_batch(16))
  return make_train_step(TX, loss_fn, batch=((x[0], y[0]), (x[1], y[1])))


def pretrained_features():
  """A frozen encoder runs in float16 as well, outside of the loss."""
  encoder = init_mlp((FEATURES, HIDDEN, FEATURES), seed=7)

  def train_step(head, opt_state, encoder, batch):
    features = ols.autocast(apply_mlp)(encoder, batch[0])
    return _train(mse_loss_fn, head, opt_state, (features, batch[1]))

  return jit_step(train_step, TX, encoder)


def alternating_updates():
  """A second model learns the residuals, in every second step."""

  def residual_loss_fn(second, first, batch):
    x, y = batch
    residual = y - lax.stop_gradient(apply_mlp(first, x))
    return mse(apply_mlp(second, x), residual)

  @jax.jit
  def train_step(first, second, first_state, second_state, count, batch):
    first, first_state, loss = _train(mse_loss_fn, first, first_state, batch)

    def update_second():
      return _train(residual_loss_fn, second, second_state, first, batch)[:2]

    second, second_state = lax.cond(
      count % 2 == 1, update_second, lambda: (second, second_state)
    )
    return first, second, first_state, second_state, count + 1, loss

  first, second = init_mlp(), init_mlp(seed=5)
  states = TX.init(first), TX.init(second)
  return train_step, (first, second, *states, jnp.int32(1), make_batch())
