"""`autocast` on models of Flax and Equinox that know nothing of float16."""

import equinox as eqx
import flax
from flax import nnx
import flax.linen as nn
from flax.training.train_state import TrainState
import haiku as hk
from helpers import equations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

X = jax.random.normal(jax.random.key(0), (16, 8))
STEPS = 3


def assert_near(actual, expected):
  """By one bound: a bias before a norm has no gradient but for rounding."""

  def check(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, atol=2e-3)

  jax.tree.map(check, actual, expected)


class NnxModel(nnx.Module):
  """Changes its statistics, its random numbers and its notes in place."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.calls = nnx.Variable(jnp.int32(0))

  def __call__(self, x):
    self.calls[...] += 1
    return self.dropout(self.norm(self.linear(x)))


def nnx_loss(model, x, mode="train"):
  assert mode == "train"
  return jnp.mean(model(x) ** 2)


def train_nnx(loss_fn, jit):
  model = NnxModel(nnx.Rngs(0))
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @jit
  def step(model, optimizer, x):
    differentiated = ols.value_and_grad(
      loss_fn, optimizer, using=nnx.value_and_grad
    )
    loss, grads = differentiated(model, x, mode="train")
    optimizer.update(model, grads)
    return loss

  losses = [step(model, optimizer, X) for _ in range(STEPS)]
  return losses, nnx.state(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast ran:UserWarning")  # one has no jit
@pytest.mark.parametrize("jit", [nnx.jit, lambda fun: fun])
def test_an_nnx_model_trains_and_changes_in_place(jit):
  losses, state = train_nnx(ols.autocast(nnx_loss), jit)
  expected_losses, expected = train_nnx(nnx_loss, nnx.jit)
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)
  assert state.calls[...] == STEPS
  arrays = nnx.Not(nnx.RngKey)
  assert_near(nnx.state(state, arrays), nnx.state(expected, arrays))


@pytest.mark.slow
def test_an_nnx_model_itself_may_be_cast():
  model, expected = NnxModel(nnx.Rngs(0)), NnxModel(nnx.Rngs(0))
  out = ols.autocast(model)(X)
  np.testing.assert_allclose(out, expected(X), atol=0.01)
  np.testing.assert_allclose(
    model.norm.mean[...], expected.norm.mean[...], atol=1e-4
  )
  assert model.calls[...] == 1


@pytest.mark.slow
def test_objects_of_nnx_may_be_shared_and_nested_in_arguments():
  model, rngs = NnxModel(nnx.Rngs(0)), nnx.Rngs(1)
  seen = []

  def fun(parts, x, *, rngs):
    assert parts["again"][0] is parts["model"]
    seen.append(parts["name"])
    return parts["model"](x) * rngs.params.uniform()

  ols.autocast(fun)(
    {"model": model, "again": [model], "name": "n"}, X, rngs=rngs
  )
  assert seen == ["n"] and model.calls[...] == 1
  assert rngs.default.count[...] == 1


class Counter(nnx.Module):
  """A layer, of which a method changes a count."""

  def __init__(self):
    self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    self.calls = nnx.Variable(jnp.int32(0))

  def __call__(self, x):
    return self.linear(x)

  def count(self, x):
    self.calls[...] += 1
    return self.linear(x)


def test_an_nnx_model_that_does_not_change_may_come_from_outside():
  model = Counter()
  loss = lambda x, model: jnp.sum(model(x) ** 2)
  expected = jax.grad(loss)(X, model)
  teacher = lambda x: jnp.sum(ols.autocast(model.__call__)(x) ** 2)
  for actual in (
    jax.grad(ols.autocast(loss))(X, model),
    jax.jit(jax.grad(lambda x: ols.autocast(loss)(x, model)))(X),
    jax.grad(teacher)(X),
  ):
    np.testing.assert_allclose(actual, expected, atol=0.01)


def test_a_bound_method_of_an_nnx_model_may_change_it():
  model = Counter()
  ols.autocast(model.count)(X)
  loss = lambda model, x: jnp.sum(model.count(x))
  nnx.grad(ols.autocast(loss))(model, X)
  assert model.calls[...] == 2


@pytest.mark.skipif(
  flax.__version__ == "0.12.0", reason="Flax 0.12.0 lets it change."
)
def test_an_nnx_model_that_may_not_change_is_an_error_that_says_so():
  model = Counter()
  loss = lambda x: jnp.sum(ols.autocast(model.count)(x))
  with pytest.raises(
    ValueError, match=r"count within autocast.*got a change of"
  ):
    jax.grad(loss)(X)
  with pytest.raises(ValueError, match=r"calls.*nnx\.value_and_grad"):
    jax.grad(loss)(X)


def test_variables_of_hijax_may_be_read():
  if not hasattr(flax.config, "flax_hijax_variable"):
    pytest.skip("This version of Flax has no such variables.")
  before = flax.config.flax_hijax_variable
  flax.config.update("flax_hijax_variable", True)
  try:
    model = Counter()
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    try:
      full, _ = nnx.value_and_grad(loss)(model, X)
    except (AssertionError, NotImplementedError):
      pytest.skip("This JAX does not differentiate them, without us.")
    half, _ = nnx.value_and_grad(ols.autocast(loss))(model, X)
  finally:
    flax.config.update("flax_hijax_variable", before)
  np.testing.assert_allclose(half, full, rtol=1e-3)


def test_a_region_of_a_haiku_transform_may_be_cast():
  def net(x):
    linear = hk.Linear(8)
    loss = lambda x: jnp.sum(linear(x) ** 2)
    return hk.grad(ols.autocast(loss))(x)

  model = hk.without_apply_rng(hk.transform(net))
  params = model.init(jax.random.key(0), X)
  assert set(equations.products(model.apply, params, X)) == {"float16"}


class LinenModel(nn.Module):
  """With statistics, random numbers and a part that stays in float32."""

  @nn.compact
  def __call__(self, x, train):
    x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
    x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
    return Kept()(ols.keep_float32(nn.Dense(4))(x))


class Kept(nn.Module):
  """A layer whose method is marked."""

  @ols.keep_float32
  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(x)


def train_linen(cast):
  model = LinenModel()
  variables = model.init(jax.random.key(0), X, train=False)
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  params, stats = variables["params"], variables["batch_stats"]
  state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  def loss_fn(params, stats, key):
    out, changed = model.apply(
      {"params": params, "batch_stats": stats},
      X,
      train=True,
      mutable=["batch_stats"],
      rngs={"dropout": key},
    )
    return jnp.mean(out**2), changed["batch_stats"]

  @jax.jit
  def step(state, stats, key):
    grad_fn = ols.value_and_grad(cast(loss_fn), state, has_aux=True)
    (loss, stats), grads = grad_fn(state.params, stats, key)
    return state.apply_gradients(grads=grads), stats, loss

  for i in range(STEPS):
    state, stats, loss = step(state, stats, jax.random.key(i))
  counts = equations.products(cast(loss_fn), params, stats, jax.random.key(0))
  return (loss, stats, state.params), counts


@pytest.mark.slow
def test_a_linen_model_trains_with_its_statistics():
  actual, counts = train_linen(ols.autocast)
  expected, _ = train_linen(lambda fun: fun)
  assert counts == {"float16": 1, "float32": 2}
  assert_near(actual, expected)


class EquinoxModel(eqx.Module):
  """With state, which breaks a model that is cast by hand."""

  linear: eqx.nn.Linear
  norm: eqx.nn.BatchNorm
  name: str

  def __init__(self, key):
    self.linear = eqx.nn.Linear(8, 8, key=key)
    self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
    self.name = "equinox"

  def __call__(self, x, state):
    return self.norm(self.linear(x), state)


def train_equinox(cast):
  model, state = eqx.nn.make_with_state(EquinoxModel)(jax.random.key(0))
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

  def loss_fn(model, state):
    run = jax.vmap(
      model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    out, state = run(X, state)
    return jnp.mean((out - X) ** 2), state

  @eqx.filter_jit
  def step(model, state, opt_state):
    grad_fn = ols.value_and_grad(
      cast(loss_fn),
      opt_state,
      has_aux=True,
      using=eqx.filter_value_and_grad,
    )
    (loss, state), grads = grad_fn(model, state)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), state, opt_state, loss

  for _ in range(STEPS):
    model, state, opt_state, loss = step(model, state, opt_state)
  return loss, eqx.filter(model, eqx.is_array), jax.tree.leaves(state)


@pytest.mark.slow
def test_an_equinox_model_trains_with_its_state():
  expected = train_equinox(lambda fun: fun)
  assert_near(train_equinox(ols.autocast), expected)
