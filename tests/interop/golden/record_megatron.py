"""Records Megatron's DynamicGradScaler. Needs: torch, megatron-core.

The class keeps its tensors on a CUDA device. Here `torch.tensor` is told to
leave them on the CPU; and the module is loaded by its path, since the package
around it wants Triton.
"""

import importlib.metadata
import importlib.util
import types

import record_common as common
import torch

_distribution = importlib.metadata.distribution("megatron-core")
_path = _distribution.locate_file("megatron/core/optimizer/grad_scaler.py")
_spec = importlib.util.spec_from_file_location("grad_scaler", _path)
module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(module)


def _tensor(data, dtype=None, device=None):
  return torch.tensor(data, dtype=dtype)


module.torch = types.SimpleNamespace(
  tensor=_tensor, float=torch.float, max=torch.max
)


class DynamicGradScaler(common.Scaler):
  def start(self):
    settings = self.settings
    # As megatron.core.optimizer makes it from its config.
    self.scaler = module.DynamicGradScaler(
      initial_scale=settings.get("initial_loss_scale", 2**32),
      min_scale=settings.get("min_loss_scale", 1.0),
      growth_factor=2.0,
      backoff_factor=0.5,
      growth_interval=settings.get("loss_scale_window", 1000),
      hysteresis=settings.get("hysteresis", 2),
    )

  def step(self, finite):
    self.scaler.update(not finite)
    return finite

  def scale(self):
    return self.scaler.scale.item()

  def counter(self):
    return self.scaler.state_dict()["growth_tracker"]

  def save(self):
    state = self.scaler.state_dict()
    return {**state, "scale": state["scale"].tolist()}

  def restore(self, saved):
    # `load_state_dict` moves the scale to a CUDA device; these are its lines.
    self.scaler._scale = torch.tensor(saved["scale"])
    self.scaler._growth_tracker = saved["growth_tracker"]
    self.scaler._hysteresis_tracker = saved["hysteresis_tracker"]


def cases():
  for window, hysteresis in ((1, 1), (2, 2), (3, 1), (3, 2), (4, 3)):
    settings = {
      "initial_loss_scale": 2.0**15,
      "loss_scale_window": window,
      "hysteresis": hysteresis,
    }
    for name, steps in common.strings(window, hysteresis).items():
      yield f"window {window}, hysteresis {hysteresis}: {name}", settings, steps
  yield "defaults", {}, "F" * 2100 + "TTT" + "F" * 2100
  high = {"initial_loss_scale": 2.0**124, "loss_scale_window": 2}
  yield "top", high, "F" * 12 + "TTT" + "F" * 8
  yield "climb", {"loss_scale_window": 1}, "F" * 90
  low = {"initial_loss_scale": 2.0**6, "min_loss_scale": 4.0}
  yield "long fall to the floor", low, "F" + "T" * 12 + "F" * 4


if __name__ == "__main__":
  common.write(
    "megatron.json",
    "megatron-core",
    _distribution.version,
    cases=common.record_cases(DynamicGradScaler, cases()),
  )
