"""Equinox: models with static leaves, filtered transformations; Diffrax."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
from helpers.bits import assert_same_bits
from helpers.small_model import make_batches, make_overflowing_batch
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


class Layer(eqx.Module):
  w: np.ndarray
  activation: Callable[..., Any] | None = None


def test_a_model_that_jax_cannot_differentiate_raises_an_error_with_the_fix():
  state, w = ols.DynamicLossScale().init(), np.ones(2, np.float32)
  for model in Layer(w, jnp.tanh), [Layer(w), Layer(w, jnp.tanh)]:
    with pytest.raises(TypeError) as caught:
      ols.grad(lambda model: 0.0, state)(model)
    hint = "Pass using=equinox.filter_value_and_grad"
    assert any(hint in note for note in caught.value.__notes__)
  # A model of floats alone needs no cure, and no other error has this one.
  ols.grad(lambda model: jnp.sum(model.w), state)(Layer(w))
  with pytest.raises(TypeError) as caught:
    ols.grad(lambda model: model(1, 2, 3), state)(Layer(w))
  assert not any("using=" in n for n in getattr(caught.value, "__notes__", ()))


def loss_fn(model, batch, *, weight=1.0):
  x, y = batch
  return weight * jnp.mean((jax.vmap(model)(x) - y) ** 2)


def make(inner):
  model, tx = eqx.filter_jit(Model)(), ols.with_loss_scaling(inner, POLICY)
  return model, tx, tx.init(eqx.filter(model, eqx.is_inexact_array))


def make_step(tx, loss_fn=loss_fn):
  traces = []
  using = eqx.filter_value_and_grad

  @eqx.filter_jit
  def step(model, opt_state, batch):
    traces.append(None)
    differentiated = ols.value_and_grad(loss_fn, opt_state, using=using)
    loss, grads = differentiated(model, batch)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss

  return step, traces


def test_an_overflow_leaves_model_and_inner_state_bitwise_unchanged():
  model, tx, opt_state = make(optax.sgd(0.1, momentum=0.9))
  step, traces = make_step(tx)
  (batch,) = make_batches(1)
  model, opt_state, first_loss = step(model, opt_state, batch)
  bad = make_overflowing_batch(batch)
  after, after_state, loss = step(model, opt_state, bad)
  assert not np.isfinite(loss)
  old, new = eqx.filter(model, eqx.is_array), eqx.filter(after, eqx.is_array)
  assert_same_bits(new, old)
  assert_same_bits(after_state.inner_state, opt_state.inner_state)
  assert ols.get_loss_scale_state(after_state).total_notfinite == 1
  assert after.name == "tiny" and after.steps_seen == 3
  *_, last_loss = step(after, after_state, batch)
  assert last_loss < first_loss
  assert len(traces) == 1


# Differential equations, with Diffrax's default adjoint under `vmap`.


def solve(field, y0):
  return diffrax.diffeqsolve(
    diffrax.ODETerm(lambda t, y, args: field(y)),
    diffrax.Tsit5(),
    t0=TS[0],
    t1=TS[-1],
    dt0=0.1,
    y0=y0,
    stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-3),
    saveat=diffrax.SaveAt(ts=TS),
    max_steps=64,
  ).ys


TS = np.linspace(0.0, 1.0, 4, dtype=np.float32)
SERIES = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)


def neural_ode(model, series):
  pred = jax.vmap(lambda ys: solve(model, ys[0]))(series)
  return jnp.mean((pred - series) ** 2)


@pytest.mark.slow
def test_a_neural_ode_trains_as_in_float32_with_most_matmuls_in_float16():
  tx = ols.with_loss_scaling(optax.adam(1e-2), POLICY)
  make_field = lambda: eqx.nn.MLP(8, 8, 16, 1, jnp.tanh, key=jax.random.key(0))

  def trained(fun):
    (step, _), model, losses = make_step(tx, fun), make_field(), []
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(20):
      model, opt_state, loss = step(model, opt_state, SERIES)
      losses.append(float(loss))
    return losses, opt_state

  # Half precision is first: with JAX 0.8, one of the rules refuses to compute
  # other derivatives than before.
  half, opt_state = trained(ols.autocast(neural_ode))
  full, _ = trained(neural_ode)
  assert full[-1] < full[0]
  np.testing.assert_allclose(half, full, atol=5e-3 * np.max(np.abs(full)))
  assert ols.get_loss_scale_state(opt_state).total_notfinite == 0
  grad_fn = eqx.filter_grad(ols.autocast(neural_ode))
  report = ols.diagnostics.count_flops(grad_fn, make_field(), SERIES)
  assert 0.5 < report.fraction < 1
