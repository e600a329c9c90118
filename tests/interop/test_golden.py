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
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
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


# Whole training runs of a linear model: 30 steps, 8 of them with an inf among
# the inputs.
APPLIED = encoding.TRAINING_STEPS.count("F")
ALL = len(encoding.TRAINING_STEPS)


def decayed(rate):
  return lambda count: rate / (1 + 0.125 * count)


SCALE, WINDOW = encoding.TRAINING_SCALE, encoding.TRAINING_WINDOW
OPTIMIZER = {"initial_scale": SCALE, "dynamic_growth_steps": WINDOW}
POLICIES = {
  "keras": interop.from_keras(OPTIMIZER)[0],
  "tf_keras": interop.from_keras({"dynamic": True, **OPTIMIZER})[0],
  "torch": torch_start({"init_scale": SCALE, "growth_interval": WINDOW})[0],
  "flax": interop.from_flax(
    {"fin_steps": 0, "scale": SCALE, "growth_interval": WINDOW - 1}
  )[0],
}
# The optimizers as the recorders made them. torch's schedule is the loop's, not
# the optimizer's, so that its runs have none.
OPTIMIZERS = {
  "sgd": optax.sgd(0.25),
  "sgd, decayed": optax.sgd(decayed(0.25)),
  "adam": optax.adam(0.0625),
  "adam, decayed": optax.adam(decayed(0.0625)),
}
RUNS = {
  (package, run["name"]): run
  for package in POLICIES
  for run in interop_replay.load(package)["training"]
}


def train(policy, inner, *, counts_move_on_skips=False):
  tx = ols.with_loss_scaling(inner, policy)

  def loss_fn(params, x, y):
    weights, bias = params
    return jnp.mean((x @ weights + bias - y) ** 2)

  @jax.jit
  def step(params, opt_state, x, y):
    _, grads = ols.value_and_grad(loss_fn, opt_state)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = tuple(map(np.float32, (encoding.FIRST_WEIGHTS, encoding.FIRST_BIAS)))
  opt_state, history = tx.init(params), []
  for at in range(ALL):
    x, y = map(np.float32, encoding.make_batch(at))
    params, opt_state = step(params, opt_state, x, y)
    if counts_move_on_skips:
      opt_state = optax.tree.set(opt_state, count=np.int32(at + 1))
    flat = np.concatenate([np.ravel(p) for p in params])
    scale = ols.get_loss_scale_state(opt_state).loss_scale
    history.append((flat, float(scale)))
  params, scales = zip(*history, strict=True)
  return np.stack(params), scales, opt_state


QUICK_RUNS = [("tf_keras", "sgd"), ("flax", "adam, decayed")]


@parametrize_slow("run", QUICK_RUNS, RUNS, ids=str)
def test_params_and_scale_equal_the_other_system_at_every_step(run):
  package, name = run
  theirs = RUNS[run]
  # tf.keras counts skipped steps as well, in its schedules and in Adam.
  moves = package == "tf_keras" and name != "sgd"
  inner, policy = OPTIMIZERS[name], POLICIES[package]
  params, scales, _ = train(policy, inner, counts_move_on_skips=moves)
  scales = [*map(encoding.encode_scale, scales)]
  assert scales == encoding.decode_runs(theirs["scale"])
  expected = np.array(theirs["params"], np.float32)
  # The params are about 0.5, where float32 has steps of 6e-8. torch and Keras
  # round Adam's bias correction differently, by 6e-5 of an update at first.
  atol = 3e-6 if "adam" in name else 1.5e-7
  np.testing.assert_allclose(params, expected, rtol=0, atol=atol)
  assert np.ptp(expected, axis=0).min() > 0.03


def test_the_counters_that_advance_on_a_skipped_step_match_the_docs():
  assert (APPLIED, ALL) == (22, 30)
  counts = {
    (package, counter): count
    for (package, _), run in RUNS.items()
    for counter, count in run["counts"].items()
  }
  assert counts == {
    ("tf_keras", "iterations"): ALL,
    ("keras", "iterations"): APPLIED,
    ("torch", "LambdaLR.last_epoch"): ALL,
    ("torch", "Adam step"): APPLIED,
    ("flax", "TrainState.step"): ALL,
    ("flax", "schedule"): APPLIED,
  }
  _, _, opt_state = train(POLICIES["flax"], OPTIMIZERS["adam, decayed"])
  assert ols.get_loss_scale_state(opt_state).total_notfinite == ALL - APPLIED
  # The counts of Adam and of its schedule.
  ours = [int(c) for _, c in optax.tree.get_all_with_path(opt_state, "count")]
  assert ours == [APPLIED, APPLIED]
