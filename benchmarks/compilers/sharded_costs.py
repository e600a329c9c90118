"""Counts the collectives of a step that bare Optax does not have."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import compiled_bytes
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import scheduled_hlo

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
  compile slowly.

  Args:
    layout: a name in ``LAYOUTS``.
    chips: a number in ``CHIPS``.
    n_leaves: how many matrices are trained.
    **options: for ``with_loss_scaling``.

  Returns:
    The number of added collectives, by operation and types of the operands. It
    is negative for collectives that only bare Optax has.
  """
  if layout == "shard_map":
    options["axis_name"] = LAYOUTS[layout][0]
  inner = optax.adam(1e-3)
  clip = optax.clip_by_global_norm(options.get("max_norm", 1.0))
  bare = optax.chain(clip, inner) if "max_norm" in options else inner
  results = Counter(_collectives(layout, chips, n_leaves, bare, None))
  wrapped = ols.with_loss_scaling(inner, **options)
  gain = Counter(
    _collectives(layout, chips, n_leaves, wrapped, ols.value_and_grad)
  )
  gain.subtract(results)
  return Counter({key: n for key, n in gain.items() if n})


def _collectives(
  layout: str,
  chips: int,
  n_leaves: int,
  tx: optax.GradientTransformation,
  value_and_grad: Callable[..., Any] | None,
) -> list[tuple[str, str]]:
  axes, spec = LAYOUTS[layout]
  mesh = _mesh(CHIPS[chips], axes)
  weight = jax.ShapeDtypeStruct(SHAPE, jax.numpy.float32)
  params = {f"w{i:03}": weight for i in range(n_leaves)}
  carry = params, jax.eval_shape(tx.init, params)
  batch = jax.ShapeDtypeStruct((8 * chips, SHAPE[0]), jax.numpy.float32)

  def step(carry, batch):
    params, state = carry
    grads = _grads(value_and_grad, params, state, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

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


def _grads(value_and_grad, params, state, batch):
  """Gradients of a sum over the leaves; under ``shard_map`` of the own part."""

  def loss_fn(params, batch):
    half = lambda x: x.astype(jax.numpy.float16)
    loss = 0.0
    for w in params.values():
      if len(params) > FEW:
        y = half(w) * half(jax.numpy.mean(batch))
      else:
        y = half(batch)[:, : w.shape[0]] @ half(w)
      loss += jax.numpy.mean(y.astype(jax.numpy.float32) ** 2)
    return loss

  if value_and_grad is None:
    return jax.grad(loss_fn)(params, batch)
  return value_and_grad(loss_fn, state)(params, batch)[1]


def _mesh(topology: str, axes: tuple[str, ...]) -> jax.sharding.Mesh:
  devices = np.array(compiled_bytes.get_topology_devices(topology))
  shape = (-1,) if len(axes) == 1 else (devices.size // 8, 8)
  return jax.sharding.Mesh(devices.reshape(shape), axes)
