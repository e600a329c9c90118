"""Any training step is checked: one without ``with_loss_scaling``, too."""

import functools

import equinox as eqx
from flax import nnx
from helpers import parametrize_slow, train_steps
from helpers.planted_layers import normal
from helpers.train_steps import BATCH, prepare_wrapped, TWO_LAYERS
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)
F16, BF16 = jnp.float16, jnp.bfloat16
ADAM = optax.adam(1e-2)
NO_LOSS_SCALING = (
  "loss scaling: the step does not call the update of with_loss_scaling, or"
  " passes no gradients to it"
)


def loss_fn(params, batch, dtype=BF16):
  params, batch = optax.tree.cast((params, batch), dtype)
  outputs = jnp.tanh(batch @ params["w"]) @ params["head"]
  return jnp.mean((outputs.astype(jnp.float32) - 1) ** 2)


def prepare(differentiate=train_steps.compute_unscaled_grads, **kwargs):
  """Return a function that makes a step with a bare optimizer."""
  defaults = {"loss_fn": loss_fn, "tx": ADAM, "params": TWO_LAYERS}
  return train_steps.prepare_step(differentiate, **(defaults | kwargs))


def check_prepared(**kwargs):
  step, args = prepare(**kwargs)()
  return check_step(step, *args)


OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "adam": ADAM,
  "adamw of 1e-5": optax.adamw(1e-5),
  "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
  "lion": optax.lion(1e-3),
  "lamb": optax.lamb(1e-2),
  "rmsprop": optax.rmsprop(1e-2),
  "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
  "muon": optax.contrib.muon(1e-2),
  "clipping": optax.chain(optax.clip_by_global_norm(0.1), ADAM),
}
CASES = {
  f"{optimizer}, {dtype.__name__}, {num_steps} steps": (tx, dtype, num_steps)
  for optimizer, tx in OPTIMIZERS.items()
  for dtype in (BF16, F16)
  for num_steps in (0, 40)
}
QUICK = "adamw of 1e-5, bfloat16, 40 steps", "muon, bfloat16, 0 steps"


@parametrize_slow("name", QUICK, CASES)
def test_the_error_is_that_of_the_gradients_whatever_the_optimizer_is(name):
  tx, dtype, num_steps = CASES[name]
  half_loss_fn = functools.partial(loss_fn, dtype=dtype)
  step, (params, opt_state, batch) = prepare(loss_fn=half_loss_fn, tx=tx)()
  for _ in range(num_steps):
    params, opt_state = step(params, opt_state, batch)
  check = check_step(step, params, opt_state, batch)
  half, exact = (
    jax.jit(jax.grad(functools.partial(loss_fn, dtype=x)))(params, batch)
    for x in (dtype, jnp.float32)
  )
  norm = optax.tree.norm
  error = norm(optax.tree.sub(half, exact)) / norm(exact)
  assert 1 / 1.7 <= check.comparison.error / error <= 1.7
  assert check.not_checked == (NO_LOSS_SCALING,)
  assert check.is_sound, str(check)


def sharpness_aware(loss, params, opt_state):
  """Return the gradients at the parameters of a worse loss."""
  grads = jax.grad(loss)(params)
  norm = optax.tree.norm(grads)
  worse = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
  return jax.grad(loss)(worse)


def scale_loss_by_hand(loss, params, opt_state):
  grads = jax.grad(lambda p: 128 * loss(p))(params)
  return jax.tree.map(lambda g: g / 128, grads)


def log_grads(tx, grads, *old):
  """The logged gradients, in front, look like parameters."""
  return grads, *train_steps.apply_updates(tx, grads, *old)


def train_two_networks(step):
  """Each network has its own loss and optimizer."""
  return lambda params, *args: (
    step(params, *args),
    step(optax.tree.scale(2, params), *args),
  )


STEPS = {
  "epoch": prepare_wrapped(train_steps.scan_steps, prepare()),
  "micro-batches": prepare(
    train_steps.accumulate(train_steps.compute_unscaled_grads)
  ),
  "sharpness-aware": prepare(sharpness_aware),
  "rematerialized": prepare(loss_fn=jax.checkpoint(jax.jit(loss_fn))),
  "logged gradients": prepare(update=log_grads),
  "two networks": prepare_wrapped(train_two_networks, prepare()),
  "loss scaled by hand": prepare(scale_loss_by_hand),
}


@parametrize_slow("name", ("epoch", "logged gradients"), STEPS)
def test_a_sound_step_has_no_problem_and_its_gradients_have_names(name):
  step, args = STEPS[name]()
  check = check_step(step, *args)
  assert check.is_sound, str(check)
  assert "the gradients are finite" in check.passed
  names = {x.split("]/")[-1] for x in check.comparison.array_errors}
  assert names == {"w", "head"}


def test_each_gradient_has_its_own_name():
  def by_hand(params):
    loss = lambda p, q: loss_fn(p, BATCH) + loss_fn(q, BATCH)
    add = lambda p, g, h: p - 0.1 * g - 0.1 * h
    return jax.tree.map(add, params, *jax.grad(loss, (0, 1))(params, params))

  names = {*check_step(by_hand, TWO_LAYERS).comparison.array_errors}
  assert names == {"w", "head", "w #2", "head #2"}


def test_gradients_of_an_optimizer_of_one_flat_array_have_numbers():
  check = check_prepared(tx=optax.flatten(ADAM))
  assert {*check.comparison.array_errors} == {"gradient 0", "gradient 1"}


def prepare_nnx():
  model = nnx.Linear(4, 4, dtype=BF16, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, batch):
    loss = lambda model: jnp.mean((model(batch) - 1) ** 2)
    optimizer.update(model, nnx.grad(loss)(model))

  return step, (model, optimizer, BATCH)


def prepare_equinox():
  model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_array)

  def loss(params, batch):
    params, batch = optax.tree.cast((params, batch), BF16)
    return jnp.mean((jax.vmap(eqx.combine(params, static))(batch) - 1) ** 2)

  return prepare(loss_fn=loss, params=params)()


# Those of Flax linen and Haiku are functions of a dict, as the steps above.
FRAMEWORKS = prepare_nnx, prepare_equinox


@parametrize_slow("prepare_step", (prepare_nnx,), FRAMEWORKS)
def test_a_step_of_a_framework_is_checked(prepare_step):
  step, args = prepare_step()
  check = check_step(step, *args)
  assert check.is_sound, str(check)
  assert check.comparison.target == "gradients"
  assert 0 < check.comparison.error < 0.02
  assert check.not_checked == (NO_LOSS_SCALING,)


def test_an_overflow_of_a_step_in_float16_is_found():
  check = check_prepared(loss_fn=lambda *args: 1e6 * loss_fn(*args, F16))
  assert check.overflow.kind == "inf" and check.overflow.backward
  assert not check.is_sound


def test_one_line_that_stands_out_is_a_problem_below_the_limit_of_errors():
  """Such as time steps that are rounded in front of sines and cosines."""
  params = {"w": normal(8, 4, seed=6).astype(BF16)}

  def loss(params, time_dtype=BF16):
    times = (29.9 * jnp.arange(8.0)).astype(time_dtype)
    angles = times[:, None] / 2.0 ** jnp.arange(4)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    hidden = jnp.tanh(waves.astype(BF16) @ params["w"])
    return jnp.mean((hidden.astype(jnp.float32) - BATCH) ** 2)

  check = check_step(jax.grad(loss), params)
  assert 16 * 2**-7 < check.comparison.error < 32 * 2**-7
  (problem,) = check.problems
  assert "loses precision in bfloat16" in problem.cause
  assert "Compute in float32 in test_bare_steps.py" in problem.fix
  cured = check_step(lambda p: jax.grad(loss)(p, jnp.float32), params)
  assert cured.is_sound and cured.comparison.error < 0.02


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_gradients_that_underflow_without_a_loss_scale_need_one(has_optimizer):
  loss = lambda params, x=BATCH: 1e-7 * loss_fn(params, x, F16)
  if has_optimizer:
    check = check_prepared(loss_fn=loss)
  else:
    check = check_step(jax.grad(loss), TWO_LAYERS)
  (problem,) = check.problems
  assert "underflows in the backward pass" in problem.cause
  assert "tx = ols.with_loss_scaling(optimizer)" in problem.fix
  opt_state = ols.with_loss_scaling(ADAM, 2.0**20).init(TWO_LAYERS)
  scaled = check_step(lambda p: ols.grad(loss, opt_state)(p), TWO_LAYERS)
  assert scaled.is_sound and scaled.comparison.error < 0.02
  assert scaled.comparison.error < check.comparison.error / 8


def test_gradients_of_zero_are_a_problem():
  check = check_prepared(loss_fn=lambda *args: 0.0 * loss_fn(*args))
  assert check.problems[0].cause == "All gradients are zero, in float32 too."


@pytest.mark.parametrize("is_taken", [True, False])
def test_gradients_in_a_branch_are_checked_if_it_is_taken(is_taken):
  def wrap(step):
    return lambda *args: jax.lax.cond(
      jnp.all(args[-1] < 1e9) == is_taken, step, lambda *args: args[:2], *args
    )

  step, args = prepare_wrapped(wrap, prepare())()
  check = check_step(step, *args)
  assert check.is_sound, str(check)
  not_taken = "the gradients: they are in a branch that was not taken"
  assert (not_taken in check.not_checked) is not is_taken
  assert ("the gradients are finite" in check.passed) is is_taken


def test_a_function_that_trains_nothing_is_checked_as_far_as_possible():
  check = check_step(lambda x: x.astype(F16) ** 2, jnp.ones(3))
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
  def layer(x, w):
    hidden = jax.ad_checkpoint.checkpoint_name(x @ w, "hidden")
    return jnp.tanh(hidden), None

  def loss(w, factor):
    out, _ = jax.lax.scan(layer, BATCH, w)
    return jnp.mean(jnp.exp(factor * out))

  grad = jax.jit(jax.grad(loss))
  w = jnp.stack([jnp.eye(4), jnp.eye(4)])
  find_overflow = functools.partial(diagnostics.find_overflow, progress=False)
  assert find_overflow(grad, w, 1.0) is None
  assert find_overflow(grad, w, 1e4).primitive == "exp"
