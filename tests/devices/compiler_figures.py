"""Prints what a compiler makes of steps, as JSON; test_compilers.py runs it.

python tests/devices/compiler_figures.py v5e
"""

import json
import sys

import compiled_bytes  # Before others import jax.
import jax
import jax.numpy as jnp
import optax
import sharded_costs

import optax_lossscale as ols

SIDE = 1024


def figures(device, tx, *, leaves=4, side=SIDE, dtype=jnp.float32):
  """Those of one step, bytes for one parameter."""
  params = {
    f"w{i:03}": jax.ShapeDtypeStruct((side, side), jnp.float32)
    for i in range(leaves)
  }
  grads = {name: x.update(dtype=dtype) for name, x in params.items()}

  def step(carry, grads):
    params, state = carry
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  carry = params, jax.eval_shape(tx.init, params)
  found = compiled_bytes.figures(
    step, carry, grads, device=device, donate_argnums=0
  )
  count = leaves * side**2
  return {
    "bytes": found.bytes / count,
    "aliased": found.aliased / count,
    "kernels": found.kernels,
  }


def steps(device):
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
    name: [figures(device, tx, **options) for tx in (bare, ours)]
    for name, (bare, ours, options) in pairs.items()
  }


def collectives():
  """What a sharded step sends more than that of bare Optax, by name."""
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


if __name__ == "__main__":
  (device,) = sys.argv[1:]
  found = {"steps": steps(device)}
  if device == "v5e":
    found["collectives"] = collectives()
  print(json.dumps(found))
