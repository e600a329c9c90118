"""Records jmp's DynamicLossScale, eagerly. Needs: jmp, jax.

Eagerly, since under jit jmp forgets a `min_loss_scale` other than 1.
"""

import importlib.metadata

import jax
import jax.numpy as jnp
import jmp
import record_common as common


class DynamicLossScale(common.Scaler):
  SCALE, COUNTER = "loss_scale", "counter"

  def start(self):
    arrays = ("loss_scale", "min_loss_scale")
    self.loss_scale = jmp.DynamicLossScale(
      **{
        key: jnp.asarray(value, jnp.float32) if key in arrays else value
        for key, value in self.settings.items()
      }
    )

  def step(self, finite):
    self.loss_scale = self.loss_scale.adjust(jnp.asarray(finite))
    return finite

  def save(self):
    saved = vars(self.loss_scale)
    return {k: x.item() if hasattr(x, "item") else x for k, x in saved.items()}

  def load(self, saved):
    return DynamicLossScale(
      {**saved, "counter": jnp.asarray(saved["counter"], jnp.int32)}
    )


if __name__ == "__main__":
  packages = {
    "jmp": importlib.metadata.version("jmp"),
    "jax": jax.__version__,
  }
  common.record("jmp", DynamicLossScale, packages)
