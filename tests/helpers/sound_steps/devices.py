"""Steps on several devices, which must skip the same steps."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
import optax

from helpers.devices import require_devices
from helpers.sharding import make_mesh, map_step, P
from helpers.train_steps import (
  ADAM,
  BATCH,
  compute_grads,
  compute_scaled_grads,
  half_loss_fn,
  make_step,
  make_tx,
  PARAMS,
)


def _put(tree, mesh, *specs):
  return jax.device_put(tree, NamedSharding(mesh, P(*specs)))


def _make_explicit_axes_step():
  """The sharding is in the type of each array."""
  mesh = make_mesh((4,), ("data",), AxisType.Explicit)
  batch = _put(BATCH, mesh, "data")
  return make_step(tx=make_tx(ADAM), params=_put(PARAMS, mesh), batch=batch)


def _make_sharded_state_step():
  """Moments are split over the devices that share a replica (ZeRO)."""
  mesh = make_mesh((4,), ("data",))

  def split(tree):
    specs = lambda x: NamedSharding(mesh, P("data") if x.ndim else P())
    return lax.with_sharding_constraint(tree, jax.tree.map(specs, tree))

  def constrain(old, new):
    whole = NamedSharding(mesh, P())
    return lax.with_sharding_constraint(new[0], whole), split(new[1])

  step, (params, opt_state, _) = make_step(
    make_result=constrain, tx=make_tx(ADAM), params=_put(PARAMS, mesh)
  )
  return step, (params, jax.jit(split)(opt_state), _put(BATCH, mesh, "data"))


def _make_half_all_reduce_step():
  """Scaled float16 gradients are sent, divided before they are summed."""

  def differentiate(loss, params, opt_state):
    half_params = optax.tree.cast(params, jnp.float16)
    grads = compute_scaled_grads(loss, half_params, opt_state)
    average = lambda g: lax.psum(g / lax.axis_size("data"), "data")
    return jax.tree.map(average, grads)

  tx = make_tx(ADAM, axis_name="data", grads_are_scaled=True)
  step, args = make_step(differentiate, loss_fn=half_loss_fn, tx=tx)
  return map_step(step, make_mesh((4,), ("data",))), args


def _make_pmap_step():
  """A replica of parameters and state for each device, as in ``pmap``."""
  require_devices(4)
  step, (*trained, batch) = make_step(
    lambda *args: lax.pmean(compute_grads(*args), "data"),
    tx=make_tx(ADAM, axis_name="data"),
  )
  replicas = jax.tree.map(lambda x: jnp.stack([x] * 4), trained)
  step = jax.pmap(step, axis_name="data")
  return step, (*replicas, batch.reshape(4, 2, 4))


STEPS = {
  "explicit axes": _make_explicit_axes_step,
  "sharded state": _make_sharded_state_step,
  "float16 all-reduce": _make_half_all_reduce_step,
  "pmap with replicas": _make_pmap_step,
}
