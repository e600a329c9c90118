"""Which leaves overflow or underflow, and why a run is stuck."""

import dataclasses

import equinox as eqx
from flax import nnx
from helpers.leaves import AS_ARRAYS, make_bad_weight, shard_array
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import interop, plots
from optax_lossscale.diagnostics import _gradient_report, _leaves

NAN, INF = float("nan"), float("inf")
BAD = make_bad_weight([(1, 5), (1, 2), (3, 0)], [INF, NAN, -INF])

as_arrays = pytest.mark.parametrize("kind", AS_ARRAYS)


@as_arrays
def test_the_counts_and_the_first_index_of_a_bad_leaf_are_reported(kind):
  tree = {"good": jnp.ones(3), "bad": AS_ARRAYS[kind](BAD)}
  (leaf,) = ols.diagnostics.nonfinite_leaves(tree)
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
    assert ols.diagnostics.nonfinite_leaves(leaf)[0].first_index == index


def test_a_scalar_an_empty_leaf_and_a_python_number_are_checked():
  tree = [jnp.array(INF), np.zeros((0, 3), np.float32), NAN, 2.0, 3, None]
  found = ols.diagnostics.nonfinite_leaves(tree)
  assert [(leaf.name, leaf.first_index) for leaf in found] == [
    ("0", ()),
    ("2", ()),
  ]
  assert "first at" not in str(found[0])


def test_a_finite_float64_of_numpy_is_not_cut_to_an_infinite_float32():
  grads = {"w": np.array([1e300, 1.0])}
  assert ols.diagnostics.nonfinite_leaves(grads) == []
  assert ols.diagnostics.gradient_report(grads).total.amax == 1e300


def test_leaves_that_are_not_gradients_are_omitted():
  tree = {
    "int": jnp.arange(3),
    "bool": jnp.array(True),
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "masked": optax.MaskedNode(),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    "_overwrite_with_gradient": {"scale": jnp.array(INF)},
    "w": jnp.array([1.0, 0.0]),
    "c": jnp.array([1 + 2j]),
  }
  assert ols.diagnostics.nonfinite_leaves(tree) == []
  report = ols.diagnostics.gradient_report(tree)
  assert [leaf.name for leaf in report.leaves] == ["c", "w"]
  assert plots.exponent_histogram(tree).counts.sum() == 2


def test_nnx_and_equinox_leaves_are_named_as_their_users_name_them():
  class Model(nnx.Module):
    def __init__(self):
      rngs = nnx.Rngs(0)
      self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
      for layer in self.layers:
        x = layer(x)
      return jnp.sum(x)

  model = Model()
  model.layers[1].bias[...] = jnp.array([1.0, NAN])
  mlp = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
  mlp = eqx.tree_at(lambda m: m.layers[1].bias, mlp, jnp.array([1.0, NAN]))

  for tree in model, nnx.state(model), mlp:
    (leaf,) = ols.diagnostics.nonfinite_leaves(tree)
    assert (leaf.name, leaf.first_index) == ("layers/1/bias", (1,))
    assert ols.diagnostics.gradient_report(tree).total.nonfinite_fraction > 0
    assert plots.exponent_histogram(tree).nonfinite_count == 1

  mlp = jax.tree.map(lambda x: x * NAN, eqx.filter(mlp, eqx.is_array))
  names = [leaf.name for leaf in ols.diagnostics.nonfinite_leaves(mlp)]
  assert names[:2] == ["layers/0/weight", "layers/0/bias"]

  grads = nnx.grad(lambda model: model(jnp.full((1, 2), INF)))(model)
  assert "layers/0/kernel" in [
    leaf.name for leaf in ols.diagnostics.nonfinite_leaves(grads)
  ]


@pytest.mark.parametrize(
  "reads_values",
  [
    ols.diagnostics.nonfinite_leaves,
    ols.diagnostics.gradient_report,
    plots.exponent_histogram,
    lambda x: ols.raise_if_stuck(
      ols.FixedLossScale(1.0).init()._replace(notfinite_count=x[0])
    ),
  ],
  ids=["nonfinite_leaves", "gradient_report", "exponent_histogram", "stuck"],
)
def test_under_jit_the_error_says_to_call_it_outside(reads_values):
  with pytest.raises(TypeError, match="must be called outside jit"):
    jax.jit(reads_values)(jnp.ones(3))


# Functions that check a leaf, and their further arguments.
REDUCE = {
  "find": (_leaves._measure_nonfinite, ()),
  "measure": (_gradient_report._measure_leaf, (1.0, 1e-8, 1e-5, 65520.0)),
  "count": (plots._count_exponents, ()),
}


@pytest.mark.parametrize("axis_type", list(AxisType)[:2])
@pytest.mark.parametrize("name", REDUCE)
def test_a_sharded_leaf_is_never_gathered(name, axis_type):
  reduce, args = REDUCE[name]
  leaf = shard_array(jnp.ones((64, 64)), axis_type)
  text = jax.jit(reduce).lower(leaf, *args).compile().as_text()
  assert "all-reduce" in text
  for gathers in ("all-gather", "all-to-all", "collective-permute", "64,64"):
    assert gathers not in text


def make_stuck_state(policy, skips):
  state = policy.init()
  for _ in range(skips):
    state = policy.adjust(state, jnp.array(False))
  return state


DYNAMIC = ols.DynamicLossScale(init_scale=2.0)
AT_FLOOR = make_stuck_state(DYNAMIC, 5)
FIXED = make_stuck_state(ols.FixedLossScale(1024.0), 5)
INFS = {"v": jnp.array(NAN), "w": jnp.array([1.0, INF])}
NANS = {"w": jnp.array([1.0, NAN])}


WELL = {"w": jnp.ones(2)}
FLOOR = "2. The scale is the lowest allowed (min_scale = 1)"
W_INF = "\n  w float32[2]: 1 inf, 0 NaN of 2, first at [1]"


@pytest.mark.parametrize(
  "state, policy, grads, messages",
  [
    (AT_FLOOR, DYNAMIC, None, [FLOOR, "Pass grads"]),
    (
      AT_FLOOR,
      "dynamic",
      INFS,
      [FLOOR, "lower min_scale", "\n  v float32[]: 0 inf, 1 NaN", W_INF],
    ),
    (AT_FLOOR, DYNAMIC, NANS, [FLOOR, "no loss scale helps", "1 NaN"]),
    (FIXED, 1024, None, ["is 1024.", "is fixed: use DynamicLossScale"]),
    (FIXED, 1024, INFS, ["fixed", "not finite:\n  v float32"]),
    (FIXED, DYNAMIC, None, ["is 1024.", "still decreasing", "Pass grads"]),
    (AT_FLOOR, DYNAMIC, WELL, ["are finite", "check_updates"]),
    (AT_FLOOR, None, None, ["is 1.", "Pass policy", "Pass grads"]),
    (AT_FLOOR, None, INFS, ["is 1.", "Pass policy", W_INF]),
    (AT_FLOOR, None, WELL, ["are finite", "check_updates"]),
  ],
)
def test_the_error_distinguishes_a_scale_that_can_decrease_from_nans(
  state, policy, grads, messages
):
  with pytest.raises(ols.LossScaleError) as error:
    ols.raise_if_stuck({"opt": state}, 5, policy=policy, grads=grads)
  for message in ["The last 5 steps were all skipped.", *messages]:
    assert message in str(error.value)


@pytest.mark.parametrize(
  "grads, leads", [(None, True), (NANS, True), (WELL, False)]
)
@pytest.mark.parametrize(
  "options",
  [{"max_consecutive_skips": 5}, {"max_skip_rate": 0.5, "steps": 5}],
)
def test_the_error_mentions_find_overflow_unless_all_is_finite(
  options, grads, leads
):
  with pytest.raises(ols.LossScaleError) as error:
    ols.raise_if_stuck(AT_FLOOR, grads=grads, **options)
  call = "diagnostics.find_overflow(train_step, params, opt_state, batch)"
  assert (call in str(error.value)) == leads


def test_an_unknown_min_scale_is_not_mentioned():
  """At 0.125 a HeadroomLossScale is far from its own, which is 2**-24."""
  state = ols.set_loss_scale(AT_FLOOR, 0.125)
  with pytest.raises(ols.LossScaleError) as error:
    ols.raise_if_stuck(state, 5)
  assert "lowest" not in str(error.value)
  assert "floor" not in str(error.value)
  with pytest.raises(ols.LossScaleError, match="still decreasing"):
    ols.raise_if_stuck(state, 5, policy=ols.HeadroomLossScale())


def test_the_error_for_a_policy_without_min_scale_does_not_mention_it():
  class Halving:
    def init(self):
      return ols.FixedLossScale(8.0).init()

    def adjust(self, state, grads_finite, *, grads_amax=None):
      state = ols.FixedLossScale(8.0).adjust(state, grads_finite)
      return state._replace(loss_scale=state.loss_scale / 2)

  with pytest.raises(ols.LossScaleError) as error:
    ols.raise_if_stuck(make_stuck_state(Halving(), 5), 5, policy=Halving())
  text = str(error.value)
  assert "The loss scale is 0.25." in text
  assert "If the loss scale is still decreasing" in text
  assert "Pass policy" not in text
  assert "min_scale" not in text


def test_a_min_scale_that_float32_rounds_is_reached():
  policy = ols.DynamicLossScale(init_scale=0.4, min_scale=0.1)
  with pytest.raises(
    ols.LossScaleError, match=r"lowest allowed .min_scale = 0.1"
  ):
    ols.raise_if_stuck(make_stuck_state(policy, 5), 5, policy=policy)


FAIRSEQ = [
  {},
  {"min_scale": 1.0},
  {"min_scale": 0.3},
  {"threshold": 4.0},
  {"threshold": 3.0, "min_scale": 1.0},
  {"threshold": 1.0, "min_scale": 1.0},
  {"threshold": 0.5, "min_scale": 1.0},
]


@pytest.mark.parametrize("options", FAIRSEQ, ids=str)
def test_the_lowest_scale_of_fairseq_is_where_its_rule_stops(options):
  """Above its min_scale, where it raises an error."""
  policy = interop.FairseqLossScale(10, init_scale=8.0, **options)
  state, floors = policy.init(), []
  for _ in range(24):
    before, state = state, policy.adjust(state, False)
    at_floor = ols.loss_scale_metrics(before, policy=policy)[
      "skips_at_min_scale"
    ]
    floors.append(at_floor.item())
    stays = not before.last_finite and state.loss_scale == before.loss_scale
    assert at_floor == stays
  assert floors[0] == 0 and floors[-1] == 1
  assert state.loss_scale > policy.min_scale
  lower = "lower threshold and min_s" if "threshold" in options else "lower min"
  with pytest.raises(ols.LossScaleError, match=f"lowest allowed .*: {lower}"):
    ols.raise_if_stuck(state, 5, policy=policy)


def make_sparse_state(steps):
  """A state after steps of which every tenth is lost, and none in a row."""
  policy = ols.DynamicLossScale()
  step = lambda state, i: (policy.adjust(state, i % 10 != 0), None)
  return jax.lax.scan(step, policy.init(), jnp.arange(steps))[0]


def test_skips_that_are_not_consecutive_are_found_by_their_fraction():
  state = make_sparse_state(100)
  ols.raise_if_stuck(state, 2)
  ols.raise_if_stuck(state, 2, max_skip_rate=0.1, steps=100)
  ols.raise_if_stuck(state, 2, max_skip_rate=0.05, steps=200)
  with pytest.raises(ols.LossScaleError) as error:
    ols.raise_if_stuck(
      state, 2, max_skip_rate=0.05, steps=jnp.int32(100), grads=INFS
    )
  text = str(error.value)
  assert "10 of 100 steps were skipped" in text
  assert "max_skip_rate = 0.05" in text
  assert f"The loss scale is {float(state.loss_scale):g}." in text
  assert "\n  w float32[2]: 1 inf" in text
  with pytest.raises(ols.LossScaleError, match="10 of 100") as error:
    ols.raise_if_stuck(state, max_skip_rate=0, steps=100)
  assert "Gradients that are not finite" not in str(error.value)


def test_the_worst_of_many_members_is_reported():
  stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  states = stack(ols.DynamicLossScale().init(), make_sparse_state(20))
  with pytest.raises(ols.LossScaleError, match="2 of 20 steps"):
    ols.raise_if_stuck(states, max_skip_rate=0.05, steps=20)
  states = stack(ols.FixedLossScale(4.0).init(), FIXED)
  with pytest.raises(ols.LossScaleError, match=r"last 5 steps .* is 1024"):
    ols.raise_if_stuck(states, max_consecutive_skips=5)


class MultiProcessArray:
  """An array as one process sees it that holds a part or a copy of it."""

  is_fully_addressable = False

  def __init__(self, value, *, is_fully_replicated):
    self.value = np.asarray(value)
    self.is_fully_replicated = is_fully_replicated

  def __array__(self, *args, **kwargs):
    assert self.is_fully_replicated
    return self.value


def test_members_of_other_processes_must_be_gathered():
  """devices/test_processes.py has the real arrays."""
  seen = lambda whole: jax.tree.map(
    lambda x: MultiProcessArray(x, is_fully_replicated=whole), AT_FLOOR
  )
  with pytest.raises(ValueError, match=r"sharded over processes.*allgather"):
    ols.raise_if_stuck(seen(False))
  with pytest.raises(ols.LossScaleError, match="The last 5 steps"):
    ols.raise_if_stuck(seen(True), 5)


TOGETHER = "max_skip_rate and steps must be given together"


@pytest.mark.parametrize(
  "kwargs, message",
  [
    ({"max_skip_rate": 0.5}, TOGETHER),
    ({"steps": 10}, TOGETHER),
    ({"max_skip_rate": 0.5, "steps": 3}, "steps must .* steps = 3 and 5"),
  ],
)
def test_a_skip_rate_requires_at_least_as_many_steps_as_skips(kwargs, message):
  with pytest.raises(ValueError, match=message):
    ols.raise_if_stuck(AT_FLOOR, **kwargs)


def test_no_error_is_raised_below_the_limit_or_after_a_finite_step():
  ols.raise_if_stuck(AT_FLOOR, max_consecutive_skips=6)
  ols.raise_if_stuck(AT_FLOOR)
  recovered = ols.DynamicLossScale().adjust(AT_FLOOR, jnp.array(True))
  ols.raise_if_stuck(recovered, max_consecutive_skips=1)


@pytest.mark.parametrize(
  "kwargs, error",
  [
    ({"max_consecutive_skips": 0}, ValueError),
    ({"max_consecutive_skips": 2.5}, ValueError),
    ({"max_consecutive_skips": True}, TypeError),
    ({"policy": 0.0}, ValueError),
    ({"policy": "low"}, TypeError),
    ({"policy": ols.DynamicLossScale}, TypeError),
    ({"max_skip_rate": -0.1, "steps": 1}, ValueError),
    ({"max_skip_rate": 1.1, "steps": 1}, ValueError),
    ({"max_skip_rate": "all", "steps": 1}, TypeError),
    ({"steps": 0, "max_skip_rate": 0.5}, ValueError),
    ({"steps": 1.5, "max_skip_rate": 0.5}, ValueError),
    ({"steps": True, "max_skip_rate": 0.5}, TypeError),
  ],
)
def test_raise_if_stuck_refuses_wrong_arguments_even_if_not_stuck(
  kwargs, error
):
  name, *_ = kwargs
  with pytest.raises(error, match=f"{name} must be"):
    ols.raise_if_stuck(ols.FixedLossScale(1.0).init(), **kwargs)


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
@pytest.mark.filterwarnings(
  "ignore:overflow encountered in cast"  # numpy's, of the oracle
)
def test_the_fractions_equal_those_of_rounding_every_entry(dtype, scale):
  dtype = jnp.dtype(dtype)
  rng = np.random.default_rng(0)
  x = rng.choice([-1, 1, 1, 0], 4000) * np.exp2(rng.uniform(-40, 30, 4000))
  # Just where rounding goes one way or the other.
  edges = [2.0**-25, 2.0**-24, 2.0**-14, 65504, 65519.9, 65520, 61440, 61439]
  x = np.concatenate([x, edges]).astype(np.float32)
  for leaf in x, jnp.asarray(x), shard_array(x, spec=(("x", "y"),)):
    total = ols.diagnostics.gradient_report([leaf], dtype, scale).total
    for kind, share in count_fractions(x, dtype, scale).items():
      assert getattr(total, kind) == pytest.approx(share, abs=1e-12), kind


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_float64_gradients_are_compared_in_float64(dtype):
  x = np.array([1e300, 1.0, 1e-300])
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    for leaf in x, jnp.asarray(x), jnp.asarray(x, jnp.complex128):
      total = ols.diagnostics.gradient_report([leaf], dtype).total
      assert (
        total.overflow_fraction
        == total.underflow_fraction
        == pytest.approx(1 / 3)
      )


@pytest.mark.parametrize(
  "dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32", "complex64"]
)
def test_all_dtypes_are_read_under_strict_promotion(dtype):
  with jax.numpy_dtype_promotion("strict"):
    grads = [jnp.array([1.0, 0.5]).astype(dtype)]
    assert (
      ols.diagnostics.gradient_report(grads, loss_scale=3.0).total.amax == 1
    )
    assert plots.exponent_histogram(grads).exponents.tolist() == [-1, 0]
    assert ols.diagnostics.nonfinite_leaves(grads) == []


def test_the_total_of_a_report_weights_leaves_by_their_size():
  grads = {"a": jnp.array([1e-9, 0.0, INF]), "b": jnp.array([4.0])}
  report = ols.diagnostics.gradient_report(grads)
  total = report.total
  assert (total.size, total.amax) == (4, 4.0)
  assert total.smallest_nonzero == pytest.approx(1e-9)
  assert (
    total.underflow_fraction,
    total.zero_fraction,
    total.nonfinite_fraction,
  ) == (0.25, 0.25, 0.25)
  assert report.as_dict()["total"] == total._asdict()
  assert report.as_dict()["leaves"]["b"]["amax"] == 4.0
  with pytest.raises(dataclasses.FrozenInstanceError):
    report.loss_scale = 2.0


def test_a_gradient_report_of_zeros_says_so():
  report = ols.diagnostics.gradient_report({"w": jnp.zeros(3)})
  assert str(report).splitlines()[0] == "All gradient entries are zero."
  assert ols.diagnostics.gradient_report({}).total.size == 0


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
  grads = {"w": jnp.array(values, jnp.float32)}
  report = ols.diagnostics.gradient_report(grads, loss_scale=scale)
  first, second, *_ = str(report).splitlines()
  assert first == conclusion
  assert second == (
    f"Gradients multiplied by loss scale {scale:g} and cast to float16:"
  )
  assert report._repr_html_() == f"<pre>{report}</pre>"


def test_the_columns_of_a_gradient_report_are_aligned():
  grads = {"w": jnp.array([1e-9, 1.0]), "bias": jnp.zeros(3), "x": jnp.ones(1)}
  report = ols.diagnostics.gradient_report(
    grads, loss_scale=ols.FixedLossScale(2.0).init()
  )
  lines = str(report).splitlines()
  assert lines[0].endswith(" underflow: find a loss scale with check_step.")
  assert lines[1] == "Gradients multiplied by loss scale 2 and cast to float16:"
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
  for function in ols.diagnostics.gradient_report, plots.plot_exponents:
    with pytest.raises(error, match=message):
      function([jnp.ones(2)], **kwargs)
