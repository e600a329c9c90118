"""Steps in which something keeps the update back, or changes its result."""

import functools

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import optax

from helpers.train_steps import (
  ADAM,
  BATCH,
  compute_grads,
  jit_step,
  loss_fn,
  make_tx,
  map_grads,
  PARAMS,
  prepare_result,
  prepare_step,
  train,
  TX,
  where,
)
import optax_lossscale as ols

COUNT = np.int32(1)
ADAM_TX = make_tx(ADAM)
_prepare = functools.partial(prepare_result, tx=ADAM_TX)


def _prepare_params(change, **kwargs):
  """Return a function that makes a step which changes its new parameters."""
  return _prepare(lambda old, new: (change(old[0], new[0]), new[1]), **kwargs)


def _make_stopped_member_step():
  """One of two members of an ensemble has stopped."""
  step, (*trained, batch, _) = _prepare(
    lambda old, new, is_stopped: where(is_stopped, old, new), extra=(False,)
  )()
  trained = jax.tree.map(lambda x: jnp.stack([x, x]), trained)
  step = jax.jit(jax.vmap(step, (0, 0, None, 0)))
  return step, (*trained, batch, jnp.array([False, True]))


def _reject(old, new):
  """The step is not taken, since the loss did not fall."""
  is_better = loss_fn(new[0], BATCH) < loss_fn(old[0], BATCH)
  return where(is_better, new[0], old[0]), new[1]


def _add_best(old, new, best, best_loss):
  loss = loss_fn(old[0], BATCH)
  best = where(loss < best_loss, old[0], best)
  return *new, best, jnp.minimum(loss, best_loss)


def _look_ahead(old, new, slow, count):
  is_sync = count % 5 == 4
  nearer = optax.incremental_update(new[0], slow, 0.5)
  slow = where(is_sync, nearer, slow)
  return where(is_sync, slow, new[0]), new[1], slow


def _react_to_skip(old, new):
  """The state of the last step changes the learning rate of this one."""
  was_applied = ols.get_loss_scale_state(old[1]).last_finite
  rate = jnp.where(was_applied, 1.0, 0.5)
  return optax.incremental_update(new[0], old[0], rate), new[1]


def _log_norm_and_scale(old, new):
  """The host receives numbers of each step, in order."""
  history = []
  scale = ols.get_loss_scale_state(new).loss_scale
  log = lambda *values: history.append([float(x) for x in values])
  io_callback(log, None, optax.tree.norm(new[0]), scale, ordered=True)
  return new


def _project_conflicts(loss, params, opt_state):
  """The gradients of two tasks, of which one is projected."""

  def join(x, y):
    product = jnp.minimum(jnp.sum(x * y), 0)
    return x + y - product / (jnp.sum(y**2) + 1e-12) * y

  first = compute_grads(loss, params, opt_state)
  second = ols.grad(loss_fn, opt_state)(params, -BATCH)
  return jax.tree.map(join, first, second)


def _sum_updates(params, opt_state, total, batch):
  """The sum is logged."""
  grads = ols.grad(loss_fn, opt_state)(params, batch)
  updates, opt_state = TX.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  return params, opt_state, optax.tree.add(total, updates)


def _augment(params, opt_state, key, batch):
  """Noise on the inputs, and a new random key among the results."""
  key, noise_key = jax.random.split(key)
  batch += 0.1 * jax.random.normal(noise_key, batch.shape)
  return *train(params, opt_state, batch), key


STEPS = {
  # Something keeps the update back. The actor waits in every second step.
  "delayed actor": _prepare(
    lambda old, new, count: (*where(count % 2 == 0, new, old), count),
    extra=(COUNT,),
  ),
  "delayed params": _prepare(
    lambda old, new, count: (where(count % 2, old[0], new[0]), new[1]),
    extra=(COUNT,),
  ),
  "rejected": prepare_result(_reject, tx=make_tx(optax.sgd(300.0))),
  "stopped member": _make_stopped_member_step,
  # Something changes the new parameters.
  "in a ball": _prepare_params(
    lambda old, new: optax.projections.projection_l2_ball(new, 1.0)
  ),
  "nonnegative": prepare_step(
    tx=make_tx(optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())),
    params={"w": np.abs(PARAMS["w"])},
  ),
  "weight decay by hand": _prepare_params(
    lambda old, new: optax.tree.add_scale(new, -1e-3, old)
  ),
  # The step subtracts what has the sign of the gradient.
  "learning rate by hand": _prepare_params(
    lambda old, new: optax.tree.add_scale(old, -1e-2, optax.tree.sub(new, old)),
    tx=make_tx(optax.scale_by_adam()),
  ),
  "rate that reacts to a skip": _prepare(_react_to_skip),
  # The old parameters, or averages, are returned next to the new ones.
  "previous params": _prepare(
    lambda old, new, _: (*new, old[0]), extra=({"w": PARAMS["w"].T},)
  ),
  "average with large weights": _prepare(
    lambda old, new, average, best: (
      *new,
      optax.incremental_update(new[0], average, 1e-3),
      best,
    ),
    extra=(PARAMS, PARAMS),
  ),
  "sum of updates": lambda: jit_step(
    _sum_updates, optax.tree.zeros_like(PARAMS)
  ),
  "best params": _prepare(_add_best, extra=(PARAMS, np.float32(0))),
  "lookahead by hand": _prepare(_look_ahead, extra=(PARAMS, np.int32(0))),
  # Gradients that the step changes.
  "centralized gradients": prepare_step(
    map_grads(lambda g: g - jnp.mean(g, 0)), tx=ADAM_TX
  ),
  "projected conflicts": prepare_step(_project_conflicts, tx=ADAM_TX),
  "augmentation": lambda: jit_step(_augment, jax.random.key(0)),
  "log on the host": prepare_result(_log_norm_and_scale),
}
