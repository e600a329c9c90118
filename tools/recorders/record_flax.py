"""Records flax.training.dynamic_scale.DynamicScale. Needs: flax, optax."""

import functools

import flax
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state as train_state_lib
import jax
import jax.numpy as jnp
import optax
import record_common as common
from record_common import encoding


@jax.jit
def one_step(dynamic_scale, factor):
  grad_fn = dynamic_scale.value_and_grad(lambda x: x * factor)
  dynamic_scale, finite, _, _ = grad_fn(jnp.float32(1))
  return dynamic_scale, finite


class DynamicScale(common.Scaler):
  SCALE, COUNTER = "scale", "fin_steps"

  def start(self):
    self.dynamic_scale = dynamic_scale_lib.DynamicScale(**self.settings)

  def step(self, finite):
    # The smaller factor keeps the scaled loss finite at any scale.
    factor = jnp.float32(2.0**-20 if finite else jnp.inf)
    self.dynamic_scale, applied = one_step(self.dynamic_scale, factor)
    return bool(applied)

  def save(self):
    saved = flax.serialization.to_state_dict(self.dynamic_scale)
    return jax.tree.map(lambda x: x.item() if hasattr(x, "item") else x, saved)

  def restore(self, saved):
    self.dynamic_scale = flax.serialization.from_state_dict(
      self.dynamic_scale, saved
    )


def training(name, tx):
  def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

  @jax.jit
  def train_step(state, dynamic_scale, x, y):
    grad_fn = dynamic_scale.value_and_grad(loss_fn)
    dynamic_scale, finite, _, grads = grad_fn(state.params, x, y)
    new = state.apply_gradients(grads=grads)
    select = functools.partial(jnp.where, finite)
    params = jax.tree.map(select, new.params, state.params)
    opt_state = jax.tree.map(select, new.opt_state, state.opt_state)
    return new.replace(params=params, opt_state=opt_state), dynamic_scale

  params = {
    "w": jnp.asarray(encoding.FIRST_WEIGHTS),
    "b": jnp.asarray(encoding.FIRST_BIAS),
  }
  state = train_state_lib.TrainState.create(apply_fn=None, params=params, tx=tx)
  dynamic_scale = dynamic_scale_lib.DynamicScale(
    scale=jnp.float32(encoding.TRAINING_SCALE),
    fin_steps=jnp.int32(0),
    # Flax grows one step later.
    growth_interval=encoding.TRAINING_WINDOW - 1,
  )

  def step(*batch):
    nonlocal state, dynamic_scale
    x, y = map(jnp.asarray, batch)
    state, dynamic_scale = train_step(state, dynamic_scale, x, y)
    return (state.params["w"], state.params["b"]), dynamic_scale.scale

  def counts():
    *_, (_, schedule) = optax.tree.get_all_with_path(state.opt_state, "count")
    return {"TrainState.step": int(state.step), "schedule": int(schedule)}

  return common.record_training(name, step, counts)


def decayed(rate):
  return lambda count: rate / (1 + 0.125 * count)


if __name__ == "__main__":
  common.record(
    "flax",
    DynamicScale,
    {x.__name__: x.__version__ for x in (flax, optax, jax)},
    exports=common.record_exports("flax", DynamicScale),
    training=[
      training("sgd, decayed", optax.sgd(decayed(0.25))),
      training("adam, decayed", optax.adam(decayed(0.0625))),
    ],
  )
