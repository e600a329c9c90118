"""Records fairseq's DynamicLossScaler. Needs: the fairseq wheel, unpacked.

fairseq 0.12.2 is the last release, and has wheels for Python 3.8 at most. The
one module that is wanted needs nothing but Python, so it is loaded out of the
wheel:

  pip download --no-deps --only-binary=:all: --python-version 3.8 \\
      --platform manylinux_2_5_x86_64 --platform manylinux1_x86_64 \\
      fairseq==0.12.2
  FAIRSEQ_WHEEL=fairseq-0.12.2-...whl \\
      python tests/interop/golden/record_fairseq.py
"""

import os
import types
import zipfile

import record_common as common

_wheel = zipfile.ZipFile(os.environ["FAIRSEQ_WHEEL"])
VERSION = os.path.basename(_wheel.filename).split("-")[1]
module = types.ModuleType("dynamic_loss_scaler")
exec(_wheel.read("fairseq/optim/dynamic_loss_scaler.py"), module.__dict__)


class DynamicLossScaler(common.Scaler):
  def start(self):
    settings = self.settings
    # As FP16Optimizer makes it from its config.
    self.scaler = module.DynamicLossScaler(
      init_scale=settings.get("fp16_init_scale", 2**7),
      scale_window=settings["fp16_scale_window"],
      tolerance=settings.get("fp16_scale_tolerance", 0.0),
      threshold=settings.get("threshold_loss_scale"),
      min_loss_scale=settings.get("min_loss_scale", 1e-4),
    )

  def step(self, finite):
    try:
      self.scaler.check_overflow(1.0 if finite else float("inf"))
    except OverflowError:
      return False
    except FloatingPointError:
      return None
    self.scaler.update()
    return True

  def scale(self):
    return float(self.scaler.loss_scale)

  def counter(self):
    since = self.scaler._iter - self.scaler._last_overflow_iter - 1
    return since % self.scaler.scale_window

  def save(self):
    return {"loss_scale": self.scaler.loss_scale}

  def restore(self, saved):
    # All that a checkpoint of fairseq holds: its counters start again.
    self.scaler.loss_scale = saved["loss_scale"]


def cases():
  for window, tolerance in (
    (1, 0.0),
    (2, 0.25),
    (3, 0.0),
    (3, 0.05),
    (4, 0.3),
    (5, 1 / 3),
    (4, 0.5),
  ):
    settings = {
      "fp16_init_scale": 2.0**15,
      "fp16_scale_window": window,
      "fp16_scale_tolerance": tolerance,
    }
    for name, steps in common.strings(window, 2).items():
      if "at" not in name or tolerance in (0.0, 0.3):
        yield f"window {window}, tolerance {tolerance}: {name}", settings, steps
  rare = {"fp16_scale_window": 100, "fp16_scale_tolerance": 0.05}
  yield "rare overflows", rare, ("F" * 30 + "T") * 20 + "TTTT" + "F" * 210
  yield (
    "window 2000",
    {"fp16_scale_window": 2000},
    "F" * 2100 + "T" + "F" * 2100,
  )
  threshold = {
    "fp16_init_scale": 2.0**6,
    "fp16_scale_window": 3,
    "threshold_loss_scale": 8.0,
  }
  yield "threshold", threshold, "F" * 4 + "T" * 9 + "F" * 8
  below = {**threshold, "fp16_init_scale": 2.0, "fp16_scale_window": 4}
  yield "start below the threshold", below, "FFTFFFFFT"
  high = {"fp16_init_scale": 2.0**124, "fp16_scale_window": 2}
  yield "top", high, "F" * 12 + "TTT" + "F" * 8
  low = {"fp16_scale_window": 4, "fp16_init_scale": 4.0}
  yield "raises at the floor", low, "F" * 5 + "T" * 20
  floor = {**low, "min_loss_scale": 0.5}
  yield "raises at its own floor", floor, "F" * 5 + "T" * 20


if __name__ == "__main__":
  common.write(
    "fairseq.json",
    "fairseq",
    VERSION,
    cases=common.record_cases(DynamicLossScaler, cases()),
  )
