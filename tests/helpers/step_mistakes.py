"""Mistakes in the wiring of a training step, and steps that resemble them.

``check_step`` must find one problem in each step of ``MISTAKES``, and none in
those of ``LOOKALIKES`` and ``UNCHECKED``. For the latter, it must say what it
could not check. A step is made when a test calls the function in its row.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import equinox as eqx
from flax import nnx
from flax.training import train_state
import jax
from jax import lax
from jax.experimental import io_callback
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from helpers import train_steps
from helpers.sharding import make_mesh, P
from helpers.train_steps import (
  accumulate,
  apply_updates,
  BATCH,
  compute_grads,
  compute_scaled_grads,
  compute_unscaled_grads,
  loss_fn,
  make_population,
  map_grads,
  PARAMS,
  POLICY,
  scan_steps,
  where,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.sgd(0.1), POLICY)
DEFAULT = ols.DynamicLossScale()
HALF_PARAMS = {"w": np.full((4, 4), 0.75, np.float16)}
_FIRST_PARAMS = {"w": jnp.eye(4)}
TWO_LAYERS = {**PARAMS, "head": np.eye(4, dtype=np.float32)}


class Row(NamedTuple):
  """A step, and what ``check_step`` must say of it.

  Attributes:
    make: a function that returns the step and its arguments.
    cause: a part of the cause of the problem, or of what is not checked.
    fix: a part of the fix of the problem.
  """

  make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
  cause: str
  fix: str = ""


def _step(*args, **kwargs):
  return functools.partial(train_steps.make_step, *args, **kwargs)


def _returns(make_result, **kwargs):
  """Return a function that makes a step with another result."""
  return _step(
    compute_grads, lambda old, new, finite: make_result(old, new), **kwargs
  )


# Gradients.


def _add_grads(change, other, *, unscaled=False):
  """Return a function that adds other gradients to those of a scaled loss."""

  def differentiate(loss, params, opt_state):
    first = (compute_scaled_grads if unscaled else compute_grads)(
      loss, params, opt_state
    )
    second = other(loss, params, opt_state)
    total = jax.tree.map(lambda a, b: a + change * b, first, second)
    return ols.unscale_grads(total, opt_state) if unscaled else total

  return differentiate


def _penalty(params):
  return 1e-2 * jnp.sum(params["w"] ** 2)


def _penalty_grads(loss, params, opt_state):
  return jax.grad(_penalty)(params)


def _penalty_after_scaling(loss, params, opt_state):
  scaled = lambda p: ols.scale_loss(loss(p), opt_state) + _penalty(p)
  return ols.unscale_grads(jax.grad(scaled)(params), opt_state)


def unscale_twice(loss, params, opt_state):
  grads = compute_grads(loss, params, opt_state)
  return ols.unscale_grads(grads, opt_state)


def _accumulate_in_while_loop(differentiate):
  """Do the same in a loop whose number of iterations is not known."""

  def accumulated(loss, params, opt_state):
    def add(_, total):
      grads = differentiate(loss, params, opt_state)
      return jax.tree.map(jnp.add, total, grads)

    zeros = jax.tree.map(jnp.zeros_like, params)
    count = jnp.where(params["w"][0, 0] > -9e9, 3, 2)
    return lax.fori_loop(0, count, add, zeros)

  return accumulated


def _sharpness_aware(differentiate_second):
  def differentiate(loss, params, opt_state):
    grads = compute_grads(loss, params, opt_state)
    moved = jax.tree.map(lambda p, g: p + 0.05 * g, params, grads)
    return differentiate_second(loss, moved, opt_state)

  return differentiate


def _scaled_by_hand(loss, params, opt_state):
  """Without a tag on the gradients."""
  scale = ols.get_loss_scale_state(opt_state).loss_scale
  grads = jax.grad(lambda params: scale * loss(params))(params)
  return jax.tree.map(lambda g: g / scale, grads)


def _penalized_gradient(loss, params, opt_state):
  """A gradient of a gradient, each of a scaled loss."""

  def penalized(params):
    norm = optax.tree.norm(compute_grads(loss, params, opt_state))
    return loss(params) + 1e-3 * norm

  return compute_grads(penalized, params, opt_state)


def _retry_with_lower_scale(loss, params, opt_state):
  grads = compute_grads(loss, params, opt_state)
  scale = opt_state.loss_scale_state.loss_scale
  lower = ols.set_loss_scale(opt_state, scale / 2**8)
  others = compute_grads(loss, params, lower)
  return where(ols.all_finite(grads), grads, others)


def _compress(g):
  """Return a gradient as int8 with a separate scale."""
  unit = jnp.max(jnp.abs(g)) / 127
  return jnp.round(g / unit).astype(jnp.int8) * unit


def _clip_by_norm(*args):
  grads = compute_grads(*args)
  norm = optax.tree.norm(grads)
  return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)


def _unscaled_head(loss, params, opt_state):
  """One of two layers is differentiated without a loss scale."""
  loss_of = lambda name: lambda x: loss({**params, name: x})
  first = compute_grads(loss_of("w"), params["w"], opt_state)
  return {"w": first, "head": jax.grad(loss_of("head"))(params["head"])}


def _two_layers_loss_fn(params, batch):
  hidden = jnp.tanh(batch @ params["w"])
  return jnp.mean((hidden @ params["head"] - 1) ** 2)


_two_layers = functools.partial(
  _step, params=TWO_LAYERS, loss_fn=ols.autocast(_two_layers_loss_fn)
)


def _clamped_loss(loss, params, opt_state):
  """Cut off the scaled loss at the largest number of float16."""
  scaled = lambda p: jnp.minimum(ols.scale_loss(loss(p), opt_state), 65_504.0)
  return ols.unscale_grads(jax.grad(scaled)(params), opt_state)


def _loss_over_itself(loss, params, opt_state):
  def scaled(params):
    value = ols.scale_loss(loss(params), opt_state)
    return value / lax.stop_gradient(value)

  return ols.unscale_grads(jax.grad(scaled)(params), opt_state)


@jax.custom_vjp
def _square_error(out):
  return jnp.mean((out - 1) ** 2)


# The rule ignores the cotangent.
_square_error.defvjp(
  lambda out: (_square_error(out), out),
  lambda out, cotangent: (2 * (out - 1) / out.size,),
)


# Several optimizers and states.


def _make_gan_step(*, swapped=False, returns_old=False):
  """Two optimizers, each with its loss scale."""

  @jax.jit
  def step(generator, critic, state, other, batch):
    scale, other_scale = (other, state) if swapped else (state, other)
    grads = ols.grad(loss_fn, scale)(generator, batch)
    generator, state = apply_updates(TX, grads, generator, state)
    grads = ols.grad(loss_fn, other_scale)(critic, batch)
    critic, new = apply_updates(TX, grads, critic, other)
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
    grads = ols.grad(loss_fn, other)(others, batch)
    return params, state, *apply_updates(TX, grads, others, other)

  state = TX.init(PARAMS)
  return step, (PARAMS, PARAMS, state, ols.set_loss_scale(state, 2.0), BATCH)


def _make_shared_state_step():
  """Two networks have one optimizer with one state."""
  tx = ols.with_loss_scaling(optax.adam(0.1), POLICY)

  @jax.jit
  def step(params, others, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    params, state = apply_updates(tx, grads, params, state)
    grads = ols.grad(loss_fn, state)(others, batch)
    return params, *apply_updates(tx, grads, others, state)

  return step, (PARAMS, {"w": PARAMS["w"].T}, tx.init(PARAMS), BATCH)


def _make_optimizers_step():
  """One loss for a list of optimizers."""

  def step(all_params, states, batch):
    grads = ols.grad(loss_fn, states[0])(all_params[0], batch)
    pairs = zip(all_params, states, strict=True)
    return [apply_updates(TX, grads, *pair) for pair in pairs]

  return step, ([PARAMS] * 2, [TX.init(PARAMS)] * 2, BATCH)


def _make_first_state_step(*, grads_use_it=False, update_uses_it=False):
  """The step closes over the state of the first step."""
  first = TX.init(PARAMS)

  @jax.jit
  def step(params, state, batch):
    grads = ols.grad(loss_fn, first if grads_use_it else state)(params, batch)
    return apply_updates(TX, grads, params, first if update_uses_it else state)

  return step, (PARAMS, first, BATCH)


def _make_new_state_step():
  """Each step initializes the state again."""

  def step(params, state, batch):
    state = TX.init(params)
    grads = ols.grad(loss_fn, state)(params, batch)
    return apply_updates(TX, grads, params, state)

  return step, (PARAMS, TX.init(PARAMS), BATCH)


def _make_leaves_step(differentiate):
  """The state is a list of arrays, as from a checkpoint."""
  leaves, structure = jax.tree.flatten(TX.init(PARAMS))

  @jax.jit
  def step(params, leaves, batch):
    state = jax.tree.unflatten(structure, leaves)
    grads = differentiate(lambda p: loss_fn(p, batch), params, state)
    params, state = apply_updates(TX, grads, params, state)
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


def _make_statistics_step(*, uses_old_state):
  """The step selects a running mean by whether it was applied."""

  def step(params, mean, state, batch):
    old_state = state
    grads = ols.grad(loss_fn, state)(params, batch)
    params, state = apply_updates(TX, grads, params, state)
    mean = ols.select_if_finite(
      old_state if uses_old_state else state,
      0.9 * mean + 0.1 * jnp.mean(batch, 0),
      mean,
    )
    return params, mean, state

  return step, (PARAMS, np.zeros(4, np.float32), TX.init(PARAMS), BATCH)


def _make_member_step():
  """An ensemble that returns the loss scale of its first member."""

  def take_first(new):
    state = jax.tree.map(
      lambda x: jnp.broadcast_to(x[:1], x.shape), new[1].loss_scale_state
    )
    return new[0], new[1]._replace(loss_scale_state=state)

  step, args = make_population(*train_steps.make_step())
  return lambda *args: take_first(step(*args)), args


def _make_nnx_step_under_jax_jit():
  """`jax.jit` drops what changes in the model and in the optimizer."""
  step, args = _make_nnx_step(puts_back=False)
  graph, state = nnx.split(args[:2])

  @jax.jit
  def jitted(state, x):
    step.__wrapped__(*nnx.merge(graph, state), x)
    return jnp.sum(x)

  return jitted, (state, BATCH)


# Results.


_IDENTITY = optax.identity()


def _as_train_state(params, state):
  return train_state.TrainState(0, None, params, _IDENTITY, state)


class _EquinoxState(eqx.Module):
  params: Any
  opt_state: Any


def _keep_inner_state(old, new):
  return new[0], new[1]._replace(inner_state=old[1].inner_state)


def _put_back_scale(new_state, state):
  return new_state._replace(loss_scale_state=state.loss_scale_state)


def put_back_all(old, new, finite):
  return where(finite, new, old)


_puts_back = functools.partial(_step, compute_grads, put_back_all)


def _adjust_again(old, new):
  state = new[1].loss_scale_state
  state = POLICY.adjust(state, state.last_finite)
  return new[0], new[1]._replace(loss_scale_state=state)


def _round_by_bits(params):
  bits = lax.bitcast_convert_type(params["w"], jnp.uint32)
  return {"w": lax.bitcast_convert_type(bits & ~jnp.uint32(1), jnp.float32)}


def _quantize(params):
  return {"w": jnp.round(params["w"] * 100).astype(jnp.int8)}


def _subtract(old, new):
  # The new parameters minus twice the update.
  return jax.tree.map(lambda a, b: 2 * a - b, old[0], new[0]), new[1]


def _average(old, new):
  return optax.incremental_update(new[0], old[0], 0.01)


def _add_in_half(old, new):
  half = lambda x: x.astype(jnp.float16)
  add = lambda p, new: (half(p) + half(new - p)).astype(jnp.float32)
  return jax.tree.map(add, old[0], new[0]), new[1]


def _limit_scale(limit, bound):
  """Return a function that limits the loss scale after a step."""

  def make_result(old, new):
    scale = new[1].loss_scale_state.loss_scale
    return new[0], ols.set_loss_scale(new[1], limit(scale, bound))

  return make_result


def _keep_head(old, new):
  return {**new[0], "head": old[0]["head"]}, new[1]


def _keep_head_sometimes(old, new):
  """As a schedule does, which another step does not."""
  is_late = jnp.sum(old[0]["w"]) > 1e9
  head = jnp.where(is_late, new[0]["head"], old[0]["head"])
  return {**new[0], "head": head}, new[1]


def _project(old, new):
  return jax.tree.map(lambda x: x / jnp.linalg.norm(x), new[0]), new[1]


def _make_first_state_epoch():
  """Each iteration starts from the state of the epoch."""
  step, args = train_steps.make_step()

  def epoch(params, state, batch):
    def body(carry, _):
      return step(carry[0], state, batch), None

    return lax.scan(body, (params, state), length=3)[0]

  return jax.jit(epoch), args


def _make_epoch(combine):
  step, args = train_steps.make_step()
  return scan_steps(step, combine), args


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


def _fill_params(num_large):
  """Return float16 parameters of which some are too large for an update."""
  is_large = np.arange(16).reshape(4, 4) < num_large
  return {"w": np.where(is_large, 0.75, 0).astype(np.float16)}


_lost = functools.partial(
  _step, params=HALF_PARAMS, loss_fn=train_steps.half_loss_fn
)


def _make_scalar_step():
  """The only parameter is a scalar."""
  loss = lambda w, x: jnp.mean(w * x**2).astype(jnp.float32)
  return train_steps.make_step(
    loss_fn=loss, params=jnp.float16(0.75), inner=optax.sgd(1e-9)
  )


def _make_masters_step():
  """The step keeps copies in float32, which receive the updates."""
  tx = ols.with_loss_scaling(optax.adam(1e-5))

  def step(params, state, masters, batch):
    grads = ols.grad(train_steps.half_loss_fn, state)(params, batch)
    masters, state = apply_updates(tx, grads, masters, state)
    return optax.tree.cast(masters, jnp.float16), state, masters

  masters = optax.tree.cast(HALF_PARAMS, jnp.float32)
  return step, (HALF_PARAMS, tx.init(masters), masters, BATCH)


def _embedding_loss(params, ids):
  rows = params["table"][ids].astype(jnp.float32)
  return jnp.mean((rows - 1) ** 2)


# Devices.


def _make_devices_step(*, averages=True, shape=(4,), axes=("data",)):
  """Each device has a part of the batch; the loss is a metric."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), axis_name="data")

  def step(params, state, batch):
    loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
    grads = lax.pmean(grads, "data") if averages else grads
    return *apply_updates(tx, grads, params, state), loss

  on_devices = jax.shard_map(
    step,
    mesh=make_mesh(shape, axes),
    in_specs=(P(), P(), P("data")),
    out_specs=P(),
    check_vma=False,
  )
  return on_devices, (PARAMS, tx.init(PARAMS), BATCH)


def make_shards_step(axis_name):
  """As in ZeRO: each device updates its own rows, one of which overflows."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), axis_name=axis_name)

  def update_shard(rows, state, x):
    loss_of_rows = lambda rows: jnp.mean(
      (x.astype(jnp.float16) @ rows.astype(jnp.float16)).astype(jnp.float32)
      ** 2
    )
    grads = ols.grad(loss_of_rows, state)(rows)
    return apply_updates(tx, grads, rows, state)

  step = jax.shard_map(
    update_shard,
    mesh=make_mesh((2,), ("i",)),
    in_specs=(P("i"), P(), P(None, "i")),
    out_specs=(P("i"), P()),
    check_vma=False,
  )
  w, x = np.eye(4, dtype=np.float32), np.ones((4, 4), np.float32)
  x[:, 0] = 4000
  return step, (w, ols.set_loss_scale(tx.init(w), 2.0**5), x)


# Steps that resemble a mistake.


def make_task_step():
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


def _make_frozen_step():
  """The gradient of the frozen part overflows, and is not used."""
  loss = ols.autocast(
    lambda p, x: jnp.mean((x @ p["w"] + 1e30 * p["frozen"]) ** 2)
  )

  def differentiate(_, params, state):
    params = params | {"frozen": jnp.zeros(4)}
    return {"w": ols.grad(loss, state)(params, BATCH)["w"]}

  return train_steps.make_step(differentiate)


def _make_delayed_step():
  """The gradients of one iteration are applied in the next one."""

  @jax.jit
  def epoch(params, state, batch):
    def body(carry, _):
      params, state, grads = carry
      new_grads = ols.grad(loss_fn, state)(params, batch)
      return (*apply_updates(TX, grads, params, state), new_grads), None

    carry = params, state, jax.tree.map(jnp.zeros_like, params)
    return lax.scan(body, carry, length=3)[0]

  return epoch, (PARAMS, TX.init(PARAMS), BATCH)


def make_delayed_actor_step():
  """The actor waits in every second step, as in TD3."""

  def train(params, state, batch):
    return apply_updates(
      TX, ols.grad(loss_fn, state)(params, batch), params, state
    )

  @jax.jit
  def step(actor, critic, state, other, batch, i):
    new_actor = lax.cond(
      i % 2 == 0, lambda: train(actor, state, batch), lambda: (actor, state)
    )
    return new_actor, train(critic, other, batch)

  state = TX.init(PARAMS)
  return step, (PARAMS, PARAMS, state, state, BATCH, jnp.int32(1))


def _make_waiting_epoch():
  """``update`` runs in every third iteration."""

  @jax.jit
  def epoch(params, state, batch):
    def step(carry, i):
      grads = ols.grad(loss_fn, carry[1])(carry[0], batch)
      update = lambda: apply_updates(TX, grads, *carry)
      return lax.cond(i % 3 == 0, update, lambda: carry), None

    return lax.scan(step, (params, state), jnp.arange(4))[0]

  return epoch, (PARAMS, TX.init(PARAMS), BATCH)


def _make_own_state_step():
  """The loss scale is an argument that no name identifies."""

  @jax.jit
  def step(params, scale, batch):
    state = ols.set_loss_scale(TX.init(params), scale)
    grads = ols.grad(loss_fn, state)(params, batch)
    params, state = apply_updates(TX, grads, params, state)
    return params, state.loss_scale_state.loss_scale

  return step, (PARAMS, jnp.float32(64.0), BATCH)


class _Hyperparameters(NamedTuple):
  loss_scale: Any


def _make_weighted_step():
  """An argument called ``loss_scale`` is the weight of the loss."""

  @jax.jit
  def step(params, state, hyperparameters, batch):
    weighted = lambda p: hyperparameters.loss_scale * loss_fn(p, batch)
    grads = compute_grads(weighted, params, state)
    return apply_updates(TX, grads, params, state)

  weight = _Hyperparameters(jnp.float32(0.5))
  return step, (PARAMS, TX.init(PARAMS), weight, BATCH)


def _draw_batches():
  """Each run of the step has another batch, from the host."""
  numbers = np.random.default_rng(0)
  draw = lambda: numbers.normal(size=BATCH.shape).astype(np.float32)
  shape = jax.ShapeDtypeStruct(BATCH.shape, jnp.float32)

  def differentiate(loss, params, state):
    batch = io_callback(draw, shape, ordered=True)
    return ols.grad(loss_fn, state)(params, batch)

  return train_steps.make_step(differentiate)


def _make_metrics_step(compute_metrics):
  """Return a step that returns metrics and updates statistics."""

  @jax.jit
  def step(params, state, mean, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    new = apply_updates(TX, grads, params, state)
    return *new, *compute_metrics(mean, batch[0])

  return step, (PARAMS, TX.init(PARAMS), jnp.zeros(4), BATCH)


# Steps of which a part is not checked.


def _make_ref_step():
  """The state of the optimizer is in mutable arrays."""
  refs = jax.tree.map(jax.new_ref, TX.init(PARAMS))

  def step(params, refs, batch):
    state = jax.tree.map(lambda ref: ref[...], refs)
    grads = ols.grad(loss_fn, state)(params, batch)
    params, state = apply_updates(TX, grads, params, state)
    for ref, x in zip(*map(jax.tree.leaves, (refs, state)), strict=True):
      ref[...] = x
    return params

  return step, (PARAMS, refs, BATCH)


def _make_closed_step(policy, differentiate=compute_grads):
  """The state of the optimizer is not an argument."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), policy)
  state = tx.init(PARAMS)

  def step(params, batch):
    grads = differentiate(lambda p: loss_fn(p, batch), params, state)
    return apply_updates(tx, grads, params, state)

  return step, (PARAMS, BATCH)


def _make_loss_step():
  """A part of a step, which returns neither parameters nor a state."""

  def step(params, state, batch):
    loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
    TX.update(grads, state)
    return loss

  return step, (PARAMS, TX.init(PARAMS), BATCH)


def _make_update_step():
  """The gradients are arguments of the step."""
  step = lambda grads, state: TX.update(grads, state)
  return step, (PARAMS, TX.init(PARAMS))


def _make_while_step():
  """The number of steps is an argument."""
  step, args = train_steps.make_step()

  @jax.jit
  def steps(params, state, batch, count):
    body = lambda _, carry: step(*carry, batch)
    return lax.fori_loop(0, count, body, (params, state))

  return steps, (*args, jnp.int32(2))


def _raise_if(find_fault, choose=lambda old, new: new):
  def make_result(old, new, finite):
    return eqx.error_if(choose(old, new), find_fault(finite), "planted")

  return _step(compute_grads, make_result)


def _guarded(is_wanted):
  """Return a function that makes a step with a branch around ``update``."""

  def guard(update, old, grads):
    return lax.cond(is_wanted(grads), update, lambda: old)

  return _step(guard=guard)


_WRITE = "ols.value_and_grad(loss_fn, opt_state)"
_RETURN = "updates, opt_state = tx.update(grads, opt_state, params)"
_APPLY = "params = optax.apply_updates(params, updates)"
_AVERAGE = "jax.lax.pmean(grads, axis_name)"

# The steps with each mistake, by a part of its cause and of its fix.
_BY_CAUSE = {
  ("gradients of an unscaled loss", _WRITE): {
    "unscaled loss": _step(compute_unscaled_grads),
    "unscaled loss with scaled gradients expected": _step(
      compute_unscaled_grads, grads_are_scaled=True
    ),
    "unscaled losses of micro-batches": _step(
      accumulate(compute_unscaled_grads)
    ),
    "unscaled loss with a constant state": functools.partial(
      _make_closed_step, POLICY, compute_unscaled_grads
    ),
    "unscaled losses in a while loop": _step(
      _accumulate_in_while_loop(compute_unscaled_grads)
    ),
  },
  ("gradients of an unscaled loss (head)", _WRITE): {
    "unscaled loss of one layer": _two_layers(_unscaled_head)
  },
  ("state of another optimizer scaled", _WRITE): {
    "state of the other optimizer": functools.partial(
      _make_gan_step, swapped=True
    ),
    "one loss for two optimizers": _make_optimizers_step,
  },
  ("that a constant loss scale scaled", "inside of the step"): {
    "gradients of the first state": functools.partial(
      _make_first_state_step, grads_use_it=True
    )
  },
  ("never unscaled", "ols.unscale_grads(grads"): {
    "never unscaled": _step(compute_scaled_grads)
  },
  ("double if the loss scale halves", "Drop unscale_grads"): {
    "unscaled twice": _step(unscale_twice),
    "loss over itself": _step(_loss_over_itself),
    "unscaled twice with a state of leaves": functools.partial(
      _make_leaves_step, unscale_twice
    ),
  },
  ("clipped while they were scaled", "Clip inside of with_loss_scaling"): {
    "clipped while scaled": _step(
      compute_scaled_grads,
      wrap_tx=lambda tx: optax.chain(optax.clip_by_global_norm(1e-3), tx),
      grads_are_scaled=True,
    )
  },
  ("cast to half precision after they were unscaled", "float32"): {
    "cast to float16 after unscaling": _step(
      map_grads(lambda g: g.astype(jnp.float16))
    )
  },
  # At the default scale such a term is 2**15 times too small, so that half of
  # the scale changes little.
  ("depend on the loss scale", "Change them after"): {
    "penalty after scaling": _step(_penalty_after_scaling, policy=DEFAULT),
    "penalty before unscaling": _step(
      _add_grads(1, _penalty_grads, unscaled=True), policy=DEFAULT
    ),
    "noise before unscaling": _step(
      _add_grads(1e-2, lambda *_: {"w": np.eye(4)}, unscaled=True),
      policy=DEFAULT,
    ),
  },
  (
    "An overflow is hidden from update",
    "Pass the gradients to update unchanged",
  ): {
    "nan_to_num": _step(map_grads(jnp.nan_to_num)),
    "nan_to_num of micro-batches": _step(accumulate(map_grads(jnp.nan_to_num))),
    "mask of finite gradients": _step(
      map_grads(lambda g: jnp.where(jnp.isfinite(g), g, 0))
    ),
    "mask of small gradients": _step(
      map_grads(lambda g: jnp.where(jnp.abs(g) < 1e3, g, 0))
    ),
    # This makes an inf finite, but not a NaN.
    "clipped gradients": _step(
      map_grads(lambda g: jnp.clip(g, -1, 1)), batch=BATCH**2
    ),
    "zero_nans and clip": _step(
      wrap_tx=lambda tx: optax.chain(optax.zero_nans(), optax.clip(1.0), tx)
    ),
  },
  (
    "update does not run if the gradients overflow",
    "Call update outside of the branch",
  ): {
    "branch on finite gradients": _guarded(ols.all_finite),
    "branch on a small norm": _guarded(
      lambda grads: optax.tree.norm(grads) < 1e6
    ),
    "apply_if_finite": _step(wrap_tx=lambda tx: optax.apply_if_finite(tx, 5)),
  },
  ("skips this step although its gradients are finite", "grads_finite="): {
    "skipped by an argument": _step(update_kwargs={"grads_finite": False}),
    "skipped by an argument of float32": _step(
      update_kwargs={"grads_finite": np.float32(0)}
    ),
  },
  ("returns an old loss-scale state", _RETURN): {
    "old state": _returns(lambda old, new: (new[0], old[1])),
    "train state with the old state": _returns(
      lambda old, new: _as_train_state(new[0], old[1])
    ),
    "Equinox module with the old state": _returns(
      lambda old, new: _EquinoxState(new[0], old[1])
    ),
    "old state, and metrics of the new one": _returns(
      lambda old, new: (new[0], old[1], ols.loss_scale_metrics(new[1]))
    ),
    "old scale in the new state": _returns(
      lambda old, new: (new[0], _put_back_scale(new[1], old[1]))
    ),
    "old state of the second optimizer": functools.partial(
      _make_gan_step, returns_old=True
    ),
    "old state, and an error after an overflow": _raise_if(
      lambda finite: ~finite, lambda old, new: (new[0], old[1])
    ),
    "old state in the carry of a scan": functools.partial(
      _make_epoch, lambda old, new: (new[0], old[1])
    ),
  },
  ("does not return the opt_state", _RETURN): {
    "no state": _returns(lambda old, new: new[0]),
    "list of parameters": _returns(lambda old, new: jax.tree.leaves(new[0])),
  },
  ("returns an old state of the inner optimizer", _RETURN): {
    "old inner state": _returns(_keep_inner_state, inner=optax.adam(1e-2))
  },
  ("returns a constant loss scale", "Call ols.set_loss_scale once, before"): {
    "constant scale": _returns(
      lambda old, new: (new[0], ols.set_loss_scale(new[1], 2.0**10))
    )
  },
  (
    "update does not use the loss-scale state among the arguments",
    "Call tx.init once, before training",
  ): {
    "new state in each step": _make_new_state_step,
    "update of the first state": functools.partial(
      _make_first_state_step, update_uses_it=True
    ),
  },
  ("the step adjusts the loss-scale state again", "Drop policy.adjust"): {
    "adjusted twice": _returns(_adjust_again)
  },
  (
    "After an overflow the step returns the old loss-scale state",
    "Return the opt_state",
  ): {
    "all put back": _puts_back(),
    "all put back with headroom": _puts_back(policy="headroom"),
    "all put back with a fixed scale": _puts_back(policy=64.0),
    "all put back with hysteresis": _puts_back(
      policy=ols.DynamicLossScale(2.0**6, hysteresis=3)
    ),
    "all put back in a population": lambda: make_population(*_puts_back()()),
    "train state put back by cond": _step(
      compute_grads,
      lambda old, new, finite: lax.cond(
        finite, lambda: _as_train_state(*new), lambda: _as_train_state(*old)
      ),
    ),
    "state put back by select_if_finite": _returns(
      lambda old, new: (new[0], ols.select_if_finite(new[1], new[1], old[1]))
    ),
    "scale put back": _step(
      compute_grads,
      lambda old, new, finite: (
        new[0],
        where(finite, new[1], _put_back_scale(new[1], old[1])),
      ),
    ),
    "NNX optimizer put back in place": functools.partial(
      _make_nnx_step, puts_back=True
    ),
  },
  ("is NaN, and stays so", "ols.select_if_finite(opt_state, new, old)"): {
    "average of gradients": functools.partial(
      _make_average_step, lambda state, new, old: new
    )
  },
  ("is NaN, and stays so", "ols.with_loss_scaling(optax.chain("): {
    f"{name} in front of the wrapper": _step(
      wrap_tx=functools.partial(optax.chain, transformation)
    )
    for name, transformation in (
      ("momentum", optax.trace(0.9)),
      ("average", optax.ema(0.9)),
      ("second moment", optax.scale_by_rms()),
    )
  },
  ("divided by the loss scale, but the backward pass", "cotangent"): {
    "rule that ignores the cotangent": _step(
      loss_fn=ols.autocast(
        lambda params, x: _square_error(jnp.tanh(x @ params["w"]))
      )
    )
  },
  ("one loss-scale state scaled and another one", "Pass the same opt_state"): {
    "unscaled with the other state": _make_other_unscaling_step
  },
  ("two wrappers are in one chain", "Wrap the chain once"): {
    "two wrappers": _step(
      lambda loss, params, state: compute_grads(loss, params, state[0]),
      wrap_tx=lambda tx: optax.chain(
        ols.with_loss_scaling(optax.clip(1.0)), tx
      ),
    )
  },
  ("something cuts off the scaled loss", "Don't clip the scaled loss"): {
    "clamped loss": _step(_clamped_loss, policy=2.0**20)
  },
  ("returns neither new parameters nor a new opt_state", "use nnx.jit"): {
    "part of a step": _make_loss_step,
    "NNX step under jax.jit": _make_nnx_step_under_jax_jit,
  },
  ("MultiSteps is around with_loss_scaling", "Put it inside"): {
    "MultiSteps around the wrapper": _step(
      lambda loss, params, state: compute_grads(
        loss, params, state.inner_opt_state
      ),
      wrap_tx=lambda tx: optax.MultiSteps(tx, 4).gradient_transformation(),
    )
  },
  ("last of 2 members overflows", "Return the state of each member"): {
    "state of the first member": _make_member_step
  },
  ("returns a higher loss scale than update does", "min_scale="): {
    "scale with a floor": _returns(
      _limit_scale(jnp.maximum, 2.0**15), policy=DEFAULT
    )
  },
  ("starts update from the same state", "Carry the opt_state"): {
    "first state in a loop": _make_first_state_epoch
  },
  ("is selected by whether the step before", "Pass the new state"): {
    "mean selected by the old state": functools.partial(
      _make_statistics_step, uses_old_state=True
    )
  },
  ("next to an average of the new ones", _APPLY): {
    "old parameters next to an average": _returns(
      lambda old, new: (old[0], _average(old, new), new[1])
    )
  },
  ("The loss does not depend on the parameters", "don't close over others"): {
    "loss over the first parameters": _step(
      lambda loss, params, state: compute_grads(loss, _FIRST_PARAMS, state)
    )
  },
  ("was rounded to half precision", "Add in float32"): {
    "sum in float16": _returns(_add_in_half)
  },
  ("share one opt_state", "Call tx.init for each"): {
    "two networks with one state": _make_shared_state_step
  },
  ("does not return parameters that depend on the updates", _APPLY): {
    "old parameters": _returns(lambda old, new: (old[0], new[1])),
    "train state with the old parameters": _returns(
      lambda old, new: _as_train_state(old[0], new[1])
    ),
    "old parameters, and the norm of the new ones": _returns(
      lambda old, new: (old[0], new[1], optax.tree.norm(new[0]))
    ),
    "old parameters after a scan": _step(
      wrap=lambda step: (
        lambda params, *args: (params, scan_steps(step)(params, *args)[1])
      )
    ),
    "no parameters": _returns(lambda old, new: new[1]),
  },
  ("returns the old parameters, although the updates are not", _APPLY): {
    "wrong branch of the parameters": _step(
      compute_grads,
      lambda old, new, finite: (where(finite, old[0], new[0]), new[1]),
    )
  },
  ("returns the old head, although its update is not zero", _APPLY): {
    "old parameters of one layer": _two_layers(
      make_result=lambda old, new, finite: _keep_head(old, new)
    )
  },
  ("The updates are subtracted", "Add them"): {
    "subtracted updates": _returns(_subtract)
  },
  (
    "No parameter changes, although the updates are not zero",
    "Keep the parameters in float32",
  ): {
    "updates lost in float16": _lost(inner=optax.sgd(1e-9)),
    "updates of Adam lost in float16": _lost(inner=optax.adam(1e-7)),
    "updates lost in bfloat16": _lost(
      inner=optax.sgd(1e-9), params=optax.tree.cast(HALF_PARAMS, jnp.bfloat16)
    ),
    "update of a scalar lost": _make_scalar_step,
  },
  ("75% of the updates don't change", "Keep the parameters in float32"): {
    "most updates lost": _lost(inner=optax.adam(1e-4), params=_fill_params(12))
  },
  ("The copies of the result 0/w on different devices", _AVERAGE): {
    "gradients not averaged": functools.partial(
      _make_devices_step, averages=False
    ),
    "gradients not averaged on two axes": functools.partial(
      _make_devices_step, averages=False, shape=(2, 2), axes=("data", "model")
    ),
  },
}
MISTAKES = {
  name: Row(make, *texts)
  for texts, steps in _BY_CAUSE.items()
  for name, make in steps.items()
}

LOOKALIKES = {
  # Gradients.
  "cast to float16 of scaled gradients": _step(
    map_grads(lambda g: g.astype(jnp.float16), compute_scaled_grads),
    grads_are_scaled=True,
  ),
  "two scaled losses and a penalty": _step(
    _add_grads(0.5, _add_grads(1, _penalty_grads))
  ),
  "scaled by hand": _step(_scaled_by_hand),
  "sharpness-aware": _step(_sharpness_aware(compute_grads)),
  "sharpness-aware by hand": _step(_sharpness_aware(_scaled_by_hand)),
  "gradient of a gradient": _step(_penalized_gradient),
  "clipped by norm": _step(_clip_by_norm),
  "compressed gradients": _step(map_grads(_compress)),
  "other names of checkpoints": _step(
    map_grads(lambda g: jax.ad_checkpoint.checkpoint_name(g, "mine"))
  ),
  "micro-batches in a while loop": _step(
    _accumulate_in_while_loop(compute_grads)
  ),
  "retry with a lower scale": _step(_retry_with_lower_scale),
  "frozen part that overflows": _make_frozen_step,
  "float32 gradients without a scale": _step(
    compute_unscaled_grads,
    loss_fn=lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2),
  ),
  "float32 gradients that never overflow": _step(
    loss_fn=lambda params, x: jnp.mean((x @ params["w"]) ** 2)
  ),
  "batches from a callback": _draw_batches,
  "argument called loss_scale": _make_weighted_step,
  # States.
  "two optimizers": _make_gan_step,
  "delayed update": _make_delayed_step,
  "update in every third iteration": _make_waiting_epoch,
  "scale without a name": _make_own_state_step,
  "state in a Ref": _make_ref_step,
  "state of leaves": functools.partial(_make_leaves_step, compute_grads),
  "headroom": _step(policy="headroom"),
  "fixed scale": _step(policy=64.0),
  "hysteresis": _step(policy=ols.DynamicLossScale(2.0**6, hysteresis=3)),
  "selected mean": functools.partial(
    _make_statistics_step, uses_old_state=False
  ),
  "selected average of gradients": functools.partial(
    _make_average_step, ols.select_if_finite
  ),
  "momentum inside of the wrapper": _step(
    inner=optax.chain(optax.trace(0.9), optax.sgd(0.1))
  ),
  # Results.
  "train state": _returns(lambda old, new: _as_train_state(*new)),
  "Equinox module": _returns(lambda old, new: _EquinoxState(*new)),
  "dict with metrics": _returns(
    lambda old, new: {
      "params": new[0],
      "opt": [new[1]],
      "metrics": ols.loss_scale_metrics(new[1]),
    }
  ),
  "leaves": _returns(lambda old, new: jax.tree.leaves(new)),
  "selected parameters": _step(
    compute_grads,
    lambda old, new, finite: (where(finite, new[0], old[0]), new[1]),
  ),
  "state of the best step, too": _step(
    compute_grads,
    lambda old, new, finite: (new, where(finite & False, new, old)),
  ),
  "capped scale": _returns(_limit_scale(jnp.minimum, 2.0**20)),
  "flat parameters": _returns(
    lambda old, new: (jax.flatten_util.ravel_pytree(new[0])[0], new[1])
  ),
  "parameters of an ensemble": _returns(lambda old, new: (new, old[0])),
  "projected parameters": _returns(_project),
  "parameters that are rounded by their bits": _returns(
    lambda old, new: (_round_by_bits(new[0]), new[1])
  ),
  "quantized parameters": _returns(
    lambda old, new: (_quantize(new[0]), new[1])
  ),
  "parameters at a bound": _step(
    compute_grads,
    lambda old, new, finite: (
      jax.tree.map(lambda x: jnp.clip(x, -0.1, 0.1), new[0]),
      new[1],
    ),
    loss_fn=ols.autocast(lambda params, x: jnp.mean(x @ params["w"])),
    params={"w": np.full((4, 4), -0.1, np.float32)},
    batch=BATCH**2,
  ),
  "parameters that wait": _two_layers(
    make_result=lambda old, new, finite: _keep_head_sometimes(old, new)
  ),
  "metric of the shape of a parameter that is NaN": _returns(
    lambda old, new: (
      new,
      {"recall": 0 * jnp.log(-jnp.ones_like(old[0]["w"]))},
    )
  ),
  "metric that is inf": functools.partial(
    _make_metrics_step, lambda mean, x: (jnp.float32(jnp.inf), mean)
  ),
  "metrics that are inf": functools.partial(
    _make_metrics_step, lambda mean, x: (jnp.full(5, jnp.inf), mean)
  ),
  "NNX optimizer in place": functools.partial(_make_nnx_step, puts_back=False),
  "scan of steps": functools.partial(_make_epoch, lambda old, new: new),
  "population": lambda: make_population(*train_steps.make_step()),
  "no error after an overflow": _raise_if(lambda finite: jnp.array(False)),
  # Updates that are zero, or much smaller than the parameters.
  "warm-up in float16": _lost(
    inner=optax.sgd(optax.linear_schedule(0.0, 0.1, 100))
  ),
  "first micro-batch in float16": _lost(
    inner=optax.MultiSteps(optax.sgd(0.1), 4)
  ),
  "few updates lost": _lost(inner=optax.adam(1e-4), params=_fill_params(4)),
  "copies in float32": _make_masters_step,
  "unused rows of a table": _step(
    loss_fn=_embedding_loss,
    params={"table": np.full((64, 4), 0.75, np.float16)},
    batch=np.array([3, 5]),
    inner=optax.sgd(1.0),
  ),
  "stacked updates of a loop": _lost(
    inner=optax.sgd(1e-3),
    params={"w": np.array([[0.0]] + [[0.75]] * 3, np.float16) * np.ones(4)},
    wrap=scan_steps,
  ),
  # Devices.
  "averaged gradients": _make_devices_step,
  "averaged gradients on two axes": functools.partial(
    _make_devices_step, shape=(2, 2), axes=("data", "model")
  ),
}

_NOT_TAKEN = "update is in a branch that was not taken"

UNCHECKED = {
  "gradients as arguments": Row(_make_update_step, "how the loss is scaled"),
  "scale by hand": Row(
    _step(
      lambda loss, params, _: jax.grad(lambda p: 1024.0 * loss(p))(params),
      policy=1024.0,
      grads_are_scaled=True,
    ),
    "how the loss is scaled",
  ),
  "constant state": Row(
    functools.partial(_make_closed_step, 64.0),
    "since its loss scale is not among its arguments",
  ),
  "error after an overflow": Row(
    _raise_if(lambda finite: ~finite),
    "after an overflow, since it raises an error",
  ),
  "steps in a while loop": Row(_make_while_step, "pass a single step instead"),
  "branch on gradients that overflow": Row(
    _guarded(lambda grads: ~ols.all_finite(grads)), _NOT_TAKEN
  ),
  "branch that is never taken": Row(
    _guarded(lambda grads: jnp.array(0)), _NOT_TAKEN
  ),
  "updates that are too small for float32": Row(
    _step(
      inner=optax.sgd(1e-12), params={"w": np.full((4, 4), 0.75, np.float32)}
    ),
    "the updates of this step are too small for float32",
  ),
  "updates of zero": Row(
    _step(inner=optax.set_to_zero()), "all updates of this step are zero"
  ),
}
