"""Records jmp's DynamicLossScale, eagerly. Needs: jmp, jax.

Eagerly, since under jit jmp forgets a `min_loss_scale` other than 1.
"""

import importlib.metadata

import jax
import jax.numpy as jnp
import jmp
import record_common as common


class DynamicLossScale(common.Scaler):
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

  def scale(self):
    return float(self.loss_scale.loss_scale)

  def counter(self):
    return int(self.loss_scale.counter)

  def save(self):
    return {
      "loss_scale": self.scale(),
      "counter": self.counter(),
      "period": self.loss_scale.period,
      "factor": self.loss_scale.factor,
      "min_loss_scale": float(self.loss_scale.min_loss_scale),
    }

  def load(self, saved):
    return DynamicLossScale(
      {**saved, "counter": jnp.asarray(saved["counter"], jnp.int32)}
    )


def cases():
  for window in (1, 2, 3, 5):
    settings = {"loss_scale": 2.0**15, "period": window}
    for name, steps in common.strings(window).items():
      yield f"window {window}: {name}", settings, steps
  yield "defaults", {"loss_scale": 2.0**15}, "F" * 2100 + "T" + "F" * 2100
  climb = {"loss_scale": 2.0**15, "period": 1}
  yield "long climb", climb, "F" * 111
  high = {"loss_scale": 2.0**124, "period": 2}
  yield "top", high, "F" * 12 + "TTT" + "F" * 8
  yield "long fall to the floor", {"loss_scale": 2.0**15}, "T" * 20 + "F" * 5
  floor = {"loss_scale": 2.0**6, "min_loss_scale": 2.0**-3, "period": 2}
  yield "own floor", floor, "T" * 12 + "F" * 8
  factor = {"loss_scale": 2.0**20, "factor": 4, "period": 3}
  yield "factor 4", factor, common.strings(3)["random 0.2"]


if __name__ == "__main__":
  common.write(
    "jmp.json",
    "jmp, jax",
    f"{importlib.metadata.version('jmp')}, {jax.__version__}",
    cases=common.record_cases(DynamicLossScale, cases()),
  )
