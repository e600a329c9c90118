"""The device by torch, and helpers that all parts in torch share."""

import torch

from on_gpu import events
from on_gpu.versions import version

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
  torch.set_num_threads(1)  # Tiny operations take longer on several threads.


def is_ready(size_name: str) -> bool:
  """Report versions and device; return whether it can measure at this size."""
  name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
  facts = {
    "torch": version("torch"),
    "torch device": name,
    "CUDA of torch": torch.version.cuda,
  }
  events.tell("facts", facts=facts)
  if DEVICE == "cpu" and size_name != "tiny":
    events.line("Left out: torch finds no GPU")
    return False
  return True


def wait() -> None:
  """Waits for the device."""
  if DEVICE == "cuda":
    torch.cuda.synchronize()


class Copy:
  """Adds one to numbers, in place."""

  skips = False

  def __init__(self, numbers: int):
    self.row = {"bytes": 8 * numbers}
    self._x = torch.ones(numbers, device=DEVICE)

  def prepare(self, skip):
    pass

  def step(self, skip):
    self._x.add_(1)

  def wait(self):
    wait()
