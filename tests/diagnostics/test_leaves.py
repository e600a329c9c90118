"""Which leaves overflow or underflow, and why a run is stuck."""

import dataclasses

import equinox as eqx
from flax import nnx
from helpers import parametrize_slow
from helpers.leaves import AS_ARRAYS, make_bad_weight, shard_array
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import interop, plots
from optax_lossscale.diagnostics import (
  _gradient_report,
  _leaves,
  gradient_report,
  nonfinite_leaves,
)

NAN, INF = float("nan"), float("inf")
BAD = make_bad_weight([(1, 5), (1, 2), (3, 0)], [INF, NAN, -INF])


@parametrize_slow(
  "kind", ["numpy", "jax", "sharded", "bfloat16 numpy"], list(AS_ARRAYS)
)
def test_the_counts_and_the_first_index_of_a_bad_leaf_are_reported(kind):
  tree = {"good": np.ones(3), "bad": AS_ARRAYS[kind](BAD)}
  (leaf,) = nonfinite_leaves(tree)
  assert leaf._asdict() == {
    "name": "bad",
    "shape": (4, 8),
    "dtype": tree["bad"].dtype,
    "inf_count": 2,
    "nan_count": 1,
    "first_index": (1, 2),
  }


@pytest.mark.parametrize(
  "index", [(0, 0, 0), (0, 2, 1), (2, 0, 0), (2, 3, 4), (1, 0, 4)]
)
def test_the_first_index_is_the_first_in_row_major_order(index):
  x = np.zeros((3, 4, 5), np.float32)
  flat = np.ravel_multi_index(index, x.shape)
  x.reshape(-1)[flat:] = NAN
  for leaf in x, jnp.asarray(x):
    assert nonfinite_leaves(leaf)[0].first_index == index


def test_a_scalar_an_empty_leaf_and_a_python_number_are_checked():
  tree = [np.float32(INF), np.zeros((0, 3), np.float32), NAN, 2.0, 3, None]
  found = nonfinite_leaves(tree)
  assert [(x.name, x.first_index) for x in found] == [("0", ()), ("2", ())]
  assert "first at" not in str(found[0])


def test_a_finite_float64_of_numpy_is_not_cut_to_an_infinite_float32():
  grads = {"w": np.array([1e300, 1.0])}
  assert nonfinite_leaves(grads) == []
  assert gradient_report(grads).total.amax == 1e300


def test_leaves_that_are_not_gradients_are_omitted():
  tree = {
    "int": np.arange(3),
    "bool": np.array(True),
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "masked": optax.MaskedNode(),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    "_overwrite_with_gradient": {"scale": np.float32(INF)},
    "w": np.float32([1, 0]),
    "c": np.complex64([1 + 2j]),
  }
  assert nonfinite_leaves(tree) == []
  report = gradient_report(tree)
  assert [leaf.name for leaf in report.leaves] == ["c", "w"]
  assert plots.exponent_histogram(tree).counts.sum() == 2


@pytest.mark.slow
def test_nnx_and_equinox_leaves_are_named_as_their_users_name_them():
  class Model(nnx.Module):
    def __init__(self):
      rngs = nnx.Rngs(0)
      self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])

  model = Model()
  model.layers[1].bias[...] = jnp.array([1.0, NAN])
  mlp = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
  mlp = eqx.tree_at(lambda m: m.layers[1].bias, mlp, jnp.array([1.0, NAN]))

  for tree in model, nnx.state(model), mlp:
    (leaf,) = nonfinite_leaves(tree)
    assert (leaf.name, leaf.first_index) == ("layers/1/bias", (1,))
    assert gradient_report(tree).total.nonfinite_fraction > 0
    assert plots.exponent_histogram(tree).nonfinite_count == 1

  mlp = jax.tree.map(lambda x: x * NAN, eqx.filter(mlp, eqx.is_array))
  names = [leaf.name for leaf in nonfinite_leaves(mlp)]
  assert names[:2] == ["layers/0/weight", "layers/0/bias"]


@pytest.mark.parametrize(
  "reads_values",
  [
    nonfinite_leaves,
    gradient_report,
    plots.exponent_histogram,
    lambda x: ols.raise_if_stuck(
      ols.FixedLossScale(1.0).init()._replace(notfinite_count=x[0])
    ),
  ],
  ids=["nonfinite_leaves", "gradient_report", "exponent_histogram", "stuck"],
)
def test_under_jit_the_error_says_to_call_it_outside(reads_values):
  with pytest.raises(TypeError, match="must be called outside jit"):
    jax.jit(reads_values)(np.ones(3))


# Functions that check a leaf, and their further arguments.
REDUCE = {
  "find": (_leaves._measure_nonfinite, ()),
  "measure": (_gradient_report._measure_leaf, (1.0, 1e-8, 1e-5, 65520.0)),
  "count": (_leaves.count_exponents, ()),
}


@parametrize_slow(
  "case",
  [("measure", AxisType.Auto)],
  [(x, y) for x in REDUCE for y in (AxisType.Auto, AxisType.Explicit)],
  ids=str,
)
def test_a_sharded_leaf_is_never_gathered(case):
  name, axis_type = case
  reduce, args = REDUCE[name]
  leaf = shard_array(np.ones((64, 64), np.float32), axis_type)
  text = jax.jit(reduce).lower(leaf, *args).compile().as_text()
  assert "all-reduce" in text
  for gathers in ("all-gather", "all-to-all", "collective-permute", "64,64"):
    assert gathers not in text


def make_stuck_state(scale):
  """Return the state of a loss scale after five skipped steps."""
  state = ols.FixedLossScale(scale).init()
  return state._replace(notfinite_count=np.int32(5))


STUCK = make_stuck_state(1.0)


def test_the_error_of_a_stuck_run_sends_to_check_step():
  with pytest.raises(ols.LossScaleError) as error:
    ols.raise_if_stuck({"opt": STUCK}, max_consecutive_skips=5)
  assert str(error.value) == (
    "The last 5 steps were all skipped. The loss scale is 1. To find the cause"
    " and its fix, call"
    " diagnostics.check_step(train_step, params, opt_state, batch)."
  )


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, 0.5, 1.0, 3.0, 4.0])
@pytest.mark.parametrize("min_scale", [0.3, 1.0])
def test_the_lowest_scale_of_fairseq_is_where_its_rule_stops(
  threshold, min_scale
):
  """Above its min_scale, where it raises an error."""
  policy = interop.FairseqLossScale(
    10, init_scale=8.0, threshold=threshold, min_scale=min_scale
  )
  state, floors = policy.init(), []
  for _ in range(24):
    before, state = state, policy.adjust(state, False)
    metrics = ols.loss_scale_metrics(before, policy=policy)
    at_floor = metrics["skips_at_min_scale"]
    floors.append(at_floor.item())
    stays = not before.last_finite and state.loss_scale == before.loss_scale
    assert at_floor == stays
  assert floors[0] == 0 and floors[-1] == 1
  assert state.loss_scale > policy.min_scale


def test_the_worst_of_many_members_is_reported():
  members = ols.FixedLossScale(4.0).init(), make_stuck_state(1024.0)
  states = jax.tree.map(lambda *x: np.stack(x), *members)
  with pytest.raises(ols.LossScaleError, match=r"last 5 steps .* is 1024"):
    ols.raise_if_stuck(states, max_consecutive_skips=5)


class MultiProcessArray(np.ndarray):
  """An array as one process sees it that holds a part or a copy of it."""

  is_fully_addressable = False


def test_members_of_other_processes_must_be_gathered():
  """devices/test_processes.py has the real arrays."""
  as_seen = lambda x: np.asarray(x).view(MultiProcessArray)
  state = jax.tree.map(as_seen, STUCK)
  for is_replicated, error, message in (
    (False, ValueError, "sharded over processes.*allgather"),
    (True, ols.LossScaleError, "The last 5 steps"),
  ):
    MultiProcessArray.is_fully_replicated = is_replicated
    with pytest.raises(error, match=message):
      ols.raise_if_stuck(state, max_consecutive_skips=5)


def test_no_error_is_raised_below_the_limit_or_after_a_finite_step():
  ols.raise_if_stuck(STUCK, max_consecutive_skips=6)
  ols.raise_if_stuck(STUCK)
  ols.raise_if_stuck(ols.FixedLossScale(1.0).init(), max_consecutive_skips=1)


@pytest.mark.parametrize(
  "limit, error", [(0, ValueError), (2.5, ValueError), (True, TypeError)]
)
def test_raise_if_stuck_refuses_a_wrong_limit_even_if_not_stuck(limit, error):
  state = ols.FixedLossScale(1.0).init()
  with pytest.raises(error, match="max_consecutive_skips must be"):
    ols.raise_if_stuck(state, max_consecutive_skips=limit)


# The effect of a dtype on scaled gradients, compared with plain rounding.
def count_fractions(x, dtype, scale):
  """The shares, by rounding each entry to the dtype."""
  x = np.asarray(x, np.float32).ravel()
  rounded = (x * np.float32(scale)).astype(dtype).astype(np.float32)
  normal = float(jnp.finfo(dtype).smallest_normal)
  is_small = np.abs(x * np.float32(scale)) < normal
  return {
    "zero_fraction": np.mean(x == 0),
    "underflow_fraction": np.mean((x != 0) & (rounded == 0)),
    "subnormal_fraction": np.mean(is_small & (rounded != 0)),
    "overflow_fraction": np.mean(~np.isfinite(rounded)),
  }


@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 1000.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_the_fractions_equal_those_of_rounding_every_entry(dtype, scale):
  dtype = jnp.dtype(dtype)
  rng = np.random.default_rng(0)
  x = rng.choice([-1, 1, 1, 0], 4000) * np.exp2(rng.uniform(-40, 30, 4000))
  # Just where rounding goes one way or the other.
  edges = [2.0**-25, 2.0**-24, 2.0**-14, 65504, 65519.9, 65520, 61440, 61439]
  x = np.concatenate([x, edges]).astype(np.float32)
  for leaf in x, jnp.asarray(x), shard_array(x, spec=(("x", "y"),)):
    total = gradient_report([leaf], dtype, scale).total
    for kind, share in count_fractions(x, dtype, scale).items():
      assert getattr(total, kind) == pytest.approx(share, abs=1e-12), kind


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_float64_gradients_are_compared_in_float64(dtype):
  x = np.array([1e300, 1.0, 1e-300])
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    for leaf in x, jnp.asarray(x), jnp.asarray(x, jnp.complex128):
      total = gradient_report([leaf], dtype).total
      fractions = total.overflow_fraction, total.underflow_fraction
      assert fractions == pytest.approx((1 / 3, 1 / 3))


@parametrize_slow(
  "dtype",
  ["complex64"],
  ["float8_e4m3fn", "float16", "bfloat16", "float32", "complex64"],
)
def test_all_dtypes_are_read_under_strict_promotion(dtype):
  with jax.numpy_dtype_promotion("strict"):
    grads = [jnp.asarray(np.array([1.0, 0.5], dtype))]
    report = gradient_report(grads, loss_scale=3.0)
    assert report.total.amax == 1
    assert plots.exponent_histogram(grads).exponents.tolist() == [-1, 0]
    assert nonfinite_leaves(grads) == []


def test_the_total_of_a_report_weights_leaves_by_their_size():
  grads = {"a": np.float32([1e-9, 0, INF]), "b": np.float32([4])}
  report = gradient_report(grads)
  total = report.total
  assert (total.size, total.amax) == (4, 4.0)
  assert total.smallest_nonzero == pytest.approx(1e-9)
  assert total.underflow_fraction == total.zero_fraction == 0.25
  assert total.nonfinite_fraction == 0.25
  assert report.as_dict()["total"] == total._asdict()
  assert report.as_dict()["leaves"]["b"]["amax"] == 4.0
  with pytest.raises(dataclasses.FrozenInstanceError):
    report.loss_scale = 2.0


def test_a_gradient_report_of_zeros_says_so():
  report = gradient_report({"w": np.zeros(3)})
  assert str(report).splitlines()[0] == "All gradient entries are zero."
  assert gradient_report({}).total.size == 0


@pytest.mark.parametrize(
  "values, scale, conclusion",
  [
    ([1e-3, 0.0], 1.0, "No gradient entry overflows or underflows."),
    ([1e-9, 1.0], 1.0,
     "50.0% of the gradient entries underflow: find a loss scale with"
     " check_step."),
    ([1e-9, *[1.0] * 3999], 1.0,
     "Fewer than 0.1% of the gradient entries underflow: find a loss scale with"
     " check_step."),
    ([1.0, 100.0], 2.0**15,
     "50.0% of the gradient entries overflow: lower the loss scale."),
    ([1.0, np.inf, np.nan, 0.0], 1.0,
     "50.0% of the gradient entries are inf or NaN: find the operation with"
     " find_overflow."),
  ],
)  # fmt: skip
def test_a_gradient_report_begins_with_its_conclusion(
  values, scale, conclusion
):
  grads = {"w": np.float32(values)}
  report = gradient_report(grads, loss_scale=scale)
  first, second, *_ = str(report).splitlines()
  assert first == conclusion
  assert second == (
    f"Gradients multiplied by loss scale {scale:g} and cast to float16:"
  )
  assert report._repr_html_() == f"<pre>{report}</pre>"


def test_the_columns_of_a_gradient_report_are_aligned():
  grads = {"w": np.float32([1e-9, 1]), "bias": np.zeros(3), "x": np.ones(1)}
  report = gradient_report(grads, loss_scale=ols.FixedLossScale(2.0).init())
  lines = str(report).splitlines()
  assert "multiplied by loss scale 2 " in lines[1]
  assert " ".join(lines[2].split()) == (
    "shape dtype amax smallest nonzero zero underflow subnormal overflow"
    " nonfinite"
  )
  assert [line.split()[0] for line in lines[3:]] == ["bias", "w", "x", "total"]
  assert len({line.index("%") for line in lines[3:]}) <= 2


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
  for function in gradient_report, plots.plot_exponents:
    with pytest.raises(error, match=message):
      function([np.ones(2)], **kwargs)
