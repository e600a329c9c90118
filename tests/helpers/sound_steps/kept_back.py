"""Steps in which something keeps the update back, or changes its result."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  init_mlp,
  jit_step,
  make_batch,
  make_train_step,
  mse_loss_fn,
  train,
)
import optax_lossscale as ols

ADAM = ols.with_loss_scaling(optax.adam(1e-2))
PARAMS, BATCH = init_mlp(), make_batch()
_cast_loss_fn = ols.autocast(mse_loss_fn)
_where = lambda flag, new, old: jax.tree.map(
  functools.partial(jnp.where, flag), new, old
)


def _make_step(change, *extra, tx=ADAM, loss_fn=mse_loss_fn, params=PARAMS):
  """Return a step whose new parameters and state are changed.

  Args:
    change: a function from the old parameters and the old state, the new ones,
      and further arguments to the result.
    *extra: the further arguments.
    tx: the wrapped optimizer.
    loss_fn: the loss.
    params: the parameters.
  """

  @jax.jit
  def train_step(params, opt_state, batch, *extra):
    new_params, new_state, _ = train(tx, loss_fn, params, opt_state, batch)
    return change((params, opt_state), (new_params, new_state), *extra)

  return train_step, (params, tx.init(params), BATCH, *extra)


# Something keeps the update back.


def delayed_actor():
  """The actor waits in every second step: in this one."""
  change = lambda old, new, count: (*_where(count % 2 == 0, new, old), count)
  return _make_step(change, jnp.int32(1))


def delayed_params():
  """The parameters wait, and the optimizer does not."""
  change = lambda old, new, count: (_where(count % 2, old[0], new[0]), new[1])
  return _make_step(change, jnp.int32(1))


def rejected_step():
  """The step is not taken, since the loss did not fall."""
  tx = ols.with_loss_scaling(optax.sgd(300.0))

  def change(old, new):
    is_better = _cast_loss_fn(new[0], BATCH) < _cast_loss_fn(old[0], BATCH)
    return _where(is_better, new[0], old[0]), new[1]

  return _make_step(change, tx=tx)


def stopped_member():
  """One of two members of an ensemble has stopped."""
  step, (*trained, batch, _) = _make_step(
    lambda old, new, is_stopped: _where(is_stopped, old, new), False
  )
  trained = jax.tree.map(lambda x: jnp.stack([x, x]), trained)
  step = jax.jit(jax.vmap(step, (0, 0, None, 0)))
  return step, (*trained, batch, jnp.array([False, True]))


def stopped():
  """Early stopping has ended the training."""
  change = lambda old, new, is_stopped: _where(is_stopped, old, new)
  return _make_step(change, jnp.array(True))


def schedule_that_begins_later():
  zero, rate = optax.constant_schedule(0.0), optax.constant_schedule(0.1)
  schedule = optax.join_schedules([zero, rate], [10])
  return make_train_step(ols.with_loss_scaling(optax.sgd(schedule)))


def branch_that_updates():
  @jax.jit
  def train_step(params, opt_state, batch, count):
    update = lambda: train(ADAM, mse_loss_fn, params, opt_state, batch)[:2]
    return lax.cond(count % 2 == 0, update, lambda: (params, opt_state))

  return train_step, (PARAMS, ADAM.init(PARAMS), BATCH, jnp.int32(0))


def second_loss_that_is_left_out():
  """The second loss has a scale, too, and is left out if it overflows."""
  policy = ols.DynamicLossScale()

  def train_step(params, opt_state, other_state, batch):
    loss_fn = ols.autocast(mse_loss_fn)
    grads = ols.grad(loss_fn, opt_state)(params, batch)
    others = ols.grad(loss_fn, other_state)(params, (batch[0], -batch[1]))
    is_finite = ols.all_finite(others)
    add = lambda a, b: a + jnp.where(is_finite, 0.1 * b, 0)
    grads = jax.tree.map(add, grads, others)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, policy.adjust(other_state, is_finite)

  return jit_step(train_step, ADAM, policy.init())


# Something changes the new parameters or the new state.


def clipped_weights():
  """As in a Wasserstein GAN."""
  clip = lambda x: jnp.clip(x, -0.1, 0.1)
  return _make_step(lambda old, new: (jax.tree.map(clip, new[0]), new[1]))


def on_a_sphere():
  params = jax.tree.map(lambda x: (x + 1) / jnp.linalg.norm(x + 1), PARAMS)
  project = lambda x: x / jnp.linalg.norm(x)
  change = lambda old, new: (jax.tree.map(project, new[0]), new[1])
  return _make_step(change, params=params)


def in_a_ball():
  project = optax.projections.projection_l2_ball
  return _make_step(lambda old, new: (project(new[0], 1.0), new[1]))


def nonnegative():
  inner = optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())
  tx = ols.with_loss_scaling(inner)
  return make_train_step(tx, params=jax.tree.map(jnp.abs, PARAMS))


def weight_decay_by_hand():
  decay = lambda old, new: new - 1e-3 * old
  return _make_step(
    lambda old, new: (jax.tree.map(decay, old[0], new[0]), new[1])
  )


def learning_rate_by_hand():
  """The step subtracts what has the sign of the gradient."""
  tx = ols.with_loss_scaling(optax.scale_by_adam())
  descend = lambda old, new: old - 1e-2 * (new - old)
  return _make_step(
    lambda old, new: (jax.tree.map(descend, old[0], new[0]), new[1]), tx=tx
  )


def previous_params():
  """The old parameters are returned next to the new ones."""
  return _make_step(lambda old, new, _: (*new, old[0]), init_mlp(seed=3))


def average_with_large_weights():
  """Another average serves evaluation."""

  def change(old, new, average, best):
    return *new, optax.incremental_update(new[0], average, 1e-3), best

  return _make_step(change, PARAMS, PARAMS)


def best_params():
  def change(old, new, best, best_loss):
    loss = _cast_loss_fn(old[0], BATCH)
    best = _where(loss < best_loss, old[0], best)
    return *new, best, jnp.minimum(loss, best_loss)

  return _make_step(change, PARAMS, jnp.float32(0))


def lookahead_by_hand():
  def change(old, new, slow, count):
    is_sync = count % 5 == 4
    nearer = optax.incremental_update(new[0], slow, 0.5)
    slow = _where(is_sync, nearer, slow)
    return _where(is_sync, slow, new[0]), new[1], slow

  return _make_step(change, PARAMS, jnp.int32(0))


def moments_restarted_now():
  def change(old, new, count):
    fresh = ADAM.init(new[0]).inner_state
    inner_state = _where(count % 10 == 0, fresh, new[1].inner_state)
    return new[0], new[1]._replace(inner_state=inner_state)

  return _make_step(change, jnp.int32(20))


def rate_that_reacts_to_a_skip():
  """The state of the last step changes the learning rate of this one."""

  def change(old, new):
    was_applied = ols.get_loss_scale_state(old[1]).last_finite
    rate = jnp.where(was_applied, 1.0, 0.5)
    return optax.incremental_update(new[0], old[0], rate), new[1]

  return _make_step(change)


# Losses whose value says nothing of the parameters.


def ratio_to_itself():
  """The first step of GRPO: the value of each ratio is one."""

  def loss_fn(params, batch):
    log_probs = jax.nn.log_softmax(apply_mlp(params, batch[0]))
    ratio = jnp.exp(log_probs - lax.stop_gradient(log_probs))
    return -jnp.mean(ratio * batch[1])

  return make_train_step(ADAM, loss_fn)


def magic_box():
  """The surrogate loss of DiCE."""

  def loss_fn(params, batch):
    log_probs = jnp.sum(jax.nn.log_softmax(apply_mlp(params, batch[0])), -1)
    box = jnp.exp(log_probs - lax.stop_gradient(log_probs))
    return jnp.mean(box * batch[1][:, 0])

  return make_train_step(ADAM, loss_fn)


def anchored():
  """A penalty pulls towards old parameters, as elastic weights do."""

  def loss_fn(params, batch):
    pairs = zip(*map(jax.tree.leaves, (params, PARAMS)), strict=True)
    return mse_loss_fn(params, batch) + sum(
      1e-2 * jnp.sum((x - y) ** 2) for x, y in pairs
    )

  return make_train_step(ADAM, loss_fn)


def temperature():
  """A scalar has an optimizer, as in SAC."""

  def loss_fn(log_alpha, params, batch):
    entropy = jnp.mean(apply_mlp(params, batch[0]) ** 2)
    return jnp.exp(log_alpha) * lax.stop_gradient(entropy + 1)

  def change(old, new, log_alpha, alpha_state):
    log_alpha, alpha_state, _ = train(
      ADAM, loss_fn, log_alpha, alpha_state, old[0], BATCH
    )
    return *new, log_alpha, alpha_state

  log_alpha = jnp.float32(0.1)
  return _make_step(change, log_alpha, ADAM.init(log_alpha))


# Gradients that the step changes.


def _make_changed_step(change):
  """Return a step that changes its gradients before `update`."""

  def train_step(params, opt_state, batch):
    grad_fn = ols.grad(ols.autocast(mse_loss_fn), opt_state)
    grads = change(grad_fn(params, batch), lambda b: grad_fn(params, b))
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return jit_step(train_step, ADAM)


def centralized_gradients():
  centre = lambda x: x - jnp.mean(x, 0) if x.ndim > 1 else x
  return _make_changed_step(lambda grads, _: jax.tree.map(centre, grads))


def projected_conflicts():
  """The gradients of two tasks, of which one is projected."""

  def join(x, y):
    product = jnp.minimum(jnp.sum(x * y), 0)
    return x + y - product / (jnp.sum(y**2) + 1e-12) * y

  def change(grads, compute_grads):
    others = compute_grads((BATCH[0], -BATCH[1]))
    return jax.tree.map(join, grads, others)

  return _make_changed_step(change)


def sharpness_aware():
  """The wrapped optimizer takes two steps for one."""
  return _make_contrib_step("sam")


def distance_over_gradients():
  return _make_contrib_step("dog")


def distance_over_weighted_gradients():
  return _make_contrib_step("dowg")


def _make_contrib_step(name):
  """Return a step of an optimizer whose state has copies of parameters."""
  adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  inner = {
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), adversary),
    "dog": lambda: optax.contrib.dog(1.0),
    "dowg": lambda: optax.contrib.dowg(),
  }[name]()
  return make_train_step(ols.with_loss_scaling(inner))
