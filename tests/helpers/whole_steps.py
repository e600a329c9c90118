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
from helpers.devices import require_devices
import optax_lossscale as ols
from optax_lossscale._jaxprs import _primitives

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


def make_grad_fn(policy):
  """Return a gradient function and its arguments, for reports."""
  return ols.grad(CAST, policy.init()), (PARAMS, BATCH)


def _compute_grads(params, state, batch):
  return ols.grad(CAST, state)(params, batch)


def train_step(
  tx, params, state, batch, differentiate=_compute_grads, **kwargs
):
  grads = differentiate(params, state, batch)
  updates, state = tx.update(grads, state, params, **kwargs)
  return optax.apply_updates(params, updates), state


def _make_optax_step(
  policy,
  wrap=lambda step: step,
  *,
  inner=None,
  wrap_tx=lambda tx: tx,
  differentiate=_compute_grads,
  **kwargs,
):
  """A step with two changed lines, and its arguments."""
  inner = inner or optax.sgd(0.1)
  tx = wrap_tx(ols.with_loss_scaling(inner, policy, **kwargs))
  step = functools.partial(train_step, tx, differentiate=differentiate)
  return wrap(step), (PARAMS, tx.init(PARAMS), BATCH)


def _make_named(name, make=_make_optax_step, **kwargs):
  """A function of the policy alone, by the name that its tests have."""
  step_maker = functools.partial(make, **kwargs)
  step_maker.__name__ = name
  return step_maker


def a_closure(policy):
  step, (*args, batch) = _make_optax_step(policy)
  return jax.jit(lambda params, state: step(params, state, batch)), args


plain = _make_named("plain")
jitted = _make_named("jitted", wrap=lambda step: jax.jit(jax.jit(step)))
donated = _make_named(
  "donated", wrap=lambda f: jax.jit(f, donate_argnums=(0, 1))
)
that_returns_a_count = _make_named(
  "that_returns_a_count", wrap=lambda step: lambda *args: len(step(*args))
)
that_returns_nothing = _make_named(
  "that_returns_nothing",
  wrap=lambda step: lambda *args: jax.jit(step)(*args) and None,
)
clipped = _make_named("clipped", max_norm=1e-3)
with_checked_updates = _make_named("with_checked_updates", check_updates=True)
with_multi_steps_outside = _make_named(
  "with_multi_steps_outside", wrap_tx=lambda tx: optax.MultiSteps(tx, 1)
)
with_multi_steps_inside = _make_named(
  "with_multi_steps_inside", inner=optax.MultiSteps(optax.adam(1e-3), 2)
)
with_checkpoint = _make_named("with_checkpoint", wrap=jax.checkpoint)
with_equinox = _make_named("with_equinox", wrap=eqx.filter_jit)


def _make_sgd_step(policy, differentiate, **kwargs):
  """Return a jitted step that takes the gradients in a custom way."""
  kwargs |= {"inner": optax.sgd(0.1), "differentiate": differentiate}
  return _make_optax_step(policy, jax.jit, **kwargs)


def _compute_scaled_grads(params, state, batch):
  loss_fn = lambda params: ols.scale_loss(CAST(params, batch), state)
  return jax.grad(loss_fn)(params)


def by_hand(policy):
  def differentiate(params, state, batch):
    return ols.unscale_grads(_compute_scaled_grads(params, state, batch), state)

  return _make_sgd_step(policy, differentiate)


with_scaled_grads = _make_named(
  "with_scaled_grads",
  _make_sgd_step,
  differentiate=_compute_scaled_grads,
  grads_are_scaled=True,
)


def with_an_additional_optax_optimizer(policy):
  """Return a step with a bare optimizer for one more array."""
  step, (params, state, batch) = _make_optax_step(policy)
  other = optax.adam(1e-3)

  def both(params, state, bias, other_state, batch):
    params, state = step(params, state, batch)
    shifted = lambda bias: loss_fn(params, batch + bias)
    updates, other_state = other.update(jax.grad(shifted)(bias), other_state)
    return params, state, optax.apply_updates(bias, updates), other_state

  bias = jnp.zeros(6)
  return jax.jit(both), (params, state, bias, other.init(bias), batch)


def under_cond(policy):
  step, args = _make_optax_step(policy)

  def maybe(params, state, batch):
    take = lambda: step(params, state, batch)
    return lax.cond(batch[0, 0] < jnp.inf, take, lambda: (params, state))

  return jax.jit(maybe), args


def _make_epoch(step):
  def epoch(params, state, batches):
    carry = params, state
    return lax.scan(lambda c, x: (step(*c, x), None), carry, batches)[0]

  return epoch


def in_a_scan_of_one(policy):
  epoch, (*args, batch) = _make_optax_step(
    policy, lambda step: jax.jit(_make_epoch(step))
  )
  return epoch, (*args, batch[None])


def accumulated(policy):
  """Over micro-batches, of which all have the same gradient."""

  def differentiate(params, state, batch):
    def add(total, micro_batch):
      grads = _compute_grads(params, state, micro_batch)
      return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = lax.scan(add, zeros, jnp.stack([batch] * 2))
    return jax.tree.map(lambda g: g / 2, total)

  return _make_sgd_step(policy, differentiate)


def an_ensemble(policy, jit=lambda fun: fun):
  step, (*args, batch) = _make_optax_step(policy)
  stacked_args = jax.tree.map(lambda x: jnp.stack([x, x]), args)
  return jit(jax.vmap(jit(step), in_axes=(0, 0, None))), (*stacked_args, batch)


an_ensemble_of_jits = _make_named(
  "an_ensemble_of_jits", an_ensemble, jit=jax.jit
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


def _make_nnx_step(policy, wrap=lambda step: step, **kwargs):
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

  return nnx.jit(wrap(step)), (model, optimizer, BATCH)


with_nnx_in_place = _make_named("with_nnx_in_place", _make_nnx_step)
with_nnx_that_returns_nothing = _make_named(
  "with_nnx_that_returns_nothing",
  _make_nnx_step,
  wrap=lambda step: lambda *args: step(*args) is None,
)
with_nnx_diff_state = _make_named(
  "with_nnx_diff_state", _make_nnx_step, argnums=nnx.DiffState(0, nnx.Param)
)


def with_sharded_jit(policy):
  step, (params, state, batch) = _make_optax_step(policy)
  mesh = sharding.make_mesh((4,), ("data",))
  sharded_batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
  return jax.jit(step), (params, state, sharded_batch)


def _make_per_device_step(policy, check_vma, *args, **kwargs):
  """The step of one device, which shares its gradients with the others."""

  def differentiate(params, state, batch):
    if check_vma:
      # Before the cast, so that the sum over devices is not in float16.
      params = jax.tree.map(
        lambda p: _primitives.cast_to_varying(p, "data"), params
      )
    return lax.pmean(_compute_grads(params, state, batch), "data")

  kwargs |= {"axis_name": "data", "differentiate": differentiate}
  return _make_optax_step(policy, *args, **kwargs)


def with_shard_map(policy, check_vma=True, wrap_step=lambda fun: fun, **kwargs):
  def wrap(step):
    mapped = jax.shard_map(
      wrap_step(step),
      mesh=sharding.make_mesh((4,), ("data",)),
      in_specs=(P(), P(), P("data")),
      out_specs=P(),
      check_vma=check_vma,
    )
    return jax.jit(mapped)

  return _make_per_device_step(policy, check_vma, wrap, **kwargs)


def an_epoch_in_shard_map(policy, check_vma=True):
  """With accumulation around each update, so with a branch in a loop."""
  accumulate = lambda tx: optax.MultiSteps(tx, 1)
  make_epoch = lambda step: (
    lambda *args: _make_epoch(step)(*args[:2], args[2][None])
  )
  return with_shard_map(policy, check_vma, make_epoch, wrap_tx=accumulate)


an_epoch_in_unchecked_shard_map = _make_named(
  "an_epoch_in_unchecked_shard_map", an_epoch_in_shard_map, check_vma=False
)
with_unchecked_shard_map = _make_named(
  "with_unchecked_shard_map", with_shard_map, check_vma=False
)


def with_pmap(policy):
  require_devices(4)
  mapped = {"axis_name": "data", "in_axes": (None, None, 0), "out_axes": None}
  wrap = lambda step: jax.pmap(step, **mapped)
  step, (*args, batch) = _make_per_device_step(policy, False, wrap)
  return step, (*args, batch.reshape(4, 2, -1))


ALL = (
  plain, jitted, donated, that_returns_a_count, that_returns_nothing, a_closure,
  clipped, with_checked_updates, with_multi_steps_outside,
  with_multi_steps_inside, by_hand, with_scaled_grads,
  with_an_additional_optax_optimizer, under_cond, with_checkpoint,
  in_a_scan_of_one, accumulated, an_ensemble, an_ensemble_of_jits,
  with_train_state, with_nnx_in_place, with_nnx_that_returns_nothing,
  with_nnx_diff_state, with_equinox, with_sharded_jit, with_shard_map,
  with_unchecked_shard_map, with_pmap, an_epoch_in_shard_map,
  an_epoch_in_unchecked_shard_map,
)  # fmt: skip
