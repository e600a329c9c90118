"""The fix of a problem leads to a sound step, near the one in float32."""

import functools

from helpers import parametrize_slow, train_steps
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
  step, args = train_steps.make_step(
    loss_fn=lambda w, batch: loss_fn(w),
    tx=train_steps.make_tx(inner or train_steps.ADAM, 2.0**4),
    params=w,
  )
  return check_step(step, *args)


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


def _prepare_dtype(loss_fn):
  return lambda dtype: check_loss(ols.autocast(lambda w: loss_fn(w, dtype)))


OVERFLOW = "returned inf (float16) in the forward pass, at test_cures.py"
SMALL = "small numbers become zero in float16, so compute it in float32"
# A part of the cause and of the fix, a function that checks a step, and its
# argument without and with the fix.
CASES = {
  "norm": (
    f"div {OVERFLOW}",
    SMALL,
    _prepare_dtype(_normalize),
    F16,
    F32,
  ),
  "division": (
    f"integer_pow {OVERFLOW}",
    SMALL,
    _prepare_dtype(_divide_by_area),
    F16,
    F32,
  ),
  "power": (
    f"integer_pow {OVERFLOW}",
    SMALL,
    _prepare_dtype(_invert_variance),
    F16,
    F32,
  ),
  "KL divergence": (
    f"exp {OVERFLOW}",
    "or limit the operand: jnp.minimum(x, 11.1)",
    lambda limit: check_loss(lambda w: _kl_divergence(w, limit)),
    100,
    8,
  ),
  "recursion": (
    "(add)",
    "A recursion begins at this number, too, in place of -inf",
    lambda start: check_loss(ols.autocast(lambda w: _recursion(w, start))),
    -jnp.inf,
    jnp.finfo(F32).min / 8,
  ),
  "hyperparameters in bfloat16": (
    "div returned NaN (bfloat16) after the backward pass",
    "optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(...)",
    lambda dtype: check_loss(
      _square,
      optax.inject_hyperparams(optax.adam, hyperparam_dtype=dtype)(0.1),
      W.astype(jnp.bfloat16),
    ),
    None,
    F32,
  ),
}


@parametrize_slow("name", ("norm", "hyperparameters in bfloat16"), CASES)
def test_the_fix_leads_to_a_sound_step_with_small_errors(name):
  cause, fix, check, bad, fixed = CASES[name]
  problem = check(bad).problems[0]
  assert cause in problem.cause
  assert fix in problem.fix
  cured = check(fixed)
  assert cured.is_sound, str(cured)
  assert cured.comparison.error < 0.05


def test_an_empty_batch_is_named():
  step, args = train_steps.make_step(batch=train_steps.BATCH[:0])
  (problem,) = check_step(step, *args).problems
  assert problem.cause.startswith("The argument batch is empty (its shape is (")
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
