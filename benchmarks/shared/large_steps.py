"""Training steps with many operations, on which the reports take long."""

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def make_step(loss_fn, params, batch, loss_scale):
  tx = ols.with_loss_scaling(optax.adam(1e-3), ols.DynamicLossScale(loss_scale))

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, params, tx.init(params), batch


def small_layers(count, width=16, loss_scale=2.0**10):
  """Layers of one shape, each with a matrix and a bias."""

  def loss_fn(params, x):
    for w, bias in params:
      x = x + jnp.tanh(x @ w + bias) / count
    return jnp.mean(x**2)

  keys = jax.random.split(jax.random.key(0), count)
  params = [(normal(key, width, width), jnp.zeros(width)) for key in keys]
  x = jax.random.normal(jax.random.key(1), (8, width))
  return make_step(ols.autocast(loss_fn), params, x, loss_scale)


def gpt(
  layers=12,
  width=32,
  heads=4,
  length=16,
  vocab=64,
  sequences=2,
  loss_scale=2.0**10,
  overflowing_layer=None,
  dtype=jnp.float32,
  inaccurate_layer=None,
):
  """A GPT without loops.

  It is cast by `autocast`, or by hand if `dtype` is not float32. The MLP of one
  layer may overflow, and a norm of one layer may be inaccurate.
  """

  def block(params, x, norm):
    h = layer_norm(params["norm1"], x)
    qkv = (h @ params["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    x = x + mixed @ params["out"]
    h = jax.nn.gelu(norm(params["norm2"], x) @ params["up"])
    return x + h @ params["down"]

  def loss_fn(params, tokens):
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    x = params["embed"][tokens[:, :-1]] + params["positions"]
    for i, block_params in enumerate(params["blocks"]):
      norm = inaccurate_norm if i == inaccurate_layer else layer_norm
      x = block(block_params, x, norm)
    logits = layer_norm(params["norm"], x) @ params["embed"].T
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, tokens[:, 1:]).mean()

  keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 3))
  params = {
    "embed": jax.random.normal(next(keys), (vocab, width)) / 8,
    "positions": jax.random.normal(next(keys), (length, width)) / 8,
    "norm": jnp.ones(width),
    "blocks": [
      {
        "norm1": jnp.ones(width),
        "qkv": normal(next(keys), width, 3 * width),
        "out": normal(next(keys), width, width),
        "norm2": jnp.ones(width),
        "up": normal(next(keys), width, 4 * width),
        "down": normal(next(keys), 4 * width, width),
      }
      for _ in range(layers)
    ],
  }
  if overflowing_layer is not None:
    params["blocks"][overflowing_layer]["up"] *= 1e5
  tokens = jax.random.randint(next(keys), (sequences, length + 1), 0, vocab)
  if dtype == jnp.float32:
    loss_fn = ols.autocast(loss_fn)
  return make_step(loss_fn, params, tokens, loss_scale)


def layer_norm(scale, x):
  y = x.astype(jnp.float32)
  y = y - y.mean(-1, keepdims=True)
  y *= jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
  return scale * y.astype(x.dtype)


def inaccurate_norm(scale, x):
  """A norm that loses the bits of numbers with a large mean."""
  x = x + jnp.asarray(40.0, x.dtype)
  mean = x.mean(-1, keepdims=True)
  variance = (x * x).mean(-1, keepdims=True) - mean * mean
  return scale * (x - mean) * jax.lax.rsqrt(variance + 1e-3)


def normal(key, *shape):
  return jax.random.normal(key, shape) / shape[0] ** 0.5
