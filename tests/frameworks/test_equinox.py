"""Equinox: models with static leaves, filtered transformations."""

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


def normalize(dtype):
  make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
  layer, state = make(4, "batch", mode="ema")
  state = to_half(state) if dtype == jnp.float16 else state
  one = lambda x: to_half(layer)(x, state)[0]
  return jax.vmap(one, axis_name="batch")(jnp.ones((3, 4), jnp.float16))


def convolve(dtype):
  layer = to_half(eqx.nn.Conv2d(1, 2, 3, key=jax.random.key(0)))
  return layer(jnp.ones((1, 5, 5), dtype))


def recur(dtype):
  cell = to_half(eqx.nn.GRUCell(4, 3, key=jax.random.key(0)))
  step = lambda carry, x: (cell(x, carry), None)
  xs = jnp.ones((2, 4), dtype)
  return jax.lax.scan(step, jnp.zeros(3, jnp.float16), xs)[0]


def multiply(dtype):
  return to_half(eqx.nn.Linear(4, 3, key=jax.random.key(0)))(jnp.ones(4, dtype))


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (normalize, "lax.select requires"),
    (convolve, "lax.conv_general_dilated requires"),
    (recur, "carry output must have equal types"),
    (multiply, None),
  ],
)
def test_a_cast_by_hand_that_forgets_one_input_is_an_error_or_in_float32(
  call, message
):
  assert call(jnp.float16).dtype == jnp.float16
  if message is None:  # without a word
    assert call(jnp.float32).dtype == jnp.float32
  else:
    with pytest.raises(TypeError, match=message):
      call(jnp.float32)


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
