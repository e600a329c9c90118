"""`autocast` on models of Flax and Haiku that know nothing of float16."""

import flax
from flax import nnx
import flax.linen as nn
import haiku as hk
from helpers import jaxprs
from helpers.planted_layers import normal
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

X = normal(16, 8) * 4


class Counter(nnx.Module):
  """A layer, of which a method changes a count."""

  def __init__(self):
    self.weight = nnx.Param(normal(8, 8))
    self.calls = nnx.Variable(jnp.asarray(np.int32(0)))

  def __call__(self, x):
    return x @ self.weight

  def count(self, x):
    self.calls[...] += 1
    return self(x)


@pytest.mark.slow
def test_objects_of_nnx_may_be_shared_and_nested_in_arguments():
  model, rngs = Counter(), nnx.Rngs(1)

  def fun(parts, x, *, rngs):
    assert parts["again"][0] is parts["model"] and parts["name"] == "n"
    return parts["model"].count(x) * rngs.params.uniform()

  parts = {"model": model, "again": [model], "name": "n"}
  ols.autocast(fun)(parts, X, rngs=rngs)
  assert model.calls[...] == rngs.default.count[...] == 1


def test_an_nnx_model_that_does_not_change_may_come_from_outside():
  model = Counter()
  loss = lambda x, model: jnp.sum(model(x) ** 2)
  teacher = lambda x: jnp.sum(ols.autocast(model.__call__)(x) ** 2)
  for fun in (
    lambda x: jax.grad(ols.autocast(loss))(x, model),
    jax.grad(lambda x: ols.autocast(loss)(x, model)),
    jax.grad(teacher),
  ):
    assert set(jaxprs.count_matmuls_by_dtype(fun, X)) == {"float16"}


@pytest.mark.slow
def test_a_bound_method_of_an_nnx_model_may_change_it():
  model = Counter()
  ols.autocast(model.count)(X)
  loss = lambda model, x: jnp.sum(model.count(x))
  nnx.grad(ols.autocast(loss))(model, X)
  assert model.calls[...] == 2


@pytest.mark.skipif(
  flax.__version__ == "0.12.0", reason="Flax 0.12.0 lets it change."
)
def test_an_nnx_model_that_may_not_change_raises_an_explanatory_error():
  model = Counter()
  loss = lambda x: jnp.sum(ols.autocast(model.count)(x))
  message = r"count inside autocast changes calls of a.*nnx\.value_and_grad"
  for _ in range(2):
    with pytest.raises(ValueError, match=message):
      jax.grad(loss)(X)


@pytest.mark.slow
def test_variables_of_hijax_may_be_read():
  if not hasattr(flax.config, "flax_hijax_variable"):
    pytest.skip("This version of Flax has no such variables.")
  before = flax.config.flax_hijax_variable
  flax.config.update("flax_hijax_variable", True)
  try:
    model = Counter()
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    full, _ = nnx.value_and_grad(loss)(model, X)
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
  params = jax.eval_shape(model.init, jax.random.key(0), X)
  counts = jaxprs.count_matmuls_by_dtype(model.apply, params, X)
  assert set(counts) == {"float16"}


class LinenModel(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Kept()(ols.keep_float32(nn.Dense(4))(nn.Dense(8)(x)))


class Kept(nn.Module):
  @ols.keep_float32
  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(x)


def test_layers_and_methods_of_linen_may_be_kept():
  model = LinenModel()
  params = jax.eval_shape(model.init, jax.random.key(0), X)
  half = ols.autocast(lambda params: model.apply(params, X))
  counts = jaxprs.count_matmuls_by_dtype(half, params)
  assert counts == {"float16": 1, "float32": 2}
