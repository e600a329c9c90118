"""Records torch.amp.GradScaler. Needs: torch."""

import record_common as common
import torch


class GradScaler(common.Scaler):
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

  def scale(self):
    return self.scaler.get_scale()

  def counter(self):
    return self.scaler.state_dict()["_growth_tracker"]

  def save(self):
    return self.scaler.state_dict()

  def restore(self, saved):
    self.scaler.load_state_dict(saved)


def cases():
  for window in (1, 2, 3, 5):
    settings = {"init_scale": 2.0**15, "growth_interval": window}
    for name, steps in common.strings(window).items():
      yield f"window {window}: {name}", settings, steps
  wide = {
    "init_scale": 2.0**20,
    "growth_factor": 8.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
  }
  for name, steps in common.strings(3).items():
    if name in ("random 0.05", "random 0.2", "bursts"):
      yield f"factors 8, 1/4: {name}", wide, steps[:60]
  yield "defaults", {}, "F" * 4100 + "T" + "F" * 2100
  high = {"init_scale": 2.0**100, "growth_interval": 2}
  yield "long climb", high, "F" * 50
  yield "top", {**high, "init_scale": 2.0**124}, "F" * 12 + "TTT" + "F" * 8
  yield "long fall", {"growth_interval": 4}, "T" * 140 + "F" * 20
  low = {"init_scale": 2.0**-120, "growth_interval": 2}
  yield "bottom", low, "T" * 32 + "F" * 8


def training(name, make_optimizer):
  weights = torch.tensor(common.FIRST_WEIGHTS, requires_grad=True)
  bias = torch.tensor(common.FIRST_BIAS, requires_grad=True)
  optimizer = make_optimizer([weights, bias])
  schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
  scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=common.TRAINING_SCALE,
    growth_interval=common.TRAINING_WINDOW,
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
  common.write(
    "torch.json",
    "torch",
    torch.__version__,
    cases=common.record_cases(GradScaler, cases()),
    exports=common.record_exports("torch", GradScaler({}).load),
    training=[
      training("sgd", lambda p: torch.optim.SGD(p, lr=0.25)),
      training("adam", lambda p: torch.optim.Adam(p, lr=0.0625)),
    ],
  )
