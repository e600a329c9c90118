"""Records Keras 3's LossScaleOptimizer on JAX. Needs: keras, jax."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import functools

import jax
import jax.numpy as jnp
import keras
import record_common as common
from record_common import encoding


@functools.cache
def optimizer_and_step(window):
  """One compiled step for all cases of a window; the state goes in and out."""
  optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.SGD(1.0), dynamic_growth_steps=window
  )
  optimizer.build([keras.Variable(0.0)])
  return optimizer, jax.jit(optimizer.stateless_apply)


class LossScaleOptimizer(common.Scaler):
  def start(self):
    self.config = {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000}
    self.config |= self.settings
    self.optimizer, self.apply = optimizer_and_step(
      self.config["dynamic_growth_steps"]
    )
    names = [v.name for v in self.optimizer.variables]
    self.at = names.index("step_counter"), names.index("dynamic_scale")
    inner = self.optimizer.inner_optimizer
    is_iterations = [v is inner.iterations for v in self.optimizer.variables]
    self.iterations_at = is_iterations.index(True)
    self.variables = [v.value for v in self.optimizer.variables]
    self.assign(0, self.config["initial_scale"])

  def assign(self, counter, scale):
    self.variables[self.at[0]] = jnp.asarray(counter, jnp.int32)
    self.variables[self.at[1]] = jnp.asarray(scale, jnp.float32)

  def step(self, finite):
    grad = jnp.float32(1.0 if finite else jnp.inf)
    before = self.variables[self.iterations_at]
    _, self.variables = self.apply(self.variables, [grad], [jnp.float32(0)])
    # The inner optimizer counts the steps that it makes.
    return bool(self.variables[self.iterations_at] != before)

  def scale(self):
    return float(self.variables[self.at[1]])

  def counter(self):
    return int(self.variables[self.at[0]])

  def save(self):
    for variable, value in zip(
      self.optimizer.variables, self.variables, strict=True
    ):
      variable.assign(value)
    self.optimizer.initial_scale = self.config["initial_scale"]
    own = self.optimizer.variables
    variables = {own[at].name: own[at].numpy().item() for at in self.at}
    config = {**self.optimizer.get_config(), "inner_optimizer": "left out"}
    return {"config": config, "variables": variables}

  def restore(self, saved):
    variables = saved["variables"]
    self.assign(variables["step_counter"], variables["dynamic_scale"])


def training(name, inner):
  weights = keras.Variable(jnp.array(encoding.FIRST_WEIGHTS))
  bias = keras.Variable(jnp.array(encoding.FIRST_BIAS))
  optimizer = keras.optimizers.LossScaleOptimizer(
    inner,
    initial_scale=encoding.TRAINING_SCALE,
    dynamic_growth_steps=encoding.TRAINING_WINDOW,
  )
  optimizer.build([weights, bias])
  scale_at = [v.name for v in optimizer.variables].index("dynamic_scale")

  @jax.jit
  def step(params, variables, x, y):
    def scaled_loss(params):
      weights, bias = params
      # As optimizer.scale_loss, with the scale of the state that is carried.
      return jnp.mean((x @ weights + bias - y) ** 2) * variables[scale_at]

    grads = jax.grad(scaled_loss)(params)
    return optimizer.stateless_apply(variables, grads, params)

  params = [weights.value, bias.value]
  variables = [v.value for v in optimizer.variables]

  def next_step(*batch):
    nonlocal params, variables
    params, variables = step(params, variables, *map(jnp.asarray, batch))
    return params, variables[scale_at]

  def counts():
    at = [v is inner.iterations for v in optimizer.variables].index(True)
    return {"iterations": int(variables[at])}

  return common.record_training(name, next_step, counts)


def decayed(rate):
  return keras.optimizers.schedules.InverseTimeDecay(rate, 1, 0.125)


if __name__ == "__main__":
  common.record(
    "keras",
    LossScaleOptimizer,
    {"keras": keras.__version__, "jax": jax.__version__},
    exports=common.record_exports(
      "keras", lambda saved: LossScaleOptimizer(saved["config"]).load(saved)
    ),
    training=[
      training("sgd, decayed", keras.optimizers.SGD(decayed(0.25))),
      training(
        "adam, decayed", keras.optimizers.Adam(decayed(0.0625), epsilon=1e-8)
      ),
    ],
  )
