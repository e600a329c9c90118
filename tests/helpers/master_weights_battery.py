"""Trains half-precision parameters with each optimizer, and masters by hand.

Run as a script, like `optax_battery`: it prints, as JSON, the problems of each
optimizer.
"""

import jax
import jax.numpy as jnp
import optax

from helpers import optax_battery
from helpers.bits import has_same_bits
from helpers.optimizers import compute_loss_and_grads, extra_args
from helpers.small_model import (
  init_params,
  loss_fn,
  make_batches,
  make_overflowing_batch,
)
import optax_lossscale as ols

DTYPES = jnp.bfloat16, jnp.float16


def round_params(masters, dtype):
  """Round as the wrapper does: ties away from zero in bfloat16."""
  if dtype != jnp.bfloat16:
    return optax.tree.cast(masters, dtype)

  def round_leaf(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = ((bits + 0x8000) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)

  return jax.tree.map(round_leaf, masters)


def train_by_hand(name, tx, dtype, batches):
  """Return (parameters, masters, optimizer state) after each step."""

  @jax.jit
  def step(masters, state, batch):
    params = round_params(masters, dtype)
    value, grads = compute_loss_and_grads(
      name, ols.value_and_grad(loss_fn, state), params, batch
    )
    grads = optax.tree.cast(grads, jnp.float32)

    def fun(masters):
      return loss_fn(optax.tree.cast(masters, dtype), batch)

    extra = extra_args(name, value, grads, fun)
    updates, state = tx.update(grads, state, masters, **extra)
    masters = optax.apply_updates(masters, updates)
    return round_params(masters, dtype), masters, state

  masters = optax.tree.cast(round_params(init_params(), dtype), jnp.float32)
  state, history = tx.init(masters), []
  for batch in batches:
    params, masters, state = step(masters, state, batch)
    history.append((params, masters, state))
  return history


def train_wrapped(name, tx, dtype, batches, traces):
  """Return the same as `train_by_hand`."""
  tx = ols.with_master_weights(tx)

  @jax.jit
  def step(params, state, batch):
    traces.append(name)
    value, grads = compute_loss_and_grads(
      name, ols.value_and_grad(loss_fn, state), params, batch
    )
    fun = lambda params: loss_fn(params, batch)
    extra = extra_args(name, value, grads, fun)
    updates, state = tx.update(grads, state, params, **extra)
    params = optax.apply_updates(params, updates)
    return params, ols.get_master_weights(state, params), state

  params = round_params(init_params(), dtype)
  state, history = tx.init(params), []
  for batch in batches:
    params, masters, state = step(params, state, batch)
    history.append((params, masters, state.inner_state))
  return history


def list_problems(name, factory, kwargs):
  """Return what an optimizer does not do as with masters by hand."""
  tx = ols.with_loss_scaling(factory(**kwargs), 2.0**8)
  batches = make_batches(6)
  batches.insert(2, make_overflowing_batch(batches[0]))
  problems, traces = [], []
  for dtype in DTYPES:
    expected = train_by_hand(name, tx, dtype, batches)
    actual = train_wrapped(name, tx, dtype, batches, traces)
    for i, states in enumerate(zip(actual, expected, strict=True)):
      if not has_same_bits(*states):
        problems.append(f"{dtype.__name__} differs in step {i}")
    if not has_same_bits(actual[1][:2], actual[2][:2]):
      problems.append(f"{dtype.__name__} changes in a skipped step")
  if len(traces) != len(DTYPES):
    problems.append("a step is traced again")
  return problems


if __name__ == "__main__":
  optax_battery.main(list_problems)
