"""Records torch.amp.GradScaler. Needs: torch."""

import record_common as common
import torch


class GradScaler(common.Scaler):
  SCALE, COUNTER = "scale", "_growth_tracker"

  def start(self):
    self.scaler = torch.amp.GradScaler("cpu", **self.settings)
    self.param = torch.zeros((), requires_grad=True)
    self.sgd = torch.optim.SGD([self.param], lr=1.0)
    # GradScaler makes its tensors when it first scales a loss.
    self.scaler.scale(torch.zeros(()))

  def step(self, finite):
    before = self.param.item()
    self.param.grad = torch.tensor(1.0 if finite else torch.inf)
    self.scaler.step(self.sgd)
    self.scaler.update()
    applied = self.param.item() != before
    with torch.no_grad():
      self.param.zero_()
    return applied

  def save(self):
    return self.scaler.state_dict()

  def restore(self, saved):
    self.scaler.load_state_dict(saved)


if __name__ == "__main__":
  common.record(
    "torch",
    GradScaler,
    {"torch": torch.__version__},
    exports=common.record_exports("torch", GradScaler({}).load),
  )
