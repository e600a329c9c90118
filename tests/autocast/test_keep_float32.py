"""Parts of a model that `keep_float32` marks."""

from flax import nnx
from helpers import jaxprs
from helpers.bits import assert_same_bits
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

X = jnp.asarray(np.float32(np.arange(32).reshape(8, 4) % 5 - 2))
W = jnp.asarray(np.float32(np.arange(16).reshape(4, 4) % 3 - 1))


def keep(w):
  return ols.keep_float32(lambda x: jnp.sin(x @ w))


def step(fun):
  return lambda carry, _: (fun(carry), None)


# Parts of a model that are kept, of two arrays.
KEPT = {
  "in place": lambda x, w: keep(w)(x),
  "around a jit": lambda x, w: ols.keep_float32(
    jax.jit(lambda x: jnp.sin(x @ w))
  )(x),
  "around a scan": lambda x, w: ols.keep_float32(
    lambda x: lax.scan(step(lambda x: jnp.sin(x @ w)), x, length=1)[0]
  )(x),
  "in a scan": lambda x, w: lax.scan(step(keep(w)), x, length=1)[0],
  "in a jit": lambda x, w: jax.jit(keep(w))(x),
  "under vmap": lambda x, w: jax.vmap(keep(w))(x),
  "a checkpoint": lambda x, w: ols.keep_float32(
    jax.checkpoint(lambda x: jnp.sin(x @ w))
  )(x),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_function_and_its_derivatives_run_in_float32(name):
  block = KEPT[name]
  model = lambda x, w: block(x, w) @ w
  loss = lambda x, w: jnp.sum(model(x, w))
  half = ols.autocast(model)
  assert jaxprs.count_matmuls_by_dtype(half, X, W) == {
    "float32": 1,
    "float16": 1,
  }
  both = jaxprs.count_matmuls_by_dtype(
    jax.grad(ols.autocast(loss), (0, 1)), X, W
  )
  assert both["float32"] >= 3 and both["float16"] == 3
  # Also where the gradient is taken inside.
  inside = jaxprs.count_matmuls_by_dtype(
    ols.autocast(jax.grad(loss, (0, 1))), X, W
  )
  assert inside == both
  # Outside of autocast nothing changes.
  assert_same_bits(block(X, W), jnp.sin(X @ W))


def test_only_keep_float32_keeps_a_function_in_float32():
  @jax.named_scope("keep_float32_not")
  def block(x, w):
    with jax.named_scope("do_keep_float32"):
      return jnp.sin(x @ w)

  assert jaxprs.count_matmuls_by_dtype(ols.autocast(block), X, W) == {
    "float16": 1
  }
  inside = lambda f: jax.vmap(jax.checkpoint(f), (None, 0))
  kept = jax.grad(lambda x, w: jnp.sum(inside(ols.keep_float32(block))(x, w)))
  loss = lambda x, w: jnp.sum(kept(x, w) @ w[0])
  counts = jaxprs.count_matmuls_by_dtype(
    ols.autocast(loss), X[:4], jnp.stack([W, W])
  )
  assert counts["float16"] == 1 and counts["float32"] >= 2


class Layer(nnx.Module):
  def __init__(self):
    self.weight = nnx.Param(W)

  def __call__(self, x):
    return x @ self.weight


def test_a_kept_function_retains_its_name_attributes_and_arguments():
  def block(x, *, n):
    """A docstring."""
    return x + n

  block.version = 3
  kept = ols.keep_float32(block)
  assert (kept.__name__, kept.__doc__) == ("block", "A docstring.")
  assert kept.version == 3 and kept(1, n=2) == 3
  # The attributes of a layer are not copied.
  layer = Layer()
  assert not hasattr(ols.keep_float32(layer), "weight")
