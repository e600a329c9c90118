"""Prints what a compiler makes of steps, as JSON; test_compilers.py runs it.

python tests/devices/compiler_figures.py v5e
"""

import json
import sys
import types

import compile_costs
import compiled_bytes  # Before others import jax.
import jax
import jax.numpy as jnp
import optax
from shared import models, weights

import optax_lossscale as ols

SIDE = 1024


def measure_step(device, tx, *, leaves=4, side=SIDE, dtype=jnp.float32):
  """The figures of one step, with the bytes for one parameter."""
  params = {
    f"w{i:03}": jax.ShapeDtypeStruct((side, side), jnp.float32)
    for i in range(leaves)
  }
  grads = {name: x.update(dtype=dtype) for name, x in params.items()}
  return compile_costs.measure_update(device, tx, params, grads)


def measure_steps(device):
  """By name, the figures of bare Optax and of ours."""
  adam, adamw = optax.adam(1e-3), optax.adamw(1e-3)
  half_adam = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
  clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
  scale = ols.with_loss_scaling
  cases = {
    "float32 gradients": (adam, scale(adam), {}),
    "float16 gradients": (adam, scale(adam), {"dtype": jnp.float16}),
    "bfloat16 gradients": (adam, scale(adam), {"dtype": jnp.bfloat16}),
    "100 leaves": (adam, scale(adam), {"leaves": 100, "side": 128}),
    "bfloat16 moments": (half_adam, scale(half_adam), {}),
    "clipped": (clipped, scale(adamw, max_norm=1.0), {}),
  }
  return {
    name: [measure_step(device, tx, **options) for tx in (bare, ours)]
    for name, (bare, ours, options) in cases.items()
  }


def measure_gradients(device):
  """Return the cost of the gradients of two models, in both precisions."""
  size = types.SimpleNamespace(
    width=256, depth=2, heads=4, vocabulary=1024, sequences=16, length=64,
    channels=64, blocks=(1, 1), images=16, pixels=64, classes=1000,
  )  # fmt: skip
  cases = {
    "transformer": (
      models.transformer_loss(size.heads, jnp.float32),
      weights.transformer(size),
      weights.token_batches(size)[0],
    ),
    "convolutions": (
      models.resnet_loss(weights.strides(size), jnp.float32),
      weights.resnet(size),
      weights.image_batches(size)[0],
    ),
  }
  results = {}
  for name, (loss_fn, params, batch) in cases.items():
    casts = {"float32": loss_fn, "autocast": ols.autocast(loss_fn)}
    results[name] = {
      cast: compiled_bytes.figures(
        jax.grad(fun), params, batch, device=device
      )._asdict()
      for cast, fun in casts.items()
    }
  return results


if __name__ == "__main__":
  (device,) = sys.argv[1:]
  found = {
    "steps": measure_steps(device),
    "master weights": compile_costs.measure_master_weights(device),
  }
  if device in ("t4", "v100"):
    found["gradients"] = measure_gradients(device)
  if device == "h100":
    found["attention"] = compile_costs.measure_attention(device)
  print(json.dumps(found))
