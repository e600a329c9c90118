"""Training steps in JAX, in each precision."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from shared import clock, models, steps, weights
from shared.jax_program import JaxProgram

from on_gpu.findings import Findings
import optax_lossscale as ols


@dataclasses.dataclass(frozen=True)
class Precision:
  """How a row computes."""

  dtype: Any = jnp.float32  # of the model
  autocast: Any = None  # the dtype of autocast, if any
  matmul_precision: str = "tensorfloat32"  # the default of JAX
  scaled: bool = False  # whether ours scales the loss


PRECISIONS = {
  "TF32": Precision(),
  "float16, autocast, ours": Precision(autocast=jnp.float16, scaled=True),
  "float16, by hand, ours": Precision(jnp.float16, scaled=True),
  "bfloat16, autocast": Precision(autocast=jnp.bfloat16),
  "bfloat16, by hand": Precision(jnp.bfloat16),
  "float32, highest": Precision(matmul_precision="highest"),
}
# Precision, and whether with a checkpoint. The most important rows come first,
# since the time may run out.
ROWS = [
  ("TF32", False),
  ("float16, autocast, ours", False),
  ("float16, by hand, ours", False),
  ("float16, autocast, ours", True),
  ("bfloat16, autocast", False),
  ("bfloat16, by hand", False),
  ("float32, highest", False),
  ("float16, by hand, ours", True),
  ("bfloat16, autocast", True),
  ("bfloat16, by hand", True),
  ("TF32", True),
  ("float32, highest", True),
]


class Model:
  """A model to train: weights, batches, and the loss in any precision."""

  def __init__(self, name: str, size):
    self.name = name
    self._size = size
    if name == "residual network":
      self.params, batches = weights.resnet(size), weights.image_batches(size)
    else:
      self.params = weights.transformer(size)
      batches = weights.token_batches(size)
    self.params = jax.device_put(self.params)
    self.batches = [jax.device_put(batch) for batch in batches]

  def loss_fn(self, precision: Precision, checkpoint: bool):
    """Return the loss function, as docs/how_to/profiling.md advises."""
    if self.name == "residual network":
      strides = weights.strides(self._size)
      loss_fn = models.resnet_loss(strides, precision.dtype)
    else:
      loss_fn = models.transformer_loss(self._size.heads, precision.dtype)
    if precision.autocast is not None:
      loss_fn = ols.autocast(loss_fn, precision.autocast)
    return models.RECOMPUTE(loss_fn) if checkpoint else loss_fn


def run(name: str, size, until: float, findings: Findings) -> None:
  """Measure one model in as many rows as there is time for."""
  rows = [
    {"variant": precision, "checkpoint": checkpoint}
    for precision, checkpoint in ROWS[: size.rows]
  ]
  findings.measure_table(
    "training",
    f"{name}, JAX",
    rows,
    functools.partial(_make_program, model=Model(name, size), size=size),
    rounds=size.rounds,
    steps=2,
    until=until,
  )


def _make_program(row, model, size):
  """Compile a row, and take its first steps."""
  precision = PRECISIONS[row["variant"]]
  step, carry = make_step(
    model.loss_fn(precision, row["checkpoint"]), precision, model.params
  )
  program = JaxProgram(row, step, carry, model.batches)
  del carry
  clock.take_first_steps(program, size.first_steps)
  row["loss"], row["steps"] = program.loss(), size.first_steps
  if precision.scaled:
    state = ols.get_loss_scale_state(program.carry)
    row["skipped"] = int(state.total_notfinite)
  return program


def make_step(loss_fn, precision: Precision, params):
  """A training step by AdamW, and its first carry."""
  tx = optax.adamw(weights.LEARNING_RATE, weight_decay=weights.WEIGHT_DECAY)
  if precision.scaled:
    tx = ols.with_loss_scaling(tx)

  def get_grad_fn(state):
    if precision.scaled:
      grad_fn = ols.value_and_grad(loss_fn, state)
    else:
      grad_fn = jax.value_and_grad(loss_fn)
    return jax.default_matmul_precision(precision.matmul_precision)(grad_fn)

  return steps.make_step(tx, get_grad_fn), (params, jax.jit(tx.init)(params))
