"""``check_step`` finds no problem in sound steps, and advises no change."""

import contextlib
import re

from helpers import parametrize_slow, sound_steps
import jax

from optax_lossscale import diagnostics

# One or two of each module, and those with which a check was once wrong. The
# others run at night.
SLOW = (
  "several_losses.dqn",
  "devices.data_parallel_with_explicit_axes",
  "devices.replicated_train_state",
  "dtypes.bfloat16_params",
  "dtypes.master_copies_beside_params",
  "dtypes.mixed_params",
  "inner_updates.darts",
  "inner_updates.diloco",
  "inner_updates.extragradient",
  "inner_updates.maml",
  "kept_back.delayed_actor",
  "kept_back.ratio_to_itself",
  "kept_back.rejected_step",
  "kept_back.stopped_member",
  "kept_back.under_cond_that_updates",
  "models.gradient_penalty",
  "models.rarely_used_rows",
  "optimizers.best_loss_that_starts_at_inf",
  "optimizers.ema_of_params",
  "optimizers.lookahead",
  "optimizers.partition_with_frozen_layer",
  "optimizers.restarted_moments",
  "optimizers.schedule_free",
  "optimizers.sharpness_aware",
  "several_losses.gan",
  "transformations.debug_print",
  "transformations.logging_callback",
  "with_equinox.train_state_module",
  "with_haiku.mlp",
  "with_keras.text_classifier",
  "with_linen.batch_stats_and_average",
  "with_nnx.biases_only",
)

# A part of these models is not in half precision: a layer that is kept, or an
# inner or outer product of vectors, which autocast does not cast.
NOT_ALL_IN_HALF = (
  "dtypes.float32_layer",
  "models.mixture_of_experts",
  "models.gradient_penalty",
)

# A sound step may leave these unchecked: facts, without advice.
FACTS = (
  r"the precision of each layer: autocast casts no matmul on which the"
  r" gradients depend",
  r"the gradients: update is in a branch that was not taken",
  r"while: only one iteration is counted",
)
# In these steps a condition keeps the update back, or it is zero.
KEPT_BACK = (
  "kept_back.delayed_actor",
  "kept_back.delayed_params",
  "kept_back.rejected_step",
  "kept_back.schedule_that_begins_later",
  "kept_back.stopped_member",
)
FACTS_BY_STEP = {
  name: r"(what the step returns|whether the parameters change): .*"
  for name in KEPT_BACK
} | {"inner_updates.diloco": r"how the loss is scaled: some gradients .*"}


def is_fact(name, sentence):
  facts = (*FACTS, FACTS_BY_STEP.get(name, "-"))
  return any(re.fullmatch(fact, sentence) for fact in facts)


@parametrize_slow("name", (), sound_steps.NAMES, SLOW)
def test_a_sound_step_has_no_problem_and_gets_no_advice(name):
  """Nor a warning, which would be an error of the test."""
  is_x64 = name == "dtypes.x64"
  with jax.enable_x64(True) if is_x64 else contextlib.nullcontext():
    step, args = sound_steps.make_step(name)
    check = diagnostics.check_step(step, *args, progress=False)
  assert check.problems == ()
  assert [x for x in check.not_checked if not is_fact(name, x)] == []
  is_whole = check.flops.fraction == 1
  assert is_whole is (name not in NOT_ALL_IN_HALF), str(check.flops)
