"""The backward pass of a ``custom_vjp`` that waits in a tangent."""

from helpers import equations, rules
from helpers.bits import assert_close
from helpers.planted_layers import normal
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import optax_lossscale as ols

X = normal(4, 8, seed=1)
PARAMS = {"first": normal(8, 8, seed=2), "second": normal(8, 8, seed=3)}


inner = rules.pulling_back(lambda w, x: jnp.tanh(x @ w))


@jax.custom_vjp
def by_hand(w, x):
  return jnp.tanh(x @ w)


def backward(residuals, ct):
  w, x, y, count = residuals
  ct = ct * (1 - y**2) * (count / 2)
  return x.T @ ct, ct @ w.T


by_hand.defvjp(
  lambda w, x: (by_hand.fun(w, x), (w, x, by_hand.fun(w, x), 2)), backward
)


def both(rule):
  return lambda params, x: rule(params["first"], x) @ params["second"]


def loss(rule):
  around = rules.pushing_forward(both(rule))
  return lambda params, x: jnp.mean(around(params, x) ** 2)


def products(fun, *args):
  """The path of the weights and the dtype of each product."""
  return [(x.weights, x.dtype) for x in equations.named_products(fun, *args)]


@pytest.mark.parametrize("rule", [inner, by_hand])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_all_of_its_products_run_in_half_and_have_names(rule, argnums):
  fun = loss(rule)
  half = jax.grad(ols.autocast(fun), argnums)
  found = products(half, PARAMS, X)
  assert {dtype for _, dtype in found} == {"float16"}
  # JAX may multiply by the zeros that are the tangent of what does not move.
  assert {path for path, _ in found} - {""} == {"first", "second"}
  exact = jax.grad(fun, argnums)(PARAMS, X)
  assert_close(half(PARAMS, X), exact)


def test_it_is_kept_by_a_name_and_by_a_mark():
  fun = loss(inner)
  by_name = jax.grad(ols.autocast(fun, keep_float32="first"))
  assert {dtype for _, dtype in products(by_name, PARAMS, X)} == {"float32"}
  marked = ols.keep_float32(inner)
  by_mark = jax.grad(ols.autocast(loss(marked)))
  found = {(path == "second", x) for path, x in products(by_mark, PARAMS, X)}
  assert found == {(False, "float32"), (True, "float16")}


def mapped(fun):
  return jax.vmap(fun, (None, 0))


def on_devices(fun):
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("i",), auto, devices=jax.devices()[:2])
  specs = P(), P("i")
  return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("i"))


@pytest.mark.parametrize("transform", [on_devices, jax.checkpoint, jax.jit])
def test_it_may_stand_in_other_functions(transform):
  net = transform(rules.pushing_forward(both(inner)))
  fun = lambda params, x: jnp.mean(net(params, x) ** 2)
  half, exact = jax.grad(ols.autocast(fun)), jax.grad(fun)
  found = products(half, PARAMS, X)
  assert {dtype for _, dtype in found} == {"float16"}
  assert_close(jax.jit(half)(PARAMS, X), exact(PARAMS, X))


def test_it_may_be_mapped_from_outside():
  half, exact = jax.grad(ols.autocast(loss(inner))), jax.grad(loss(inner))
  x = jnp.stack([X, 2 * X])
  assert_close(jax.jit(mapped(half))(PARAMS, x), mapped(exact)(PARAMS, x))


def test_a_tangent_without_products_stays_as_it_is():
  clip = jax.custom_vjp(lambda x: x)
  clip.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
  net = rules.pushing_forward(lambda params, x: clip(x @ params["first"]))
  fun = lambda params, x: jnp.sum(net(params, x))
  found = products(jax.grad(ols.autocast(fun)), PARAMS, X)
  assert {dtype for _, dtype in found} == {"float16"}
  x = 100 * X
  assert_close(jax.grad(ols.autocast(fun))(PARAMS, x), jax.grad(fun)(PARAMS, x))


def test_a_tangent_of_the_users_own_is_refused_as_without():
  tangent = lambda x: jax.jvp(lambda x: inner(PARAMS["first"], x), (x,), (x,))
  for fun in tangent, ols.autocast(tangent):
    with pytest.raises(TypeError, match="forward-mode"):
      jax.jit(fun)(X)
