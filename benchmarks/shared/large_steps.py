"""Training steps with many operations, on which the reports take long."""

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def make_step(loss_fn, params, batch, loss_scale):
  tx = ols.with_loss_scaling(optax.adam(1e-3), ols.DynamicLossScale(loss_scale))
  cast = ols.autocast(loss_fn)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(cast, opt_state)(params, batch)
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
  return make_step(loss_fn, params, x, loss_scale)


def gpt(
  layers=12,
  width=32,
  heads=4,
  length=16,
  vocab=64,
  sequences=2,
  loss_scale=2.0**10,
  overflowing_layer=None,
):
  """A GPT without loops, whose MLP may overflow in one of the layers."""

  def block(params, x):
    h = layer_norm(params["norm1"], x)
    qkv = (h @ params["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    x = x + mixed @ params["out"]
    h = jax.nn.gelu(layer_norm(params["norm2"], x) @ params["up"])
    return x + h @ params["down"]

  def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["positions"]
    for block_params in params["blocks"]:
      x = block(block_params, x)
    logits = layer_norm(params["norm"], x) @ params["embed"].T
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
  return make_step(loss_fn, params, tokens, loss_scale)


def layer_norm(scale, x):
  x = x - x.mean(-1, keepdims=True)
  return scale * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def normal(key, *shape):
  return jax.random.normal(key, shape) / shape[0] ** 0.5
