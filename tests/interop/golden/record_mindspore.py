"""Records mindspore.amp.DynamicLossScaler. Needs: mindspore."""

import mindspore
from mindspore import amp
import record_common as common


class DynamicLossScaler(common.Scaler):
  def start(self):
    self.scaler = amp.DynamicLossScaler(**self.settings)

  def step(self, finite):
    self.scaler.adjust(mindspore.Tensor(finite))
    return finite

  def scale(self):
    return float(self.scaler.scale_value.asnumpy())

  def counter(self):
    return int(self.scaler.counter.asnumpy())

  def save(self):
    return {
      "scale_value": self.scale(),
      "scale_factor": self.scaler.scale_factor,
      "scale_window": self.scaler.scale_window,
      "counter": self.counter(),
    }

  def restore(self, saved):
    scale = mindspore.Tensor(saved["scale_value"], mindspore.float32)
    self.scaler.scale_value.set_data(scale)
    counter = mindspore.Tensor(saved["counter"], mindspore.int32)
    self.scaler.counter.set_data(counter)


def cases():
  for window in (1, 2, 3, 5):
    settings = {
      "scale_value": 2.0**15,
      "scale_factor": 2,
      "scale_window": window,
    }
    for name, steps in common.strings(window).items():
      yield f"window {window}: {name}", settings, steps
  high = {"scale_value": 2.0**124, "scale_factor": 2, "scale_window": 2}
  yield "top", high, "F" * 12 + "TTT" + "F" * 8
  low = {"scale_value": 2.0**15, "scale_factor": 4, "scale_window": 3}
  yield "factor 4, to the floor", low, "F" * 7 + "T" * 20 + "F" * 5


if __name__ == "__main__":
  common.write(
    "mindspore.json",
    "mindspore",
    mindspore.__version__,
    cases=common.record_cases(DynamicLossScaler, cases()),
  )
