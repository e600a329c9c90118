"""What a rule computes has the names of its weights, and is kept by them."""

import functools

from helpers import equations, quick_alone, rules
from helpers.bits import assert_same_bits
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

X = normal(4, 8, seed=1)
WEIGHTS = normal(8, 8)


def dense(w, x):
  return x @ w


def looped(w, x):
  return lax.while_loop(
    lambda state: state[0] < 2,
    lambda state: (state[0] + 1, dense(w, state[1])),
    (0, x),
  )[1]


# What multiplies by weights within a rule.
INNER = {
  "jit": jax.jit(dense),
  "scan": lambda w, x: lax.scan(
    lambda x, _: (dense(w, x), None), x, None, length=2
  )[0],
  "stack": lambda w, x: lax.scan(lambda x, w: (dense(w, x), None), x, w)[0],
  "cond": lambda w, x: lax.cond(x[0, 0] > 0, dense, dense, w, x),
  "checkpoint": jax.checkpoint(dense),
  "two deep": jax.jit(
    lambda w, x: lax.cond(
      x[0, 0] > 0, jax.checkpoint(dense), jax.jit(dense), w, x
    )
  ),
}


def overflowing(inner):
  """A layer that overflows in float16."""
  return lambda params, x: (
    jnp.tanh(inner(params["up"], 3e5 * x) / 3e5) @ params["down"]
  )


def with_vjp(inner, params, x):
  """Its gradient never runs the function itself, but what the rule does."""
  return rules.pulling_back(overflowing(inner))(params, x)


def with_jvp(inner, params, x):
  return rules.pushing_forward(overflowing(inner))(params, x)


def with_a_loop(params, x):
  block = jax.custom_vjp(overflowing(looped))

  def backward(residuals, ct):
    params, x = residuals
    before = looped(params["up"].T, ct @ params["down"].T)
    return {"up": x.T @ before, "down": x.T @ ct}, before

  block.defvjp(lambda params, x: (block.fun(params, x), (params, x)), backward)
  return block({name: params[name] for name in ("up", "down")}, x)


PROGRAMS = {
  f"{rule.__name__} {name}": (functools.partial(rule, inner), name == "stack")
  for rule in (with_vjp, with_jvp)
  for name, inner in INNER.items()
} | {"with_vjp while": (with_a_loop, False)}


@pytest.mark.parametrize(
  "name",
  quick_alone(
    ["with_vjp jit", "with_vjp stack", "with_jvp cond", "with_vjp while"],
    PROGRAMS,
  ),
)
def test_a_name_keeps_what_a_mark_keeps(name):
  block, is_stack = PROGRAMS[name]
  up = jnp.stack([WEIGHTS] * 2) if is_stack else WEIGHTS
  params = {"up": up, "down": WEIGHTS, "head": WEIGHTS}

  def loss(block):
    return lambda params, x: jnp.mean((block(params, x) @ params["head"]) ** 2)

  def are_finite(tree):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))

  marked = ols.autocast(loss(ols.keep_float32(block)))
  for kept in "up", "u*", "down":
    cast = ols.autocast(loss(block), keep_float32=kept)
    for transform in (lambda f: f), jax.grad:
      dtypes, expected = (
        [x.dtype for x in equations.named_products(transform(fun), params, X)]
        for fun in (cast, marked)
      )
      assert dtypes == expected and "float16" in dtypes  # of the head
  results = [jax.jit(jax.grad(fun))(params, X) for fun in (cast, marked)]
  assert_same_bits(*results)
  assert are_finite(results)
  # What is not named overflows as before.
  cast = ols.autocast(loss(block), keep_float32="head")
  assert not are_finite(jax.grad(cast)(params, X))


def layer(params, x):
  return jnp.tanh(x @ params["up"]) @ params["down"]


by_hand = jax.custom_vjp(layer)


def forward(params, x):
  hidden = jnp.tanh(x @ params["up"])
  return hidden @ params["down"], (params, x, hidden)


def backward(residuals, ct):
  params, x, hidden = residuals
  before = (ct @ params["down"].T) * (1 - hidden**2)
  by_batch = jnp.einsum("bi,bj->ij", x, before)
  down = jax.jit(lambda h, ct: (ct.T @ h).T)(hidden, ct)
  weights = lax.optimization_barrier({"up": by_batch + 0, "down": down})
  return weights, before @ params["up"].T


by_hand.defvjp(forward, backward)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_the_backward_pass_of_a_rule_has_the_names_of_its_weights(wrap):
  layer = wrap(by_hand)

  def loss(params, x):
    for its_params in params["blocks"]:
      x = layer(its_params, x)
    return jnp.mean((x @ params["head"]) ** 2)

  draw = lambda i: {
    "up": normal(8, 8, seed=i),
    "down": normal(8, 8, seed=9 + i),
  }
  params = {"blocks": [draw(i) for i in range(3)], "head": WEIGHTS}
  cast = jax.grad(ols.autocast(loss))
  found = equations.named_products(cast, params, X)
  names = {f"blocks/{i}/{name}" for i in range(3) for name in ("up", "down")}
  assert {x.weights for x in found} == {*names, "head"}
  of_each = [[x for x in found if x.weights == name] for name in names]
  assert min(map(len, of_each)) == 3
  assert {x.dtype for x in found} == {"float16"}
