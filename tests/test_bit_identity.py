"""A skipped step changes no bit, wherever the bad entry is and however large.

XLA reduces large arrays by other paths than small ones, and in other orders.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax_battery import factories
import pytest

import optax_lossscale as ols

ALL = {
  f"{module}.{name}": (factory, kwargs)
  for module in ("optax", "optax.contrib")
  for name, (factory, kwargs) in factories(module).items()
}
# These need more than gradients: covered with their arguments by the battery.
NEED_MORE = {"lbfgs", "sophia", "momo", "momo_adam", "polyak_sgd", "dpsgd"}
NAMES = [name for name in ALL if name.split(".")[-1] not in NEED_MORE]
BAD = [np.nan, np.inf, -np.inf]
LEAVES = ["first", "middle", "zlast"]
DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def make_params(shape):
  """Three leaves; zeros of both signs among their entries."""
  size = int(np.prod(shape))
  x = np.linspace(-1, 1, size, dtype=np.float32).reshape(shape)
  x.reshape(-1)[:1] = 0.0
  x.reshape(-1)[1:2] = -0.0
  return {
    "first": jnp.asarray(x),
    "middle": jnp.asarray(-x),
    "zlast": jnp.asarray(x + 1),
  }


def check_skips(inner, shape, dtype, leaves=LEAVES, bad=BAD):
  params = make_params(shape)
  tx = ols.with_loss_scaling(inner)

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
    updates, new_state = tx.update(grads, state, params)
    new_params = optax.apply_updates(params, updates)
    return (
      new_params,
      new_state,
      same_bits(
        (new_params, new_state.inner_state), (params, state.inner_state)
      ),
    )

  grads = jax.tree.map(lambda x: (x * 0.5 + 0.25).astype(dtype), params)
  size = params["first"].size
  params, state, same = step(params, tx.init(params), grads, -1, 0, 0.0)
  assert not same
  assert state.loss_scale_state.last_finite
  for value in bad:
    for leaf in leaves:
      for where in (0, size // 2, size - 1):
        _, after, same = step(
          params, state, grads, LEAVES.index(leaf), where, value
        )
        assert same, (value, leaf, where)
        assert after.loss_scale_state.total_notfinite == 1


def same_bits(a, b):
  """Whether two trees of arrays are equal by bits; on the device."""

  def same(x, y):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    if jnp.issubdtype(x.dtype, jnp.inexact):
      unsigned = f"uint{8 * x.dtype.itemsize}"
      x, y = (jax.lax.bitcast_convert_type(z, unsigned) for z in (x, y))
    return jnp.all(x == y)

  return jnp.all(jnp.array(jax.tree.leaves(jax.tree.map(same, a, b))))


@pytest.mark.parametrize("size", [1, 1_000_003])
def test_a_skip_changes_no_bit_of_adam_in_leaves_of_any_size(size):
  check_skips(optax.adam(0.1), (size,), "float32")


@pytest.mark.nightly
@pytest.mark.parametrize("size", [4097, 1_000_000, 10_000_000])
@pytest.mark.parametrize("dtype", [*DTYPES, "f64"])
@pytest.mark.parametrize("name", ["sgd", "adam", "lion"])
def test_a_skip_changes_no_bit_in_large_leaves(name, dtype, size):
  factory, kwargs = ALL[f"optax.{name}"]
  x64 = jax.enable_x64(True) if dtype == "f64" else contextlib.nullcontext()
  with x64:
    dtype = DTYPES.get(dtype, "float64")
    check_skips(factory(**kwargs), (size,), dtype)


# GaLore's own lax.cond refuses these, wrapped or bare.
REFUSED = {("optax.contrib.galore", "bf16")}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")
@pytest.mark.parametrize(
  "name, dtype",
  [
    (name, dtype)
    for name in NAMES
    for dtype in DTYPES
    if (name, dtype) not in REFUSED
  ],
)
def test_a_skip_changes_no_bit_of_any_optimizer(name, dtype):
  factory, kwargs = ALL[name]
  check_skips(factory(**kwargs), (6, 4), DTYPES[dtype])


@pytest.mark.parametrize(
  "fill, dtype, size",
  [
    (1e30, "float32", 1_000_000),
    (-1e30, "float32", 1_000_000),
    (65504, "float16", 1_000_000),
    (1e30, "bfloat16", 1_000_000),
    (1e-45, "float32", 1_000_000),
    (6e-8, "float16", 1_000_000),
    (0, "float32", 1_000_000),
    (-0.0, "float16", 1_000_000),
  ],
)
def test_finite_gradients_of_any_size_are_applied(fill, dtype, size):
  tx = ols.with_loss_scaling(optax.sgd(1.0))
  params = jnp.zeros(size)
  grads = jnp.full(size, fill, dtype)
  _, state = jax.jit(tx.update)(grads, tx.init(params), params)
  assert state.loss_scale_state.last_finite
