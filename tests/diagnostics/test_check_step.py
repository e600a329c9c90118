"""One call says whether a training step is sound, and what to fix."""

import functools
import json

from helpers import train_steps
from helpers.usual_losses import BATCH, PARAMS
import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)


def loss_fn(params, batch, factor=1.0):
  hidden = factor * (batch["x"] @ params["w"])
  return jnp.mean(jax.nn.softmax(hidden @ params["head"] / factor) ** 2)


make_step = functools.partial(
  train_steps.make_step, params={**PARAMS, "head": jnp.eye(4)}, batch=BATCH
)


@functools.cache
def check_sound_step():
  step, args = make_step(loss_fn=ols.autocast(loss_fn))
  return check_step(step, *args)


def test_a_sound_step_has_no_problems_and_says_what_was_checked():
  check = check_sound_step()
  assert check.is_sound and check.overflow is None
  lines = str(check).splitlines()
  assert lines[0] == "No problems."
  for sentence in (
    "ok  the loss is scaled once, by the state that update holds",
    "ok  the gradients are finite",
    "ok  100.0% of the matmul and convolution FLOPs run in float16",
  ):
    assert sentence in lines
  assert check.comparison.layers == ()  # Its error is small.
  assert any(x.startswith("ok  relative error of the gradi") for x in lines)
  assert "ok  0.0% of the gradient entries underflow" in lines
  assert lines[-1].startswith("More: check.flops, check.overflow, check.")
  assert len(lines) <= 20
  assert json.loads(json.dumps(check.as_dict()))["is_sound"] is True


@pytest.mark.slow
def test_a_layer_that_overflows_is_a_problem_with_its_name_and_its_magnitude():
  loss = functools.partial(loss_fn, factor=1e5)
  step, args = make_step(loss_fn=ols.autocast(loss))
  check = check_step(step, *args)
  problem = check.problems[0]
  assert problem.cause.startswith("head overflows in the forward pass: max abs")
  assert problem.cause.endswith("float16 ends at 65504.")
  assert problem.fix == "ols.autocast(loss_fn, keep_float32='head')"
  assert problem.keep_float32 == ("head",)
  assert {row.name for row in check.comparison.layers} == {"head"}
  assert check.overflow.name.startswith("head")
  assert str(check).startswith("1 problem.\n1. head overflows")
  kept = problem.keep_float32
  step, args = make_step(loss_fn=ols.autocast(loss, keep_float32=kept))
  assert check_step(step, *args).is_sound


def test_a_loss_scale_that_is_too_high_is_a_problem_with_a_lower_one():
  step, (params, state, batch) = train_steps.make_step(
    loss_fn=train_steps.linear_loss_fn,
    tx=train_steps.make_tx(policy=ols.DynamicLossScale(2.0**40)),
  )
  check = check_step(step, params, state, batch)
  (problem,) = check.problems
  assert problem.cause.startswith(
    "The backward pass overflows, so this step is"
  )
  assert "ols.set_loss_scale(opt_state, " in problem.fix
  assert any("not finite" in what for what in check.not_checked)
  state = ols.set_loss_scale(state, problem.loss_scale)
  assert check_step(step, params, state, batch).is_sound


def test_a_float32_model_is_sound_and_says_how_to_use_float16():
  step, args = make_step(loss_fn=loss_fn)
  check = check_step(step, *args)
  assert check.is_sound and check.comparison is None
  (limitation,) = check.not_checked
  assert limitation.startswith("half precision, to which this step rounds no")
  assert "ols.autocast(loss_fn)" in limitation


@pytest.mark.slow
def test_a_nan_in_the_batch_is_named():
  step, (params, state, batch) = make_step(loss_fn=ols.autocast(loss_fn))
  batch = {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}
  check = check_step(step, params, state, batch)
  assert (
    check.problems[0].cause == "The argument batch['x'] contains NaN (float32)."
  )


def test_at_most_twenty_lines_are_printed():
  problem = diagnostics.Problem("A cause.", "A fix.")
  check = check_sound_step()
  many = diagnostics.StepCheck(
    (problem,) * 9,
    check.passed[:5],
    ("a limitation",) * 9,
    check.flops,
    check.overflow,
    check.comparison,
  )
  text = str(many)
  assert "5 more: check.problems" in text
  assert "more was not checked: check.not_checked" in text
  assert len(text.splitlines()) <= 20
