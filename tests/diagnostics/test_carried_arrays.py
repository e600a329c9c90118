"""Arrays that are stored in half precision must change as in float32."""

from helpers import parametrize_slow, train_steps
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

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


HALF_PARAMS = cast(PARAMS)


def loss_fn(params, batch):
  params, batch = cast((params, batch))
  hidden = jnp.tanh(batch @ params["w"]) * params["scale"]
  return jnp.mean((hidden @ params["v"]).astype(F32) ** 2)


def check_step(step, *args):
  return diagnostics.check_step(step, *args, progress=False)


def check_optimizer(tx, params=HALF_PARAMS, **kwargs):
  """Check a step with a bare optimizer."""
  step, args = train_steps.make_step(
    train_steps.compute_unscaled_grads,
    loss_fn=loss_fn,
    tx=tx,
    params=params,
    batch=X,
    **kwargs,
  )
  return check_step(step, *args)


def check_next_to_params(change, extra):
  """Check a step in float32 that changes a further argument, too."""

  def make_result(old, new, extra):
    params, opt_state, grads = new
    return params, opt_state, change(extra, params, grads)

  return check_optimizer(
    optax.adam(1e-3),
    PARAMS,
    make_result=make_result,
    update=lambda tx, grads, *old: (
      *train_steps.apply_updates(tx, grads, *old),
      grads,
    ),
    extra=(extra,),
  )


def check_average(dtype, decay=0.9999):
  def change(average, params, grads):
    add = lambda x, p: decay * x + (1 - decay) * p.astype(x.dtype)
    return cast(jax.tree.map(add, average, params), dtype)

  far = jax.tree.map(lambda p: 1.05 * p, PARAMS)
  return check_next_to_params(change, cast(far, dtype))


def check_squares(dtype):
  """The second moments of a long training."""

  def change(squares, params, grads):
    add = lambda x, g: (0.999 * x + 0.001 * (g * g)).astype(dtype)
    return jax.tree.map(add, squares, grads)

  grads = jax.grad(loss_fn)(PARAMS, X)
  squares = jax.tree.map(lambda g: 1.5 * g * g, grads)
  return check_next_to_params(change, cast(squares, dtype))


def check_running_mean(dtype):
  add = lambda mean, *_: 0.999 * mean + (0.001 * X.mean(0)).astype(dtype)
  return check_next_to_params(add, jnp.full(8, 2, dtype))


def check_count(dtype, start=256):
  return check_next_to_params(
    lambda count, *_: count + 1, jnp.asarray(start, dtype)
  )


# How the cause begins, a part of the fix, a function that checks a step, and
# its argument without the fix and with it.
CASES = {
  "parameters": (
    "A parameter stored in bfloat16 hardly changes (params['scale'],"
    " params['v'], params['w']): 0%",
    "tx = ols.with_master_weights(tx)",
    check_optimizer,
    optax.adam(1e-5),
    ols.with_master_weights(optax.adam(1e-5)),
  ),
  "a norm scale of ones": (
    "A parameter stored in bfloat16 hardly changes (params['scale']): 0%",
    "keep the parameters in float32, and cast them in the model",
    lambda dtype: check_optimizer(optax.adam(1e-3), cast(PARAMS, dtype)),
    BF16,
    F32,
  ),
  "an average": (
    "An average of parameters stored in bfloat16 hardly changes",
    "optax.tree.cast(params, jnp.float32)",
    check_average,
    BF16,
    F32,
  ),
  "second moments": (
    "A moment or a sum of gradients stored in bfloat16 hardly",
    "tx = ols.with_master_weights(tx) gives the optimizer float32",
    check_squares,
    BF16,
    F32,
  ),
  "a running mean": (
    "A running value stored in bfloat16 hardly changes (args[3]): 0%",
    "Keep it in float32",
    check_running_mean,
    BF16,
    F32,
  ),
  "a counter": (
    "A counter or a sum stored in bfloat16 hardly changes (args[3]): 0%",
    "jnp.zeros((), jnp.int32)",
    check_count,
    BF16,
    jnp.int32,
  ),
}


@parametrize_slow("name", ("parameters", "a running mean"), CASES)
def test_an_array_that_hardly_changes_is_a_problem_and_its_fix_cures_it(name):
  cause, fix, check, bad, fixed = CASES[name]
  (problem,) = check(bad).problems
  assert problem.cause.startswith(cause)
  assert fix in problem.fix
  cured = check(fixed)
  assert cured.is_sound, str(cured)
  assert not any("hardly changes" in sentence for sentence in cured.passed)


def round_with_noise(y, key):
  noise = jax.random.uniform(key, y.shape, minval=-0.5, maxval=0.5)
  return (y + noise * 2**-8 * jnp.abs(y)).astype(BF16)


def round_by_bits(y, key):
  bits = jax.lax.bitcast_convert_type(y, jnp.uint32)
  bits += jax.random.bits(key, y.shape, jnp.uint32) & 0xFFFF
  bits &= jnp.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(bits, F32).astype(BF16)


def check_addition(add, extra):
  """Check a step that adds its updates in another way."""
  return check_optimizer(
    optax.adam(1e-5),
    make_result=lambda old, new, extra: (*add(old[0], new[0], extra), new[1]),
    update=lambda tx, grads, params, state: tx.update(grads, state, params),
    extra=(extra,),
  )


def check_stochastic_rounding(round_fn):
  def add(params, updates, key):
    add = lambda p, u: round_fn(p.astype(F32) + u.astype(F32), key)
    return (jax.tree.map(add, params, updates),)

  return check_addition(add, jax.random.key(1))


def check_kahan():
  """A sum with compensation."""

  def add(params, updates, rest):
    added = jax.tree.map(lambda u, r: (u + r).astype(BF16), updates, rest)
    new = jax.tree.map(jnp.add, params, added)
    return new, jax.tree.map(lambda a, n, p: a - (n - p), added, new, params)

  return check_addition(add, optax.tree.zeros_like(HALF_PARAMS))


def check_velocity_in_loss():
  """A first step adds its gradients, which have few bits, to zeros."""

  @jax.jit
  def step(params, velocity):
    near = optax.tree.add_scale(params, -0.9, velocity)
    grads = jax.grad(loss_fn)(near, X)
    velocity = optax.tree.add_scale(grads, 0.9, velocity)
    return optax.tree.add_scale(params, -0.1, velocity), velocity

  return check_step(step, PARAMS, optax.tree.zeros_like(PARAMS))


def check_line_search():
  """The state of the search has gradients, which a loop computes."""
  tx = optax.lbfgs(
    1e-3, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=1)
  )
  fun = lambda params: loss_fn(params, X).astype(F32)

  @jax.jit
  def step(params, state):
    loss, grads = optax.value_and_grad_from_state(fun)(params, state=state)
    updates, state = tx.update(
      grads, state, params, value=loss, grad=grads, value_fn=fun
    )
    return optax.apply_updates(params, updates), state

  state = tx.init(PARAMS)
  # The gradients of the second step hardly differ from those of the first.
  _, state = step(PARAMS, state)
  return check_step(step, PARAMS, state)


SOUND = {
  "a velocity in the loss": check_velocity_in_loss,
  "a line search": check_line_search,
  "large updates": lambda: check_optimizer(optax.adam(1e-2)),
  "momentum": lambda: check_optimizer(
    optax.sgd(0.1, 0.9, accumulator_dtype=BF16), PARAMS
  ),
  "below the spacing of float32": lambda: check_optimizer(optax.sgd(1e-9)),
  "float16 masters": lambda: check_optimizer(
    ols.with_master_weights(optax.adam(1e-5)), cast(PARAMS, jnp.float16)
  ),
  "noise": lambda: check_stochastic_rounding(round_with_noise),
  "random bits": lambda: check_stochastic_rounding(round_by_bits),
  "compensation": check_kahan,
  "an average of a small decay": lambda: check_average(BF16, 0.9),
  "a small count": lambda: check_count(BF16, 3),
}


@parametrize_slow("name", ("large updates", "noise", "compensation"), SOUND)
def test_sound_storage_in_half_precision_is_no_problem(name):
  check = SOUND[name]()
  assert check.is_sound, str(check)


def test_the_array_that_keeps_least_of_its_change_is_named():
  (sentence,) = (
    x
    for x in check_average(BF16, 0.9).passed
    if x.startswith("arrays stored in")
  )
  assert sentence.startswith("arrays stored in bfloat16 change as in float32;")
  assert "args[3]['v'] keeps least, 99%" in sentence


@pytest.mark.slow
def test_an_average_is_checked_next_to_a_step_in_float32():
  """No gradient depends on half precision, so errors are not compared."""

  @jax.jit
  def step(w, average):
    w = w - 0.1 * jax.grad(lambda w: jnp.mean((X @ w) ** 2))(w)
    return w, (0.9999 * average + 1e-4 * w).astype(BF16)

  check = check_step(step, PARAMS["w"], cast(1.05 * PARAMS["w"]))
  assert check.comparison is None
  (problem,) = check.problems
  assert "An average of parameters stored in bfloat16" in problem.cause
