"""A name keeps in a rule what a mark keeps, forward and backward."""

import functools

from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import _jaxprs

X = normal(4, 8, seed=1)
WEIGHTS = normal(8, 8)


def dense(w, x):
  return x @ w


def scanned(w, x):
  return lax.scan(lambda x, _: (dense(w, x), None), x, None, length=2)[0]


def stacked(w, x):
  return lax.scan(lambda x, w: (dense(w, x), None), x, w)[0]


def looped(w, x):
  return lax.while_loop(
    lambda state: state[0] < 2,
    lambda state: (state[0] + 1, dense(w, state[1])),
    (0, x),
  )[1]


SHAPES = {
  "jit": jax.jit(dense),
  "scan": scanned,
  "stack": stacked,
  "cond": lambda w, x: lax.cond(x[0, 0] > 0, dense, dense, w, x),
  "checkpoint": jax.checkpoint(dense),
  "two deep": jax.jit(
    lambda w, x: lax.cond(
      x[0, 0] > 0, jax.checkpoint(dense), jax.jit(dense), w, x
    )
  ),
}


def with_vjp(inner, params, x):
  """Its gradient never runs the function itself, but what the rule does."""

  @jax.custom_vjp
  def block(params, x):
    return jnp.tanh(inner(params["up"], 3e5 * x) / 3e5) @ params["down"]

  block.defvjp(
    lambda params, x: jax.vjp(block.fun, params, x),
    lambda pull_back, ct: pull_back(ct),
  )
  return block(params, x)


def with_jvp(inner, params, x):
  @jax.custom_jvp
  def block(params, x):
    return jnp.tanh(inner(params["up"], 3e5 * x) / 3e5) @ params["down"]

  block.defjvp(lambda primals, tangents: jax.jvp(block.fun, primals, tangents))
  return block(params, x)


def with_a_loop(params, x):
  @jax.custom_vjp
  def block(params, x):
    return jnp.tanh(looped(params["up"], 3e5 * x) / 3e5) @ params["down"]

  def backward(residuals, ct):
    params, x = residuals
    before = looped(params["up"].T, ct @ params["down"].T)
    return {"up": x.T @ before, "down": x.T @ ct}, before

  block.defvjp(lambda params, x: (block.fun(params, x), (params, x)), backward)
  return block({name: params[name] for name in ("up", "down")}, x)


PROGRAMS = {
  f"{rule.__name__} {name}": (functools.partial(rule, inner), name == "stack")
  for rule in (with_vjp, with_jvp)
  for name, inner in SHAPES.items()
} | {"with_vjp while": (with_a_loop, False)}


def products(fun, *args):
  """The dtypes of all products that are in a program."""
  found = []

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      if _jaxprs.is_matrix_product(eqn):
        found.append(str(eqn.outvars[0].aval.dtype))
      for closed in list(_jaxprs.held_jaxprs(eqn)):
        walk(closed.jaxpr)

  walk(jax.make_jaxpr(fun)(*args).jaxpr)
  return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_name_keeps_what_a_mark_keeps(name):
  block, is_stack = PROGRAMS[name]
  up = jnp.stack([WEIGHTS] * 2) if is_stack else WEIGHTS
  params = {"up": up, "down": WEIGHTS, "head": WEIGHTS}

  def loss(block):
    return lambda params, x: jnp.mean((block(params, x) @ params["head"]) ** 2)

  marked = ols.autocast(loss(ols.keep_float32(block)))
  for kept in "up", "u*", "down":
    cast = ols.autocast(loss(block), keep_float32=kept)
    for transform in (lambda f: f), jax.grad:
      one, other = (transform(fun) for fun in (cast, marked))
      assert products(one, params, X) == products(other, params, X)
      assert "float16" in products(one, params, X)  # of the head
      pairs = zip(
        jax.tree.leaves(jax.jit(one)(params, X)),
        jax.tree.leaves(jax.jit(other)(params, X)),
        strict=True,
      )
      for a, b in pairs:
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_not_named_overflows_as_before(name):
  """So that the test above would fail if nothing were kept."""
  block, is_stack = PROGRAMS[name]
  up = jnp.stack([WEIGHTS] * 2) if is_stack else WEIGHTS
  params = {"up": up, "down": WEIGHTS, "head": WEIGHTS}
  loss = lambda params: jnp.mean((block(params, X) @ params["head"]) ** 2)
  grads = jax.grad(ols.autocast(loss, keep_float32="head"))(params)
  finite = [bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(grads)]
  assert not all(finite)
