"""Random programs of matmuls, data movement, arithmetic and control flow."""

from helpers import custom_rules, half_eqns, jaxprs
from helpers.bits import assert_same_bits
import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

W = jnp.float32(np.arange(16).reshape(4, 4) % 3 - 1)


def small(x):
  """Integers from -2 to 2, so that float16 represents each product exactly."""
  return x - 5 * jnp.round(x / 5)


# From an array of shape (4, 4) to another one.
STEPS = {
  "matmul": lambda x: small(x) @ W,
  "square": lambda x: small(x) @ small(x),
  "same twice": lambda x: jnp.einsum("ij,kj->ik", small(x), small(x)),
  "batched": lambda x: jnp.sum(jnp.stack([small(x), W]) @ W, 0),
  "outer": lambda x: jnp.outer(small(x)[0], W[1]),
  "conv": lambda x: jnp.squeeze(
    lax.conv(small(x)[None, None], W[None, None, :3, :3], (1, 1), "SAME")
  ),
  "transpose": lambda x: x.T,
  "slice": lambda x: jnp.concatenate([x[2:], x[:2]]),
  "reshape": lambda x: x.reshape(2, 8).T.reshape(4, 4),
  "where": lambda x: jnp.where(x > 0, x, x.T),
  "gather": lambda x: x[jnp.array([3, 3, 0, 1])],
  "pad": lambda x: jnp.pad(x, 1)[:4, :4],
  "add": lambda x: x + 1,
  "relu": jax.nn.relu,
  "half already": lambda x: jnp.float32(small(x).astype(jnp.bfloat16) @ W),
}


# From such a function to another one.
AROUND = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "keep": ols.keep_float32,
  "scan": lambda f: (
    lambda x: lax.scan(lambda c, s: (f(c) + s, c), x, jnp.stack([x, W]))[0]
  ),
  "stack": lambda f: (
    lambda x: jnp.sum(lax.scan(lambda c, s: (c, f(s)), x, x[None])[1], 0)
  ),
  "fori": lambda f: lambda x: lax.fori_loop(0, 2, lambda i, c: f(c) + i, x),
  "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda x: x @ W, x),
  "vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, x + 1])), 0),
  "map": lambda f: lambda x: lax.map(f, x[None])[0],
  "custom_jvp": custom_rules.add_custom_jvp,
  "custom_vjp": custom_rules.add_recomputing_vjp,
  "gradient": lambda f: jax.grad(lambda x: jnp.sum(f(x) * W)),
  "scope": lambda f: jax.named_scope("a")(f),
}


def compose(steps):
  def fun(x):
    for step in steps:
      x = small(step(x))
    return x

  return fun


programs = st.recursive(
  st.sampled_from(sorted(STEPS)).map(STEPS.get),
  lambda inner: st.one_of(
    st.lists(inner, min_size=2, max_size=4).map(compose),
    st.builds(
      lambda name, f: AROUND[name](f), st.sampled_from(sorted(AROUND)), inner
    ),
  ),
  max_leaves=8,
)


@hypothesis.given(programs)
@hypothesis.settings(max_examples=30)
def test_a_random_program_gives_the_same_bits(program):
  # The last matmul guarantees that at least one runs in half precision.
  fun = lambda x: small(program(x)) @ W
  half = ols.autocast(fun)
  assert_same_bits(jax.jit(half)(W), jax.jit(fun)(W))
  assert jaxprs.count_matmuls_by_dtype(half, W)["float16"]
  loss = lambda f: lambda x: jnp.sum(small(f(x)) * W)
  # Also of many members, no cotangents are summed in half precision. A mapped
  # branch selects its residuals, of which each member has its own.
  many = jax.vmap(jax.grad(loss(half)))
  jaxpr = jax.make_jaxpr(many)(jnp.stack([W, W + 1, W + 2]))
  assert half_eqns.list_half_sums(jaxpr) <= {"select_n"}
  actual, expected = (jax.jit(jax.grad(loss(f)))(W) for f in (half, fun))
  # Cotangents grow: float16 has to round them, and in the end cannot hold them.
  largest = np.max(np.abs(expected), initial=1)
  hypothesis.assume(largest < 2**12)
  np.testing.assert_allclose(actual / largest, expected / largest, atol=0.01)
