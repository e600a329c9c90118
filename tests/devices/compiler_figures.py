"""Prints what a compiler makes of steps, as JSON; test_compilers.py runs it.

python tests/devices/compiler_figures.py v5e
"""

import json
import sys

import attention_costs
import compile_costs
import compiled_bytes  # Before others import jax.
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax
import sharded_costs
import trained_models

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
  pairs = {}
  for name, options in {
    "float32 gradients": {},
    "float16 gradients": {"dtype": jnp.float16},
    "bfloat16 gradients": {"dtype": jnp.bfloat16},
    "100 leaves": {"leaves": 100, "side": 128},
  }.items():
    adam = optax.adam(1e-3)
    pairs[name] = adam, ols.with_loss_scaling(adam), options
  adam = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
  pairs["bfloat16 moments"] = adam, ols.with_loss_scaling(adam), {}
  adamw = optax.adamw(1e-3)
  pairs["clipped"] = (
    optax.chain(optax.clip_by_global_norm(1.0), adamw),
    ols.with_loss_scaling(adamw, max_norm=1.0),
    {},
  )
  return {
    name: [measure_step(device, tx, **options) for tx in (bare, ours)]
    for name, (bare, ours, options) in pairs.items()
  }


def measure_collectives():
  """Return the additional collectives of a sharded step, by name."""
  cases = {
    "data parallel": ("data parallel", 2, {}),
    "FSDP, 2 leaves": ("FSDP", 2, {}),
    "FSDP, 20 leaves": ("FSDP", 20, {}),
    "FSDP, clipped": ("FSDP", 2, {"max_norm": 1.0}),
    "two axes": ("two axes", 3, {}),
    "shard_map": ("shard_map", 3, {}),
  }
  return {
    name: sorted(map(list, sharded_costs.gained(layout, 16, n, **options)))
    for name, (layout, n, options) in cases.items()
  }


def measure_gradients(device):
  """Return the cost of the gradients of two models, in both precisions."""
  images = jax.ShapeDtypeStruct((16, 64, 64, 3), jnp.float32)
  models = {
    "transformer": trained_models.ViT(depth=2, width=256, heads=4),
    "convolutions": trained_models.ResNet50(blocks=(1, 1)),
  }
  results = {}
  for name, model in models.items():
    params = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss_fn(params, images, model=model):
      y, _ = model.apply(params, images, mutable=["batch_stats"])
      return jnp.mean(nn.log_softmax(y)[:, 0])

    casts = {"float32": loss_fn, "autocast": ols.autocast(loss_fn)}
    results[name] = {
      cast: compiled_bytes.figures(
        jax.grad(fun), params, images, device=device
      )._asdict()
      for cast, fun in casts.items()
    }
  return results


if __name__ == "__main__":
  (device,) = sys.argv[1:]
  found = {"steps": measure_steps(device)}
  if device == "v5e":
    found["collectives"] = measure_collectives()
  if device in ("t4", "v100"):
    found["gradients"] = measure_gradients(device)
  if device == "h100":
    found["attention"] = attention_costs.attention(device)
  print(json.dumps(found))
