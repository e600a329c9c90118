"""Records tf_keras's LossScaleOptimizer. Needs: tf_keras, tensorflow.

The second kind of case is the class under it in TF 1 and early TF 2,
`tf.compat.v1.mixed_precision.DynamicLossScale`, which has a multiplier.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import record_common as common
import tensorflow as tf
import tf_keras

mixed_precision = tf.compat.v1.mixed_precision


class LossScaleOptimizer(common.Scaler):
  def start(self):
    self.optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
      tf_keras.optimizers.SGD(1.0), **self.settings
    )
    self.param = tf.Variable(0.0)

  def step(self, finite):
    grad = tf.constant(1.0 if finite else float("inf"))
    before = self.param.numpy()
    self.optimizer.apply_gradients([(grad, self.param)])
    applied = self.param.numpy() != before
    self.param.assign(0.0)
    return bool(applied)

  def scale(self):
    return float(self.optimizer.loss_scale.numpy())

  def counter(self):
    counter = self.optimizer.dynamic_counter
    return 0 if counter is None else int(counter.numpy())

  def save(self):
    own = self.optimizer.get_config()
    own.pop("inner_optimizer")
    config = {"inner_optimizer": "left out", **own}
    variables = {}
    if self.optimizer.dynamic:
      variables = {
        "current_loss_scale": self.scale(),
        "good_steps": self.counter(),
      }
    return {"config": config, "variables": variables}

  def load(self, saved):
    config = dict(saved["config"])
    config.pop("inner_optimizer", None)
    other = LossScaleOptimizer(config)
    if saved["variables"]:
      state = other.optimizer._loss_scale
      state.current_loss_scale.assign(saved["variables"]["current_loss_scale"])
      state.counter.assign(saved["variables"]["good_steps"])
    return other


class DynamicLossScale(common.Scaler):
  def start(self):
    self.loss_scale = mixed_precision.DynamicLossScale(**self.settings)

  def step(self, finite):
    grad = tf.constant(1.0 if finite else float("inf"))
    return bool(self.loss_scale.update([grad])[1].numpy())

  def scale(self):
    return float(self.loss_scale().numpy())

  def counter(self):
    return int(self.loss_scale._num_good_steps.numpy())

  def save(self):
    variables = {
      "current_loss_scale": self.scale(),
      "good_steps": self.counter(),
    }
    return {"config": self.loss_scale.get_config(), "variables": variables}

  def load(self, saved):
    other = DynamicLossScale(saved["config"])
    other.loss_scale._current_loss_scale.assign(self.scale())
    other.loss_scale._num_good_steps.assign(self.counter())
    return other


def optimizer_cases():
  for window in (1, 2, 3, 5):
    config = {"initial_scale": 2.0**15, "dynamic_growth_steps": window}
    for name, steps in common.strings(window).items():
      yield f"window {window}: {name}", config, steps
  yield "defaults", {}, "F" * 2100 + "T" + "F" * 2100
  yield "long climb", {"dynamic_growth_steps": 1}, "F" * 111
  high = {"initial_scale": 2.0**124, "dynamic_growth_steps": 2}
  yield "top", high, "F" * 12 + "TTT" + "F" * 8
  yield "long fall to the floor", {}, "T" * 20 + "F" * 5
  fixed = {"dynamic": False, "initial_scale": 128.0}
  yield "fixed", fixed, "FFTTF"


def loss_scale_cases():
  for multiplier, window in ((4.0, 2), (2.0, 3)):
    config = {
      "initial_loss_scale": 2.0**14,
      "increment_period": window,
      "multiplier": multiplier,
    }
    for name, steps in common.strings(window).items():
      if "at" not in name:
        yield f"multiplier {multiplier:g}: {name}", config, steps


def training(name, inner):
  weights = tf.Variable(common.FIRST_WEIGHTS)
  bias = tf.Variable(common.FIRST_BIAS)
  optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
    inner,
    initial_scale=common.TRAINING_SCALE,
    dynamic_growth_steps=common.TRAINING_WINDOW,
  )

  def step(*batch):
    x, y = map(tf.constant, batch)
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean((x @ weights + bias - y) ** 2)
      scaled = optimizer.get_scaled_loss(loss)
    grads = tape.gradient(scaled, [weights, bias])
    grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(zip(grads, [weights, bias], strict=True))
    return (weights.numpy(), bias.numpy()), optimizer.loss_scale.numpy()

  counts = lambda: {"iterations": int(optimizer.iterations.numpy())}
  return common.record_training(name, step, counts)


def decayed(rate):
  return tf_keras.optimizers.schedules.InverseTimeDecay(rate, 1, 0.125)


if __name__ == "__main__":
  common.write(
    "tf_keras.json",
    "tf_keras, tensorflow",
    f"{tf_keras.__version__}, {tf.__version__}",
    cases=common.record_cases(LossScaleOptimizer, optimizer_cases()),
    loss_scale_cases=common.record_cases(DynamicLossScale, loss_scale_cases()),
    exports=common.record_exports("tf_keras", LossScaleOptimizer({}).load),
    training=[
      training("sgd", tf_keras.optimizers.SGD(0.25)),
      training("sgd, decayed", tf_keras.optimizers.SGD(decayed(0.25))),
      training(
        "adam, decayed", tf_keras.optimizers.Adam(decayed(0.0625), epsilon=1e-8)
      ),
    ],
  )
