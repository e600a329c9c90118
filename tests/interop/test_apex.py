"""apex's two rules, against oracles in plain Python: apex is not on PyPI.

The oracles restate `apex/amp/scaler.py` and `csrc/update_scale_hysteresis.cu`.
"""

import random

from helpers import interop_replay
from interop.golden import record_common as common
import numpy as np
import pytest

from optax_lossscale import interop


def amp(steps, *, scale, window, low, high, unskipped=0):
  """After each step: scale, steps since the last move or overflow."""
  for step in steps:
    if step == "T":
      scale = max(low, scale / 2) if low else scale / 2
      unskipped = 0
    else:
      unskipped += 1
    if unskipped == window:
      scale = min(high, scale * 2)
      unskipped = 0
    yield scale, unskipped


def kernel(steps, *, scale, window, hysteresis, tracker, growth=0):
  """After each step: scale, growth tracker and hysteresis tracker."""
  for step in steps:
    if step == "T":
      tracker -= 1
      growth = 0
      if tracker <= 0:
        scale *= 0.5
    else:
      growth += 1
      if growth == window:
        scale *= 2.0
        growth = 0
      tracker = hysteresis
    yield scale, growth, tracker


def run(policy, state, steps):
  """After each step: scale and count, as the oracles give them."""
  scales, counts, _ = interop_replay.replay(policy, state, steps)
  return list(zip(scales, counts, strict=True))


def all_strings(window, hysteresis=1):
  named = common.strings(window, hysteresis)
  picked = [v for k, v in named.items() if "at" not in k or k.endswith(" 3")]
  yield from picked
  rng = random.Random(window)
  yield "".join(rng.choice("FFFT") for _ in range(60))


AMP = [
  {"window": 3, "low": None, "high": 2.0**24},
  {"window": 1, "low": 2.0**3, "high": 2.0**18},
  {"window": 2, "low": 2.0**14, "high": 2.0**17},
]


@pytest.mark.parametrize("rule", AMP)
def test_amp_goes_on_from_its_state_dict_as_its_own_rule_does(rule):
  settings = {
    "scale_window": rule["window"],
    "min_loss_scale": rule["low"],
    "max_loss_scale": rule["high"],
  }
  for steps in all_strings(rule["window"]):
    policy, state = interop.from_apex({}, **settings)
    trace = list(amp(steps, scale=2.0**16, **rule))
    assert run(policy, state, steps) == trace
    half = len(steps) // 2
    scale, unskipped = trace[half - 1]
    saved = {"loss_scaler0": {"loss_scale": scale, "unskipped": unskipped}}
    policy, state = interop.from_apex(saved, **settings)
    assert run(policy, state, steps[half:]) == trace[half:]


@pytest.mark.parametrize("window, hysteresis", [(3, 1), (2, 2), (4, 3)])
def test_the_hysteresis_kernel_goes_on_as_its_own_rule_does(window, hysteresis):
  settings = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": window,
    "hysteresis": hysteresis,
  }
  for steps in all_strings(window, hysteresis):
    start = {"scale": 2.0**16, "tracker": hysteresis}
    trace = list(kernel(steps, window=window, hysteresis=hysteresis, **start))
    states = [(2.0**16, 0, hysteresis), *trace]
    for half in (0, len(steps) // 2, len(steps) - 2):
      scale, growth, tracker = states[half]
      policy, state = interop.from_apex(
        {
          "current_scale": np.array([scale], np.float32),
          "growth_tracker": np.array([growth], np.int32),
          "hysteresis_tracker": np.array([tracker], np.int32),
        },
        **settings,
      )
      expected = [(scale, growth) for scale, growth, _ in trace[half:]]
      assert run(policy, state, steps[half:]) == expected


def test_amp_starts_below_its_ceiling():
  policy, _ = interop.from_apex({}, max_loss_scale=2.0**10)
  assert policy.init_scale == 2.0**10


def test_one_of_several_losses_is_chosen_by_its_id():
  saved = {
    f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)
  }
  _, state = interop.from_apex(saved, loss_id=2)
  assert (state.loss_scale, state.finite_count) == (4.0, 2)
