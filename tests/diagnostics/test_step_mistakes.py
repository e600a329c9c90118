"""``check_step`` finds mistakes in the wiring of a step, and no others."""

import functools
import re

from helpers import parametrize_slow, step_mistakes, train_steps, usual_losses
from helpers.step_mistakes import (
  devices,
  gradients,
  results,
  updates,
)
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)

# Rows that between them take most branches.
QUICK = (
  "unscaled loss",
  "never unscaled",
  "unscaled twice",
  "cast to float16 after unscaling",
  "nan_to_num of micro-batches",
  "clipped gradients",
  "skipped by an argument",
  "old state",
  "constant scale",
  "all put back",
  "old parameters",
  "sum in float16",
  "loss over the first head",
  "crossed updates",
  "updates times the scale",
)
QUICK_LOOKALIKES = (
  "capped scale",
  "few updates lost",
  "logged gradients",
  "selected parameters",
  "sum of scaled gradients of earlier calls",
)
QUICK_UNCHECKED = "gradients as arguments", "updates of zero"
# Their programs differ most from those of the other losses.
SLOW_LOSSES = (
  "ctc",
  "attention",
  "mask of the lowest number",
  "solve",
  "dropout",
  "zero weight",
)
OF_GRADS = re.compile(
  r"update( \[\d\])? (received|skips)|All gradients|The loss does not depend|"
  r"The updates of two networks are crossed|The parameters change .* as much|"
  r"The new parameters .* are stored in float32"
)
RETURNED = "the new parameters and the new loss-scale state are returned"


@parametrize_slow("name", QUICK, step_mistakes.MISTAKES)
def test_a_mistake_is_the_only_problem_and_its_fix_says_what_to_write(name):
  row = step_mistakes.MISTAKES[name]
  step, args = row.make()
  check = check_step(step, *args)
  problem, *others = check.problems
  assert row.cause in problem.cause
  assert all(row.cause in other.cause for other in others)  # of each update
  assert row.fix in problem.fix and problem.fix
  # If its gradients are wrong, a step still returns what update returned.
  assert (RETURNED in check.passed) is bool(OF_GRADS.match(problem.cause))
  is_scaled_once = any("scaled once" in sentence for sentence in check.passed)
  assert is_scaled_once is problem.cause.startswith("The new parameters")


@parametrize_slow("name", QUICK_LOOKALIKES, step_mistakes.LOOKALIKES)
def test_a_sound_step_that_resembles_a_mistake_has_no_problem(name):
  step, args = step_mistakes.LOOKALIKES[name]()
  check = check_step(step, *args)
  assert check.is_sound, str(check)
  assert RETURNED in check.passed


@parametrize_slow("name", QUICK_UNCHECKED, step_mistakes.UNCHECKED)
def test_what_cannot_be_checked_is_no_problem_but_is_listed(name):
  row = step_mistakes.UNCHECKED[name]
  step, args = row.make()
  check = check_step(step, *args)
  assert check.is_sound, str(check)
  assert any(row.cause in sentence for sentence in check.not_checked)


@parametrize_slow("name", (), usual_losses.LOSSES, SLOW_LOSSES)
def test_each_mistake_in_the_scaling_of_a_usual_loss_is_found(name):
  loss = ols.autocast(functools.partial(usual_losses.loss_fn, name))
  for differentiate, expected in (
    (train_steps.compute_grads, None),
    (train_steps.compute_unscaled_grads, "gradients of an unscaled loss"),
    (train_steps.compute_scaled_grads, "never unscaled"),
    (gradients.unscale_twice, "double if the loss scale halves"),
  ):
    step, args = train_steps.make_step(
      differentiate,
      loss_fn=loss,
      params=usual_losses.PARAMS,
      batch=usual_losses.BATCH,
    )
    causes = [problem.cause for problem in check_step(step, *args).problems]
    assert len(causes) == (expected is not None)
    assert all(expected in cause for cause in causes)


@pytest.mark.slow
def test_an_accumulator_belongs_inside_of_the_wrapper():
  """In front of it, the gradients are zero until it has all of them."""
  accumulate = optax.apply_every(4)
  step, args = train_steps.make_step(tx=optax.chain(accumulate, train_steps.TX))
  nan, zero = check_step(step, *args).problems
  assert "grad_acc/w is NaN, and stays so" in nan.cause
  assert nan.fix.startswith("Put it inside of the wrapper")
  assert zero.fix.startswith("This is fine if it is meant")
  inner = optax.chain(accumulate, optax.sgd(0.1))
  step, args = train_steps.make_step(tx=train_steps.make_tx(inner))
  assert check_step(step, *args).is_sound


@pytest.mark.slow
def test_the_fix_of_a_hidden_overflow_is_not_to_wait_for_a_lower_scale():
  """The bad step is applied, so its scale does not decrease."""
  step, (params, state, batch) = step_mistakes.MISTAKES[
    "mask of finite gradients"
  ].make()
  state = ols.set_loss_scale(state, 2.0**40)
  hidden, overflow = check_step(step, params, state, batch).problems
  assert "An overflow is hidden from update" in hidden.cause
  assert overflow.cause.startswith("The backward pass overflows (loss scale")
  assert "decreases on its own" not in overflow.fix


@pytest.mark.slow
def test_an_overflowing_step_that_puts_its_state_back_does_not_recover():
  step, (params, state, batch) = step_mistakes.MISTAKES["all put back"].make()
  state = ols.set_loss_scale(state, 2.0**40)
  check = check_step(step, params, state, batch)
  assert "it counts 0 skipped steps in place of 1" in check.problems[0].cause
  assert "decreases on its own" not in str(check)


@pytest.mark.slow
@pytest.mark.parametrize("axis_name", [None, "i"])
def test_shards_of_an_optimizer_need_one_loss_scale(axis_name):
  """An overflow on one device is a separate problem."""
  step, args = devices.make_shards_step(axis_name)
  fixes = [problem.fix for problem in check_step(step, *args).problems]
  is_advised = any("ols.with_loss_scaling(inner, axis_name" in x for x in fixes)
  assert is_advised is (axis_name is None)


@pytest.mark.parametrize(
  ("kwargs", "num_problems"),
  [
    ({"update": results.put_back_all}, 1),
    (
      {
        "tx": updates.SMALL_SGD,
        "params": updates.HALF_PARAMS,
        "loss_fn": train_steps.half_loss_fn,
      },
      1,
    ),
    pytest.param({}, 0, marks=pytest.mark.slow),
  ],
)
@parametrize_slow("ordered", [False], [False, True])
def test_a_step_that_is_run_again_prints_once(kwargs, num_problems, ordered):
  seen = []

  def differentiate(*args):
    grads = train_steps.compute_grads(*args)
    log = lambda finite: seen.append(bool(finite))
    jax.debug.callback(log, ols.all_finite(grads), ordered=ordered)
    return grads

  step, args = train_steps.make_step(differentiate, **kwargs)
  check = check_step(step, *args)
  jax.effects_barrier()
  assert len(check.problems) == num_problems
  assert seen == [True]


@pytest.mark.slow
def test_a_callback_that_returns_something_runs_after_an_overflow_too():
  seen = []

  def note(finite):
    seen.append(bool(finite))
    return jnp.float32(1)

  def select(finite, new, old):
    one = jax.pure_callback(note, jax.ShapeDtypeStruct((), "float32"), finite)
    return new, {"metric": one}

  update = train_steps.select_result(select)
  step, args = train_steps.make_step(update=update)
  check = check_step(step, *args)
  assert check.is_sound and RETURNED in check.passed
  assert "after an overflow, since" not in str(check)
  assert not all(seen)
