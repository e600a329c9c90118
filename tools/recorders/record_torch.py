"""Records torch.amp.GradScaler. Needs: torch."""

import record_common as common
from record_common import encoding
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


def training(name, make_optimizer):
  weights = torch.tensor(encoding.FIRST_WEIGHTS, requires_grad=True)
  bias = torch.tensor(encoding.FIRST_BIAS, requires_grad=True)
  optimizer = make_optimizer([weights, bias])
  schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
  scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=encoding.TRAINING_SCALE,
    growth_interval=encoding.TRAINING_WINDOW,
  )

  def step(*batch):
    x, y = map(torch.tensor, batch)
    optimizer.zero_grad()
    loss = ((x @ weights + bias - y) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    return (weights.detach(), bias.detach()), scaler.get_scale()

  def counts():
    counts = {"LambdaLR.last_epoch": schedule.last_epoch}
    if "step" in optimizer.state[weights]:
      counts["Adam step"] = int(optimizer.state[weights]["step"])
    return counts

  return common.record_training(name, step, counts)


if __name__ == "__main__":
  common.record(
    "torch",
    GradScaler,
    {"torch": torch.__version__},
    exports=common.record_exports("torch", GradScaler({}).load),
    training=[
      training("sgd", lambda p: torch.optim.SGD(p, lr=0.25)),
      training("adam", lambda p: torch.optim.Adam(p, lr=0.0625)),
    ],
  )
