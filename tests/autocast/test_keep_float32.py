"""Parts of a model that `keep_float32` marks."""

from flax import nnx
from helpers import jaxprs
import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols

X = jnp.asarray(np.float32(np.arange(32).reshape(8, 4) % 5 - 2))
W = jnp.asarray(np.float32(np.arange(16).reshape(4, 4) % 3 - 1))


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
