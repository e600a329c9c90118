"""Trajectories of the real packages, replayed: scale, counter, skipped or not.

`tools/recorders` recorded them. Where a package leaves the range [2**-126,
2**126] in which float32 holds the scale and its reciprocal, the comparison
ends, and ours must stay inside.
"""

import dataclasses
import functools
import re

from helpers import interop_replay, parametrize_slow, ROOT
from helpers import interop_samples as samples
from interop.golden import encoding
import numpy as np
import pytest

from optax_lossscale import interop

LEAVES_THE_RANGE = {"top", "bottom", "long fall", "long climb"}


@dataclasses.dataclass(frozen=True)
class System:
  start: object  # from the recorded settings to (policy, state)
  resume: object  # from these and what was saved to (policy, state)


def torch_start(settings):
  start = {"growth_interval": 2000, "_growth_tracker": 0, **settings}
  scale = start.pop("init_scale", 2.0**16)
  return interop.from_torch({**samples.TORCH, **start, "scale": scale})


def keras_start(settings):
  config = {**settings, "inner_optimizer": "left out"}
  name = "LossScaleOptimizer"
  return interop.from_keras({"class_name": name, "config": config})


def keras_resume(settings, saved):
  return interop.from_keras(saved["config"], saved["variables"] or None)


JMP = samples.make_lookalike("DynamicLossScale")
# By the name of the file.
SYSTEMS = {
  "torch": System(torch_start, lambda _, d: interop.from_torch(d)),
  "tf_keras": System(
    lambda s: interop.from_keras({"dynamic": True, **s}), keras_resume
  ),
  "tf": System(interop.from_keras, keras_resume),
  "keras": System(keras_start, keras_resume),
  "flax": System(
    lambda s: interop.from_flax({"fin_steps": 0, "scale": 65536.0, **s}),
    lambda s, saved: interop.from_flax(
      saved, **{k: v for k, v in s.items() if k != "scale"}
    ),
  ),
  "jmp": System(
    lambda s: JMP({**samples.JMP, "period": 2000, "counter": 0, **s}),
    lambda _, d: JMP(d),
  ),
}


@functools.cache
def load_cases(name):
  groups = {}
  for case in interop_replay.load(name)["cases"]:
    if case["settings"].get("dynamic", True):
      groups.setdefault(str(case["settings"]), []).append(case)
  return list(groups.values())


GROUPS = [(name, i) for name in SYSTEMS for i in range(len(load_cases(name)))]
# A window of two steps.
QUICK = [(name, 1) for name in SYSTEMS]


@parametrize_slow("group", QUICK, GROUPS, ids=str)
def test_policies_move_like_the_other_system_also_from_a_saved_state(group):
  name, number = group
  system = SYSTEMS[name]
  for case in load_cases(name)[number]:
    settings, half = case["settings"], case["half"]
    check_trajectory(case, *system.start(settings), first=0)
    scales = encoding.decode_runs(case["scale"])
    before = encoding.decode_scale(scales[half - 1]) if half else 1.0
    if interop_replay.is_in_range(before):  # or refused: see test_errors.py
      resumed = system.resume(settings, case["saved"])
      check_trajectory(case, *resumed, first=half)


def check_trajectory(case, policy, state, *, first):
  """Compare the steps of a case from `first` on with what was recorded."""
  expected = {
    "scale": encoding.decode_runs(case["scale"])[first:],
    "taken": encoding.unpack(case["taken"])[first:],
  }
  steps = encoding.unpack(case["steps"])[first:]
  interop_replay.assert_same_trajectory(
    expected,
    encoding.decode_counters(case["counter"])[first:],
    interop_replay.replay(policy, state, steps),
    case["name"] in LEAVES_THE_RANGE,
  )


@pytest.mark.parametrize("file", SYSTEMS)
def test_the_page_names_the_version_of_a_golden_file(file):
  golden = interop_replay.load(file)
  version = re.escape(golden["version"].split(",")[0].split("+")[0])
  package = golden["package"].split(",")[0]
  page = (ROOT / "docs" / "reference" / "migrating.md").read_text()
  tested = page.split("\n## Tested versions\n")[1]
  assert re.search(rf"\b{package}\b[^,]*{version}", tested)


def test_factors_other_than_powers_of_two_may_differ_in_the_last_bit():
  """torch multiplies a float32 scale by a float64 factor; ours is float32."""
  rule = {**samples.TORCH, "growth_factor": 1.1, "growth_interval": 1}
  differ = 0
  for scale in np.geomspace(1, 2.0**16, 100, dtype=np.float32):
    policy, state = interop.from_torch({**rule, "scale": scale})
    (ours,), _, _ = interop_replay.replay(policy, state, "F")
    theirs = np.float32(np.float64(scale) * 1.1)
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)
    differ += bool(ours != theirs)
  assert 0 < differ < 100
