"""A transformer as it is written without a library.

Rotary embeddings, grouped queries, RMS norms of epsilon 1e-8, gated MLPs, and
positions beyond 2048, where float16 has no odd numbers.
"""

import jax
import jax.numpy as jnp

from helpers.float32_models import Model

VOCABULARY, WIDTH, HEADS, GROUPS, SIZE = 96, 32, 4, 2, 8
FIRST_POSITION = 4097


def rotary_transformer():
  keys = jax.random.split(jax.random.key(0), 4)
  params = {
    "embedding": 0.1 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
    "layers": [_init_layer(key) for key in keys[1:3]],
    "norm": jnp.ones(WIDTH),
  }
  tokens = jax.random.randint(keys[3], (4, 33), 0, VOCABULARY)
  return Model(_loss_fn, params, (tokens,))


def _init_layer(key):
  shapes = {
    "q": (WIDTH, HEADS, SIZE),
    "k": (WIDTH, GROUPS, SIZE),
    "v": (WIDTH, GROUPS, SIZE),
    "out": (HEADS, SIZE, WIDTH),
    "gate": (WIDTH, 2 * WIDTH),
    "up": (WIDTH, 2 * WIDTH),
    "down": (2 * WIDTH, WIDTH),
  }
  keys = jax.random.split(key, len(shapes))
  layer = {
    name: 0.2 * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }
  return {**layer, "norms": jnp.ones((2, WIDTH))}


def _loss_fn(params, tokens):
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  x = params["embedding"][inputs] * WIDTH**0.5
  for layer in params["layers"]:
    x = x + _attend(layer, _rms_norm(x, layer["norms"][0]))
    y = _rms_norm(x, layer["norms"][1])
    gate = jax.nn.silu(y @ layer["gate"])
    x = x + (gate * (y @ layer["up"])) @ layer["down"]
  logits = _rms_norm(x, params["norm"]) @ params["embedding"].T
  log_probabilities = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probabilities, targets[..., None], -1)
  return -jnp.mean(chosen), logits


def _attend(layer, x):
  q = _rotate(jnp.einsum("btw,whd->bthd", x, layer["q"]))
  k = _rotate(jnp.einsum("btw,wgd->btgd", x, layer["k"]))
  v = jnp.einsum("btw,wgd->btgd", x, layer["v"])
  q = q.reshape(*q.shape[:2], GROUPS, HEADS // GROUPS, SIZE)
  scores = jnp.einsum("bqghd,bkgd->bghqk", q, k) / SIZE**0.5
  mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
  weights = jax.nn.softmax(scores + jnp.where(mask, 0.0, -1e9))
  y = jnp.einsum("bghqk,bkgd->bqghd", weights, v)
  y = y.reshape(*y.shape[:2], HEADS, SIZE)
  return jnp.einsum("bthd,hdw->btw", y, layer["out"])


def _rotate(x):
  positions = FIRST_POSITION + jnp.arange(x.shape[1], dtype=jnp.float32)
  frequencies = 10_000.0 ** -jnp.linspace(0, 1, SIZE // 2, endpoint=False)
  angles = jnp.einsum("t,f->tf", positions, frequencies)[:, None]
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  left, right = jnp.split(x, 2, -1)
  return jnp.concatenate(
    [left * cos - right * sin, right * cos + left * sin], -1
  )


def _rms_norm(x, scale):
  mean_square = jnp.mean(x**2, -1, keepdims=True)
  return x * jax.lax.rsqrt(mean_square + 1e-8) * scale
