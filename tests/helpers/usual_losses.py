"""Losses that users train with, around one matmul.

Each is a function of the outputs of a linear layer and a batch. Most have
integers or bools in their arithmetic: masks, counts, labels, images.
"""

import jax
from jax import lax
import jax.numpy as jnp
import optax

_KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = {"w": jax.random.normal(_KEYS[0], (6, 4)) / 3}
BATCH = {
  "x": jax.random.normal(_KEYS[1], (8, 6)),
  "target": jax.random.normal(_KEYS[2], (8, 4)),
  "labels": jnp.arange(8) % 4,
  "mask": jnp.arange(8) < 5,
  "weights": jnp.arange(8) % 3,
  "image": jnp.arange(32, dtype=jnp.uint8).reshape(8, 4),
  "bits": (jnp.arange(32) % 3 == 0).reshape(8, 4),
  "segments": jnp.arange(8) // 3,
  "key": jax.random.key(1),
}


def _cross_entropy(y, b):
  return optax.softmax_cross_entropy_with_integer_labels(y, b["labels"])


def _squares(y, b):
  return (y - b["target"]) ** 2


def _dropout(y, b):
  keep = jax.random.bernoulli(b["key"], 0.5, y.shape)
  return jnp.mean((y * keep / 0.5) ** 2)


def _attention(y, b):
  scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), y @ y.T, -jnp.inf)
  return jnp.mean(jax.nn.softmax(scores) @ b["target"] * y)


def _added_mask(y, b):
  scores = y @ y.T + -1e9 * (1 - jnp.tril(jnp.ones((8, 8))))
  return jnp.mean(jax.nn.softmax(scores) ** 2)


def _finfo_mask(y, b):
  scores = y @ y.T
  scores = jnp.where(b["mask"], scores, jnp.finfo(scores.dtype).min)
  return jnp.mean((jax.nn.softmax(scores) @ y) ** 2)


def _fully_masked_rows(y, b):
  """The double where: a row without a key gives zeros instead of NaN."""
  mask = jnp.tril(jnp.ones((8, 8), bool), -1)
  scores = jnp.where(mask, y @ y.T, -jnp.inf)
  scores = jnp.where(jnp.any(mask, -1, keepdims=True), scores, 0)
  return jnp.mean((jax.nn.softmax(scores) @ y) ** 2)


def _sampled_code(y, b):
  """The reconstruction and the divergence of a VAE."""
  mean, log_variance = jnp.split(y, 2, -1)
  noise = jax.random.normal(b["key"], mean.shape)
  code = mean + jnp.exp(log_variance / 2) * noise
  divergence = jnp.exp(log_variance) + mean**2 - 1 - log_variance
  return jnp.mean((code - b["target"][:, :2]) ** 2 + 0.05 * divergence)


def _ctc(y, b):
  logits = y.reshape(1, 8, 4)
  labels = jnp.array([[1, 2, 1]])
  return jnp.mean(
    optax.ctc_loss(logits, jnp.zeros((1, 8)), labels, jnp.zeros((1, 3)))
  )


def _solve(y, b):
  matrix = y.T @ y + jnp.eye(4)
  return jnp.sum(jnp.linalg.solve(matrix, b["target"].T) ** 2)


def _triangular(y, b):
  matrix = jnp.tril(y.T @ y) + 9 * jnp.eye(4)
  solved = jax.scipy.linalg.solve_triangular(matrix, b["target"].T, lower=True)
  return jnp.mean(y**2) + 0.0 * jnp.sum(solved)


def _pooled(y, b):
  image = y.reshape(1, 8, 4, 1)
  window = (1, 2, 2, 1)
  pooled = lax.reduce_window(image, -jnp.inf, lax.max, window, window, "VALID")
  return jnp.mean(pooled**2)


def _zero_of_fft(y, b):
  return jnp.mean(y**2) + 0.0 * jnp.mean(jnp.abs(jnp.fft.rfft(y, axis=0)) ** 2)


def _segments(y, b):
  sums = jax.ops.segment_sum(y, b["segments"], 3)
  counts = jax.ops.segment_sum(jnp.ones(8, int), b["segments"], 3)
  return jnp.mean((sums / counts[:, None]) ** 2)


def _scan(y, b):
  def step(carry, row):
    values, keep = row
    return jnp.where(keep, jnp.tanh(carry + values), carry), None

  last, _ = lax.scan(step, jnp.zeros(4), (y, b["mask"]))
  return jnp.mean(last**2)


def _ppo(y, b):
  log_probs = jnp.take_along_axis(
    jax.nn.log_softmax(y), b["labels"][:, None], 1
  )[:, 0]
  ratio = jnp.exp(log_probs - lax.stop_gradient(log_probs))
  gain = b["target"][:, 0]
  clipped = jnp.clip(ratio, 0.8, 1.2)
  return -jnp.sum(jnp.minimum(ratio * gain, clipped * gain) * b["mask"]) / 5


def _straight_through(y, b):
  rounded = y + lax.stop_gradient(jnp.round(y) - y)
  return jnp.mean(_squares(rounded, b))


def _spectral(y, b):
  return jnp.mean(jnp.abs(jnp.fft.rfft(y, axis=0)) ** 2)


def _top_k(y, b):
  values, _ = lax.top_k(y, 2)
  return jnp.mean(values**2)


def _penalty(y, b):
  energy = lambda y: jnp.sum(jnp.tanh(y) ** 3)
  return jnp.mean(jax.grad(energy)(y) ** 2)


LOSSES = {
  "mean squared error": lambda y, b: jnp.mean(_squares(y, b)),
  "token mask": lambda y, b: (
    (_cross_entropy(y, b) * b["mask"]).sum() / b["mask"].sum()
  ),
  "select": lambda y, b: jnp.sum(jnp.where(b["mask"], _cross_entropy(y, b), 0)),
  "integer weights": lambda y, b: jnp.mean(_cross_entropy(y, b) * b["weights"]),
  "integer powers": lambda y, b: jnp.mean(y ** b["weights"][:, None]),
  "uint8 image": lambda y, b: jnp.mean((y - b["image"] / 255) ** 2),
  "dropout": _dropout,
  "attention": _attention,
  "added mask": _added_mask,
  "mask of the lowest number": _finfo_mask,
  "rows that are fully masked": _fully_masked_rows,
  "sampled code": _sampled_code,
  "one-hot": lambda y, b: (
    -jnp.mean(jax.nn.log_softmax(y) * jax.nn.one_hot(b["labels"], 4, dtype=int))
  ),
  "sigmoid": lambda y, b: jnp.mean(
    optax.sigmoid_binary_cross_entropy(y, b["bits"])
  ),
  "ctc": _ctc,
  "ntxent": lambda y, b: optax.ntxent(y, b["labels"]),
  "ranking": lambda y, b: optax.losses.ranking_softmax_loss(
    y[:, 0], b["weights"].astype(jnp.float32), where=b["mask"]
  ),
  "fft": _spectral,
  "zero times an fft": _zero_of_fft,
  "zero weight": lambda y, b: (
    jnp.mean(y**2) + 0.0 * jnp.mean(_cross_entropy(y, b))
  ),
  "pooling": _pooled,
  "solve": _solve,
  "zero times a triangular solve": _triangular,
  "segments": _segments,
  "masked recurrence": _scan,
  "policy gradient": _ppo,
  "straight-through": _straight_through,
  "sorted": lambda y, b: jnp.mean(jnp.sort(y, 0) * jnp.arange(8)[:, None]),
  "top-k": _top_k,
  "cumulative": lambda y, b: jnp.mean(
    jnp.cumsum(y, 0) / jnp.arange(1, 9)[:, None]
  ),
  "log-sum-exp": lambda y, b: jnp.mean(
    jax.nn.logsumexp(y, 1, b=b["bits"] + 1) ** 2
  ),
  "checkpoint": lambda y, b: jax.checkpoint(
    lambda y: jnp.mean(jnp.sin(y) ** 2 * b["mask"][:, None])
  )(y),
  "derivative": _penalty,
}


def loss_fn(name, params, batch):
  """Computes the loss of this name."""
  return LOSSES[name](batch["x"] @ params["w"], batch)
