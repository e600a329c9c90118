"""Steps in which something keeps the update back, or changes its result."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.train_steps import (
  apply_updates,
  BATCH,
  compute_grads,
  jit_step,
  loss_fn,
  map_grads,
  PARAMS,
  prepare_result,
  prepare_step,
  TX,
  where,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)
OTHERS = {"w": PARAMS["w"].T}
_prepare = functools.partial(prepare_result, inner=ADAM)


def _prepare_params(change, **kwargs):
  """Return a function that makes a step which changes its new parameters.

  Args:
    change: a function of an old and a new array.
    **kwargs: further arguments of ``make_step``.
  """
  make_result = lambda old, new: (jax.tree.map(change, old[0], new[0]), new[1])
  return _prepare(make_result, **kwargs)


def _reject(old, new):
  """The step is not taken, since the loss did not fall."""
  is_better = loss_fn(new[0], BATCH) < loss_fn(old[0], BATCH)
  return where(is_better, new[0], old[0]), new[1]


def stopped_member():
  """One of two members of an ensemble has stopped."""
  step, (*trained, batch, _) = _prepare(
    lambda old, new, is_stopped: where(is_stopped, old, new), extra=(False,)
  )()
  trained = jax.tree.map(lambda x: jnp.stack([x, x]), trained)
  step = jax.jit(jax.vmap(step, (0, 0, None, 0)))
  return step, (*trained, batch, jnp.array([False, True]))


def under_cond_that_waits():
  """Gradients are added in float32; every second call updates."""

  def train_step(params, opt_state, total, count, batch):
    grads = ols.grad(loss_fn, opt_state)(params, batch)
    total, count = optax.tree.add(total, grads), count + 1

    def apply():
      mean = optax.tree.scale(1 / 2, total)
      new = apply_updates(TX, mean, params, opt_state)
      return *new, optax.tree.zeros_like(total), count * 0

    return lax.cond(
      count == 2, apply, lambda: (params, opt_state, total, count)
    )

  return jit_step(train_step, optax.tree.zeros_like(PARAMS), np.int32(0))


def under_cond_that_updates():
  step, args = under_cond_that_waits()
  return step, (*step(*args), args[-1])


def second_loss_that_is_left_out():
  """The second loss has a scale, too, and is left out if it overflows."""
  policy = ols.DynamicLossScale()

  def train_step(params, opt_state, other_state, batch):
    grads = ols.grad(loss_fn, opt_state)(params, batch)
    others = ols.grad(loss_fn, other_state)(params, -batch)
    is_finite = ols.all_finite(others)
    add = lambda a, b: a + jnp.where(is_finite, 0.1 * b, 0)
    grads = jax.tree.map(add, grads, others)
    new = apply_updates(TX, grads, params, opt_state)
    return *new, policy.adjust(other_state, is_finite)

  return jit_step(train_step, policy.init())


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


@ols.autocast
def _ratio_loss_fn(params, batch):
  """The first step of GRPO: the value of each ratio is one."""
  log_probs = jax.nn.log_softmax(batch @ params["w"])
  ratio = jnp.exp(log_probs - lax.stop_gradient(log_probs))
  return -jnp.mean(ratio * batch)


@ols.autocast
def _anchored_loss_fn(params, batch):
  """A penalty pulls towards old parameters, as elastic weights do."""
  penalty = jnp.sum((params["w"] - PARAMS["w"]) ** 2)
  return jnp.mean((batch @ params["w"]) ** 2) + 1e-2 * penalty


def temperature():
  """A scalar has an optimizer, as in SAC."""

  def temperature_loss(log_alpha, params, batch):
    entropy = jnp.mean((batch @ params["w"]) ** 2)
    return jnp.exp(log_alpha) * lax.stop_gradient(entropy + 1)

  def step(params, state, log_alpha, alpha_state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    cast = ols.autocast(temperature_loss)
    alpha_grad = ols.grad(cast, alpha_state)(log_alpha, params, batch)
    params, state = apply_updates(TX, grads, params, state)
    alpha = apply_updates(TX, alpha_grad, log_alpha, alpha_state)
    return params, state, *alpha

  log_alpha = jnp.float32(0.1)
  return jit_step(step, log_alpha, TX.init(log_alpha))


def _project_conflicts(loss, params, opt_state):
  """The gradients of two tasks, of which one is projected."""

  def join(x, y):
    product = jnp.minimum(jnp.sum(x * y), 0)
    return x + y - product / (jnp.sum(y**2) + 1e-12) * y

  first = compute_grads(loss, params, opt_state)
  second = ols.grad(loss_fn, opt_state)(params, -BATCH)
  return jax.tree.map(join, first, second)


_ZERO, _RATE = optax.constant_schedule(0.0), optax.constant_schedule(0.1)

STEPS = {
  # Something keeps the update back. The actor waits in every second step.
  "delayed_actor": _prepare(
    lambda old, new, count: (*where(count % 2 == 0, new, old), count),
    extra=(np.int32(1),),
  ),
  "delayed_params": _prepare(
    lambda old, new, count: (where(count % 2, old[0], new[0]), new[1]),
    extra=(np.int32(1),),
  ),
  "rejected_step": prepare_result(_reject, inner=optax.sgd(300.0)),
  "schedule_that_begins_later": prepare_step(
    inner=optax.sgd(optax.join_schedules([_ZERO, _RATE], [10]))
  ),
  # Something changes the new parameters.
  "in_a_ball": _prepare(
    lambda old, new: (
      optax.projections.projection_l2_ball(new[0], 1.0),
      new[1],
    )
  ),
  "nonnegative": prepare_step(
    inner=optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    params={"w": np.abs(PARAMS["w"])},
  ),
  "weight_decay_by_hand": _prepare_params(lambda old, new: new - 1e-3 * old),
  # The step subtracts what has the sign of the gradient.
  "learning_rate_by_hand": _prepare_params(
    lambda old, new: old - 1e-2 * (new - old), inner=optax.scale_by_adam()
  ),
  "rate_that_reacts_to_a_skip": _prepare(_react_to_skip),
  # The old parameters, or averages, are returned next to the new ones.
  "previous_params": _prepare(
    lambda old, new, _: (*new, old[0]), extra=(OTHERS,)
  ),
  "average_with_large_weights": _prepare(
    lambda old, new, average, best: (
      *new,
      optax.incremental_update(new[0], average, 1e-3),
      best,
    ),
    extra=(PARAMS, PARAMS),
  ),
  "best_params": _prepare(_add_best, extra=(PARAMS, np.float32(0))),
  "lookahead_by_hand": _prepare(_look_ahead, extra=(PARAMS, np.int32(0))),
  # Losses whose value says nothing of the parameters.
  "ratio_to_itself": prepare_step(loss_fn=_ratio_loss_fn, inner=ADAM),
  "anchored": prepare_step(loss_fn=_anchored_loss_fn, inner=ADAM),
  # Gradients that the step changes.
  "centralized_gradients": prepare_step(
    map_grads(lambda g: g - jnp.mean(g, 0)), inner=ADAM
  ),
  "projected_conflicts": prepare_step(_project_conflicts, inner=ADAM),
}
