"""Steps on several devices, which must skip the same steps."""

from flax.training import train_state
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from helpers.devices import require_devices
from helpers.sharding import make_mesh
from helpers.sound_steps import (
  apply_mlp,
  init_mlp,
  make_batch,
  make_train_step,
  mse,
  mse_loss_fn,
  train,
  TX,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def _put(tree, mesh, *specs):
  return jax.device_put(tree, NamedSharding(mesh, P(*specs)))


def data_parallel_with_explicit_axes():
  """The sharding is in the type of each array."""
  mesh = make_mesh((4,), ("data",), AxisType.Explicit)
  params, batch = _put(init_mlp(), mesh), _put(make_batch(), mesh, "data")
  return make_train_step(params=params, batch=batch)


def sharded_optimizer_state():
  """Moments are split over the devices that share a replica (ZeRO)."""
  mesh = make_mesh((4,), ("data",))

  def constrain(tree):
    split = lambda x: NamedSharding(mesh, P("data") if x.ndim else P())
    return lax.with_sharding_constraint(tree, jax.tree.map(split, tree))

  @jax.jit
  def train_step(params, opt_state, batch):
    params, opt_state, loss = train(TX, mse_loss_fn, params, opt_state, batch)
    replicated = NamedSharding(mesh, P())
    params = lax.with_sharding_constraint(params, replicated)
    return params, constrain(opt_state), loss

  params = _put(init_mlp(), mesh)
  opt_state = jax.jit(lambda params: constrain(TX.init(params)))(params)
  return train_step, (params, opt_state, _put(make_batch(), mesh, "data"))


def half_precision_all_reduce():
  """Scaled float16 gradients are sent, divided before they are summed."""
  tx = ols.with_loss_scaling(ADAM, axis_name="data", grads_are_scaled=True)

  def scaled_loss_fn(half_params, opt_state, batch):
    x = batch[0].astype(jnp.float16)
    loss = mse(apply_mlp(half_params, x).astype(jnp.float32), batch[1])
    return ols.scale_loss(loss, opt_state), loss

  def train_step(params, opt_state, batch):
    half_params = optax.tree.cast(params, jnp.float16)
    (_, loss), grads = jax.value_and_grad(scaled_loss_fn, has_aux=True)(
      half_params, opt_state, batch
    )
    average = lambda g: lax.psum(g / lax.axis_size("data"), "data")
    grads = jax.tree.map(average, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(loss, "data")

  params = init_mlp()
  step = jax.shard_map(
    train_step,
    mesh=make_mesh((4,), ("data",)),
    in_specs=(P(), P(), P("data")),
    out_specs=P(),
    check_vma=False,
  )
  return jax.jit(step), (params, tx.init(params), make_batch())


def replicated_train_state():
  """A ``TrainState`` for each device, as in Flax's examples for ``pmap``."""
  tx = ols.with_loss_scaling(ADAM, axis_name="data")
  state = train_state.TrainState.create(
    apply_fn=apply_mlp, params=init_mlp(), tx=tx
  )

  def train_step(state, batch):
    def loss_fn(params):
      return mse(state.apply_fn(params, batch[0]), batch[1])

    loss, grads = ols.value_and_grad(ols.autocast(loss_fn), state)(state.params)
    grads = lax.pmean(grads, "data")
    return state.apply_gradients(grads=grads), lax.pmean(loss, "data")

  replicate = lambda x: jnp.stack([x] * 4)
  batch = jax.tree.map(lambda x: x.reshape(4, 4, -1), make_batch(16))
  require_devices(4)
  step = jax.pmap(train_step, axis_name="data")
  return step, (jax.tree.map(replicate, state), batch)
