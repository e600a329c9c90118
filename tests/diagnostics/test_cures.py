"""The fix of a problem leads to a sound step, near the one in float32."""

import functools

from helpers import parametrize_slow
from helpers.cured_steps import Case
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)
F16, F32 = jnp.float16, jnp.float32
X = jnp.cos(jnp.arange(32.0)).reshape(4, 8)
W = jnp.sin(jnp.arange(64.0)).reshape(8, 8)


def check_loss(loss_fn, inner=None, w=W):
  """Check a step with a loss scale."""
  tx = ols.with_loss_scaling(inner or optax.adam(1e-2), 2.0**4)

  @jax.jit
  def step(w, state):
    updates, state = tx.update(ols.grad(loss_fn, state)(w), state, w)
    return optax.apply_updates(w, updates), state

  return check_step(step, w, tx.init(w))


def _normalize(w, dtype):
  """Normalize vectors whose squares are zero in float16."""
  hidden = (1e-4 * (X @ w)).astype(dtype)
  norm = jnp.sqrt(jnp.sum(hidden**2, -1, keepdims=True))
  return jnp.mean((hidden / norm).astype(F32) ** 3)


def _divide_by_area(w, dtype):
  """Divide by the area of small boxes, which is zero in float16."""
  sides = (1e-4 + 1e-4 * jnp.abs(X @ w)).astype(dtype)
  area = sides[:, :4] * sides[:, 4:]
  return jnp.mean((sides[:, :4] / area).astype(F32)) * 1e-4


def _invert_variance(w, dtype):
  sigma = (2e-3 * (1 + jnp.abs(X @ w))).astype(dtype)
  return jnp.mean((sigma**-2).astype(F32)) * 1e-6


def _kl_divergence(w, limit):
  log_variance = 16 * X @ w
  log_variance = jnp.minimum(log_variance, limit).astype(F16)
  return jnp.mean((jnp.exp(log_variance) - log_variance).astype(F32))


def _recursion(w, start):
  """The forward algorithm of CTC and of hidden Markov models."""
  scores = jax.nn.log_softmax(X @ w)

  def add(total, score):
    shifted = jnp.concatenate([jnp.full(1, start), total[:-1]])
    return jnp.logaddexp(total, shifted) + score, None

  first = jnp.full(8, start).at[0].set(0.0)
  return -jax.lax.scan(add, first, scores)[0][2]


def _square(w):
  return jnp.mean((X.astype(w.dtype) @ w).astype(F32) ** 2)


def _in_float32(loss_fn, primitive):
  return Case(
    f"{primitive} returned inf (float16) in the forward pass, at test_cures.py",
    "small numbers become zero in float16, so compute it in float32",
    lambda: check_loss(lambda w: loss_fn(w, F16)),
    lambda: check_loss(ols.autocast(lambda w: loss_fn(w, F32))),
  )


_half_optimizer = functools.partial(
  check_loss, _square, w=W.astype(jnp.bfloat16)
)
CASES = {
  "norm": _in_float32(_normalize, "div"),
  "division": _in_float32(_divide_by_area, "integer_pow"),
  "power": _in_float32(_invert_variance, "integer_pow"),
  "KL divergence": Case(
    "exp returned inf (float16) in the forward pass, at test_cures.py",
    "or limit the operand: jnp.minimum(x, 11.1)",
    lambda: check_loss(lambda w: _kl_divergence(w, 100)),
    lambda: check_loss(lambda w: _kl_divergence(w, 8)),
  ),
  "recursion": Case(
    "(add)",
    "A recursion begins at this number, too, in place of -inf",
    lambda: check_loss(ols.autocast(lambda w: _recursion(w, -jnp.inf))),
    lambda: check_loss(
      ols.autocast(lambda w: _recursion(w, jnp.finfo(F32).min / 8))
    ),
  ),
  "hyperparameters in bfloat16": Case(
    "div returned NaN (bfloat16) after the backward pass",
    "optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(...)",
    lambda: _half_optimizer(optax.inject_hyperparams(optax.adam)(0.1)),
    lambda: _half_optimizer(
      optax.inject_hyperparams(optax.adam, hyperparam_dtype=F32)(0.1)
    ),
  ),
}


@parametrize_slow("name", ("norm", "hyperparameters in bfloat16"), CASES)
def test_the_fix_leads_to_a_sound_step_with_small_errors(name):
  case = CASES[name]
  problem = case.check().problems[0]
  assert case.cause in problem.cause
  assert case.fix in problem.fix
  cured = case.check_cured()
  assert cured.is_sound, str(cured)
  assert cured.comparison.error < 0.05


def test_an_empty_batch_is_named():
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(w, state, x):
    loss = ols.autocast(lambda w: jnp.mean(x @ w))
    updates, state = tx.update(ols.grad(loss, state)(w), state, w)
    return optax.apply_updates(w, updates), state

  (problem,) = check_step(step, W, tx.init(W), X[:0]).problems
  assert problem.cause.startswith("The argument x is empty (its shape is (0")
  assert problem.fix.startswith("Pass a batch with examples")


def test_a_callback_may_return_something_else_in_each_run():
  draw = np.random.default_rng(0).standard_normal
  noise_type = jax.ShapeDtypeStruct(X.shape, X.dtype)

  def loss(w):
    noise = jax.pure_callback(lambda: draw(X.shape, np.float32), noise_type)
    return jnp.mean(jnp.tanh((X + noise) @ w))

  check = check_step(jax.grad(ols.autocast(loss)), W)
  assert check.is_sound
  assert any(
    "a callback returns something else" in x for x in check.not_checked
  )
