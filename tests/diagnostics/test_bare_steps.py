"""Any training step is checked: one without ``with_loss_scaling``, too."""

import functools

from flax import nnx
import flax.linen as nn
from helpers import parametrize_slow
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)
compare = functools.partial(diagnostics.compare_precision, progress=False)
NO_LOSS_SCALING = (
  "loss scaling: the step does not call the update of with_loss_scaling, or"
  " passes no gradients to it"
)
KEYS = jax.random.split(jax.random.key(0), 8)
INPUTS = jax.random.normal(KEYS[7], (16, 8))
TARGETS = jnp.sin(INPUTS[:, :4] * INPUTS[:, 4:])


def _draw(i, *shape):
  return jax.random.normal(KEYS[i], shape) / np.sqrt(shape[0])


MLP = {
  "first": {"w": _draw(0, 8, 32), "b": jnp.zeros(32)},
  "last": {"w": _draw(1, 32, 4), "b": jnp.zeros(4)},
}
TRANSFORMER = {
  "qkv": _draw(2, 8, 24),
  "out": _draw(3, 8, 8),
  "scale": jnp.ones(8),
  "up": _draw(4, 8, 32),
  "down": _draw(5, 32, 8),
  "head": _draw(6, 8, 4),
}


def mlp_loss(params, dtype):
  params = optax.tree.cast(params, dtype)
  x = INPUTS.astype(dtype)
  x = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
  x = x @ params["last"]["w"] + params["last"]["b"]
  return jnp.mean((x.astype(jnp.float32) - TARGETS) ** 2)


def transformer_loss(params, dtype):
  params = optax.tree.cast(params, dtype)
  x = INPUTS.astype(dtype)
  query, key, value = jnp.split(x @ params["qkv"], 3, -1)
  x += jax.nn.softmax(query @ key.T / 3) @ value @ params["out"]
  x = x * params["scale"] / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3)
  x += jax.nn.gelu(x @ params["up"]) @ params["down"]
  x = (x @ params["head"]).astype(jnp.float32)
  return jnp.mean((x - TARGETS) ** 2)


MODELS = {
  "mlp": (mlp_loss, MLP),
  "transformer": (transformer_loss, TRANSFORMER),
}
OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "adam": optax.adam(1e-2),
  "adamw of 1e-5": optax.adamw(1e-5),
  "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
  "lion": optax.lion(1e-3),
  "lamb": optax.lamb(1e-2),
  "rmsprop": optax.rmsprop(1e-2),
  "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
  "muon": optax.contrib.muon(1e-2),
  "clipping": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
}


def make_step(tx, loss_fn, *, has_grads=False):
  @jax.jit
  def step(params, opt_state):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    logs = {"loss": loss, "grads": grads} if has_grads else loss
    return optax.apply_updates(params, updates), opt_state, logs

  return step


def _measure_error(params, loss_fn, dtype):
  """Return the relative error of all gradients."""
  half, exact = (
    jax.flatten_util.ravel_pytree(
      jax.jit(jax.grad(loss_fn), static_argnums=1)(params, x)
    )[0]
    for x in (dtype, jnp.float32)
  )
  return float(jnp.linalg.norm(half - exact) / jnp.linalg.norm(exact))


CASES = {
  f"{optimizer}, {model}, {dtype.__name__}, {num_steps} steps": (
    optimizer,
    model,
    dtype,
    num_steps,
  )
  for optimizer in OPTIMIZERS
  for model in MODELS
  for dtype in (jnp.bfloat16, jnp.float16)
  for num_steps in (0, 40)
}
QUICK = (
  "adamw of 1e-5, transformer, bfloat16, 40 steps",
  "muon, mlp, bfloat16, 0 steps",
)


@parametrize_slow("name", QUICK, CASES)
def test_the_error_is_that_of_the_gradients_whatever_the_optimizer_is(name):
  optimizer, model, dtype, num_steps = CASES[name]
  tx, (loss_fn, params) = OPTIMIZERS[optimizer], MODELS[model]
  step = make_step(tx, functools.partial(loss_fn, dtype=dtype))
  opt_state = tx.init(params)
  for _ in range(num_steps):
    params, opt_state, _ = step(params, opt_state)
  check = check_step(step, params, opt_state)
  error = _measure_error(params, loss_fn, dtype)
  assert 1 / 1.7 <= check.comparison.error / error <= 1.7
  assert check.not_checked == (NO_LOSS_SCALING,)
  # After 40 steps, errors of the transformer are large.
  assert check.is_sound or num_steps, str(check)


half_loss = functools.partial(mlp_loss, dtype=jnp.bfloat16)
ADAM = optax.adam(1e-2)


def _train(params, opt_state, loss=half_loss, tx=ADAM):
  grads = jax.grad(loss)(params)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


def by_hand(params):
  return jax.tree.map(
    lambda p, g: p - 0.1 * g, params, jax.grad(half_loss)(params)
  )


def epoch(params, opt_state):
  """Train in a loop of steps."""
  body = lambda carry, _: (_train(*carry), None)
  return jax.lax.scan(body, (params, opt_state), length=3)[0]


def micro_batches(params, opt_state):
  """Add the gradients of micro-batches in a loop."""
  add = lambda total, _: (
    jax.tree.map(jnp.add, total, jax.grad(half_loss)(params)),
    None,
  )
  zeros = jax.tree.map(jnp.zeros_like, params)
  grads = jax.lax.scan(add, zeros, length=2)[0]
  updates, opt_state = ADAM.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


def sharpness_aware(params, opt_state):
  """The gradients at the parameters of a worse loss."""
  grads = jax.grad(half_loss)(params)
  norm = optax.tree.norm(grads)
  worse = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
  updates, opt_state = ADAM.update(jax.grad(half_loss)(worse), opt_state)
  return optax.apply_updates(params, updates), opt_state


def rematerialized(params, opt_state):
  return _train(params, opt_state, jax.checkpoint(jax.jit(half_loss)))


def logged_grads(params, opt_state):
  """The logged gradients, in front, look like parameters."""
  grads = jax.grad(half_loss)(params)
  updates, opt_state = ADAM.update(grads, opt_state, params)
  return grads, optax.apply_updates(params, updates), opt_state


def two_networks(params, opt_state):
  """Each network has its own loss and optimizer."""
  others = jax.tree.map(lambda x: 2 * x, params)
  return _train(params, opt_state), _train(others, opt_state)


def loss_scaled_by_hand(params, opt_state):
  grads = jax.grad(lambda p: 128 * half_loss(p))(params)
  grads = jax.tree.map(lambda g: g / 128, grads)
  updates, opt_state = ADAM.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


STEPS = (
  epoch,
  micro_batches,
  sharpness_aware,
  rematerialized,
  logged_grads,
  two_networks,
  loss_scaled_by_hand,
)


@parametrize_slow("step", (epoch, logged_grads), STEPS)
def test_a_sound_step_has_no_problem_and_its_gradients_have_names(step):
  check = check_step(step, MLP, ADAM.init(MLP))
  assert check.is_sound, str(check)
  assert "the gradients are finite" in check.passed
  names = {x.split("]/")[-1] for x in check.comparison.array_errors}
  assert names == {"first/w", "first/b", "last/w", "last/b"}


def test_each_gradient_has_its_own_name():
  def by_hand(params):
    grads = jax.grad(lambda p, q: half_loss(p) + half_loss(q), (0, 1))
    add = lambda p, g, h: p - 0.1 * g - 0.1 * h
    return jax.tree.map(add, params, *grads(params, params))

  names = {*check_step(by_hand, MLP).comparison.array_errors}
  paths = {"first/w", "first/b", "last/w", "last/b"}
  assert names == paths | {f"{path} #2" for path in paths}


def test_gradients_of_an_optimizer_of_one_flat_array_have_numbers():
  tx = optax.flatten(ADAM)
  check = check_step(functools.partial(_train, tx=tx), MLP, tx.init(MLP))
  assert {*check.comparison.array_errors} == {f"gradient {i}" for i in range(4)}


def _check_flax_linen():
  model = nn.Dense(4, dtype=jnp.bfloat16)
  params = model.init(KEYS[0], INPUTS)
  loss = lambda p: jnp.mean((model.apply(p, INPUTS) - TARGETS) ** 2)
  train = functools.partial(_train, loss=loss)
  return check_step(train, params, ADAM.init(params))


def _check_flax_nnx():
  model = nnx.Linear(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    loss = lambda model: jnp.mean((model(INPUTS) - TARGETS) ** 2)
    optimizer.update(model, nnx.grad(loss)(model))

  return check_step(step, model, optimizer)


def _check_equinox():
  eqx = pytest.importorskip("equinox")
  model = eqx.nn.Linear(8, 4, key=KEYS[0])
  params, static = eqx.partition(model, eqx.is_array)

  def loss(params):
    half = eqx.combine(optax.tree.cast(params, jnp.bfloat16), static)
    outputs = jax.vmap(half)(INPUTS.astype(jnp.bfloat16))
    return jnp.mean((outputs - TARGETS) ** 2)

  train = functools.partial(_train, loss=loss)
  return check_step(train, params, ADAM.init(params))


def _check_haiku():
  hk = pytest.importorskip("haiku")

  def forward(x):
    return hk.Linear(4)(x)

  model = hk.without_apply_rng(hk.transform(forward))
  params = model.init(KEYS[0], INPUTS)
  cast = functools.partial(optax.tree.cast, dtype=jnp.bfloat16)

  def loss(params):
    outputs = model.apply(cast(params), INPUTS.astype(jnp.bfloat16))
    return jnp.mean((outputs - TARGETS) ** 2)

  train = functools.partial(_train, loss=loss)
  return check_step(train, params, ADAM.init(params))


FRAMEWORKS = {
  "linen": _check_flax_linen,
  "nnx": _check_flax_nnx,
  "equinox": _check_equinox,
  "haiku": _check_haiku,
}


@parametrize_slow("framework", ("nnx",), FRAMEWORKS)
def test_a_step_of_a_framework_is_checked(framework):
  check = FRAMEWORKS[framework]()
  assert check.is_sound, str(check)
  assert check.comparison.target == "gradients"
  assert 0 < check.comparison.error < 0.02
  assert check.not_checked == (NO_LOSS_SCALING,)


def test_an_overflow_of_a_step_in_float16_is_found():
  def loss(params):
    return 1e6 * mlp_loss(params, jnp.float16)

  check = check_step(functools.partial(_train, loss=loss), MLP, ADAM.init(MLP))
  assert check.overflow.kind == "inf" and check.overflow.backward
  assert not check.is_sound


def test_one_line_that_stands_out_is_a_problem_below_the_limit_of_errors():
  """Such as time steps that are rounded in front of sines and cosines."""

  def loss(params, time_dtype=jnp.bfloat16):
    times = (29.9 * jnp.arange(8.0)).astype(time_dtype)
    angles = times[:, None] / 2.0 ** jnp.arange(4)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    hidden = jnp.tanh(waves.astype(jnp.bfloat16) @ params["w"])
    return jnp.mean((hidden.astype(jnp.float32) - TARGETS[:8]) ** 2)

  params = {"w": _draw(0, 8, 4).astype(jnp.bfloat16)}
  check = check_step(jax.grad(loss), params)
  assert 16 * 2**-7 < check.comparison.error < 32 * 2**-7
  (problem,) = check.problems
  assert "loses precision in bfloat16" in problem.cause
  assert "Compute in float32 in test_bare_steps.py" in problem.fix
  cured = check_step(lambda p: jax.grad(loss)(p, jnp.float32), params)
  assert cured.is_sound and cured.comparison.error < 0.02


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_gradients_that_underflow_without_a_loss_scale_need_one(has_optimizer):
  loss = lambda params: 1e-7 * mlp_loss(params, jnp.float16)
  args = (MLP, ADAM.init(MLP)) if has_optimizer else (MLP,)
  train = functools.partial(_train, loss=loss)
  check = check_step(train if has_optimizer else jax.grad(loss), *args)
  (problem,) = check.problems
  assert "underflows in the backward pass" in problem.cause
  assert "tx = ols.with_loss_scaling(optimizer)" in problem.fix
  opt_state = ols.with_loss_scaling(ADAM, 2.0**20).init(MLP)
  scaled = check_step(lambda p: ols.grad(loss, opt_state)(p), MLP)
  assert scaled.is_sound and scaled.comparison.error < 0.02
  assert scaled.comparison.error < check.comparison.error / 8


def test_gradients_of_zero_are_a_problem():
  loss = lambda params: 0.0 * half_loss(params)
  check = check_step(functools.partial(_train, loss=loss), MLP, ADAM.init(MLP))
  assert check.problems[0].cause == "All gradients are zero, in float32 too."


@pytest.mark.parametrize("is_taken", [True, False])
def test_gradients_in_a_branch_are_checked_if_it_is_taken(is_taken):
  @jax.jit
  def step(params, opt_state):
    train, skip = (
      (lambda: _train(params, opt_state)),
      (lambda: (params, opt_state)),
    )
    return jax.lax.cond(jnp.all(INPUTS < 1e9) == is_taken, train, skip)

  check = check_step(step, MLP, ADAM.init(MLP))
  assert check.is_sound, str(check)
  not_taken = "the gradients: they are in a branch that was not taken"
  assert (not_taken in check.not_checked) is not is_taken
  assert ("the gradients are finite" in check.passed) is is_taken


def test_a_function_that_trains_nothing_is_checked_as_far_as_possible():
  check = check_step(lambda x: x.astype(jnp.float16) ** 2, jnp.ones(3))
  assert check.is_sound and check.comparison.target == "results"
  assert check.not_checked == (NO_LOSS_SCALING,)


def test_an_update_without_gradients_is_not_checked():
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state):
    updates, state = tx.update({}, state)
    return optax.apply_updates(params, updates), state

  assert NO_LOSS_SCALING in check_step(step, {}, tx.init({})).not_checked


def test_residuals_in_the_memory_of_the_host_are_no_fault():
  """A checkpoint policy offloads them."""
  policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
  )

  @functools.partial(jax.checkpoint, policy=policy)
  def loss(w, factor):
    hidden = jax.ad_checkpoint.checkpoint_name(jnp.tanh(INPUTS @ w), "hidden")
    return jnp.mean(jnp.exp(factor * hidden @ w.T))

  grad = jax.jit(jax.grad(loss))
  w = _draw(0, 8, 4)
  find_overflow = functools.partial(diagnostics.find_overflow, progress=False)
  assert find_overflow(grad, w, 1.0) is None
  assert find_overflow(grad, w, 1e4).primitive == "exp"
