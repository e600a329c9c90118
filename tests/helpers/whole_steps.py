"""Training steps of every shape, around one model with one bad layer.

``make_step`` makes each from a policy. Float16 loses the differences of the
squares in `centers`, since they are far from zero.
"""

import equinox as eqx
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from helpers import on_host, sharding, train_steps
from helpers.devices import require_devices
from helpers.train_steps import make_population
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
_ADAM = optax.adam(1e-3)


def make_grad_fn(policy):
  """Return a gradient function and its arguments, for reports."""
  return ols.grad(CAST, policy.init()), (PARAMS, BATCH)


def _step(
  wrap=lambda step: step,
  *,
  wrap_tx=lambda tx: tx,
  differentiate=train_steps.compute_grads,
  batch=BATCH,
  **kwargs,
):
  """Return a function that makes a step from a policy."""

  def make(policy):
    tx = wrap_tx(train_steps.make_tx(policy=policy, **kwargs))
    step, args = train_steps.make_step(
      differentiate, tx=tx, loss_fn=CAST, params=PARAMS, batch=batch
    )
    return wrap(step.__wrapped__), args

  return make


_make_plain = _step()


def _close_over_batch(policy):
  step, (*args, batch) = _make_plain(policy)
  return jax.jit(lambda params, state: step(params, state, batch)), args


def _compute_grads_by_hand(loss, params, state):
  grads = train_steps.compute_scaled_grads(loss, params, state)
  return ols.unscale_grads(grads, state)


def _add_optax_optimizer(policy):
  """Return a step with a bare optimizer for one more array."""
  step, (params, state, batch) = _make_plain(policy)

  def both(params, state, bias, other_state, batch):
    params, state = step(params, state, batch)
    shifted = lambda bias: loss_fn(params, batch + bias)
    updates, other_state = _ADAM.update(jax.grad(shifted)(bias), other_state)
    return params, state, optax.apply_updates(bias, updates), other_state

  bias = jnp.zeros(6)
  return jax.jit(both), (params, state, bias, _ADAM.init(bias), batch)


def _call_under_cond(step):
  def maybe(params, state, batch):
    take = lambda: step(params, state, batch)
    return lax.cond(batch[0, 0] < jnp.inf, take, lambda: (params, state))

  return jax.jit(maybe)


def _make_epoch(step):
  def epoch(params, state, batches):
    carry = params, state
    return lax.scan(lambda c, x: (step(*c, x), None), carry, batches)[0]

  return epoch


class _Model(nnx.Module):
  def __init__(self):
    for name, value in PARAMS.items():
      setattr(self, name, nnx.Param(value))

  def __call__(self, batch):
    return loss_fn({name: getattr(self, name)[...] for name in PARAMS}, batch)


def _nnx_step(wrap=lambda step: step, **kwargs):
  """Return a function that makes a step in place from a policy."""

  def step(model, optimizer, batch):
    cast = ols.autocast(lambda model: model(batch))
    differentiate = ols.value_and_grad(
      cast, optimizer, using=nnx.value_and_grad, **kwargs
    )
    loss, grads = differentiate(model)
    optimizer.update(model, grads)
    return loss

  def make(policy):
    model = _Model()
    tx = ols.with_loss_scaling(_ADAM, policy)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return nnx.jit(wrap(step)), (model, optimizer, BATCH)

  return make


def _shard_batch(policy):
  step, (params, state, batch) = _make_plain(policy)
  mesh = sharding.make_mesh((4,), ("data",))
  sharded_batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
  return jax.jit(step), (params, state, sharded_batch)


def _device_step(check_vma, **kwargs):
  """The step of one device, which shares its gradients with the others."""

  def differentiate(loss, params, state):
    if check_vma:
      # Before the cast, so that the sum over devices is not in float16.
      params = jax.tree.map(
        lambda p: _primitives.cast_to_varying(p, "data"), params
      )
    return lax.pmean(train_steps.compute_grads(loss, params, state), "data")

  return _step(differentiate=differentiate, axis_name="data", **kwargs)


def _in_shard_map(check_vma, wrap_step=lambda fun: fun, **kwargs):
  def wrap(step):
    mesh = sharding.make_mesh((4,), ("data",))
    return sharding.map_step(wrap_step(step), mesh, check_vma=check_vma)

  return _device_step(check_vma, wrap=wrap, **kwargs)


def _epoch_in_shard_map(check_vma):
  """With accumulation around each update, so with a branch in a loop."""
  return _in_shard_map(
    check_vma,
    lambda step: lambda *args: _make_epoch(step)(*args[:2], args[2][None]),
    wrap_tx=lambda tx: optax.MultiSteps(tx, 1),
  )


def _make_pmap_step(policy):
  require_devices(4)
  mapped = {"axis_name": "data", "in_axes": (None, None, 0), "out_axes": None}
  make = _device_step(False, wrap=lambda step: jax.pmap(step, **mapped))
  step, (*args, batch) = make(policy)
  return step, (*args, batch.reshape(4, 2, -1))


_STEPS = {
  "plain": _make_plain,
  "jitted": _step(lambda step: jax.jit(jax.jit(step))),
  "donated": _step(lambda step: jax.jit(step, donate_argnums=(0, 1))),
  "that returns a count": _step(lambda step: lambda *args: len(step(*args))),
  "that returns nothing": _step(
    lambda step: lambda *args: jax.jit(step)(*args) and None
  ),
  "a closure": _close_over_batch,
  "clipped": _step(max_norm=1e-3),
  "with checked updates": _step(check_updates=True),
  "with MultiSteps outside": _step(wrap_tx=lambda tx: optax.MultiSteps(tx, 1)),
  "with MultiSteps inside": _step(inner=optax.MultiSteps(_ADAM, 2)),
  "by hand": _step(jax.jit, differentiate=_compute_grads_by_hand),
  "with scaled gradients": _step(
    jax.jit,
    differentiate=train_steps.compute_scaled_grads,
    grads_are_scaled=True,
  ),
  "with an additional Optax optimizer": _add_optax_optimizer,
  "on the host": _step(lambda step: on_host.run_on_host(jax.jit(step))),
  "under cond": _step(_call_under_cond),
  "with checkpoint": _step(jax.checkpoint),
  "in a scan of one": _step(
    lambda step: jax.jit(_make_epoch(step)), batch=BATCH[None]
  ),
  "accumulated": _step(
    jax.jit,
    differentiate=train_steps.map_grads(
      lambda g: g / 2, train_steps.accumulate(train_steps.compute_grads)
    ),
  ),
  "an ensemble": lambda policy: make_population(*_make_plain(policy)),
  "an ensemble of jits": lambda policy: make_population(
    *_step(jax.jit)(policy)
  ),
  "with NNX in place": _nnx_step(),
  "with NNX that returns nothing": _nnx_step(
    lambda step: lambda *args: step(*args) is None
  ),
  "with NNX DiffState": _nnx_step(argnums=nnx.DiffState(0, nnx.Param)),
  "with Equinox": _step(eqx.filter_jit),
  "with a sharded batch": _shard_batch,
  "with shard_map": _in_shard_map(True),
  "with unchecked shard_map": _in_shard_map(False),
  "with pmap": _make_pmap_step,
  "an epoch in shard_map": _epoch_in_shard_map(True),
  "an epoch in unchecked shard_map": _epoch_in_shard_map(False),
}
NAMES = tuple(_STEPS)


def make_step(name, policy):
  """Return a training step, and the arguments of a call."""
  return _STEPS[name](policy)
