"""Trajectories of the real packages, replayed: scale, counter, skipped or not.

`tests/interop/golden/record_*.py` recorded them. Where a package leaves the
range [2**-126, 2**126] in which float32 holds the scale and its reciprocal, the
comparison ends, and ours must stay inside.
"""

import dataclasses
import functools

from helpers import interop_replay
from interop.golden import record_common as common
import numpy as np
import pytest

from optax_lossscale import interop

LEAVES_THE_RANGE = {"top", "bottom", "long fall", "long climb"}


def named(class_name, **attributes):
  """An object that looks like one of another package."""
  return type(class_name, (), attributes)()


@dataclasses.dataclass(frozen=True)
class System:
  """How the tests read a golden file.

  Attributes:
    file: its name.
    start: from the recorded settings to (policy, state).
    resume: from the recorded settings and what was saved to (policy, state).
    counts: from the recorded counters and the settings to ours.
    key: the list of cases in the file.
  """

  file: str
  start: object
  resume: object
  counts: object = lambda counters, settings: counters
  key: str = "cases"


def torch_start(settings):
  defaults = {
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 0,
  }
  state_dict = {**defaults, **settings}
  return interop.from_torch(
    {"scale": state_dict.pop("init_scale"), **state_dict}
  )


def keras_start(settings):
  config = {**settings, "inner_optimizer": "left out"}
  return interop.from_keras(
    {"class_name": "LossScaleOptimizer", "config": config}
  )


def tf_keras_start(settings):
  return interop.from_keras({"dynamic": True, **settings})


def keras_resume(settings, saved):
  return interop.from_keras(saved["config"], saved["variables"] or None)


def jmp_start(settings):
  arrays = {"counter": np.int32(0), "min_loss_scale": np.ones([], np.float32)}
  plain = {"period": 2000, "factor": 2}
  return interop.from_jmp(
    named("DynamicLossScale", **{**arrays, **plain, **settings})
  )


def mindspore_start(settings):
  return interop.from_jmp(
    named("DynamicLossScaler", **{"counter": np.int32(0), **settings})
  )


def paddle_start(settings):
  defaults = {
    "init_loss_scaling": 2.0**16,
    "incr_ratio": 2.0,
    "decr_ratio": 0.5,
    "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1,
    "incr_count": 0,
    "decr_count": 0,
    "use_dynamic_loss_scaling": True,
  }
  state_dict = {**defaults, **settings}
  scale = np.array([state_dict.pop("init_loss_scaling")], np.float32)
  return interop.from_paddle({"scale": scale, **state_dict})


def with_scale_array(saved):
  return {**saved, "scale": np.array(saved["scale"], np.float32)}


def finite_since_growth(since_overflow, window, first):
  """DeepSpeed counts from the last overflow; ours from the last growth, too."""
  if since_overflow <= first:
    return since_overflow % first
  return (since_overflow - first) % window


def deepspeed_counts(counters, settings, more):
  window = settings.get("loss_scale_window", 1000)
  return [finite_since_growth(c, window, window + more) for c in counters]


SYSTEMS = {
  "torch": System("torch", torch_start, lambda _, d: interop.from_torch(d)),
  "tf_keras": System("tf_keras", tf_keras_start, keras_resume),
  "tf": System(
    "tf_keras", interop.from_keras, keras_resume, key="loss_scale_cases"
  ),
  "keras": System("keras", keras_start, keras_resume),
  "flax": System(
    "flax",
    lambda s: interop.from_flax({"fin_steps": 0, "scale": 65536.0, **s}),
    lambda s, saved: interop.from_flax(
      saved, **{k: v for k, v in s.items() if k != "scale"}
    ),
  ),
  "jmp": System(
    "jmp",
    jmp_start,
    lambda s, d: interop.from_jmp(named("DynamicLossScale", **d)),
  ),
  "mindspore": System(
    "mindspore",
    mindspore_start,
    lambda s, d: interop.from_jmp(named("DynamicLossScaler", **d)),
  ),
  "paddle": System(
    "paddle",
    paddle_start,
    lambda s, d: interop.from_paddle(with_scale_array(d)),
  ),
  "megatron": System(
    "megatron",
    interop.from_megatron,
    lambda s, d: interop.from_megatron(s, with_scale_array(d)),
  ),
  "deepspeed, old": System(
    "deepspeed_old",
    lambda s: interop.from_deepspeed(s, version="0.17.0"),
    lambda s, d: interop.from_deepspeed(s, d, version="0.17.0"),
    functools.partial(deepspeed_counts, more=0),
  ),
  "deepspeed, new": System(
    "deepspeed_new",
    interop.from_deepspeed,
    interop.from_deepspeed,
    functools.partial(deepspeed_counts, more=1),
  ),
  "fairseq": System(
    "fairseq",
    interop.from_fairseq,
    lambda s, d: interop.from_fairseq(s, d["loss_scale"]),
  ),
}


def cases_of(system):
  for case in interop_replay.load(system.file)[system.key]:
    if case["settings"].get("dynamic", True):
      yield case


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_each_recorded_trajectory_is_ours_as_well(system):
  for case in cases_of(system):
    policy, state = system.start(case["settings"])
    ours = interop_replay.replay(policy, state, common.unpack(case["steps"]))
    counts = system.counts(
      interop_replay.counters(case["counter"]), case["settings"]
    )
    interop_replay.assert_the_same(
      case, counts, ours, case["name"] in LEAVES_THE_RANGE
    )


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_ours_goes_on_from_what_they_saved_as_they_do(system):
  for case in cases_of(system):
    half, steps = case["half"], common.unpack(case["steps"])
    scales = common.unruns(case["scale"])
    before = common.number(scales[half - 1]) if half else 1.0
    if not interop_replay.in_range(before):
      continue  # Refused, see test_interop_errors.
    theirs = case.get("restored") or {
      "scale": scales[half:],
      "taken": common.unpack(case["taken"])[half:],
    }
    counts = interop_replay.counters(
      theirs.get("counter") or common.unruns(case["counter"])
    )
    counts = counts if "restored" in case else counts[half:]
    counts = system.counts(counts, case["settings"])
    policy, state = system.resume(case["settings"], case["saved"])
    ours = interop_replay.replay(policy, state, steps[half:])
    interop_replay.assert_the_same(
      theirs, counts, ours, case["name"] in LEAVES_THE_RANGE
    )


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_the_recorded_strings_are_as_many_and_as_long_as_they_are_said_to_be(
  system,
):
  cases = list(cases_of(system))
  names = " ".join(case["name"] for case in cases)
  steps = [common.unpack(case["steps"]) for case in cases]
  assert len(cases) >= 15
  for word in ("finite", "bursts", "F T", "random", "window, T"):
    assert word in names
  if system.key == "cases":
    assert "overflow at 5" in names
    assert "top" in names
  assert max(map(len, steps)) >= 100
  assert any("T" in s and "F" in s[s.index("T") :] for s in steps)
