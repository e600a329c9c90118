"""Counts the collectives of a step that bare Optax does not have."""

from collections import Counter
import functools
from typing import Any

import compiled_bytes
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import scheduled_hlo
from shared.steps import make_step

import optax_lossscale as ols

SHAPE = (2048, 512)
FEW = 20  # leaves
# Topologies by the number of chips: H100 in one machine, v5e, and v5p.
CHIPS = {8: "8 h100", 16: "v5e:4x4", 256: "v5e:16x16", 2048: "v5p:8x16x16"}
# Name: (names of the mesh axes, spec of the parameters).
LAYOUTS = {
  "data parallel": (("data",), P()),
  "FSDP": (("data",), P("data")),
  "two axes": (("data", "model"), P("data", "model")),
  "shard_map": (("data",), P("data")),
}


def gained(layout: str, chips: int, n_leaves: int, **options: Any) -> Counter:
  """Count the collectives that loss scaling adds to a step of Adam.

  The loss has a float16 matmul of the batch with each leaf, so that the
  gradients of replicated parameters are summed over the devices. With many
  leaves, it multiplies them by a scalar of the batch instead, since matmuls
  compile slowly. Options are for ``with_loss_scaling``.

  Returns:
    The number of added collectives, by operation and types of the operands. It
    is negative for collectives that only bare Optax has.
  """
  inner = optax.adam(1e-3)
  clip = optax.clip_by_global_norm(options.get("max_norm", 1.0))
  bare = optax.chain(clip, inner) if "max_norm" in options else inner
  if layout == "shard_map":
    options["axis_name"] = LAYOUTS[layout][0]
  wrapped = ols.with_loss_scaling(inner, **options)
  gain = Counter(
    _collectives(layout, chips, n_leaves, wrapped, ols.value_and_grad)
  )
  value_and_grad = lambda fun, state: jax.value_and_grad(fun)
  gain.subtract(_collectives(layout, chips, n_leaves, bare, value_and_grad))
  return Counter({key: n for key, n in gain.items() if n})


def _collectives(layout, chips, n_leaves, tx, value_and_grad):
  axes, spec = LAYOUTS[layout]
  devices = np.array(compiled_bytes.get_topology_devices(CHIPS[chips]))
  shape = (-1,) if len(axes) == 1 else (devices.size // 8, 8)
  mesh = jax.sharding.Mesh(devices.reshape(shape), axes)
  weight = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
  params = {f"w{i:03}": weight for i in range(n_leaves)}
  carry = params, jax.eval_shape(tx.init, params)
  batch = jax.ShapeDtypeStruct((8 * chips, SHAPE[0]), jnp.float32)

  train = make_step(tx, functools.partial(value_and_grad, _loss_fn))
  step = lambda carry, batch: train(carry, batch)[0]

  carry_specs = jax.tree.map(lambda x: spec if x.ndim == 2 else P(), carry)
  if layout == "shard_map":
    step = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(carry_specs, P("data")),
      out_specs=carry_specs,
    )
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), carry_specs)
  compiled = compiled_bytes.compile_for(
    CHIPS[chips],
    step,
    jax.tree.map(compiled_bytes.place, carry, shardings),
    compiled_bytes.place(batch, NamedSharding(mesh, P("data"))),
    donate_argnums=0,
    out_shardings=shardings,
  )
  return scheduled_hlo.collectives(compiled.as_text())


def _loss_fn(params, batch):
  """A sum over the leaves; under ``shard_map`` of the device's own part."""
  half = lambda x: x.astype(jnp.float16)
  loss = 0.0
  for w in params.values():
    if len(params) > FEW:
      y = half(w) * half(jnp.mean(batch))
    else:
      y = half(batch)[:, : w.shape[0]] @ half(w)
    loss += jnp.mean(y.astype(jnp.float32) ** 2)
  return loss
