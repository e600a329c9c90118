"""A skipped step changes no bit, wherever the bad entry is and however large.

XLA reduces large arrays by other paths than small ones, and in other orders.
"""

from helpers import optimizers
from helpers.bits import has_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

ALL = optimizers.get_all_factories()
BAD = [np.nan, np.inf, -np.inf]
LEAVES = ["first", "middle", "zlast"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
# GaLore's own lax.cond refuses these, wrapped or bare.
REFUSED = {("optax.contrib.galore", "bfloat16")}
# The shapes of the three leaves; some optimizers factorize matrices.
SHAPES = {
  "small": [(6, 4)] * 3,
  "large": [(1001, 1000)] * 3,
  "mixed": [(1,), (10_000_000,), (4097,)],
}


def make_params(shapes, dtype):
  """Leaves with zeros of both signs among their entries."""
  return {
    name: jnp.asarray(make_leaf(shape, dtype) + i)
    for i, (name, shape) in enumerate(zip(LEAVES, shapes, strict=True))
  }


def make_leaf(shape, dtype):
  x = np.linspace(-1, 1, np.prod(shape), dtype=dtype)
  x[:1] = 0.0
  x[1:2] = -0.0
  return x.reshape(shape)


def check_skips(name, shapes, dtype):
  """Each kind of bad entry, at nine indices in turn, changes nothing."""
  factory, kwargs = ALL[name]
  tx = ols.with_loss_scaling(factory(**kwargs))
  params = make_params(shapes, "float64" if dtype == "float64" else "float32")

  @jax.jit
  def step(params, state, grads, leaf_number, where, value):
    # The bad entry is put in here, so that nothing is compiled again.
    grads = {
      name: grad.reshape(-1)
      .at[jnp.where(leaf_number == i, where, grad.size)]
      .set(value, mode="drop")
      .reshape(grad.shape)
      for i, (name, grad) in enumerate(grads.items())
    }
    value = optimizers.sum_of_squares(params)
    updates, new_state = optimizers.update(
      name, tx, value, grads, state, params
    )
    return optax.apply_updates(params, updates), new_state

  grads = jax.tree.map(lambda x: (x * 0.5 + 0.25).astype(dtype), params)
  start, state = params, tx.init(params)
  for _ in range(2):  # The first step of some only fills their state.
    params, state = step(params, state, grads, -1, 0, 0.0)
  assert not has_same_bits(params, start)
  assert state.loss_scale_state.last_finite
  for value in BAD:
    for leaf, leaf_name in enumerate(LEAVES):
      size = params[leaf_name].size
      for where in (0, size // 2, size - 1):
        new, after = step(params, state, grads, leaf, where, value)
        assert has_same_bits(
          (new, after.inner_state), (params, state.inner_state)
        ), (value, leaf_name, where)
        assert after.loss_scale_state.total_notfinite == 1


def test_a_skip_changes_no_bit_of_adam_in_leaves_of_any_size():
  check_skips("optax.adam", [(1,), (200_003,), (4097,)], "float32")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_a_skip_changes_no_bit_of_any_optimizer(name, dtype, shapes):
  if (name, dtype) in REFUSED:
    pytest.skip("refused by the bare optimizer, too")
  with jax.enable_x64(dtype == "float64"):
    check_skips(name, SHAPES[shapes], dtype)
