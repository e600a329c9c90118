"""What a dtype does to gradients at a loss scale, against plain rounding."""

import dataclasses

from helpers.leaves import shard
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import plots

INF = float("inf")


def count_kinds(x, dtype, scale):
  """The shares, by rounding each entry to the dtype."""
  x = np.asarray(x, np.float32).ravel()
  rounded = (x * np.float32(scale)).astype(dtype).astype(np.float32)
  normal = float(jnp.finfo(dtype).smallest_normal)
  is_small = np.abs(x * np.float32(scale)) < normal
  return {
    "zero": np.mean(x == 0),
    "flushed": np.mean((x != 0) & (rounded == 0)),
    "subnormal": np.mean(is_small & (rounded != 0)),
    "overflow": np.mean(~np.isfinite(rounded)),
  }


@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 1000.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
@pytest.mark.filterwarnings(
  "ignore:overflow encountered in cast"  # numpy's, of the oracle
)
def test_the_shares_are_those_of_rounding_every_entry(dtype, scale):
  dtype = jnp.dtype(dtype)
  rng = np.random.default_rng(0)
  x = rng.choice([-1, 1, 1, 0], 4000) * np.exp2(rng.uniform(-40, 30, 4000))
  # Just where rounding goes one way or the other.
  edges = [2.0**-25, 2.0**-24, 2.0**-14, 65504, 65519.9, 65520, 61440, 61439]
  x = np.concatenate([x, edges]).astype(np.float32)
  for leaf in x, jnp.asarray(x), shard(x, spec=(("x", "y"),)):
    total = ols.diagnostics.gradient_report([leaf], dtype, scale).total
    for kind, share in count_kinds(x, dtype, scale).items():
      assert getattr(total, kind) == pytest.approx(share, abs=1e-12), kind


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_float64_gradients_are_compared_in_float64(dtype):
  x = np.array([1e300, 1.0, 1e-300])
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    for leaf in x, jnp.asarray(x), jnp.asarray(x, jnp.complex128):
      total = ols.diagnostics.gradient_report([leaf], dtype).total
      assert total.overflow == total.flushed == pytest.approx(1 / 3)


@pytest.mark.parametrize(
  "dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32", "complex64"]
)
def test_all_dtypes_are_read_under_strict_promotion(dtype):
  with jax.numpy_dtype_promotion("strict"):
    grads = [jnp.array([1.0, 0.5]).astype(dtype)]
    assert (
      ols.diagnostics.gradient_report(grads, loss_scale=3.0).total.largest == 1
    )
    assert plots.exponent_histogram(grads).exponents.tolist() == [-1, 0]
    assert ols.diagnostics.nonfinite_leaves(grads) == []


def test_the_total_of_a_report_weighs_leaves_by_their_size():
  grads = {"a": jnp.array([1e-9, 0.0, INF]), "b": jnp.array([4.0])}
  report = ols.diagnostics.gradient_report(grads)
  total = report.total
  assert (total.size, total.largest) == (4, 4.0)
  assert total.smallest == pytest.approx(1e-9)
  assert (total.flushed, total.zero, total.nonfinite) == (0.25, 0.25, 0.25)
  assert report.as_dict()["total"] == total._asdict()
  assert report.as_dict()["leaves"]["b"]["largest"] == 4.0


@pytest.mark.parametrize(
  "values",
  [[1.0], [1e-3, 1e-8], [65519.0, 3e-7], [2.0**-3, 2.0**-10], [1e4, 1e-30]],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_the_best_scales_are_all_that_lose_least_and_no_more(values):
  x = np.array(values, np.float32)

  def loses(log2_scale):
    with np.errstate(over="ignore"):
      shares = count_kinds(x, np.float16, np.exp2(np.float64(log2_scale)))
    return shares["overflow"], shares["flushed"]

  low, high = ols.diagnostics.gradient_report([x]).total.best_scales
  least = min(loses(k) for k in range(-60, 100))
  assert loses(low) == loses(high) == least
  assert loses(high + 1) > least
  # Where no scale saves all, only the largest that does not overflow is named.
  assert least[1] > 0 or loses(low - 1) > least


def test_the_best_scales_of_zeros_are_any():
  report = ols.diagnostics.gradient_report({"w": jnp.zeros(3)})
  assert report.leaves[0].best_scales is None
  assert str(report).splitlines()[2].endswith("any")
  assert ols.diagnostics.gradient_report({}).total.size == 0


def test_the_report_prints_aligned_and_sorts_by_any_column():
  grads = {"w": jnp.array([1e-9, 1.0]), "bias": jnp.zeros(3), "x": jnp.ones(1)}
  report = ols.diagnostics.gradient_report(
    grads, loss_scale=ols.FixedLossScale(2.0).init()
  )
  lines = str(report).splitlines()
  assert lines[0] == "In float16, times 2:"
  assert " ".join(lines[1].split()) == (
    "shape dtype largest smallest zero flushed subnormal overflow nonfinite"
    " best scales"
  )
  assert [line.split()[0] for line in lines[2:]] == ["bias", "w", "x", "total"]
  assert len({line.index("%") for line in lines[2:]}) <= 2
  for column in ols.diagnostics.GradientStats._fields:
    ascending = report.sorted_by(column, reverse=False)
    assert {leaf.name for leaf in ascending.leaves} == {"bias", "w", "x"}
  assert report.sorted_by("flushed").leaves[0].name == "w"
  with pytest.raises(ValueError, match="got column = 'color'"):
    report.sorted_by("color")


def test_a_report_cannot_be_changed():
  report = ols.diagnostics.gradient_report({"w": jnp.ones(3)})
  with pytest.raises(dataclasses.FrozenInstanceError):
    report.loss_scale = 2.0


@pytest.mark.parametrize(
  "kwargs, error, message",
  [
    ({"dtype": jnp.int32}, TypeError, "dtype must be a float dtype"),
    ({"dtype": np.float64}, TypeError, "at most 32 bits"),
    ({"loss_scale": 0.0}, ValueError, "loss_scale must be"),
    ({"loss_scale": "dynamic"}, TypeError, "loss_scale must be"),
  ],
)
def test_a_report_for_wrong_arguments_is_refused(kwargs, error, message):
  for function in ols.diagnostics.gradient_report, plots.plot_exponents:
    with pytest.raises(error, match=message):
      function([jnp.ones(2)], **kwargs)
