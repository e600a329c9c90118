"""Mistakes in the loss-scale state that a step returns."""

import functools

import equinox as eqx
from flax import nnx
from flax.training import train_state
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.step_mistakes.states import make_gan_step, POLICIES
from helpers.train_steps import (
  apply_updates,
  BATCH,
  compute_unscaled_grads,
  half_loss_fn,
  loss_fn,
  make_population,
  make_tx,
  PARAMS,
  POLICY,
  prepare_result,
  prepare_step,
  prepare_wrapped,
  scan_steps,
  select_result,
  train,
  TX,
  where,
)
import optax_lossscale as ols

_IDENTITY = optax.identity()


def as_train_state(params, state):
  return train_state.TrainState(0, None, params, _IDENTITY, state)


def _keep_inner_state(old, new):
  return new[0], new[1]._replace(inner_state=old[1].inner_state)


def _put_back_scale(new_state, state):
  return new_state._replace(loss_scale_state=state.loss_scale_state)


put_back_all = select_result(where)


def _make_critic_step(*, puts_back):
  """The critic trains twice, and then the generator."""

  @jax.jit
  def step(generator, critic, state, other, batch):
    for _ in range(2):
      critic, other = train(critic, other, batch)
    grads = ols.grad(loss_fn, state)(generator, batch)
    generator, new = apply_updates(TX, grads, generator, state)
    if puts_back:
      new = where(ols.all_finite(grads), new, state)
    return generator, critic, new, other

  state = TX.init(PARAMS)
  return step, (PARAMS, PARAMS, state, state, BATCH)


_puts_back = functools.partial(prepare_step, update=put_back_all)


def _adjust_again(old, new):
  state = new[1].loss_scale_state
  state = POLICY.adjust(state, state.last_finite)
  return new[0], new[1]._replace(loss_scale_state=state)


def _limit_scale(limit, bound):
  """Return a function that limits the loss scale after a step."""

  def make_result(old, new):
    scale = new[1].loss_scale_state.loss_scale
    return new[0], ols.set_loss_scale(new[1], limit(scale, bound))

  return make_result


def _make_nnx_step(*, puts_back):
  """The model and the optimizer are changed in place."""
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, x):
    # A copy, since the variables change in place.
    old = jax.tree.map(lambda x: x, nnx.state(optimizer))
    cast = ols.autocast(lambda model, x: jnp.mean((model(x) - 1) ** 2))
    grads = ols.grad(cast, optimizer, using=nnx.value_and_grad)(model, x)
    optimizer.update(model, grads)
    if puts_back:
      new = nnx.state(optimizer)
      nnx.update(optimizer, where(ols.all_finite(grads), new, old))

  return step, (model, optimizer, BATCH)


def _make_nnx_step_under_jax_jit():
  """`jax.jit` drops what changes in the model and in the optimizer."""
  step, args = _make_nnx_step(puts_back=False)
  graph, state = nnx.split(args[:2])

  @jax.jit
  def jitted(state, x):
    step.__wrapped__(*nnx.merge(graph, state), x)
    return jnp.sum(x)

  return jitted, (state, BATCH)


def _prepare_infs(shape):
  """The step returns metrics and updates statistics."""
  add = lambda old, new, mean: (*new, jnp.full(shape, jnp.inf), mean)
  return prepare_result(add, extra=(np.zeros(4, np.float32),))


def raise_if(find_fault, choose=lambda old, new: new):
  """Return a function that makes a step with an error."""

  def select(finite, new, old):
    return eqx.error_if(choose(old, new), find_fault(finite), "planted")

  return prepare_step(update=select_result(select))


_RETURN = "Return it unchanged: updates, opt_state = tx.update(grads, opt_state"

MISTAKES = {
  ("does not return the opt_state that update returns. So", _RETURN): {
    "old state": prepare_result(lambda old, new: (new[0], old[1])),
    "train state with the old state": prepare_result(
      lambda old, new: as_train_state(new[0], old[1])
    ),
    "old state, and metrics of the new one": prepare_result(
      lambda old, new: (new[0], old[1], ols.loss_scale_metrics(new[1]))
    ),
    "old scale in the new state": prepare_result(
      lambda old, new: (new[0], _put_back_scale(new[1], old[1]))
    ),
    "old state of the second optimizer": functools.partial(
      make_gan_step, returns_old=True
    ),
    "old state, and an error after an overflow": raise_if(
      lambda finite: ~finite, lambda old, new: (new[0], old[1])
    ),
    "old state of master weights": prepare_result(
      lambda old, new: (new[0], old[1]),
      loss_fn=half_loss_fn,
      params=optax.tree.cast(PARAMS, jnp.bfloat16),
      tx=ols.with_master_weights(make_tx(optax.adam(1e-5))),
    ),
    "old state in the carry of a scan": prepare_wrapped(
      lambda step: scan_steps(step, lambda old, new: (new[0], old[1]))
    ),
    "no state": prepare_result(lambda old, new: new[0]),
  },
  ("its inner_state is the old one", _RETURN): {
    "old inner state": prepare_result(
      _keep_inner_state, tx=make_tx(optax.adam(1e-2))
    )
  },
  ("with a lower loss scale, its scale is 1024 in place of 1", _RETURN): {
    "constant scale": prepare_result(
      lambda old, new: (new[0], ols.set_loss_scale(new[1], 2.0**10))
    )
  },
  ("after an overflow, it counts 2 skipped steps in place of 1", _RETURN): {
    "adjusted twice": prepare_result(_adjust_again)
  },
  ("after an overflow, it counts 0 skipped steps in place of 1", _RETURN): {
    "all put back": _puts_back(),
    **{
      f"all put back with {name}": _puts_back(tx=make_tx(policy=policy))
      for name, policy in POLICIES.items()
    },
    "all put back, of an unscaled loss": _puts_back(
      compute_unscaled_grads, loss_fn=half_loss_fn, tx=make_tx(policy=1.0)
    ),
    "all put back in a population": lambda: make_population(*_puts_back()()),
    "train state put back by cond": prepare_step(
      update=select_result(
        lambda finite, new, old: lax.cond(
          finite, lambda: as_train_state(*new), lambda: as_train_state(*old)
        )
      )
    ),
    "state put back by select_if_applied": prepare_result(
      lambda old, new: (new[0], ols.select_if_applied(new[1], new[1], old[1]))
    ),
    "scale put back": prepare_step(
      update=select_result(
        lambda finite, new, old: (
          new[0],
          where(finite, new[1], _put_back_scale(new[1], old[1])),
        )
      )
    ),
    "state of the generator put back": functools.partial(
      _make_critic_step, puts_back=True
    ),
    "NNX optimizer put back in place": functools.partial(
      _make_nnx_step, puts_back=True
    ),
  },
  ("returns neither new parameters nor a new opt_state", "use nnx.jit"): {
    "part of a step": prepare_result(lambda old, new: loss_fn(old[0], BATCH)),
    "NNX step under jax.jit": _make_nnx_step_under_jax_jit,
  },
  ("its scale is 32768 in place of 128", "min_scale="): {
    "scale with a floor": prepare_result(
      _limit_scale(jnp.maximum, 2.0**15), tx=make_tx(policy="dynamic")
    )
  },
}

LOOKALIKES = {
  "train state": prepare_result(lambda old, new: as_train_state(*new)),
  "dict with metrics": prepare_result(
    lambda old, new: {
      "params": new[0],
      "opt": [new[1]],
      "metrics": ols.loss_scale_metrics(new[1]),
    }
  ),
  "leaves": prepare_result(lambda old, new: jax.tree.leaves(new)),
  "state of the best step, too": prepare_step(
    update=select_result(
      lambda finite, new, old: (new, where(finite & False, new, old))
    )
  ),
  "critic that trains twice": functools.partial(
    _make_critic_step, puts_back=False
  ),
  "capped scale": prepare_result(_limit_scale(jnp.minimum, 2.0**20)),
  "metric of the shape of a parameter that is NaN": prepare_result(
    lambda old, new: (
      new,
      {"recall": 0 * jnp.log(-jnp.ones_like(old[0]["w"]))},
    )
  ),
  "metric that is inf": _prepare_infs(()),
  "metrics that are inf": _prepare_infs((5,)),
  "NNX optimizer in place": functools.partial(_make_nnx_step, puts_back=False),
  "no error after an overflow": raise_if(lambda finite: jnp.array(False)),
}

UNCHECKED = {
  "error after an overflow": (
    raise_if(lambda finite: ~finite),
    "after an overflow, since it raises an error",
  ),
}
