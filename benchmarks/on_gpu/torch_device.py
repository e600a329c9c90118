"""The device of torch, and a program on it."""

from shared import clock
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
  torch.set_num_threads(1)  # Tiny operations take longer on several threads.


class TorchProgram(clock.Program):
  """A program that torch runs."""

  def wait(self):
    if DEVICE == "cuda":
      torch.cuda.synchronize()
