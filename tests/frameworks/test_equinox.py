"""Equinox: models with static leaves, filtered transformations."""

import functools
import inspect

import chex
import equinox as eqx
from helpers.bits import assert_same_bits
from helpers.small_model import make_batches, overflowing
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

POLICY = ols.DynamicLossScale(init_scale=2.0**10, growth_interval=3)


class Model(eqx.Module):
  """With an activation, a name, an integer array and a gap among its leaves."""

  mlp: eqx.nn.MLP
  name: str
  steps_seen: jax.Array
  gap: None = None

  def __init__(self):
    self.mlp = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    self.name = "tiny"
    self.steps_seen = jnp.array(3)

  def __call__(self, x):
    half = lambda leaf: leaf.astype(jnp.float16)
    arrays, static = eqx.partition(self.mlp, eqx.is_inexact_array)
    mlp = eqx.combine(jax.tree.map(half, arrays), static)
    return mlp(half(x)).astype(jnp.float32)


def loss_fn(model, batch, *, weight=1.0):
  x, y = batch
  return weight * jnp.mean((jax.vmap(model)(x) - y) ** 2)


def make(inner):
  model, tx = Model(), ols.with_loss_scaling(inner, POLICY)
  return model, tx, tx.init(eqx.filter(model, eqx.is_inexact_array))


def make_step(tx):
  traces = []

  @eqx.filter_jit
  def step(model, opt_state, batch):
    traces.append(None)
    loss, grads = ols.value_and_grad(
      loss_fn, opt_state, using=eqx.filter_value_and_grad
    )(model, batch)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss

  return step, traces


def test_an_equinox_model_trains_with_only_two_lines_changed():
  model, tx, opt_state = make(optax.adam(0.01))
  step, traces = make_step(tx)
  (batch,) = make_batches(1)
  losses = []
  for _ in range(60):
    model, opt_state, loss = step(model, opt_state, batch)
    losses.append(loss)
  assert losses[-1] < losses[0] / 2
  assert len(traces) == 1


def test_an_overflow_leaves_model_and_inner_state_bitwise_unchanged():
  model, tx, opt_state = make(optax.adam(0.01))
  step, traces = make_step(tx)
  (batch,) = make_batches(1)
  model, opt_state, _ = step(model, opt_state, batch)
  after, after_state, loss = step(model, opt_state, overflowing(batch))
  assert not np.isfinite(loss)
  old, new = eqx.filter(model, eqx.is_array), eqx.filter(after, eqx.is_array)
  assert_same_bits(new, old)
  assert_same_bits(after_state.inner_state, opt_state.inner_state)
  assert ols.get_loss_scale_state(after_state).total_notfinite == 1
  assert after.name == "tiny" and after.steps_seen == 3
  step(after, after_state, batch)
  assert len(traces) == 1


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_filtered_gradients_are_equinox_s_own(weight):
  model, _, opt_state = make(optax.sgd(0.1))
  (batch,) = make_batches(1)
  differentiated = ols.value_and_grad(
    loss_fn, opt_state, using=eqx.filter_value_and_grad
  )
  loss, grads = differentiated(model, batch, weight=weight)
  want_loss, want = eqx.filter_value_and_grad(loss_fn)(
    model, batch, weight=weight
  )
  assert loss == want_loss
  assert grads.steps_seen is None and grads.mlp.activation is None
  # Unscaled float16 gradients have fewer digits where they are small.
  chex.assert_trees_all_close(grads, want, rtol=1e-2, atol=1e-4)


def test_a_scan_carries_the_arrays_of_a_model():
  model, tx, opt_state = make(optax.sgd(0.1))
  step, _ = make_step(tx)
  batches = make_batches(4)
  batches[1] = overflowing(batches[1])
  arrays, static = eqx.partition(model, eqx.is_array)

  def body(carry, batch):
    arrays, opt_state = carry
    model = eqx.combine(arrays, static)
    model, opt_state, loss = step(model, opt_state, batch)
    return (eqx.filter(model, eqx.is_array), opt_state), loss

  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
  (arrays, opt_state), losses = jax.lax.scan(body, (arrays, opt_state), stacked)
  np.testing.assert_array_equal(np.isfinite(losses), [1, 0, 1, 1])
  assert ols.get_loss_scale_state(opt_state).loss_scale == 2.0**9
  assert ols.all_finite(arrays)


def test_a_frozen_layer_is_filtered_out():
  model, tx, _ = make(optax.sgd(0.1))
  spec = jax.tree.map(lambda _: False, model)
  spec = eqx.tree_at(lambda m: m.mlp.layers[-1].bias, spec, True)
  diff, frozen = eqx.partition(model, spec)
  opt_state = tx.init(diff)
  (batch,) = make_batches(1)

  def loss_of_bias(diff, batch):
    return loss_fn(eqx.combine(diff, frozen), batch)

  grads = ols.grad(loss_of_bias, opt_state, using=eqx.filter_value_and_grad)(
    diff, batch
  )
  updates, _ = tx.update(grads, opt_state, diff)
  assert len(jax.tree.leaves(updates)) == 1
  after = eqx.combine(eqx.apply_updates(diff, updates), frozen)
  assert loss_fn(after, batch) < loss_fn(model, batch)


# What the page on frameworks says of a model that is cast by hand.


def to_half(tree):
  arrays, static = eqx.partition(tree, eqx.is_inexact_array)
  arrays = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), arrays)
  return eqx.combine(arrays, static)


def normalize(state_too):
  model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
    4, "batch", mode="ema"
  )
  state = to_half(state) if state_too else state
  call = jax.vmap(
    to_half(model), in_axes=(0, None), out_axes=(0, None), axis_name="batch"
  )
  return call(jnp.ones((3, 4), jnp.float16), state)[0]


def convolve(x):
  return to_half(eqx.nn.Conv2d(1, 2, 3, key=jax.random.key(0)))(x)


def recur(x):
  cell = to_half(eqx.nn.GRUCell(4, 3, key=jax.random.key(0)))
  step = lambda carry, x: (cell(x, carry), None)
  return jax.lax.scan(step, jnp.zeros(3, jnp.float16), x)[0]


def multiply(x):
  return to_half(eqx.nn.Linear(4, 3, key=jax.random.key(0)))(x)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: normalize(state_too=False), "lax.select requires"),
    (
      lambda: convolve(jnp.ones((1, 5, 5))),
      "lax.conv_general_dilated requires",
    ),
    (lambda: recur(jnp.ones((2, 4))), "carry output must have equal types"),
  ],
  ids=["BatchNorm", "Conv2d", "GRUCell"],
)
def test_a_cast_by_hand_that_forgets_one_input_is_an_error(call, message):
  with pytest.raises(TypeError, match=message):
    call()


def test_a_linear_layer_with_a_forgotten_input_silently_computes_in_float32():
  assert multiply(jnp.ones(4)).dtype == jnp.float32


def test_a_cast_by_hand_that_forgets_nothing_computes_in_float16():
  half = functools.partial(jnp.ones, dtype=jnp.float16)
  for out in (
    normalize(state_too=True),
    convolve(half((1, 5, 5))),
    recur(half((2, 4))),
    multiply(half(4)),
  ):
    assert out.dtype == jnp.float16


@pytest.mark.parametrize(
  "using", [jax.value_and_grad, eqx.filter_value_and_grad]
)
def test_below_a_decorator_is_the_loss(using):
  loss_fn = lambda w: (w.astype(jnp.float16) ** 2).astype(jnp.float32)
  state = ols.FixedLossScale(2.0**10).init()
  decorated = using(loss_fn)
  plain = inspect.unwrap(decorated)
  assert plain is loss_fn
  fun = ols.value_and_grad(plain, state, using=using)
  assert fun(jnp.float32(3)) == (9, 6)
