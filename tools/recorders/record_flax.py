"""Records flax.training.dynamic_scale.DynamicScale. Needs: flax."""

import flax
from flax.training import dynamic_scale as dynamic_scale_lib
import jax
import jax.numpy as jnp
import record_common as common


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


if __name__ == "__main__":
  common.record(
    "flax",
    DynamicScale,
    {x.__name__: x.__version__ for x in (flax, jax)},
    exports=common.record_exports("flax", DynamicScale),
  )
