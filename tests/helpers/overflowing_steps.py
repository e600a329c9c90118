"""Training steps that are slow to compile, each with an overflow in it."""

import jax
from jax import lax
import jax.numpy as jnp

F16 = jnp.float16


def graph_network(nodes=30, edges=80, width=16, depth=4):
  """Messages along edges, with attention, and a fault in the second layer."""
  keys = jax.random.split(jax.random.key(0), 6)
  sender, receiver = (
    jax.random.randint(key, (edges,), 0, nodes) for key in keys[:2]
  )
  shape = (depth, 2, 2 * width, width)
  params = [
    {"edge": edge, "node": node, "scale": jnp.ones(width)}
    for edge, node in jax.random.normal(keys[2], shape) / 4
  ]
  x = jax.random.normal(keys[3], (nodes, width))
  target = jax.random.normal(keys[4], (width,))

  def attend(message):
    logits = jax.nn.leaky_relu(message.sum(1))
    largest = jax.ops.segment_max(logits, receiver, nodes)
    weights = jnp.exp(logits - largest[receiver])
    total = jax.ops.segment_sum(weights, receiver, nodes)
    weights = weights / (total[receiver] + F16(1e-3))
    return jax.ops.segment_sum(message * weights[:, None], receiver, nodes)

  def loss_fn(params, x, target):
    x = x.astype(F16)
    for i, layer in enumerate(params):
      layer = jax.tree.map(lambda w: w.astype(F16), layer)
      pairs = jnp.concatenate([x[sender], x[receiver]], 1)
      message = jax.nn.relu(pairs @ layer["edge"])
      new = jnp.concatenate([x, attend(message)], 1) @ layer["node"]
      mean = new.mean(1, keepdims=True)
      rsqrt = lax.rsqrt(new.var(1, keepdims=True) + F16(1e-3))
      new = (new - mean) * rsqrt * layer["scale"]
      if i == 1:
        new = new * 40000
      x = x + jax.nn.silu(new)
    return jnp.mean((x.mean(0).astype(jnp.float32) - target) ** 2)

  return jax.value_and_grad(loss_fn), params, x, target


def layers_of_all_shapes(depth=12):
  """Dense layers of which no two have the same shape; the third overflows."""
  widths = range(20, 21 + depth)
  keys = jax.random.split(jax.random.key(0), depth)
  params = [
    jax.random.normal(key, (n, n + 1)) / n**0.5
    for key, n in zip(keys, widths, strict=False)
  ]
  x = jax.random.normal(jax.random.key(1), (8, widths[0]))

  def loss_fn(params, x):
    x = x.astype(F16)
    for i, w in enumerate(params):
      x = jax.nn.gelu(x @ w.astype(F16))
      if i == 2:
        x = jnp.square(x * 400)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return jax.value_and_grad(loss_fn), params, x
