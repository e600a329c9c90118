"""A million steps."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

POLICIES = {
  "fixed": ols.FixedLossScale(2.0**10),
  "dynamic": ols.DynamicLossScale(growth_interval=50),
  "hysteresis": ols.DynamicLossScale(growth_interval=50, hysteresis=2),
  "headroom": ols.HeadroomLossScale(),
}
STEPS, CHUNKS = 1_000_000, 10
TOP = 2**31 - 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_long_run_keeps_bounds_counts_types_and_memory(policy):
  rng = np.random.default_rng(0)
  tx = ols.with_loss_scaling(optax.sgd(0.0, momentum=0.5), policy)

  @jax.jit
  def run(state, grads):
    def step(state, grad):
      _, state = tx.update({"w": jnp.full(3, grad)}, state)
      return state, state.loss_scale_state.loss_scale

    return jax.lax.scan(step, state, grads)

  state = tx.init({"w": jnp.zeros(3)})
  # It will saturate, except for the fixed scale.
  start = 0 if isinstance(policy, ols.FixedLossScale) else TOP - 10
  state = optax.tree.set(state, total_notfinite=jnp.int32(start))
  types = jax.tree.map(jax.typeof, state)
  skips, resident = 0, []
  for _ in range(CHUNKS):
    overflow = rng.random(STEPS // CHUNKS) < 1 / 200
    grads = np.exp2(rng.normal(-10, 2, STEPS // CHUNKS)).astype(np.float32)
    state, scales = run(state, np.where(overflow, np.float32(np.inf), grads))
    skips += overflow.sum()
    assert scales.min() >= getattr(policy, "min_scale", 2.0**10)
    assert scales.max() <= getattr(policy, "max_scale", 2.0**10)
    assert jax.tree.map(jax.typeof, state) == types
    resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
  assert abs(skips - STEPS / 200) < 500
  scale_state = state.loss_scale_state
  assert scale_state.total_notfinite == min(start + skips, TOP)
  if start == 0:
    assert scale_state.finite_count == np.argmax(overflow[::-1])
  assert ols.all_finite(state)
  assert resident[-1] - resident[1] < 32 * 1024  # KiB
