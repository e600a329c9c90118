"""Records mindspore.amp.DynamicLossScaler. Needs: mindspore."""

import mindspore
from mindspore import amp
import record_common as common


class DynamicLossScaler(common.Scaler):
  SCALE, COUNTER = "scale_value", "counter"

  def start(self):
    self.scaler = amp.DynamicLossScaler(**self.settings)

  def step(self, finite):
    self.scaler.adjust(mindspore.Tensor(finite))
    return finite

  def save(self):
    return {
      "scale_value": float(self.scaler.scale_value.asnumpy()),
      "scale_factor": self.scaler.scale_factor,
      "scale_window": self.scaler.scale_window,
      "counter": int(self.scaler.counter.asnumpy()),
    }

  def restore(self, saved):
    scale = mindspore.Tensor(saved["scale_value"], mindspore.float32)
    self.scaler.scale_value.set_data(scale)
    counter = mindspore.Tensor(saved["counter"], mindspore.int32)
    self.scaler.counter.set_data(counter)


if __name__ == "__main__":
  packages = {"mindspore": mindspore.__version__}
  common.record("mindspore", DynamicLossScaler, packages)
