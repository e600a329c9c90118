"""``check_step`` finds no problem in sound steps, and advises no change."""

import contextlib
import re

from helpers import parametrize_slow
from helpers.sound_steps import STEPS
import jax

from optax_lossscale import diagnostics

# One or two of each module, and those with which a check was once wrong. The
# others run at night.
SLOW = (
  "DQN",
  "DARTS",
  "DiLoCo",
  "Equinox, statistics",
  "Haiku, LSTM",
  "Keras, text",
  "MAML",
  "NNX, biases only",
  "NNX, tied weights",
  "NNX, two optimizers",
  "bfloat16 params",
  "branch that updates",
  "delayed actor",
  "explicit axes",
  "extragradient",
  "frozen layer",
  "gradient penalty",
  "linen, statistics",
  "log on the host",
  "lookahead",
  "metrics",
  "mixed params",
  "pmap with replicas",
  "print in the loss",
  "ratio to itself",
  "rejected",
  "restarted moments",
  "schedule-free",
  "sharpness-aware",
  "stopped member",
)

# A part of these models is not in half precision: a layer that is kept, or an
# inner or outer product of vectors, which autocast does not cast.
NOT_ALL_IN_HALF = "float32 layer", "mixture of experts", "gradient penalty"

# A sound step may leave these unchecked: facts, without advice.
FACTS = (
  r"the precision of each layer: autocast casts no matmul on which the"
  r" gradients depend",
  r"the gradients: they are in a branch that was not taken",
  r"while: only one iteration is counted",
)
# In these steps a condition keeps the update back, or it is zero.
KEPT_BACK = (
  "delayed actor",
  "delayed params",
  "rejected",
  "schedule that begins later",
  "stopped member",
)
FACTS_BY_STEP = {
  name: r"(what the step returns|whether the parameters change): .*"
  for name in KEPT_BACK
} | {"DiLoCo": r"how the loss is scaled: some gradients .*"}


def is_fact(name, sentence):
  facts = (*FACTS, FACTS_BY_STEP.get(name, "-"))
  return any(re.fullmatch(fact, sentence) for fact in facts)


@parametrize_slow("name", (), STEPS, SLOW)
def test_a_sound_step_has_no_problem_and_gets_no_advice(name):
  """Nor a warning, which would be an error of the test."""
  is_x64 = name == "x64"
  with jax.enable_x64(True) if is_x64 else contextlib.nullcontext():
    step, args = STEPS[name]()
    check = diagnostics.check_step(step, *args, progress=False)
  assert check.problems == ()
  assert [x for x in check.not_checked if not is_fact(name, x)] == []
  is_whole = check.flops.fraction == 1
  assert is_whole is (name not in NOT_ALL_IN_HALF), str(check.flops)
