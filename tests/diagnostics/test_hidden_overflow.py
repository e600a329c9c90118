"""Code between a gradient and `update` that hides an overflow is reported."""

import functools
import warnings

from helpers import mark_slow_params, whole_steps
from helpers.whole_steps import BATCH, CAST, LARGE, PARAMS, SMALL
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

DYNAMIC = ols.DynamicLossScale(2.0**6)
compare = functools.partial(diagnostics.compare_precision, progress=False)
gradient_of = whole_steps._compute_grads


def make_step(
  policy,
  transform_grads=lambda grads: grads,
  differentiate=gradient_of,
  wrap_tx=lambda tx: tx,
  **kwargs,
):
  """Return a step with code between its gradients and `update`."""
  tx = wrap_tx(ols.with_loss_scaling(optax.sgd(0.1), policy, **kwargs))

  def changed(params, state, batch):
    return transform_grads(differentiate(params, state, batch))

  step = functools.partial(whole_steps.train_step, tx, differentiate=changed)
  return jax.jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def map_grads(change):
  return lambda grads: jax.tree.map(change, grads)


def make_guarded_step(policy, taken):
  """Return a step with a custom branch around the update."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), policy)

  def step(params, state, batch):
    grads = gradient_of(params, state, batch)
    update = lambda: tx.update(grads, state, params)
    nothing = lambda: (jax.tree.map(jnp.zeros_like, grads), state)
    is_taken = taken(grads) if callable(taken) else taken
    updates, new_state = lax.cond(is_taken, update, nothing)
    return optax.apply_updates(params, updates), new_state

  return jax.jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def of_micro_batches(policy):
  """The second of two overflows, and is left out."""
  last = 1e6 if policy is LARGE else 1.0
  batches = jnp.stack([BATCH, last * BATCH])
  weak = ols.FixedLossScale(1.0)

  def differentiate(params, state, _):
    def add(total, batch):
      grads = gradient_of(params, state, batch)
      return jax.tree.map(
        jnp.add, total, map_grads(jnp.nan_to_num)(grads)
      ), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]

  return make_step(weak, differentiate=differentiate)


def every_other_step(policy):
  return make_guarded_step(policy, lambda grads: BATCH[0, 0] > jnp.inf)


HIDE = {
  "nan_to_num": lambda p: make_step(p, map_grads(jnp.nan_to_num)),
  "where": lambda p: make_step(
    p, map_grads(lambda g: jnp.where(jnp.isfinite(g), g, 0))
  ),
  "zero_nans, clip": lambda p: make_step(
    p,
    wrap_tx=lambda tx: optax.chain(optax.zero_nans(), optax.clip(1.0), tx),
  ),
  "micro-batches": of_micro_batches,
}
GUARD = {
  "apply_if_finite": lambda p: make_step(
    p, wrap_tx=lambda tx: optax.apply_if_finite(tx, 5)
  ),
  "cond": lambda p: make_guarded_step(p, ols.all_finite),
}
HIDDEN = "An overflow is hidden from update: value_and_grad returned gradients"
NOT_RUN = (
  "update did not run in this step, since its branch was not taken. Pass"
  " arguments with which the branch is taken. If the branch tests whether the"
  " gradients are finite, call update outside of it, since with_loss_scaling"
  " skips bad steps."
)


@pytest.mark.parametrize("name", mark_slow_params({"where"}, HIDE))
def test_an_overflow_that_is_hidden_from_update_is_named_and_reported(name):
  step, args = HIDE[name](LARGE)
  hit = diagnostics.find_overflow(step, *args)
  assert hit.source_line and hit.warnings[0].startswith(HIDDEN)
  assert str(hit).startswith(HIDDEN)
  if name != "micro-batches":  # Its forward pass overflows, in float32, too.
    assert compare(step, *args).warnings[0].startswith(HIDDEN)
  step, args = HIDE[name](SMALL)
  assert diagnostics.find_overflow(step, *args) is None  # without a warning
  assert compare(step, *args).warnings == ()


@pytest.mark.parametrize("name", mark_slow_params({"cond"}, GUARD))
def test_an_overflow_that_prevents_update_is_named_and_reported(name):
  step, args = GUARD[name](LARGE)
  hit = diagnostics.find_overflow(step, *args)
  assert hit.backward and hit.warnings == (NOT_RUN,)
  report = compare(step, *args)
  assert report.suggested_log2_scale_change < 0 and report.warnings == (
    NOT_RUN,
  )
  step, args = GUARD[name](SMALL)
  assert diagnostics.find_overflow(step, *args) is None  # without a warning
  assert compare(step, *args).warnings == ()
  (note,) = diagnostics.precision_report(step, *args).limitations
  assert note.startswith("whether update runs, in cond at ")


def test_an_update_that_does_not_run_is_reported():
  step, args = every_other_step(SMALL)
  with pytest.warns(UserWarning, match=f"no inf or NaN. {NOT_RUN[:-1]}"):
    assert diagnostics.find_overflow(step, *args) is None
  assert compare(step, *args).warnings == (NOT_RUN,)
  step, args = every_other_step(LARGE)
  assert diagnostics.find_overflow(step, *args).warnings == (NOT_RUN,)


def test_an_update_that_waits_in_some_iterations_is_sound():
  tx = ols.with_loss_scaling(optax.sgd(0.1), SMALL)

  def epoch(params, state):
    def step(carry, i):
      grads = gradient_of(params, carry, BATCH)
      update = lambda: tx.update(grads, carry, params)[1]
      return lax.cond(i % 3 == 0, update, lambda: carry), None

    return lax.scan(step, state, jnp.arange(4))[0]

  assert diagnostics.find_overflow(jax.jit(epoch), PARAMS, tx.init(PARAMS)) is (
    None  # without a warning
  )


@pytest.mark.slow
def test_each_of_two_optimizers_receives_its_own_overflow():
  """A skipped step next to one that was applied hides nothing."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), SMALL)
  large = ols.with_loss_scaling(optax.sgd(0.1), LARGE)

  def both(params, one, other):
    for its_tx, state in (tx, one), (large, other):
      grads = gradient_of(params, state, BATCH)
      params = optax.apply_updates(params, its_tx.update(grads, state)[0])
    return params

  args = PARAMS, tx.init(PARAMS), large.init(PARAMS)
  hit = diagnostics.find_overflow(jax.jit(both), *args)
  assert hit.backward and hit.warnings == ()


def bare_gradient_of(params, state, batch):
  return jax.grad(CAST)(params, batch)


def scaled_gradient_of(params, state, batch):
  return whole_steps._compute_scaled_grads(params, state, batch)


def twice(params, state, batch):
  return ols.unscale_grads(gradient_of(params, state, batch), state)


def by_a_factor_of_ones_own(params, state, batch):
  scale = ols.get_loss_scale_state(state).loss_scale
  grads = jax.grad(lambda params: scale * CAST(params, batch))(params)
  return ols.unscale_grads(grads, state)


def penalized(params, state, batch):
  """A gradient of a gradient, each of a scaled loss."""

  def loss(params):
    grads = gradient_of(params, state, batch)
    return CAST(params, batch) + 1e-3 * optax.tree.norm(grads)

  return ols.grad(loss, state)(params)


def clipped(params, state, batch):
  grads = gradient_of(params, state, batch)
  norm = optax.tree.norm(grads)
  return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)


def jitted_bare(params, state, batch):
  return jax.jit(jax.grad(CAST))(params, batch)


def accumulated_bare(params, state, batch):
  add = lambda total, x: (
    jax.tree.map(jnp.add, total, jax.grad(CAST)(params, x)),
    None,
  )
  zeros = jax.tree.map(jnp.zeros_like, params)
  return lax.scan(add, zeros, jnp.stack([batch] * 2))[0]


RIGHT = gradient_of, by_a_factor_of_ones_own, penalized, clipped
UNSCALED = [
  (bare_gradient_of, False),
  (bare_gradient_of, True),
  (jitted_bare, False),
  (accumulated_bare, False),
]


@pytest.mark.parametrize(("differentiate", "are_scaled"), UNSCALED)
def test_each_report_warns_of_gradients_of_an_unscaled_loss(
  differentiate, are_scaled
):
  step, args = make_step(
    DYNAMIC, differentiate=differentiate, grads_are_scaled=are_scaled
  )
  warning = "update received gradients of an unscaled loss, so small"
  report = diagnostics.precision_report(step, *args)
  assert str(report).startswith(warning)
  assert report.as_dict()["warnings"][0].startswith(warning)
  assert str(compare(step, *args)).startswith(warning)
  with pytest.warns(UserWarning, match=f"found no inf or NaN. {warning}"):
    diagnostics.find_overflow(step, *args)


@pytest.mark.parametrize("differentiate", RIGHT)
def test_a_step_that_is_scaled_once_causes_no_warning(differentiate):
  step, args = make_step(DYNAMIC, differentiate=differentiate)
  assert diagnostics.precision_report(step, *args).warnings == ()
  assert compare(step, *args).warnings == ()


@pytest.mark.parametrize("make", whole_steps.ALL, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:The loss scale is inside optax.Multi")
def test_sound_steps_of_every_shape_cause_no_warning_about_their_scale(make):
  step, args = make(DYNAMIC)  # A fixed scale is not judged.
  assert diagnostics.precision_report(step, *args).warnings == ()


def test_gradients_passed_as_arguments_are_not_judged():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  step = lambda grads, state: tx.update(grads, state)
  args = PARAMS, tx.init(PARAMS)
  assert diagnostics.precision_report(step, *args).warnings == ()


def test_a_ref_among_the_arguments_is_unchanged():
  if not hasattr(jax, "new_ref"):
    return  # There are none before.
  refs = jax.tree.map(jax.new_ref, PARAMS)
  tx = ols.with_loss_scaling(optax.sgd(0.1), SMALL)

  @jax.jit
  def step(refs, state, batch):
    params = jax.tree.map(lambda ref: ref[...], refs)
    grads = gradient_of(params, state, batch)
    updates, state = tx.update(grads, state, params)
    for ref, update in zip(
      jax.tree.leaves(refs), jax.tree.leaves(updates), strict=True
    ):
      ref[...] += update
    return state

  args = refs, tx.init(PARAMS), BATCH
  assert diagnostics.find_overflow(step, *args) is None
  expected = compare(*whole_steps.make_grad_fn(SMALL)[:1], PARAMS, BATCH)
  report = compare(step, *args)
  assert report.error == pytest.approx(expected.error, rel=0.05)
  assert diagnostics.precision_report(step, *args).fraction == 1
  for name, ref in refs.items():
    np.testing.assert_array_equal(ref[...], PARAMS[name])
  for report in diagnostics.find_overflow, compare:
    with pytest.raises(TypeError, match="Pass the Ref as an argument"):
      report(lambda state, batch: step(refs, state, batch), *args[1:])


def test_a_step_with_compiler_options_is_accepted():
  plain, args = make_step(SMALL)
  options = {"xla_cpu_enable_fast_math": False}
  step = jax.jit(plain.__wrapped__, compiler_options=options)
  assert diagnostics.find_overflow(step, *args) is None
  assert compare(step, *args).error == compare(plain, *args).error
  assert diagnostics.precision_report(step, *args).fraction == 1


def test_a_compiled_step_raises_an_error_that_says_what_to_pass():
  step, args = make_step(SMALL)
  compiled = step.lower(*args).compile()
  for report in (
    diagnostics.find_overflow,
    compare,
    diagnostics.precision_report,
  ):
    with pytest.raises(TypeError, match="Pass the jitted function, without"):
      report(compiled, *args)


def test_an_error_of_the_step_is_raised_unchanged():
  def step(x):
    raise ValueError("a mistake")

  for report in diagnostics.find_overflow, diagnostics.precision_report:
    with pytest.raises(ValueError, match="a mistake"):
      report(jax.jit(step), 1.0)


def test_sound_steps_cause_no_warning():
  step, args = make_step(SMALL)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert diagnostics.find_overflow(step, *args) is None
  assert compare(step, *args).warnings == ()
