"""Three ways to train a model that computes with bfloat16 weights.

As in `variants`, each is a function from a workload to ``(step, carry)``. The
data of the workload are bfloat16 gradients. A cast of float32 parameters is a
part of the model, and not of these steps.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from shared.steps import make_step
from shared.workloads import make_workloads, Workload

Built = tuple[Callable[..., Any], Any]


def float32_params(workload: Workload) -> Built:
  tx, params = workload.optimizer(), workload.params
  step = make_step(tx)
  float32_step = lambda carry, grads: step(carry, _cast(grads, jnp.float32))
  return float32_step, (params, tx.init(params))


def masters_by_hand(workload: Workload) -> Built:
  """float32 masters, and a bfloat16 copy that is kept for the next step."""
  tx, masters = workload.optimizer(), workload.params

  def step(carry, grads):
    _, masters, opt_state = carry
    grads = _cast(grads, jnp.float32)
    updates, opt_state = tx.update(grads, opt_state, masters)
    masters = optax.apply_updates(masters, updates)
    return (_cast(masters, jnp.bfloat16), masters, opt_state), None

  return step, (_cast(masters, jnp.bfloat16), masters, tx.init(masters))


def ours(workload: Workload) -> Built:
  tx = ols.with_master_weights(workload.optimizer())
  params = _cast(workload.params, jnp.bfloat16)
  return make_step(tx), (params, tx.init(params))


def make_workload(scale: float) -> Workload:
  """Return AdamW with bfloat16 gradients; for the scale, see `workloads`."""
  workload = make_workloads(scale)["adam"]()
  grads = _cast(workload.data, jnp.bfloat16)
  return dataclasses.replace(workload, data=grads, weight_decay=True)


def count_resident_bytes(carry: Any, workload: Workload) -> float:
  """Return the bytes of parameters and state, for each parameter."""
  count = lambda tree, get: sum(map(get, jax.tree.leaves(tree)))
  n_params = count(workload.params, lambda x: x.size)
  return round(count(carry, lambda x: x.nbytes) / n_params, 2)


def _cast(tree: Any, dtype: Any) -> Any:
  return jax.tree.map(lambda x: x.astype(dtype), tree)


VARIANTS = {
  "float32 parameters, cast in the model": float32_params,
  "float32 masters and a bfloat16 copy": masters_by_hand,
  "`with_master_weights`": ours,
}
