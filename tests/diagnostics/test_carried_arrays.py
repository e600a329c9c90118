"""Arrays that are stored in half precision must change as in float32."""

import functools

from helpers import parametrize_slow
from helpers.cured_steps import Case
import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)
BF16, F32 = jnp.bfloat16, jnp.float32
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[2], (4, 8))
PARAMS = {
  "w": 0.3 * jax.random.normal(KEYS[0], (8, 16)),
  "scale": jnp.ones(16),
  "v": 0.3 * jax.random.normal(KEYS[1], (16, 2)),
}


def cast(tree, dtype=BF16):
  return optax.tree.cast(tree, dtype)


def loss_fn(params):
  params = cast(params)
  hidden = jnp.tanh(X.astype(BF16) @ params["w"]) * params["scale"]
  return jnp.mean((hidden @ params["v"]).astype(F32) ** 2)


def check_optimizer(tx, params=None):
  """Check a step with an optimizer."""
  params = cast(PARAMS) if params is None else params

  @jax.jit
  def step(params, opt_state):
    updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return check_step(step, params, tx.init(params))


def check_next_to_params(change, extra):
  """Check a step in float32 that changes a further argument, too."""
  tx = optax.adam(1e-3)

  @jax.jit
  def step(params, opt_state, extra):
    grads = jax.grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, change(extra, params, grads)

  return check_step(step, PARAMS, tx.init(PARAMS), extra)


def _average(decay, dtype):
  def change(average, params, grads):
    del grads
    new = jax.tree.map(
      lambda x, p: decay * x + (1 - decay) * p.astype(x.dtype), average, params
    )
    return cast(new, dtype)

  far = jax.tree.map(lambda p: 1.05 * p, PARAMS)
  return check_next_to_params(change, cast(far, dtype))


def _squares(dtype):
  """The second moments of a long training."""

  def change(squares, params, grads):
    del params
    add = lambda x, g: (0.999 * x + 0.001 * (g * g)).astype(dtype)
    return jax.tree.map(add, squares, grads)

  grads = jax.grad(loss_fn)(PARAMS)
  squares = jax.tree.map(lambda g: 1.5 * g * g, grads)
  return check_next_to_params(change, cast(squares, dtype))


def _running_mean(dtype):
  def change(mean, params, grads):
    del params, grads
    return 0.999 * mean + (0.001 * X.mean(0)).astype(dtype)

  return check_next_to_params(change, jnp.full(8, 2, dtype))


def _count(dtype):
  return check_next_to_params(
    lambda count, params, grads: count + 1, jnp.asarray(256, dtype)
  )


CASES = {
  "parameters": Case(
    "A parameter stored in bfloat16 hardly changes (params['scale'],"
    " params['v'], params['w']): 0%",
    "tx = ols.with_master_weights(tx)",
    lambda: check_optimizer(optax.adam(1e-5)),
    lambda: check_optimizer(ols.with_master_weights(optax.adam(1e-5))),
  ),
  "a norm scale of ones": Case(
    "A parameter stored in bfloat16 hardly changes (params['scale']): 0%",
    "keep the parameters in float32, and cast them in the model",
    lambda: check_optimizer(optax.adam(1e-3)),
    lambda: check_optimizer(optax.adam(1e-3), PARAMS),
  ),
  "an average": Case(
    "An average of parameters stored in bfloat16 hardly changes",
    "optax.tree.cast(params, jnp.float32)",
    lambda: _average(0.9999, BF16),
    lambda: _average(0.9999, F32),
  ),
  "second moments": Case(
    "A moment or a sum of gradients stored in bfloat16 hardly",
    "tx = ols.with_master_weights(tx) gives the optimizer float32",
    lambda: _squares(BF16),
    lambda: _squares(F32),
  ),
  "a running mean": Case(
    "A running value stored in bfloat16 hardly changes (extra): 0%",
    "Keep it in float32",
    lambda: _running_mean(BF16),
    lambda: _running_mean(F32),
  ),
  "a counter": Case(
    "A counter or a sum stored in bfloat16 hardly changes (extra): 0%",
    "jnp.zeros((), jnp.int32)",
    lambda: _count(BF16),
    lambda: _count(jnp.int32),
  ),
}


@parametrize_slow("name", ("parameters", "a running mean"), CASES)
def test_an_array_that_hardly_changes_is_a_problem_and_its_fix_cures_it(name):
  case = CASES[name]
  (problem,) = case.check().problems
  assert problem.cause.startswith(case.cause)
  assert case.fix in problem.fix
  cured = case.check_cured()
  assert cured.is_sound, str(cured)
  assert not any("hardly changes" in sentence for sentence in cured.passed)


def _round_with_noise(y, key):
  noise = jax.random.uniform(key, y.shape, minval=-0.5, maxval=0.5)
  return (y + noise * 2**-8 * jnp.abs(y)).astype(BF16)


def _round_by_bits(y, key):
  bits = jax.lax.bitcast_convert_type(y, jnp.uint32)
  bits += jax.random.bits(key, y.shape, jnp.uint32) & 0xFFFF
  bits &= jnp.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(bits, F32).astype(BF16)


def _check_stochastic_rounding(round_fn):
  tx = optax.adam(1e-5)

  def step(params, opt_state, key):
    grads = jax.grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    add = lambda p, u: round_fn(p.astype(F32) + u.astype(F32), key)
    return jax.tree.map(add, params, updates), opt_state

  params = cast(PARAMS)
  return check_step(step, params, tx.init(params), jax.random.key(1))


def _check_kahan():
  """A sum with compensation."""
  tx = optax.adam(1e-5)

  def step(params, rest, opt_state):
    grads = jax.grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    added = jax.tree.map(lambda u, r: (u + r).astype(BF16), updates, rest)
    new = jax.tree.map(jnp.add, params, added)
    rest = jax.tree.map(lambda a, n, p: a - (n - p), added, new, params)
    return new, rest, opt_state

  params = cast(PARAMS)
  return check_step(
    step, params, optax.tree.zeros_like(params), tx.init(params)
  )


def _check_masters_as_arguments():
  tx = optax.adam(1e-5)

  def step(params, masters, opt_state):
    grads = cast(jax.grad(loss_fn)(params), F32)
    updates, opt_state = tx.update(grads, opt_state, masters)
    masters = optax.apply_updates(masters, updates)
    return cast(masters), masters, opt_state

  return check_step(step, cast(PARAMS), PARAMS, tx.init(PARAMS))


SOUND = {
  "large updates": lambda: check_optimizer(optax.adam(1e-2)),
  "momentum": lambda: check_optimizer(
    optax.sgd(0.1, 0.9, accumulator_dtype=BF16), PARAMS
  ),
  "below the spacing of float32": lambda: check_optimizer(optax.sgd(1e-9)),
  "float16 masters": lambda: check_optimizer(
    ols.with_master_weights(optax.adam(1e-5)), cast(PARAMS, jnp.float16)
  ),
  "noise": lambda: _check_stochastic_rounding(_round_with_noise),
  "random bits": lambda: _check_stochastic_rounding(_round_by_bits),
  "compensation": _check_kahan,
  "masters as arguments": _check_masters_as_arguments,
  "an average of a small decay": lambda: _average(0.9, BF16),
  "a small count": lambda: check_next_to_params(
    lambda count, params, grads: count + 1, jnp.asarray(3, BF16)
  ),
}


@parametrize_slow("name", ("large updates", "noise", "compensation"), SOUND)
def test_sound_storage_in_half_precision_is_no_problem(name):
  check = SOUND[name]()
  assert check.is_sound, str(check)


def test_the_array_that_keeps_least_of_its_change_is_named():
  (sentence,) = (
    x for x in _average(0.9, BF16).passed if x.startswith("arrays stored in")
  )
  assert sentence.startswith("arrays stored in bfloat16 change as in float32;")
  assert "extra['v'] keeps least, 99%" in sentence
