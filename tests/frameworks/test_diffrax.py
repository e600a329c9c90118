"""Diffrax: differential equations, with its default adjoint under `vmap`."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

WIDTH = 8
KEYS = jax.random.split(jax.random.key(0), 3)
POLICY = ols.DynamicLossScale(init_scale=2.0**10)


def solve(vector_field, y0, ts, args=None):
  return diffrax.diffeqsolve(
    diffrax.ODETerm(vector_field),
    diffrax.Tsit5(),
    t0=ts[0],
    t1=ts[-1],
    dt0=0.1,
    y0=y0,
    args=args,
    stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-3),
    saveat=diffrax.SaveAt(ts=ts),
    max_steps=64,
  ).ys


class Model(eqx.Module):
  """A vector field, and what makes its first state of a series."""

  field: eqx.nn.MLP
  encoder: eqx.nn.Linear

  def __init__(self):
    self.field = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, jnp.tanh, key=KEYS[0])
    self.encoder = eqx.nn.Linear(4 * WIDTH, WIDTH, key=KEYS[1])

  def __call__(self, t, y, args):
    return self.field(y)


TS = jnp.linspace(0.0, 1.0, 4)
SERIES = jax.random.normal(KEYS[2], (3, 4, WIDTH))


def neural_ode(model, series):
  pred = jax.vmap(lambda ys: solve(model, ys[0], TS))(series)
  return jnp.mean((pred - series) ** 2)


def latent_ode(model, series):
  def one(ys):
    return solve(model, jnp.tanh(model.encoder(ys.ravel())), TS)

  return jnp.mean((jax.vmap(one)(series) - series) ** 2)


def continuous_normalizing_flow(model, series):
  def with_divergence(t, state, noise):
    y, _ = state
    f, pull_back = jax.vjp(lambda y: model(t, y, None), y)
    return f, jnp.sum(pull_back(noise)[0] * noise)

  def log_probability(y, noise):
    ts = jnp.array([0.0, 0.5])
    z, change = solve(with_divergence, (y, jnp.zeros(())), ts, noise)
    return -0.5 * jnp.sum(z[-1] ** 2) - change[-1]

  return -jnp.mean(jax.vmap(log_probability)(series[:, 0], series[:, 1]))


@pytest.mark.slow
@pytest.mark.parametrize(
  "loss_fn", [neural_ode, latent_ode, continuous_normalizing_flow]
)
def test_it_trains_as_in_float32(loss_fn):
  tx = ols.with_loss_scaling(optax.adam(1e-2), POLICY)

  def trained(fun):
    @eqx.filter_jit
    def step(model, opt_state):
      loss, grads = ols.value_and_grad(
        fun, opt_state, using=eqx.filter_value_and_grad
      )(model, SERIES)
      updates, opt_state = tx.update(grads, opt_state)
      return loss, eqx.apply_updates(model, updates), opt_state

    model, losses = Model(), []
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(20):
      loss, model, opt_state = step(model, opt_state)
      losses.append(float(loss))
    return losses, opt_state

  # In half first: with JAX 0.8, one of the rules refuses to be asked for other
  # derivatives than before.
  half, opt_state = trained(ols.autocast(loss_fn))
  full, _ = trained(loss_fn)
  assert full[-1] < full[0]
  np.testing.assert_allclose(half, full, atol=5e-3 * np.max(np.abs(full)))
  assert ols.get_loss_scale_state(opt_state).total_notfinite == 0


def test_the_products_of_a_mapped_solver_run_in_half():
  report = ols.diagnostics.precision_report(
    eqx.filter_grad(ols.autocast(neural_ode)), Model(), SERIES
  )
  assert 0.5 < report.share < 1
