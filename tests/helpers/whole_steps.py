"""Training steps of every shape, around one model with one bad layer.

Each is a function of a policy, which returns the step, its arguments, and what
the gradient of the loss is given. Float16 loses the differences of the squares
in `centers`, since they are far from zero.
"""

import functools

import equinox as eqx
from flax import nnx
from flax.training import train_state
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from helpers import sharding
import optax_lossscale as ols
from optax_lossscale import _jaxprs

_KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
  "first": jax.random.normal(_KEYS[0], (6, 4)) / 3,
  "centers": 20 + jax.random.normal(_KEYS[1], (8, 4)) / 2,
  "last": jax.random.normal(_KEYS[2], (8, 2)),
}
BATCH = jax.random.normal(_KEYS[3], (8, 6))
SMALL, LARGE = ols.FixedLossScale(2.0**6), ols.FixedLossScale(2.0**40)


def loss_fn(params, batch):
  hidden = 20 + jnp.tanh(batch @ params["first"])
  squares = jnp.sum(hidden**2, 1)[:, None] + jnp.sum(params["centers"] ** 2, 1)
  distances = squares - 2 * hidden @ params["centers"].T
  return jnp.mean((jnp.exp(-distances / 4) @ params["last"]) ** 2)


CAST = ols.autocast(loss_fn)


def gradient(policy):
  """What a report of the gradient alone is given."""
  return ols.grad(CAST, policy.init()), (PARAMS, BATCH)


def step_with(tx, params, state, batch, **kwargs):
  grads = ols.grad(CAST, state)(params, batch)
  updates, state = tx.update(grads, state, params, **kwargs)
  return optax.apply_updates(params, updates), state


def _optax(policy, make=lambda tx: tx, **kwargs):
  tx = make(ols.with_loss_scaling(optax.adam(1e-3), policy, **kwargs))
  return functools.partial(step_with, tx), (PARAMS, tx.init(PARAMS), BATCH)


def plain(policy):
  return _optax(policy)


def jitted(policy):
  step, args = _optax(policy)
  return jax.jit(jax.jit(step)), args


def donated(policy):
  step, args = _optax(policy)
  return jax.jit(step, donate_argnums=(0, 1)), args


def that_returns_a_count(policy):
  step, args = _optax(policy)
  return lambda *args: len(step(*args)), args


def that_returns_nothing(policy):
  step, args = _optax(policy)
  return lambda *args: jax.jit(step)(*args) and None, args


def a_closure(policy):
  step, (params, state, batch) = _optax(policy)
  return jax.jit(lambda params, state: step(params, state, batch)), (
    params,
    state,
  )


def clipped(policy):
  return _optax(policy, max_norm=1e-3)


def with_checked_updates(policy):
  return _optax(policy, check_updates=True)


def with_multi_steps_around(policy):
  return _optax(policy, lambda tx: optax.MultiSteps(tx, 1))


def with_multi_steps_inside(policy):
  inner = optax.MultiSteps(optax.adam(1e-3), 2)
  tx = ols.with_loss_scaling(inner, policy)
  return functools.partial(step_with, tx), (PARAMS, tx.init(PARAMS), BATCH)


def by_hand(policy):
  tx = ols.with_loss_scaling(optax.sgd(0.1), policy)

  def step(params, state, batch):
    scaled = lambda params: ols.scale_loss(CAST(params, batch), state)
    grads = ols.unscale_grads(jax.grad(scaled)(params), state)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def with_scaled_grads(policy):
  tx = ols.with_loss_scaling(optax.sgd(0.1), policy, grads_are_scaled=True)

  def step(params, state, batch):
    scaled = lambda params: ols.scale_loss(CAST(params, batch), state)
    updates, state = tx.update(jax.grad(scaled)(params), state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def with_a_foreign_optimizer_beside(policy):
  """Which is given the gradient of one more array, and is not looked at."""
  step, (params, state, batch) = _optax(policy)
  other = optax.adam(1e-3)

  def both(params, state, bias, other_state, batch):
    params, state = step(params, state, batch)
    shifted = lambda bias: loss_fn(params, batch + bias)
    updates, other_state = other.update(jax.grad(shifted)(bias), other_state)
    return params, state, optax.apply_updates(bias, updates), other_state

  bias = jnp.zeros(6)
  return jax.jit(both), (params, state, bias, other.init(bias), batch)


def under_cond(policy):
  step, args = _optax(policy)

  def maybe(params, state, batch):
    take = lambda: step(params, state, batch)
    return lax.cond(batch[0, 0] < jnp.inf, take, lambda: (params, state))

  return jax.jit(maybe), args


def with_checkpoint(policy):
  step, args = _optax(policy)
  return jax.checkpoint(step), args


def in_a_scan_of_one(policy):
  step, (params, state, batch) = _optax(policy)

  def epoch(params, state, batches):
    carry = params, state
    return lax.scan(lambda c, x: (step(*c, x), None), carry, batches)[0]

  return jax.jit(epoch), (params, state, batch[None])


def accumulated(policy):
  """Over micro-batches, of which all have the same gradient."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), policy)

  def step(params, state, batch):
    def add(total, micro_batch):
      grads = ols.grad(CAST, state)(params, micro_batch)
      return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = lax.scan(add, zeros, jnp.stack([batch] * 2))
    grads = jax.tree.map(lambda g: g / 2, total)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def an_ensemble(policy):
  step, args = _optax(policy)
  both = jax.tree.map(lambda x: jnp.stack([x, x]), args[:2])
  return jax.vmap(step, in_axes=(0, 0, None)), (*both, args[2])


def an_ensemble_of_jits(policy):
  step, args = _optax(policy)
  both = jax.tree.map(lambda x: jnp.stack([x, x]), args[:2])
  return jax.jit(jax.vmap(jax.jit(step), in_axes=(0, 0, None))), (
    *both,
    args[2],
  )


def with_train_state(policy):
  tx = ols.with_loss_scaling(optax.adam(1e-3), policy)
  state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

  @jax.jit
  def step(state, batch):
    grads = ols.grad(CAST, state)(state.params, batch)
    return state.apply_gradients(grads=grads)

  return step, (state, BATCH)


class _Model(nnx.Module):
  def __init__(self):
    for name, value in PARAMS.items():
      setattr(self, name, nnx.Param(value))

  def __call__(self, batch):
    return loss_fn({name: getattr(self, name)[...] for name in PARAMS}, batch)


def _nnx(policy, **kwargs):
  model = _Model()
  tx = ols.with_loss_scaling(optax.adam(1e-3), policy)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  def step(model, optimizer, batch):
    cast = ols.autocast(lambda model: model(batch))
    differentiate = ols.value_and_grad(
      cast, optimizer, using=nnx.value_and_grad, **kwargs
    )
    loss, grads = differentiate(model)
    optimizer.update(model, grads)
    return loss

  return step, (model, optimizer, BATCH)


def with_nnx_in_place(policy):
  step, args = _nnx(policy)
  return nnx.jit(step), args


def with_nnx_that_returns_nothing(policy):
  step, args = _nnx(policy)
  return nnx.jit(lambda *args: step(*args) is None), args


def with_nnx_diff_state(policy):
  step, args = _nnx(policy, argnums=nnx.DiffState(0, nnx.Param))
  return nnx.jit(step), args


def with_equinox(policy):
  step, args = _optax(policy)
  return eqx.filter_jit(step), args


def with_sharded_jit(policy):
  step, (params, state, batch) = _optax(policy)
  mesh = sharding.make_mesh((4,), ("data",))
  placed = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
  return jax.jit(step), (params, state, placed)


def _local_step(tx, check_vma, params, state, batch):
  """The step of one device, which shares its gradients with the others."""
  local = params
  if check_vma:
    # Before the cast, so that the sum over devices is not in float16.
    local = jax.tree.map(lambda p: _jaxprs.as_varying(p, "data"), params)
  grads = lax.pmean(ols.grad(CAST, state)(local, batch), "data")
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def _mapped(fun, check_vma):
  return jax.shard_map(
    fun,
    mesh=sharding.make_mesh((4,), ("data",)),
    in_specs=(P(), P(), P("data")),
    out_specs=P(),
    check_vma=check_vma,
  )


def with_shard_map(policy, check_vma=True):
  tx = ols.with_loss_scaling(optax.adam(1e-3), policy, axis_name="data")
  step = _mapped(functools.partial(_local_step, tx, check_vma), check_vma)
  return jax.jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def an_epoch_in_shard_map(policy, check_vma=True):
  """With accumulation around each update, so with a branch in a loop."""
  tx = ols.with_loss_scaling(optax.adam(1e-3), policy, axis_name="data")
  tx = optax.MultiSteps(tx, 1)
  step = functools.partial(_local_step, tx, check_vma)

  def epoch(params, state, batch):
    carry = params, state
    return lax.scan(lambda c, _: (step(*c, batch), None), carry, length=1)[0]

  mapped = _mapped(epoch, check_vma)
  return jax.jit(mapped), (PARAMS, tx.init(PARAMS), BATCH)


def an_epoch_in_unchecked_shard_map(policy):
  return an_epoch_in_shard_map(policy, check_vma=False)


def with_unchecked_shard_map(policy):
  return with_shard_map(policy, check_vma=False)


def with_pmap(policy):
  tx = ols.with_loss_scaling(optax.adam(1e-3), policy, axis_name="data")
  step = jax.pmap(
    functools.partial(_local_step, tx, False),
    axis_name="data",
    in_axes=(None, None, 0),
    out_axes=None,
  )
  return step, (PARAMS, tx.init(PARAMS), BATCH.reshape(4, 2, -1))


ALL = (
  plain, jitted, donated, that_returns_a_count, that_returns_nothing, a_closure,
  clipped, with_checked_updates, with_multi_steps_around,
  with_multi_steps_inside, by_hand, with_scaled_grads,
  with_a_foreign_optimizer_beside, under_cond, with_checkpoint,
  in_a_scan_of_one, accumulated, an_ensemble, an_ensemble_of_jits,
  with_train_state, with_nnx_in_place, with_nnx_that_returns_nothing,
  with_nnx_diff_state, with_equinox, with_sharded_jit, with_shard_map,
  with_unchecked_shard_map, with_pmap, an_epoch_in_shard_map,
  an_epoch_in_unchecked_shard_map,
)  # fmt: skip
