"""Subnormal parameters on a skipped step: the sentences that the pages say.

The wrapper's -0.0 adds nothing, but XLA treats subnormal numbers as zero when
it adds on CPU, whatever is added, and with it `optax.apply_updates`.
"""

from helpers import mark_slow_params
from helpers.bits import has_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

KEPT = ["float16", "float8_e4m3fn", "float8_e5m2"]
LOST_EAGERLY = ["float32", "bfloat16", "float64", "complex64"]
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}


def make_subnormals(dtype):
  """The smallest and the largest of both signs, among other numbers."""
  info = jnp.finfo(dtype)
  smallest = np.array(info.smallest_subnormal, dtype)
  largest = np.array(info.tiny, dtype) - smallest
  few = [smallest, -smallest, largest, -largest, 0.0, -0.0, 1.0]
  return jnp.asarray(np.tile(np.array(few, dtype), 9))


def run_skipped_step(optimizer, params, jitted, select=False):
  """The params after a step that is skipped."""
  tx = ols.with_loss_scaling(OPTIMIZERS[optimizer])

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    if select:
      new = ols.select_if_finite(state, new, params)
    return new, state

  step = jax.jit(step) if jitted else step
  return step(params, tx.init(params), params * jnp.nan)[0]


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


both = pytest.mark.parametrize("jitted", [True, False])
optimizers = pytest.mark.parametrize(
  "optimizer", mark_slow_params(["sgd"], OPTIMIZERS)
)


@pytest.mark.slow
@both
@optimizers
@pytest.mark.parametrize("dtype", KEPT)
def test_float16_and_float8_keep_subnormal_moments(dtype, optimizer, jitted):
  params = make_subnormals(dtype)
  assert has_same_bits(run_skipped_step(optimizer, params, jitted), params)


@optimizers
@pytest.mark.parametrize("dtype", LOST_EAGERLY)
def test_outside_jit_other_dtypes_flush_subnormals_to_zero_only(
  dtype, optimizer
):
  old = np.asarray(make_subnormals(dtype))
  new = np.asarray(run_skipped_step(optimizer, jnp.asarray(old), jitted=False))
  # In NumPy, which preserves subnormal numbers.
  are_subnormal = (old != 0) & (np.abs(old) < np.array(jnp.finfo(dtype).tiny))
  assert are_subnormal.any()
  assert (new[are_subnormal] == 0).all()
  assert has_same_bits(new[~are_subnormal], old[~are_subnormal])


@both
@optimizers
@pytest.mark.parametrize(
  "dtype", mark_slow_params(["float16", "float32"], [*KEPT, *LOST_EAGERLY])
)
def test_select_if_finite_keeps_all_subnormal_moments(dtype, optimizer, jitted):
  params = make_subnormals(dtype)
  assert has_same_bits(
    run_skipped_step(optimizer, params, jitted, select=True), params
  )


@optimizers
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_under_jit_float32_and_float64_keep_subnormal_moments(dtype, optimizer):
  params = make_subnormals(dtype)
  assert has_same_bits(run_skipped_step(optimizer, params, jitted=True), params)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_under_jit_bfloat16_and_complex_adam_moments_lose_subnormals(dtype):
  params = make_subnormals(dtype)
  assert not has_same_bits(
    run_skipped_step("adam", params, jitted=True), params
  )


@pytest.mark.parametrize("dtype", LOST_EAGERLY)
def test_no_update_could_keep_subnormal_moments(dtype):
  """So it is not for the wrapper to mend."""
  params = make_subnormals(dtype)
  zeros = jnp.zeros_like(params)
  for update in (zeros, -zeros, params, -params):
    assert not has_same_bits(optax.apply_updates(params, update), params)
