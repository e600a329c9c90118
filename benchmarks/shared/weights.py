"""Initial weights and batches of the models, in NumPy.

A `size` has the sizes as attributes, such as `on_gpu.sizes.Size`.
"""

from typing import Any

import numpy as np

BATCHES = 2  # They take turns.
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 1e-4  # of AdamW


def transformer(size) -> dict[str, Any]:
  """Weights of a transformer, with a dictionary for each layer."""
  rng = np.random.default_rng(0)
  width, depth = size.width, size.depth
  draw = lambda scale, *shape: normal(rng, scale, shape)
  deep = (2 * depth) ** -0.5  # Keeps the sum of all layers near one.
  embedding = draw(0.02, size.vocabulary, width)
  positions = draw(0.02, size.length, width)
  stacked = {
    "qkv": draw(width**-0.5, depth, width, 3 * width),
    "out": draw(width**-0.5 * deep, depth, width, width),
    "up": draw(width**-0.5, depth, width, 4 * width),
    "down": draw((4 * width) ** -0.5 * deep, depth, 4 * width, width),
    "norms": np.ones((depth, 2, width), np.float32),
  }
  return {
    "embedding": embedding,
    "positions": positions,
    "layers": [
      {name: w[i] for name, w in stacked.items()} for i in range(depth)
    ],
    "norm": np.ones(width, np.float32),
  }


def token_batches(size) -> list[dict[str, Any]]:
  """Tokens of which few are frequent, as in a language."""
  rng = np.random.default_rng(1)
  shape = BATCHES, size.sequences, size.length + 1
  drawn = (size.vocabulary * rng.random(shape) ** 4).astype(np.int32)
  return [{"inputs": x[:, :-1], "labels": x[:, 1:]} for x in drawn]


def resnet(size) -> dict[str, Any]:
  """Weights of a residual network; kernels are height, width, in, out."""
  rng = np.random.default_rng(2)
  kernel = lambda k, n_in, n_out: normal(
    rng, (2 / (k * k * n_in)) ** 0.5, (k, k, n_in, n_out)
  )
  n = size.channels
  params = {"stem": _conv(kernel(7, 3, n)), "blocks": []}
  n_in = n
  for stage, blocks in enumerate(size.blocks):
    inner = size.channels * 2**stage
    for i in range(blocks):
      block = {
        "reduce": _conv(kernel(1, n_in, inner)),
        "middle": _conv(kernel(3, inner, inner)),
        "expand": _conv(kernel(1, inner, 4 * inner), gain=0.0),
      }
      if i == 0:
        block["shortcut"] = _conv(kernel(1, n_in, 4 * inner))
      params["blocks"].append(block)
      n_in = 4 * inner
  params["head"] = normal(rng, n_in**-0.5, (n_in, size.classes))
  return params


def strides(size) -> list[int]:
  """By how much each block of the residual network shrinks its images."""
  return [
    2 if stage > 0 and i == 0 else 1
    for stage, blocks in enumerate(size.blocks)
    for i in range(blocks)
  ]


def image_batches(size) -> list[dict[str, Any]]:
  """Noise with labels; the network can only learn them by heart."""
  rng = np.random.default_rng(3)
  shape = size.images, size.pixels, size.pixels, 3
  return [
    {
      "inputs": rng.standard_normal(shape, np.float32),
      "labels": rng.integers(0, size.classes, size.images, np.int32),
    }
    for _ in range(BATCHES)
  ]


def _conv(kernel, gain=1.0):
  n_out = kernel.shape[-1]
  return {
    "kernel": kernel,
    "gain": np.full(n_out, gain, np.float32),
    "bias": np.zeros(n_out, np.float32),
  }


def normal(rng, scale, shape):
  """Return random numbers with a standard deviation of `scale`."""
  x = rng.standard_normal(shape, np.float32)
  x *= np.float32(scale)
  return x
