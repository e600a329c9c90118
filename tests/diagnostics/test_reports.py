"""Each report says what it cannot run, and leaves its arguments unchanged."""

import functools

from helpers import step_mistakes, train_steps
from helpers.train_steps import BATCH, make_step, PARAMS
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.diagnostics import (
  _tracing,
  check_step,
  compare_precision,
  count_flops,
  find_overflow,
)

compare = functools.partial(compare_precision, progress=False)
every_report = pytest.mark.parametrize(
  "report", [find_overflow, compare, count_flops]
)


@every_report
def test_an_argument_other_than_a_function_is_refused(report):
  with pytest.raises(
    TypeError, match=r"fun must be a function, got fun = 3\.0"
  ):
    report(3.0)


@every_report
def test_reports_that_need_arrays_refuse_shapes(report):
  x = jax.ShapeDtypeStruct((2,), jnp.float32)
  programs = {
    "x": lambda x: jnp.exp(x),
    r"args\[0\]": lambda *args: jnp.exp(args[0]),
  }
  for name, fun in programs.items():
    if report is count_flops:
      report(fun, x)
    else:
      with pytest.raises(TypeError, match=f"needs concrete arrays.* at {name}"):
        report(fun, x)


@every_report
def test_under_jit_the_error_says_to_call_the_report_outside(report):
  def called(*args):
    report(lambda *args: jnp.zeros(()), *args)

  with pytest.raises(TypeError, match=r"outside jit, .* a tracer at args\[0\]"):
    jax.jit(called)(jnp.ones(2))
  if report is not count_flops:
    with pytest.raises(TypeError, match=r"outside jit, .* on the host\."):
      jax.jit(called)()


@every_report
def test_an_error_of_the_step_is_raised_unchanged(report):
  def step(x):
    raise ValueError("a mistake")

  with pytest.raises(ValueError, match="a mistake"):
    report(jax.jit(step), 1.0)


@every_report
def test_an_object_that_stores_its_state_is_unchanged(report):
  class Trainer:
    def __init__(self):
      self.step, (self.params, self.state, _) = make_step()

    def fit(self, batch):
      self.params, self.state = self.step(self.params, self.state, batch)

  trainer = Trainer()
  message = r"got Trainer\.fit, which writes them to self\.params"
  with pytest.raises(TypeError, match=message):
    report(trainer.fit, BATCH)
  assert trainer.params is PARAMS


@pytest.mark.slow
def test_a_step_with_compiler_options_is_accepted():
  plain, args = make_step()
  options = {"xla_cpu_enable_fast_math": False}
  step = jax.jit(plain.__wrapped__, compiler_options=options)
  assert find_overflow(step, *args) is None
  assert compare(step, *args).error == compare(plain, *args).error
  assert count_flops(step, *args).fraction == 1


@pytest.mark.slow
def test_a_ref_among_the_arguments_is_unchanged():
  refs = jax.tree.map(jax.new_ref, PARAMS)
  plain, (_, state, batch) = make_step()

  @jax.jit
  def step(refs, state, batch):
    params, state = plain({"w": refs["w"][...]}, state, batch)
    refs["w"][...] = params["w"]
    return state

  args = refs, state, batch
  assert find_overflow(step, *args) is None
  error = compare(plain, PARAMS, state, batch).error
  assert compare(step, *args).error == pytest.approx(error, rel=0.05)
  assert count_flops(step, *args).fraction == 1
  np.testing.assert_array_equal(refs["w"][...], PARAMS["w"])
  for report in find_overflow, compare:
    with pytest.raises(TypeError, match="Pass the Ref as an argument"):
      report(lambda state, batch: step(refs, state, batch), *args[1:])


@pytest.mark.parametrize(
  ("report", "scale"),
  [
    (find_overflow, 2.0**6),
    pytest.param(find_overflow, 2.0**40, marks=pytest.mark.slow),
    (count_flops, 2.0**6),
    pytest.param(compare, 2.0**6, marks=pytest.mark.slow),
  ],
)
def test_reports_transfer_what_they_need_and_donate_nothing(report, scale):
  step, args = make_step(
    loss_fn=train_steps.linear_loss_fn,
    tx=train_steps.make_tx(policy=scale),
  )
  step = jax.jit(step, donate_argnums=(0, 1))
  args = jax.tree.map(jnp.asarray, args)
  with jax.transfer_guard("disallow_explicit"):
    str(report(step, *args))
  assert not any(x.is_deleted() for x in jax.tree.leaves(args))


@pytest.mark.parametrize(
  ("report", "actions"),
  [
    (
      find_overflow,
      ["compiling and running the function", "measuring 1 operation"],
    ),
    pytest.param(
      compare_precision,
      [
        "running the function as trained",
        "running the function in float32",
        "measuring layers, run 1",
        "measuring layers, run 2",
      ],
      marks=pytest.mark.slow,
    ),
  ],
)
def test_progress_is_shown_only_if_it_takes_long(
  report, actions, capsys, monkeypatch
):
  fun = jax.jit(lambda x: lax.scan(lambda x, _: (x * 60000, x), x, None, 2))
  x = jnp.ones(4, jnp.float16)
  report(fun, x, progress=False)  # The compiled programs are cached.
  monkeypatch.setattr(_tracing, "_DELAY_SECONDS", 60)
  report(fun, x)
  monkeypatch.setattr(_tracing, "_DELAY_SECONDS", -1)
  report(fun, x, progress=False)
  assert capsys.readouterr() == ("", "")
  report(fun, x)
  out, err = capsys.readouterr()
  assert out == ""
  texts = [line.rpartition(", ")[0] for line in err.splitlines()]
  assert texts == [f"{report.__name__}: {action}" for action in actions]


def test_reports_use_up_no_random_key():
  def fun(x, key):
    return jnp.sum(jax.random.bernoulli(key, 0.9, x.shape) * x)

  x, key = jnp.ones((4, 4)), jax.random.key(0)
  with jax.debug_key_reuse(True):
    assert find_overflow(fun, x, key) is None
    jax.jit(fun)(x, key)
    with pytest.raises(jax.errors.KeyReuseError):
      jax.jit(fun)(x, key)


@pytest.mark.slow
def test_an_update_that_does_not_run_is_a_problem_next_to_an_overflow():
  step, (params, state, batch) = step_mistakes.UNCHECKED[
    "branch that is never taken"
  ].make()
  report = compare(step, params, state, batch)
  assert report.reference_is_zero
  assert str(report).startswith("All gradients are zero in float32")
  high = ols.set_loss_scale(state, 2.0**40)
  check = check_step(step, params, high, batch)
  assert any("did not run" in problem.cause for problem in check.problems)


def test_only_check_step_judges_how_a_step_scales_its_gradients():
  """A warning would be an error of the test."""
  step, args = step_mistakes.MISTAKES["unscaled twice"].make()
  assert find_overflow(step, *args) is None


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["branch on finite gradients", "apply_if_finite"]
)
def test_an_overflow_that_prevents_update_is_found(name):
  step, (params, state, batch) = step_mistakes.MISTAKES[name].make()
  (note,) = count_flops(step, params, state, batch).limitations
  assert note.startswith("whether update runs, in cond at ")
  state = ols.set_loss_scale(state, 2.0**40)
  assert find_overflow(step, params, state, batch).backward
  report = compare(step, params, state, batch)
  assert report.suggested_log2_scale_change < 0
  causes = [x.cause for x in check_step(step, params, state, batch).problems]
  assert any("update did not run in this step" in cause for cause in causes)


@pytest.mark.slow
def test_each_of_two_optimizers_receives_its_own_overflow():
  """A skipped step next to one that was applied hides nothing."""
  step, (params, others, state, other, batch) = step_mistakes.LOOKALIKES[
    "two optimizers"
  ]()
  other = ols.set_loss_scale(other, 2.0**40)
  check = check_step(step, params, others, state, other, batch)
  assert check.overflow.backward and "hidden" not in str(check)
  assert check.problems[0].fix.startswith("Lower the loss scale by 2**")
  assert check.problems[0].loss_scale is None  # Only one is too high.


@pytest.mark.slow
def test_a_member_of_a_population_that_is_skipped_is_no_mistake():
  step, (params, state, batch) = train_steps.make_population(*make_step())
  batches = jnp.stack([batch, 1e6 * batch])
  step = jax.vmap(step.__wrapped__.__wrapped__)
  check = check_step(step, params, state, batches)
  assert check.overflow is not None
  assert not any("update" in problem.cause for problem in check.problems)
