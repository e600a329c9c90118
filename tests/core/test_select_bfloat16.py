"""A skipped step keeps each bfloat16, whichever way XLA selects it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _arrays

PATTERNS = np.arange(2**16, dtype=np.uint16)
MAGNITUDES = PATTERNS & 0x7FFF
IS_NAN = MAGNITUDES > 0x7F80
IS_SUBNORMAL = (MAGNITUDES > 0) & (MAGNITUDES < 0x80)
# XLA's compiler for CPU converts all bfloat16 to float32 and back by itself. It
# makes one NaN of all, and keeps the sign.
PAYLOAD = np.where(IS_NAN, 0x7F, 0).astype(np.uint16)


def bits(x):
  return np.asarray(x).view(np.uint16)


def test_a_skipped_step_keeps_every_bfloat16_moment():
  tx = ols.with_loss_scaling(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
  params = jnp.zeros(2**16)
  state = tx.init(params)
  adam, *others = state.inner_state
  mu = jnp.asarray(PATTERNS.view(jnp.bfloat16))
  state = state._replace(inner_state=(adam._replace(mu=mu), *others))
  grads = params.at[0].set(jnp.nan)
  _, after = jax.jit(tx.update)(grads, state, params)
  kept = bits(after.inner_state[0].mu)
  np.testing.assert_array_equal(kept | PAYLOAD, PATTERNS | PAYLOAD)
  assert not after.loss_scale_state.last_finite


@pytest.mark.parametrize("condition", [True, False])
def test_selected_in_float32_each_number_stays_and_each_nan_is_one(condition):
  """This way is for TPU; CPU takes subnormal numbers for zero in either."""
  other = np.ones(2**16, jnp.bfloat16)
  numbers = PATTERNS.view(jnp.bfloat16)
  args = (numbers, other) if condition else (other, numbers)
  out = bits(jax.jit(_arrays._select_in_float32)(condition, *args))
  certain = ~IS_NAN & ~IS_SUBNORMAL
  np.testing.assert_array_equal(out[certain], PATTERNS[certain])
  assert (out[IS_NAN] & 0x7FFF > 0x7F80).all()


def test_only_bfloat16_and_only_on_tpu_is_selected_in_float32(monkeypatch):
  ways = []

  def platform_dependent(*args, default, **others):
    ways.append((args[-1].dtype.name, others, default))
    return default(*args)

  monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)
  old = [jnp.ones(3, t) for t in ("bfloat16", "float16", "float32", "int32")]
  new = jax.tree.map(jnp.zeros_like, old)
  out = jax.jit(_arrays.select)(False, new, old)
  assert [x.dtype for x in out] == [x.dtype for x in old]
  on_tpu = {"tpu": _arrays._select_in_float32}
  assert ways == [("bfloat16", on_tpu, jax.lax.select)]
  # Outside jit nothing is fused: there it would be one more program.
  _arrays.select(jnp.bool_(False), new, old)
  assert len(ways) == 1
