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
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def _put(tree, mesh, *specs):
  return jax.device_put(tree, NamedSharding(mesh, P(*specs)))


def data_parallel():
  """Sharded ``jit`` over a mesh with Auto axes."""
  mesh = make_mesh((4,), ("data",))
  params, batch = _put(init_mlp(), mesh), _put(make_batch(), mesh, "data")
  return make_train_step(
    ols.with_loss_scaling(ADAM), params=params, batch=batch
  )


def data_parallel_with_explicit_axes():
  """The same with a sharding in the type of each array."""
  mesh = make_mesh((4,), ("data",), AxisType.Explicit)
  params, batch = _put(init_mlp(), mesh), _put(make_batch(), mesh, "data")
  return make_train_step(
    ols.with_loss_scaling(ADAM), params=params, batch=batch
  )


def _shard_hidden(mesh, params):
  """The hidden layer is split over the axis ``model``."""
  specs = {
    "layer_0": {"w": (None, "model"), "b": ("model",)},
    "layer_1": {"w": ("model", None), "b": (None,)},
  }
  return {
    layer: {k: _put(x, mesh, *specs[layer][k]) for k, x in arrays.items()}
    for layer, arrays in params.items()
  }


def tensor_parallel():
  mesh = make_mesh((2, 4), ("data", "model"))
  params = _shard_hidden(mesh, init_mlp())
  tx = ols.with_loss_scaling(ADAM, max_norm=1.0)
  return make_train_step(
    tx, params=params, batch=_put(make_batch(), mesh, "data")
  )


def constrained_activations():
  """``with_sharding_constraint`` inside of the loss."""
  mesh = make_mesh((2, 4), ("data", "model"))
  sharding = NamedSharding(mesh, P("data", "model"))

  def loss_fn(params, batch):
    hidden = jnp.tanh(batch[0] @ params["layer_0"]["w"])
    hidden = lax.with_sharding_constraint(hidden, sharding)
    return mse(hidden @ params["layer_1"]["w"], batch[1])

  params = {k: {"w": x["w"]} for k, x in init_mlp().items()}
  return make_train_step(
    ols.with_loss_scaling(ADAM),
    loss_fn,
    _put(params, mesh),
    _put(make_batch(), mesh, "data"),
  )


def sharded_optimizer_state():
  """Moments are split over the devices that share a replica (ZeRO)."""
  mesh = make_mesh((4,), ("data",))
  tx = ols.with_loss_scaling(ADAM)

  def constrain(tree):
    split = lambda x: NamedSharding(mesh, P("data") if x.ndim else P())
    return lax.with_sharding_constraint(tree, jax.tree.map(split, tree))

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    replicated = NamedSharding(mesh, P())
    params = lax.with_sharding_constraint(params, replicated)
    return params, constrain(opt_state), loss

  params = _put(init_mlp(), mesh)
  opt_state = jax.jit(lambda params: constrain(tx.init(params)))(params)
  return train_step, (params, opt_state, _put(make_batch(), mesh, "data"))


def _map_over_devices(tx, train_step, *, check_vma=True):
  """Return a step on parts of the batch, and its arguments."""
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=make_mesh((4,), ("data",)),
      in_specs=(P(), P(), P("data")),
      out_specs=P(),
      check_vma=check_vma,
    )
  )
  params = init_mlp()
  return step, (params, tx.init(params), make_batch())


def _make_per_device_step(axis_name, differentiate):
  tx = ols.with_loss_scaling(ADAM, axis_name=axis_name)

  def train_step(params, opt_state, batch):
    loss, grads = differentiate(params, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(loss, axis_name)

  return tx, train_step


def _average_grads(params, opt_state, batch):
  loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
    params, batch
  )
  return loss, lax.pmean(grads, "data")


def pmap():
  require_devices(4)
  tx, train_step = _make_per_device_step("data", _average_grads)
  step = jax.pmap(
    train_step,
    axis_name="data",
    in_axes=(None, None, 0),
    out_axes=(None, None, None),
  )
  params = init_mlp()
  batch = jax.tree.map(lambda x: x.reshape(4, 4, -1), make_batch(16))
  return step, (params, tx.init(params), batch)


def shard_map():
  """JAX sums the gradients of replicated parameters."""

  def differentiate(params, opt_state, batch):
    # A part of the mean over all devices.
    loss_fn = lambda *args: mse_loss_fn(*args) / lax.axis_size("data")
    loss, grads = ols.value_and_grad(ols.autocast(loss_fn), opt_state)(
      params, batch
    )
    return loss * lax.axis_size("data"), grads

  tx, train_step = _make_per_device_step("data", differentiate)
  return _map_over_devices(tx, train_step)


def unchecked_shard_map():
  """The step averages the gradients."""
  tx, train_step = _make_per_device_step("data", _average_grads)
  return _map_over_devices(tx, train_step, check_vma=False)


def fully_sharded():
  """Rows of the matrices are on different devices, and are gathered."""
  specs = {
    "layer_0": {"w": P("data"), "b": P()},
    "layer_1": {"w": P("data"), "b": P()},
  }

  def loss_fn(params, batch):
    gather = lambda x, spec: (
      lax.all_gather(x, "data", tiled=True) if spec else x
    )
    params = jax.tree.map(gather, params, specs)
    return mse_loss_fn(params, batch) / lax.axis_size("data")

  tx = ols.with_loss_scaling(ADAM, axis_name="data")

  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, lax.psum(loss, "data")

  params = init_mlp()
  opt_state = tx.init(params)
  state_specs = optax.tree.map_params(
    tx,
    lambda _, spec: spec,
    opt_state,
    specs,
    transform_non_params=lambda _: P(),
  )
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=make_mesh((4,), ("data",)),
      in_specs=(specs, state_specs, P("data")),
      out_specs=(specs, state_specs, P()),
    )
  )
  return step, (params, opt_state, make_batch())


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

  return _map_over_devices(tx, train_step, check_vma=False)


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
