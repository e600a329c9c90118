"""check_step names the cause of zero gradients and of infs, and bad scales."""

import functools

from helpers import parametrize_slow, train_steps
from helpers.effects import pass_through_host
import jax
from jax import lax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)
F16 = jnp.float16
X = jax.random.normal(jax.random.key(5), (16, 4))
PARAMS = {"w": jax.random.normal(jax.random.key(6), (4, 4))}


def make_step(loss_fn, policy="dynamic", inner=None):
  """Return a step and its arguments."""
  step, args = train_steps.make_step(
    loss_fn=loss_fn,
    tx=train_steps.make_tx(inner, policy),
    params=PARAMS,
    batch=X,
  )
  return step, *args


def find_problem(loss_fn, *args, **kwargs):
  check = check_step(*make_step(loss_fn, *args, **kwargs))
  (problem,) = check.problems
  assert not any("scaled once" in sentence for sentence in check.passed)
  return problem


def in_half(loss_fn):
  """Returns a loss whose inputs are float16."""

  def half_loss(params, batch):
    half = jax.tree.map(lambda x: x.astype(F16), (params, batch))
    return loss_fn(*half).astype(jnp.float32)

  return half_loss


def scores(params, batch):
  return jnp.tanh(batch @ params["w"])


def hidden_cut(params, batch):
  return jnp.mean((lax.stop_gradient(scores(params, batch)) - 1) ** 2)


def accuracy(params, batch):
  labels = jnp.argmax(scores(params, batch), -1)
  return jnp.mean((labels == 0).astype(jnp.float32))


@pytest.mark.parametrize("cast", [ols.autocast, lambda loss_fn: loss_fn])
def test_gradients_that_no_operation_computes_are_a_problem(cast):
  problem = find_problem(cast(accuracy))
  assert problem.cause.startswith("All gradients are zero")
  assert "stop_gradient, argmax, rounding" in problem.fix
  assert "a constant that is inf in float16" in problem.fix


def dead_layer(params, batch):
  return jnp.mean(jax.nn.relu(scores(params, batch) - 2))


def test_gradients_that_are_zero_for_this_batch_are_a_problem():
  problem = find_problem(ols.autocast(dead_layer))
  assert problem.cause == "All gradients are zero, in float32 too."


def test_zero_gradients_of_one_of_two_updates_are_named():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  sound = ols.autocast(lambda p, x: jnp.mean((scores(p, x) - 1) ** 2))

  def step(params, state, other_state, batch):
    grads = ols.grad(sound, state)(params, batch)
    updates, state = tx.update(grads, state)
    grads = ols.grad(hidden_cut, other_state)(params, batch)
    other_updates, other_state = tx.update(grads, other_state)
    return updates, other_updates, state, other_state

  state = tx.init(PARAMS)
  (problem,) = check_step(step, PARAMS, state, state, X).problems
  assert problem.cause.startswith("All gradients of update [1] are zero")


def tiny_loss(params, batch):
  return 1e-9 * jnp.mean(in_half(scores)(params, batch) ** 2)


def test_gradients_that_all_underflow_are_a_problem_with_a_higher_scale():
  problem = find_problem(tiny_loss, policy=ols.DynamicLossScale(1.0))
  assert "w underflows in the backward pass: relative error 1" in problem.cause
  assert problem.loss_scale >= 2**8
  step, params, state, batch = make_step(tiny_loss, inner=optax.adam(0.1))
  state = ols.set_loss_scale(state, 2.0 * problem.loss_scale)
  assert check_step(step, params, state, batch).is_sound


@in_half
def norm_by_hand(params, batch):
  out = 300 * (batch @ params["w"])
  out = out / jnp.sqrt(jnp.sum(out * out, -1, keepdims=True))
  return jnp.mean((out.astype(jnp.float32) - 1) ** 2)


@in_half
def in_a_scan(params, batch):
  def body(total, x):
    out = 300 * (x @ params["w"])
    return total + jnp.mean(out / jnp.sum(out * out)), None

  return lax.scan(body, F16(0), batch[:, None])[0]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
  "loss_fn, name",
  [
    (norm_by_hand, "norm_by_hand"),
    pytest.param(in_a_scan, "body", marks=pytest.mark.slow),
  ],
)
def test_an_inf_of_the_forward_pass_that_disappears_is_a_problem(loss_fn, name):
  check = check_step(*make_step(loss_fn, ols.DynamicLossScale(1.0)))
  assert check.overflow is None
  first = check.problems[0]
  assert "overflows in the forward pass: max abs" in first.cause
  assert f"({name})" in first.cause
  assert "x.astype(jnp.float32)" in first.fix


def causal(x):
  return jnp.tril(jnp.ones((len(x), len(x)), bool))


@in_half
def masked_by_addition(params, batch):
  mask = (1 - causal(batch).astype(F16)) * F16(-6e4)
  logits = scores(params, batch) @ batch.T + mask + mask
  weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
  weights /= jnp.sum(weights, -1, keepdims=True)
  return jnp.mean((weights @ batch).astype(jnp.float32) ** 2)


@in_half
def masked_by_logarithms(params, batch):
  logits = scores(params, batch) @ batch.T + jnp.log(causal(batch).astype(F16))
  return jnp.mean((jax.nn.softmax(logits) @ batch).astype(jnp.float32) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [masked_by_addition, masked_by_logarithms])
def test_a_mask_of_minus_inf_is_sound(loss_fn):
  check = check_step(*make_step(loss_fn))
  assert check.is_sound, str(check)


def make_gaussian(exponent):
  @in_half
  def loss(params, batch):
    out = batch @ params["w"]
    gaussian = jnp.exp(exponent(300 * out))
    return jnp.mean((gaussian + out).astype(jnp.float32))

  return loss


GAUSSIANS = {
  "a product": lambda x: -(x * x),
  "a distance": lambda x: -jnp.sum(x**2, -1, keepdims=True) / 8,
  "a wide one": lambda x: -1e-4 * x**2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GAUSSIANS)
def test_a_gaussian_is_a_problem_only_if_its_overflow_changes_the_result(name):
  loss_fn = make_gaussian(GAUSSIANS[name])
  check = check_step(*make_step(loss_fn, ols.DynamicLossScale(1.0)))
  assert check.is_sound != (name == "a wide one"), str(check)


@in_half
def log_of_softmax(params, batch):
  probs = jax.nn.softmax(20 * (batch @ params["w"]))
  return -jnp.mean(jnp.log(probs + 1e-8).astype(jnp.float32))


def log_of_probability(params, batch):
  probs = jax.nn.softmax(200 * (batch @ params["w"]))
  return -jnp.mean(jnp.log(probs[:, 0]))


def binary_cross_entropy(params, batch):
  probs = jax.nn.sigmoid(400 * (batch @ params["w"])[:, 0])
  labels = batch[:, 0] > 0
  return -jnp.mean(labels * jnp.log(probs) + (1 - labels) * jnp.log(1 - probs))


def out_of_classes(params, batch):
  logits = jax.nn.log_softmax(batch @ params["w"])
  labels = jnp.full((16, 1), 7)
  picked = jnp.take_along_axis(logits, labels, 1)
  return jnp.sum(params["w"]) - jnp.mean(picked)


def out_of_vocabulary(params, batch):
  rows = jnp.take(params["w"], jnp.array([1, 300]), axis=0, mode="fill")
  return jnp.mean(rows**2)


LOG = "log returned", "jnp.where(x > 0, x, 1)"
INDEX = "gather returned", "an index is out of bounds"
# A loss, and a part of the cause and of the fix.
UNDEFINED = {
  "log of a softmax in float16": (log_of_softmax, *LOG),
  "log of a probability": (log_of_probability, *LOG),
  "binary cross-entropy": (ols.autocast(binary_cross_entropy), *LOG),
  "class that does not exist": (out_of_classes, *INDEX),
  "word that does not exist": (out_of_vocabulary, *INDEX),
}


@parametrize_slow("scale", (), [2.0**15, 2.0**-14], slow=[2.0**15])
@pytest.mark.parametrize("name", UNDEFINED)
def test_what_is_not_defined_at_any_scale_is_not_blamed_on_the_scale(
  name, scale
):
  loss_fn, cause, fix = UNDEFINED[name]
  policy = ols.DynamicLossScale(scale, min_scale=2.0**-20)
  check = check_step(*make_step(loss_fn, policy))
  problem = check.problems[0]
  assert problem.cause.startswith(cause) and fix in problem.fix
  assert "loss scale" not in problem.cause + problem.fix
  if cause == "log returned":
    assert "forward pass" in problem.cause and "logits" in problem.fix
    assert not check.overflow.backward


def large_labels(params, batch):
  return jnp.mean((batch @ params["w"] - 1.5e8) ** 2)


@pytest.mark.slow
def test_a_scale_below_the_minimum_of_the_policy_is_named():
  problem = find_problem(ols.autocast(large_labels))
  assert "min_scale of its policy stops it at 1" in problem.fix
  assert "decreases on its own" not in problem.fix
  assert problem.loss_scale is None
  free = ols.DynamicLossScale(min_scale=2.0**-40)
  problem = find_problem(ols.autocast(large_labels), free)
  assert problem.loss_scale < 1
  assert "decreases on its own" in problem.fix


@pytest.mark.slow
def test_without_autocast_the_scale_that_helps_is_named():
  squares = in_half(lambda p, x: jnp.mean(8 * (x @ p["w"] - 1) ** 2))
  check = check_step(*make_step(squares, ols.DynamicLossScale(2.0**24)))
  assert 0 < check.overflow.scale_factor < 1
  new_scale = 2.0**24 * check.overflow.scale_factor
  assert check.problems[0].loss_scale == new_scale
  assert f"ols.set_loss_scale(opt_state, {new_scale:g})" in str(check)


@pytest.mark.slow
def test_statistics_that_are_not_finite_are_a_problem_and_a_metric_is_not():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  loss_fn = ols.autocast(lambda p, x: jnp.mean((scores(p, x) - 1) ** 2))

  def step(params, state, mean, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    updates, state = tx.update(grads, state, params)
    return updates, state, jnp.inf * batch[0], mean + jnp.sum(batch) / mean

  check = check_step(step, PARAMS, tx.init(PARAMS), jnp.zeros(3), X)
  (problem,) = check.problems
  assert problem.cause.startswith("div returned")
  assert check.overflow.other_origins == ()


@pytest.mark.slow
def test_zero_gradients_of_a_step_with_a_callback_are_a_problem():
  problem = find_problem(lambda p, x: dead_layer(p, pass_through_host(x)))
  assert problem.cause == "All gradients are zero."
