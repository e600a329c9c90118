"""Both ways to test gradients, that of CPU and that of all other devices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import _grads

DTYPES = [
  *("float16", "bfloat16", "float32", "float64", "complex64"),
  *("float8_e5m2", "float8_e4m3fn"),
]
BAD = [np.nan, np.inf, -np.inf]
FAULTS = {
  "sums": _grads._nan_unless_sum_is_finite,
  "elements": _grads._nan_unless_finite,
  "counts": _grads._count_not_finite,
}
WITHOUT_FACTOR = [(way, None) for way in FAULTS]
WITH_FACTOR = [("sums", 2.0**-15), ("counts", 2.0**-15), ("counts", 3.0)]


def test_on_cpu_and_elsewhere_another_way_is_taken(monkeypatch):
  """Of those below; the compilers of TPU and GPU are asked in test_hlo.py."""
  taken = []

  def platform_dependent(*args, cpu, default):
    taken.append((cpu, default))
    return cpu(*args)

  monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)
  jax.jit(ols.all_finite).trace(jnp.zeros(3))
  jax.jit(lambda x: _grads.sum_is_finite([x])).trace(jnp.zeros(3))
  elements, sums, counts = (FAULTS[k] for k in ("elements", "sums", "counts"))
  faults = [tuple(way.args[0] for way in ways) for ways in taken]
  assert faults == [(elements, counts), (sums, counts)]


@functools.partial(jax.jit, static_argnums=0)
def is_finite(way, leaves, factor):
  return _grads._add_to_zero(FAULTS[way], leaves, factor)


@pytest.mark.slow
@pytest.mark.parametrize("way, factor", WITHOUT_FACTOR + WITH_FACTOR)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_way_finds_each_bad_entry_wherever_it_is(dtype, way, factor):
  with jax.enable_x64(dtype == "float64"):
    leaves = [jnp.linspace(-1, 1, n).astype(dtype) for n in (7, 4099, 1)]
    factor = factor and jnp.float32(factor)
    assert is_finite(way, leaves, factor)
    # e4m3fn has no infinity: a cast of one makes NaN of it.
    for number, value in itertools.product(range(3), BAD):
      size = leaves[number].size
      for where in {0, size // 2, size - 1}:
        bad = list(leaves)
        bad[number] = bad[number].at[where].set(value)
        assert not is_finite(way, bad, factor), (number, value, where)
    if dtype == "complex64":
      assert not is_finite(way, [jnp.array([1 + 1j * np.inf])], factor)


@pytest.mark.parametrize("way, factor", WITHOUT_FACTOR + WITH_FACTOR[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_way_takes_the_ends_of_the_range_for_an_overflow(dtype, way, factor):
  with jax.enable_x64(dtype == "float64"):
    info = jnp.finfo(dtype)
    factor = factor and jnp.float32(factor)
    tiny = info.smallest_subnormal
    ends = [info.max, -info.max, info.tiny, tiny, -tiny, 0.0, -0.0]
    leaves = [jnp.array([x], dtype) for x in ends]
    assert is_finite(way, [*leaves, jnp.zeros((0, 3), dtype)], factor)


def test_a_count_has_no_limit_where_a_sum_overflows():
  large = [jnp.full(1_000_000, 1e33)]
  assert is_finite("counts", large, None)
  assert not is_finite("sums", large, None)
  assert is_finite("counts", large, jnp.float32(2.0**-15))


def test_a_count_loses_none_among_many_leaves():
  leaves = [jnp.zeros(2)] * 30 + [jnp.full(20_000_000, jnp.inf)]
  assert not is_finite("counts", leaves[::-1], None)
  leaves[-1] = jnp.array([0.0, jnp.nan])
  assert not is_finite("counts", leaves, None)


@pytest.mark.parametrize("way", ["sums", "counts"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_product_that_overflows_is_found(dtype, way):
  """With a scale below 1, of an entry that is finite."""
  largest = jnp.array([jnp.finfo(dtype).max], dtype)
  factor = jnp.float32(2.0**127) if dtype == "float16" else jnp.float32(2)
  assert is_finite(way, [largest], jnp.float32(1))
  assert not is_finite(way, [largest], factor)
  assert not is_finite(way, [-largest], factor)


def test_no_gradients_are_finite():
  for way in FAULTS:
    assert is_finite(way, [], None)
