"""Records deepspeed's DynamicLossScaler. Needs: torch, deepspeed.

DS_BUILD_OPS=0 installs deepspeed without compiling anything. The rule changed
in 0.17.1: deepspeed_old.json has that of 0.17.0, and is not recorded again.

The scaler is made as the engine makes it, from the `fp16` block of a config.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.runtime.fp16 import loss_scaler as module
import record_common as common
import torch

# The scaler asks for the rank before it logs an overflow.
module.dist.get_rank = lambda *args, **kwargs: 1
STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DynamicLossScaler(common.Scaler):
  SCALE = "cur_scale"

  def start(self):
    fp16 = self.settings
    # As the engine reads a block in which at least one of these is set. Without
    # any, 0.17.0 gives no arguments: the class then has 2**32 and 1.
    arguments = {
      "init_scale": 2 ** fp16.get("initial_scale_power", 16),
      "scale_window": fp16.get("loss_scale_window", 1000),
      "delayed_shift": fp16.get("hysteresis", 2),
      "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
      "min_scale": fp16.get("min_loss_scale", 1),
    }
    self.scaler = module.CreateLossScaler(torch.half, 0, True, arguments)

  def step(self, finite):
    try:
      self.scaler.update_scale(not finite)
    except Exception as error:
      if "already at minimum" not in str(error):
        raise
      return None
    return finite

  def counter(self):
    return self.scaler.cur_iter - self.scaler.last_overflow_iter - 1

  def save(self):
    return {name: getattr(self.scaler, name) for name in STATE}

  def restore(self, saved):
    for name in STATE:
      setattr(self.scaler, name, saved[name])


if __name__ == "__main__":
  common.record(
    "deepspeed_new", DynamicLossScaler, {"deepspeed": deepspeed.__version__}
  )
