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
  SCALE, COUNTER = "scale", "growth_tracker"

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

  def save(self):
    state = self.scaler.state_dict()
    return {**state, "scale": state["scale"].tolist()}

  def restore(self, saved):
    # `load_state_dict` moves the scale to a CUDA device; these are its lines.
    self.scaler._scale = torch.tensor(saved["scale"])
    self.scaler._growth_tracker = saved["growth_tracker"]
    self.scaler._hysteresis_tracker = saved["hysteresis_tracker"]


if __name__ == "__main__":
  packages = {"megatron-core": _distribution.version}
  common.record("megatron", DynamicGradScaler, packages)
