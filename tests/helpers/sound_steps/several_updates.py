"""Steps with several losses, optimizers or updates."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.train_steps import (
  ADAM,
  apply_updates,
  jit_step,
  loss_fn,
  make_tx,
  PARAMS,
  train,
  TX,
)
import optax_lossscale as ols

ADAM_TX = make_tx(ADAM)
OTHERS = {"w": PARAMS["w"].T}


def _apply(params, x):
  return jnp.tanh(x @ params["w"])


def _train_on(loss_fn, params, opt_state, *args):
  """Return the new parameters and the new state, with another loss."""
  grads = ols.grad(ols.autocast(loss_fn), opt_state)(params, *args)
  return apply_updates(TX, grads, params, opt_state)


def _dqn(params, opt_state, target, batch):
  """The target network follows slowly, and has no gradient."""

  def dqn_loss_fn(params):
    next_value = jnp.max(_apply(target, batch[::-1]), -1)
    wanted = 1 + 0.9 * jnp.where(jnp.arange(8) == 3, 0, next_value)
    value = _apply(params, batch)[:, 0]
    return jnp.mean(optax.huber_loss(value, lax.stop_gradient(wanted)))

  params, opt_state = _train_on(dqn_loss_fn, params, opt_state)
  new_target = optax.incremental_update(params, target, 0.05)
  target = ols.select_if_applied(opt_state, new_target, target)
  return params, opt_state, target


def _make_two_states_step():
  """Two loss-scale states next to the optimizer, which only skips."""
  policy = ols.DynamicLossScale()
  tx = make_tx(ADAM, 1.0)

  def step(params, opt_state, scale_states, batch):
    pairs = zip(scale_states, (batch, batch**2), strict=True)
    all_grads = [ols.grad(loss_fn, state)(params, x) for state, x in pairs]
    scale_states = [
      policy.adjust(state, ols.all_finite(grads))
      for state, grads in zip(scale_states, all_grads, strict=True)
    ]
    grads = optax.tree.add(*all_grads)
    return *apply_updates(tx, grads, params, opt_state), scale_states

  return jit_step(step, [policy.init(), policy.init()], tx=tx)


def _train_head(head, opt_state, encoder, batch):
  """A frozen encoder runs in float16 as well, outside of the loss."""
  return train(head, opt_state, ols.autocast(_apply)(encoder, batch))


def _alternate(first, first_state, second, second_state, count, batch):
  """A second model learns the residuals, in every second step."""
  first, first_state = train(first, first_state, batch)

  def residual_loss_fn(second):
    residual = 1 - lax.stop_gradient(_apply(first, batch))
    return jnp.mean((_apply(second, batch) - residual) ** 2)

  second, second_state = lax.cond(
    count % 2 == 1,
    lambda: _train_on(residual_loss_fn, second, second_state),
    lambda: (second, second_state),
  )
  return first, first_state, second, second_state, count + 1


def _tune_temperature(params, opt_state, log_alpha, alpha_state, batch):
  """A scalar has an optimizer, as in SAC."""

  def temperature_loss(log_alpha):
    entropy = jnp.mean((batch @ params["w"]) ** 2)
    return jnp.exp(log_alpha) * lax.stop_gradient(entropy + 1)

  alpha = _train_on(temperature_loss, log_alpha, alpha_state)
  return *train(params, opt_state, batch), *alpha


def _leave_out_second_loss(params, opt_state, other_state, batch):
  """The second loss has a scale, too, and is left out if it overflows."""
  grads = ols.grad(loss_fn, opt_state)(params, batch)
  others = ols.grad(loss_fn, other_state)(params, -batch)
  is_finite = ols.all_finite(others)
  add = lambda a, b: a + jnp.where(is_finite, 0.1 * b, 0)
  new = apply_updates(TX, jax.tree.map(add, grads, others), params, opt_state)
  return *new, ols.DynamicLossScale().adjust(other_state, is_finite)


def _train_twice(params, opt_state, batch):
  for part in jnp.split(batch, 2):
    params, opt_state = train(params, opt_state, part, tx=ADAM_TX)
  return params, opt_state


def _make_diloco_step():
  """The outer optimizer receives the difference of parameters."""
  outer = make_tx(optax.sgd(0.7, momentum=0.9, nesterov=True))

  def step(params, inner_state, outer_state, batch):
    new_params, inner_state = _train_twice(params, inner_state, batch)
    difference = jax.tree.map(jnp.subtract, params, new_params)
    params, outer_state = apply_updates(outer, difference, params, outer_state)
    return params, inner_state, outer_state

  return jit_step(step, outer.init(PARAMS), tx=ADAM_TX)


def _extragradient(params, opt_state, batch):
  """The gradient is that of parameters ahead."""
  ahead, _ = train(params, opt_state, batch, tx=ADAM_TX)
  grads = ols.grad(loss_fn, opt_state)(ahead, batch)
  return apply_updates(ADAM_TX, grads, params, opt_state)


def _darts(params, opt_state, weights, weights_state, batch):
  """The weights of operations are judged after a virtual step."""

  def weighted_loss(weights, params):
    out = jax.nn.sigmoid(weights) * jnp.tanh(batch @ params["w"])
    return jnp.mean((out - 1) ** 2)

  of_params = lambda params: weighted_loss(weights, params)
  virtual, _ = _train_on(of_params, params, opt_state)
  weights, weights_state = _train_on(
    weighted_loss, weights, weights_state, virtual
  )
  new = _train_on(of_params, params, opt_state)
  return *new, weights, weights_state


def _maml(params, opt_state, inner_state, batch):
  """The loss is that after an inner update, which is differentiated."""

  def moved_loss(params):
    return loss_fn(train(params, inner_state, batch)[0], batch)

  grads = ols.grad(moved_loss, opt_state)(params)
  return *apply_updates(TX, grads, params, opt_state), inner_state


def _average_clients(params, opt_state, batch):
  """Each client starts from the same parameters and the same state."""
  client = functools.partial(_train_twice, params, opt_state)
  all_params, states = jax.vmap(client)(jnp.stack([batch, -batch]))
  mean = jax.tree.map(lambda x: jnp.mean(x, 0), all_params)
  return mean, jax.tree.map(lambda x: x[0], states)


def _retry_in_branch(params, opt_state, batch):
  """A skipped step is repeated with the lower loss scale."""
  first = train(params, opt_state, batch)
  is_applied = ols.get_loss_scale_state(first[1]).last_finite
  again = lambda: train(params, first[1], batch)
  return lax.cond(is_applied, lambda: first, again)


def _update_every_second_time(params, opt_state, total, count, batch):
  """Gradients are added in float32; every second call updates."""
  grads = ols.grad(loss_fn, opt_state)(params, batch)
  total, count = optax.tree.add(total, grads), count + 1

  def apply():
    mean = optax.tree.scale(1 / 2, total)
    new = apply_updates(TX, mean, params, opt_state)
    return *new, optax.tree.zeros_like(total), count * 0

  return lax.cond(count == 2, apply, lambda: (params, opt_state, total, count))


def _prepare(step, *args, tx=TX):
  """Return a function that makes a step with arguments before the batch."""
  return functools.partial(jit_step, step, *args, tx=tx)


_COUNT, _SCALAR = np.int32(1), np.float32(0.1)
_ZEROS = optax.tree.zeros_like(PARAMS)

STEPS = {
  "DQN": _prepare(_dqn, PARAMS),
  "a state for each loss": _make_two_states_step,
  "pretrained features": _prepare(_train_head, OTHERS),
  "alternating": _prepare(_alternate, OTHERS, TX.init(OTHERS), _COUNT),
  "temperature": _prepare(_tune_temperature, _SCALAR, TX.init(_SCALAR)),
  "second loss left out": _prepare(
    _leave_out_second_loss, ols.DynamicLossScale().init()
  ),
  "two updates": _prepare(_train_twice, tx=ADAM_TX),
  "DiLoCo": _make_diloco_step,
  "extragradient": _prepare(_extragradient, tx=ADAM_TX),
  "DARTS": _prepare(_darts, np.zeros(4, np.float32), TX.init(_ZEROS["w"][0])),
  "MAML": _prepare(_maml, TX.init(PARAMS)),
  "federated averaging": _prepare(_average_clients, tx=ADAM_TX),
  "retry in a branch": _prepare(_retry_in_branch),
  "branch that waits": _prepare(_update_every_second_time, _ZEROS, np.int32(0)),
  "branch that updates": _prepare(_update_every_second_time, _ZEROS, _COUNT),
}
