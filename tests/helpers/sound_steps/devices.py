"""Steps on several devices, which must skip the same steps."""

from flax.training import train_state
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from helpers.devices import require_devices
from helpers.sharding import make_mesh, map_step
from helpers.train_steps import (
  BATCH,
  compute_scaled_grads,
  half_loss_fn,
  loss_fn,
  make_step,
  PARAMS,
  train,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)
TX = ols.with_loss_scaling(ADAM)


def _put(tree, mesh, *specs):
  return jax.device_put(tree, NamedSharding(mesh, P(*specs)))


def data_parallel_with_explicit_axes():
  """The sharding is in the type of each array."""
  mesh = make_mesh((4,), ("data",), AxisType.Explicit)
  batch = _put(BATCH, mesh, "data")
  return make_step(inner=ADAM, params=_put(PARAMS, mesh), batch=batch)


def sharded_optimizer_state():
  """Moments are split over the devices that share a replica (ZeRO)."""
  mesh = make_mesh((4,), ("data",))

  def constrain(tree):
    split = lambda x: NamedSharding(mesh, P("data") if x.ndim else P())
    return lax.with_sharding_constraint(tree, jax.tree.map(split, tree))

  @jax.jit
  def train_step(params, opt_state, batch):
    params, opt_state = train(params, opt_state, batch, tx=TX)
    replicated = NamedSharding(mesh, P())
    params = lax.with_sharding_constraint(params, replicated)
    return params, constrain(opt_state)

  params = _put(PARAMS, mesh)
  opt_state = jax.jit(lambda params: constrain(TX.init(params)))(params)
  return train_step, (params, opt_state, _put(BATCH, mesh, "data"))


def half_precision_all_reduce():
  """Scaled float16 gradients are sent, divided before they are summed."""

  def compute_grads(loss, params, opt_state):
    half_params = optax.tree.cast(params, jnp.float16)
    grads = compute_scaled_grads(loss, half_params, opt_state)
    average = lambda g: lax.psum(g / lax.axis_size("data"), "data")
    return jax.tree.map(average, grads)

  mesh = make_mesh((4,), ("data",))
  return make_step(
    compute_grads,
    loss_fn=half_loss_fn,
    inner=ADAM,
    wrap=lambda step: map_step(step, mesh),
    axis_name="data",
    grads_are_scaled=True,
  )


def replicated_train_state():
  """A ``TrainState`` for each device, as in Flax's examples for ``pmap``."""
  require_devices(4)
  tx = ols.with_loss_scaling(ADAM, axis_name="data")
  state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

  def train_step(state, batch):
    grad_fn = ols.value_and_grad(loss_fn, state)
    loss, grads = grad_fn(state.params, batch)
    grads = lax.pmean(grads, "data")
    return state.apply_gradients(grads=grads), lax.pmean(loss, "data")

  state = jax.tree.map(lambda x: jnp.stack([x] * 4), state)
  step = jax.pmap(train_step, axis_name="data")
  return step, (state, BATCH.reshape(4, 2, 4))
