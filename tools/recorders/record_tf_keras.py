"""Records tf_keras's LossScaleOptimizer. Needs: tf_keras, tensorflow.

tf.json has the class under it in TF 1 and early TF 2,
`tf.compat.v1.mixed_precision.DynamicLossScale`, and is not recorded again.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import record_common as common
from record_common import encoding
import tensorflow as tf
import tf_keras


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


def training(name, inner):
  weights = tf.Variable(encoding.FIRST_WEIGHTS)
  bias = tf.Variable(encoding.FIRST_BIAS)
  optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
    inner,
    initial_scale=encoding.TRAINING_SCALE,
    dynamic_growth_steps=encoding.TRAINING_WINDOW,
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
  common.record(
    "tf_keras",
    LossScaleOptimizer,
    {"tf_keras": tf_keras.__version__, "tensorflow": tf.__version__},
    exports=common.record_exports("tf_keras", LossScaleOptimizer({}).load),
    training=[
      training("sgd", tf_keras.optimizers.SGD(0.25)),
      training("sgd, decayed", tf_keras.optimizers.SGD(decayed(0.25))),
      training(
        "adam, decayed", tf_keras.optimizers.Adam(decayed(0.0625), epsilon=1e-8)
      ),
    ],
  )
