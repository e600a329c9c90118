"""Mistakes in which loss-scale state a step reads, and what it does with it."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

from helpers.step_mistakes.gradients import (
  make_closed_step,
)
from helpers.train_steps import (
  apply_updates,
  BATCH,
  compute_grads,
  jit_step,
  loss_fn,
  make_population,
  make_step,
  make_tx,
  PARAMS,
  prepare_step,
  prepare_wrapped,
  scan_steps,
  train,
  TX,
)
import optax_lossscale as ols

POLICIES = {
  "headroom": "headroom",
  "a fixed scale": 64.0,
  "hysteresis": ols.DynamicLossScale(2.0**6, hysteresis=3),
}


def make_gan_step(*, swapped=False, returns_old=False):
  """Two optimizers, each with its loss scale."""

  @jax.jit
  def step(generator, critic, state, other, batch):
    scale, other_scale = (other, state) if swapped else (state, other)
    generator, state = train(generator, state, batch, scale)
    critic, new = train(critic, other, batch, other_scale)
    return generator, critic, state, other if returns_old else new

  state = TX.init(PARAMS)
  return step, (PARAMS, PARAMS, state, state, BATCH)


def _make_other_unscaling_step():
  """Gradients that one state scales, and the other one unscales."""

  @jax.jit
  def step(params, others, state, other, batch):
    scaled = lambda p: ols.scale_loss(loss_fn(p, batch), state)
    grads = ols.unscale_grads(jax.grad(scaled)(params), other)
    params, state = apply_updates(TX, grads, params, state)
    return params, state, *train(others, other, batch)

  state = TX.init(PARAMS)
  return step, (PARAMS, PARAMS, state, ols.set_loss_scale(state, 2.0), BATCH)


def _make_optimizers_step():
  """One loss for a list of optimizers."""

  def step(all_params, states, batch):
    grads = ols.grad(loss_fn, states[0])(all_params[0], batch)
    pairs = zip(all_params, states, strict=True)
    return [apply_updates(TX, grads, *pair) for pair in pairs]

  return step, ([PARAMS] * 2, [TX.init(PARAMS)] * 2, BATCH)


def _make_new_state_step():
  """Each step initializes the state again."""
  step = lambda params, state, batch: train(params, TX.init(params), batch)
  return step, (PARAMS, TX.init(PARAMS), BATCH)


def _make_leaves_step():
  """The state is a list of arrays, as from a checkpoint."""
  leaves, structure = jax.tree.flatten(TX.init(PARAMS))

  @jax.jit
  def step(params, leaves, batch):
    state = jax.tree.unflatten(structure, leaves)
    params, state = train(params, state, batch)
    return params, jax.tree.leaves(state)

  return step, (PARAMS, leaves, BATCH)


def _make_average_step(select):
  """The step averages its gradients next to the optimizer."""

  def step(params, average, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    new = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, average, grads)
    params, state = apply_updates(TX, grads, params, state)
    return params, select(state, new, average), state

  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  return step, (PARAMS, zeros, TX.init(PARAMS), BATCH)


def _make_member_step():
  """An ensemble that returns the loss scale of its first member."""

  def take_first(new):
    state = jax.tree.map(
      lambda x: jnp.broadcast_to(x[:1], x.shape), new[1].loss_scale_state
    )
    return new[0], new[1]._replace(loss_scale_state=state)

  step, args = make_population(*make_step())
  return lambda *args: take_first(step(*args)), args


def _make_task_step():
  """One of three losses is chosen when the step runs."""

  @jax.jit
  def step(task, params, state, batch):
    def update_with(weight):
      loss = lambda params: weight * loss_fn(params, batch)
      return lambda: apply_updates(
        TX, compute_grads(loss, params, state), params, state
      )

    return lax.switch(task, [update_with(k) for k in (1.0, 2.0, 3.0)])

  return step, (jnp.int32(1), PARAMS, TX.init(PARAMS), BATCH)


def _make_delayed_step():
  """The gradients of one iteration are applied in the next one."""

  def epoch(params, state, batch):
    def body(carry, _):
      params, state, grads = carry
      new_grads = ols.grad(loss_fn, state)(params, batch)
      return (*apply_updates(TX, grads, params, state), new_grads), None

    carry = params, state, jax.tree.map(jnp.zeros_like, params)
    return lax.scan(body, carry, length=3)[0]

  return jit_step(epoch)


def _make_waiting_epoch():
  """``update`` runs in every third iteration."""

  def epoch(params, state, batch):
    def step(carry, i):
      grads = ols.grad(loss_fn, carry[1])(carry[0], batch)
      update = lambda: apply_updates(TX, grads, *carry)
      return lax.cond(i % 3 == 0, update, lambda: carry), None

    return lax.scan(step, (params, state), jnp.arange(4))[0]

  return jit_step(epoch)


def _make_own_state_step():
  """The loss scale is an argument that no name identifies."""

  @jax.jit
  def step(params, scale, batch):
    state = ols.set_loss_scale(TX.init(params), scale)
    params, state = train(params, state, batch)
    return params, state.loss_scale_state.loss_scale

  return step, (PARAMS, jnp.float32(64.0), BATCH)


def _make_ref_step():
  """The state of the optimizer is in mutable arrays."""
  refs = jax.tree.map(jax.new_ref, TX.init(PARAMS))

  def step(params, refs, batch):
    state = jax.tree.map(lambda ref: ref[...], refs)
    params, state = train(params, state, batch)
    for ref, x in zip(*map(jax.tree.leaves, (refs, state)), strict=True):
      ref[...] = x
    return params

  return step, (PARAMS, refs, BATCH)


def _make_while_step():
  """The number of steps is an argument."""
  step, args = make_step()

  @jax.jit
  def steps(params, state, batch, count):
    body = lambda _, carry: step(*carry, batch)
    return lax.fori_loop(0, count, body, (params, state))

  return steps, (*args, jnp.int32(2))


_WRITE = "ols.value_and_grad(loss_fn, opt_state)"

MISTAKES = {
  ("state of another optimizer scaled", _WRITE): {
    "state of the other optimizer": functools.partial(
      make_gan_step, swapped=True
    ),
    "one loss for two optimizers": _make_optimizers_step,
  },
  ("that a constant loss scale scaled", "inside of the step"): {
    "gradients of the first state": prepare_step(
      lambda loss, params, state: compute_grads(loss, params, TX.init(PARAMS))
    )
  },
  (
    "update does not use the loss-scale state among the arguments",
    "Call tx.init once, before training",
  ): {
    "new state in each step": _make_new_state_step,
    "update of the first state": prepare_step(
      update=lambda tx, grads, params, state: apply_updates(
        tx, grads, params, tx.init(PARAMS)
      )
    ),
  },
  ("is NaN, and stays so", "ols.select_if_applied(opt_state, new, old)"): {
    "average of gradients": functools.partial(
      _make_average_step, lambda state, new, old: new
    )
  },
  ("is NaN, and stays so", "ols.with_loss_scaling(optax.chain("): {
    f"{name} in front of the wrapper": prepare_step(
      tx=optax.chain(transformation, TX)
    )
    for name, transformation in (
      ("momentum", optax.trace(0.9)),
      ("average", optax.ema(0.9)),
      ("second moment", optax.scale_by_rms()),
    )
  },
  ("one loss-scale state scaled and another one", "Pass the same opt_state"): {
    "unscaled with the other state": _make_other_unscaling_step
  },
  ("MultiSteps is around with_loss_scaling", "Put it inside"): {
    "MultiSteps around the wrapper": prepare_step(
      lambda loss, params, state: compute_grads(
        loss, params, state.inner_opt_state
      ),
      tx=optax.MultiSteps(TX, 4).gradient_transformation(),
    )
  },
  ("its scale is 64 in place of 1", "Return it unchanged"): {
    "state of the first member": _make_member_step
  },
}

LOOKALIKES = {
  "two optimizers": make_gan_step,
  "one of three tasks": _make_task_step,
  "delayed update": _make_delayed_step,
  "update in every third iteration": _make_waiting_epoch,
  "scale without a name": _make_own_state_step,
  "state in a Ref": _make_ref_step,
  "state of leaves": _make_leaves_step,
  **{name: prepare_step(tx=make_tx(policy=x)) for name, x in POLICIES.items()},
  "selected average of gradients": functools.partial(
    _make_average_step, ols.select_if_applied
  ),
  "scan of steps": prepare_wrapped(scan_steps),
  "population": lambda: make_population(*make_step()),
}

UNCHECKED = {
  "constant state": (
    functools.partial(make_closed_step, 64.0),
    "since its loss scale is not among its arguments",
  ),
  "steps in a while loop": (_make_while_step, "pass a single step instead"),
}
