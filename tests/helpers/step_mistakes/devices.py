"""Steps on several devices, whose gradients must be averaged."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.sharding import make_mesh, map_step, P
from helpers.train_steps import apply_updates, BATCH, loss_fn, PARAMS
import optax_lossscale as ols


def _make_devices_step(*, averages=True, shape=(4,), axes=("data",)):
  """Each device has a part of the batch; the loss is a metric."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), axis_name="data")

  def step(params, state, batch):
    loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
    grads = lax.pmean(grads, "data") if averages else grads
    return *apply_updates(tx, grads, params, state), loss

  on_devices = map_step(step, make_mesh(shape, axes))
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


_ON_TWO_AXES = {"shape": (2, 2), "axes": ("data", "model")}

MISTAKES = {
  (
    "The copies of the result 0/w on different devices",
    "jax.lax.pmean(grads, axis_name)",
  ): {
    "gradients not averaged": functools.partial(
      _make_devices_step, averages=False
    ),
    "gradients not averaged on two axes": functools.partial(
      _make_devices_step, averages=False, **_ON_TWO_AXES
    ),
  },
}

LOOKALIKES = {
  "averaged gradients": _make_devices_step,
  "averaged gradients on two axes": functools.partial(
    _make_devices_step, **_ON_TWO_AXES
  ),
}
UNCHECKED = {}
