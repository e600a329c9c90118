"""The backward pass of a ``custom_vjp`` that waits in a tangent."""

import warnings

from helpers.planted_layers import normal
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import _jaxprs

X = normal(4, 8, seed=1)
PARAMS = {"first": normal(8, 8, seed=2), "second": normal(8, 8, seed=3)}


@jax.custom_vjp
def inner(w, x):
  return jnp.tanh(x @ w)


inner.defvjp(
  lambda w, x: jax.vjp(lambda w, x: jnp.tanh(x @ w), w, x),
  lambda pull_back, ct: pull_back(ct),
)


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


def around(fun):
  outer = jax.custom_jvp(fun)
  outer.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
  return outer


def loss(rule):
  return lambda params, x: jnp.mean(around(both(rule))(params, x) ** 2)


def assert_close(actual, expected):
  pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
  for a, b in pairs:
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=0.02, atol=1e-4)


def products(fun, *args):
  closed = jax.make_jaxpr(fun)(*args)
  steps = _jaxprs.walk(closed, _jaxprs.held_jaxprs)
  return [
    (step.place.weights, str(step.eqn.outvars[0].aval.dtype))
    for step in steps
    if _jaxprs.is_matrix_product(step.eqn)
  ]


@pytest.mark.parametrize("rule", [inner, by_hand])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_all_of_its_products_run_in_half_and_have_names(rule, argnums):
  fun = loss(rule)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
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
  kept = [d for path, d in products(by_mark, PARAMS, X) if path != "second"]
  assert set(kept) == {"float32"}
  others = [d for path, d in products(by_mark, PARAMS, X) if path == "second"]
  assert set(others) == {"float16"}


def mapped(fun):
  return jax.vmap(fun, (None, 0))


def on_devices(fun):
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("i",), auto, devices=jax.devices()[:2])
  specs = P(), P("i")
  return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("i"))


@pytest.mark.parametrize("transform", [on_devices, jax.checkpoint, jax.jit])
def test_it_may_stand_in_other_functions(transform):
  net = transform(around(both(inner)))
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
  net = around(lambda params, x: clip(x @ params["first"]))
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
