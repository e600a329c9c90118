"""Records paddle.amp.GradScaler. Needs: paddlepaddle, numpy<2.3.

With numpy 2.4 paddle 3.3.1 raises on its first backoff (it prints the scale as
`float(array of one element)`).
On a CPU the class disables itself. Its check of the device is told that there
is a GPU; nothing else is changed, and the kernels run on the CPU.
"""

import contextlib
import io
import types

import numpy as np
import paddle
from paddle.amp import grad_scaler as module
import record_common as common

_place = types.SimpleNamespace(is_gpu_place=lambda: True)
_tracer = types.SimpleNamespace(_expected_place=_place)


def enabled(**settings):
  real, module._dygraph_tracer = module._dygraph_tracer, lambda: _tracer
  try:
    return paddle.amp.GradScaler(**settings)
  finally:
    module._dygraph_tracer = real


class GradScaler(common.Scaler):
  SCALE, COUNTER = "scale", "incr_count"

  def start(self):
    self.scaler = enabled(**self.settings)
    self.param = paddle.create_parameter(
      [1], "float32", default_initializer=paddle.nn.initializer.Constant(0.0)
    )
    self.sgd = paddle.optimizer.SGD(1.0, parameters=[self.param])

  def step(self, finite):
    grad = 1.0 if finite else float("inf")
    self.param.set_value(np.zeros([1], np.float32))
    self.sgd.clear_grad()
    (self.param * paddle.to_tensor([grad])).sum().backward()
    with contextlib.redirect_stdout(io.StringIO()):
      self.scaler.step(self.sgd)
      self.scaler.update()
    # This value decided; the update itself may underflow at a large scale.
    return not bool(self.scaler._cache_found_inf)

  def save(self):
    state = self.scaler.state_dict()
    return {**state, "scale": state["scale"].tolist()}

  def restore(self, saved):
    self.scaler.load_state_dict({**saved, "scale": np.array(saved["scale"])})


if __name__ == "__main__":
  common.record("paddle", GradScaler, {"paddlepaddle": paddle.__version__})
