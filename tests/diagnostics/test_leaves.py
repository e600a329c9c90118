"""Which leaves overflow or underflow, and why a run is stuck."""

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
from optax_lossscale import plots
from optax_lossscale.diagnostics import _leaves, nonfinite_leaves

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
    assert plots.exponent_histogram(tree).nonfinite_count == 1

  mlp = jax.tree.map(lambda x: x * NAN, eqx.filter(mlp, eqx.is_array))
  names = [leaf.name for leaf in nonfinite_leaves(mlp)]
  assert names[:2] == ["layers/0/weight", "layers/0/bias"]


@pytest.mark.parametrize(
  "reads_values",
  [
    nonfinite_leaves,
    plots.exponent_histogram,
    lambda x: ols.raise_if_stuck(
      ols.FixedLossScale(1.0).init()._replace(notfinite_count=x[0])
    ),
  ],
  ids=["nonfinite_leaves", "exponent_histogram", "stuck"],
)
def test_under_jit_the_error_says_to_call_it_outside(reads_values):
  with pytest.raises(TypeError, match="must be called outside jit"):
    jax.jit(reads_values)(np.ones(3))


# Functions that reduce a leaf.
REDUCE = {
  "find": _leaves._measure_nonfinite,
  "count": _leaves.count_exponents,
}


@parametrize_slow(
  "case",
  [("count", AxisType.Auto)],
  [(x, y) for x in REDUCE for y in (AxisType.Auto, AxisType.Explicit)],
  ids=str,
)
def test_a_sharded_leaf_is_never_gathered(case):
  name, axis_type = case
  leaf = shard_array(np.ones((64, 64), np.float32), axis_type)
  text = jax.jit(REDUCE[name]).lower(leaf).compile().as_text()
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


@parametrize_slow(
  "dtype",
  ["complex64"],
  ["float8_e4m3fn", "float16", "bfloat16", "float32", "complex64"],
)
def test_all_dtypes_are_read_under_strict_promotion(dtype):
  with jax.numpy_dtype_promotion("strict"):
    grads = [jnp.asarray(np.array([1.0, 0.5], dtype))]
    assert plots.exponent_histogram(grads).exponents.tolist() == [-1, 0]
    assert nonfinite_leaves(grads) == []
