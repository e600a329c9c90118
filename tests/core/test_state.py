"""The state as a pytree: stable types, tolerant of any leaf, found anywhere."""

import functools
import pickle
from typing import NamedTuple

import flax.core
import flax.serialization
from helpers.bits import has_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
# Each kind of field that a state may have.
POLICY = ols.DynamicLossScale(hysteresis=2)


def get_types(tree):
  """Return the types, which must not change from step to step."""
  return jax.tree.map(jax.typeof, tree)


@pytest.mark.parametrize("params", [{}, None, (), [{}]], ids=str)
def test_init_and_update_work_on_an_empty_tree(params):
  tx = ols.with_loss_scaling(optax.adam(0.1), max_norm=1.0)
  state = tx.init(params)
  updates, state = jax.jit(tx.update)(params, state, params)
  assert updates == params
  assert state.loss_scale_state.last_finite


def test_init_works_on_placeholders_and_shapes():
  tx = ols.with_loss_scaling(optax.adam(0.1))
  params = {"w": jnp.ones(3, jnp.float16), "b": jnp.ones(2)}
  shapes = jax.eval_shape(lambda: params)
  state = tx.init(params)
  assert jax.eval_shape(tx.init, shapes) == jax.eval_shape(lambda: state)
  assert tx.init(shapes).inner_state[0].mu["w"].dtype == jnp.float32
  to = {"transform_non_params": str}
  marked = optax.tree.map_params(tx.init, lambda _: "param", state, **to)
  assert marked.inner_state[0].mu == {"w": "param", "b": "param"}
  assert marked.loss_scale_state.loss_scale == "32768.0"


def test_shapes_in_an_inner_state_stay_shapes():
  keeps = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))
  shape = jax.ShapeDtypeStruct((2,), jnp.float32)
  assert ols.with_loss_scaling(keeps).init(shape).inner_state == shape


@pytest.mark.parametrize("x64", [False, True])
def test_the_scale_is_float32_in_every_mode(x64):
  dtype = jnp.float64 if x64 else jnp.float32
  leaves = {"f16": jnp.float16, "f32": jnp.float32, "bf16": jnp.bfloat16}

  def step():
    params = {"w": jnp.ones(3, dtype)}
    options = {"check_updates": True, "max_norm": 2.0}
    tx = ols.with_loss_scaling(optax.identity(), POLICY, **options)
    state = tx.init(params)
    grads = ols.grad(lambda p: jnp.sum(p["w"] * p["w"]), state)(params)
    updates, after = tx.update(grads, state, params)
    # The rest of our functions, for what strict promotion has to say.
    zoo = {name: jnp.ones((), x) for name, x in leaves.items()}
    ols.unscale_grads(ols.scale_loss(zoo, state), state)
    ols.all_finite([params, zoo, 1.0])
    ols.select_if_applied(state, params, params)
    ols.loss_scale_metrics(ols.set_loss_scale(state, 2))
    return (params, params, state), (grads, updates, after)

  with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
    before, after = jax.eval_shape(step)
  assert after == before
  assert not any(x.weak_type for x in jax.tree.leaves(after[-1]))
  scale_state = after[-1].loss_scale_state
  assert scale_state.loss_scale.dtype == jnp.float32
  assert scale_state.finite_count.dtype == jnp.int32
  assert scale_state.policy_state.hysteresis_remaining.dtype == jnp.int32


HIDDEN_IN = {
  "itself": lambda s: s,
  "scale state": lambda s: s.loss_scale_state,
  "nested": lambda s: {"a": [s, jnp.ones(2)]},
  "chain": lambda s: (optax.EmptyState(), s),
  "mapping": flax.serialization.to_state_dict,
  "pickled": lambda s: pickle.loads(pickle.dumps(s)),
}


@pytest.mark.parametrize("hide", HIDDEN_IN.values(), ids=HIDDEN_IN)
def test_the_scale_is_found_and_set_wherever_it_is(hide):
  tx = ols.with_loss_scaling(optax.adam(0.1), 64.0)
  state = jax.tree.map(np.asarray, tx.init(PARAMS))
  counted = state.loss_scale_state._replace(finite_count=np.int32(1))
  tree = hide(state._replace(loss_scale_state=counted))
  changed = ols.set_loss_scale(tree, 8)
  assert jax.tree.structure(changed) == jax.tree.structure(tree)
  assert get_types(changed) == get_types(tree)
  for tree_or_changed, numbers in (tree, (64, 1)), (changed, (8, 0)):
    found = ols.get_loss_scale_state(tree_or_changed)
    assert isinstance(found, ols.LossScaleState)
    assert (found.loss_scale, found.finite_count) == numbers
  leaves = zip(*map(jax.tree.leaves, (changed, tree)), strict=True)
  assert all((a == b).all() for a, b in leaves if jnp.size(a) > 1)


def test_a_dict_with_more_keys_than_a_state_is_not_a_state():
  state = ols.FixedLossScale(4.0).init()._asdict()
  assert ols.get_loss_scale_state(state).loss_scale == 4
  for tree in ({**state, "step": 1}, {"loss_scale": state["loss_scale"]}):
    with pytest.raises(ValueError, match="dict that holds none"):
      ols.get_loss_scale_state(tree)


class Valued(NamedTuple):
  value: jax.Array
  other: jax.Array


def test_a_policy_state_with_a_field_named_value_is_not_a_variable():
  policy_state = Valued(jnp.int32(1), jnp.int32(2))
  state = ols.FixedLossScale(4.0).init()._replace(policy_state=policy_state)
  assert ols.get_loss_scale_state({"loss": state}).policy_state == policy_state


def test_a_traced_scale_is_clipped_to_its_range():
  state = ols.FixedLossScale(4.0).init()
  set_scale = jax.jit(ols.set_loss_scale)
  values = np.float32([8, 0, -1, np.inf, np.nan])
  found = [set_scale(state, value).loss_scale for value in values]
  assert found == [8, 2.0**-126, 2.0**-126, 2.0**126, 4]


def test_setting_the_scale_of_many_members_sets_each():
  state = jax.vmap(lambda s: ols.FixedLossScale(s).init())(jnp.arange(1.0, 4))
  assert ols.set_loss_scale(state, 2).loss_scale.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
  "get",
  [
    ols.get_loss_scale_state,
    ols.loss_scale_metrics,
    ols.raise_if_stuck,
    functools.partial(ols.set_loss_scale, value=2.0),
    functools.partial(ols.scale_loss, 1.0),
    functools.partial(ols.unscale_grads, 1.0),
    functools.partial(ols.select_if_applied, new=1, old=1),
    functools.partial(ols.value_and_grad, lambda x: x),
    functools.partial(ols.grad, lambda x: x),
  ],
)
def test_no_scale_or_two_is_an_error_that_says_what_to_do(get):
  two = {name: ols.FixedLossScale(1.0).init() for name in "gd"}
  for tree, message in (
    ({"w": jnp.ones(2)}, "dict that holds none.*with_loss_scaling"),
    (two, r"holds 2: at \['d'\], \['g'\]. Pass only"),
  ):
    with pytest.raises(ValueError, match=message):
      get(state=tree)


@pytest.mark.parametrize("finite", [True, False])
def test_select_if_applied_takes_one_side_bit_by_bit(finite):
  """The result has the containers of the second argument."""
  state = ols.DynamicLossScale().init()._replace(last_finite=np.bool_(finite))
  frozen = flax.core.FrozenDict
  leaves = {"value": np.float32(3), "other": np.float32(4)}
  others = {"value": np.float32(5), "other": np.float32(6)}
  arrays, other_arrays = (
    {"m": np.float32(m), "n": np.int32(n), "k": jax.random.key(n), "x": None}
    for m, n in (([np.nan, -np.inf], 4), ([-0.0, 1.0], 3))
  )
  containers = (dict, frozen), (frozen, dict), (dict, lambda x: Valued(**x))
  applied = [arrays, *(first(leaves) for first, _ in containers)]
  skipped = [other_arrays, *(second(others) for _, second in containers)]
  expected = [arrays, *(second(leaves) for _, second in containers)]
  got = jax.jit(ols.select_if_applied)(state, applied, skipped)
  assert has_same_bits(got, expected if finite else skipped)


def test_select_if_applied_keeps_the_dtypes_and_the_float0_of_skipped():
  state = ols.FixedLossScale(1.0).init()
  got = ols.select_if_applied(state, jnp.float16(2), jnp.float32(1))
  assert (got, got.dtype) == (2, jnp.float32)
  skipped = np.zeros(2, jax.dtypes.float0)
  assert ols.select_if_applied(state, skipped.copy(), skipped) is skipped


DIFFERENT = r"must be equal in leaves that are not arrays.*got .* at mode"


@pytest.mark.parametrize(
  ("new", "old", "message"),
  [
    ({"a": 1}, {"b": 1}, "got b only in old"),
    ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, "got a/c only in new"),
    ({"a": None}, {"a": 1}, "got a only in old"),
    ([1, 2], [1], "got 1 only in new"),
    (1, (), "the root of the tree only in new"),
    ({"mode": "eval"}, {"mode": "train"}, DIFFERENT),
    ({"mode": abs}, {"mode": max}, DIFFERENT),
    ({"mode": 1.0}, {"mode": "train"}, DIFFERENT),
  ],
)
def test_select_if_applied_names_a_leaf_that_it_cannot_select(
  new, old, message
):
  state = ols.DynamicLossScale().init()
  for finite in np.True_, np.False_:
    with pytest.raises(ValueError, match=message):
      ols.select_if_applied(state._replace(last_finite=finite), new, old)


def test_select_if_applied_keeps_equal_leaves_that_are_not_arrays():
  state = ols.DynamicLossScale().init()
  word = "".join(["tr", "ain"])  # equal, and another object
  applied, skipped = {"f": abs, "mode": word}, {"f": abs, "mode": "train"}
  assert ols.select_if_applied(state, applied, skipped) == skipped


def test_metrics_are_scalars_with_the_names_of_the_state():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  state = tx.update(jnp.inf, tx.init(0.0))[1]
  metrics = jax.jit(ols.loss_scale_metrics)(state)
  assert {k: v.item() for k, v in metrics.items()} == {
    "loss_scale": 2.0**14,
    "finite_count": 0,
    "notfinite_count": 1,
    "last_finite": False,
    "total_notfinite": 1,
    "log2_loss_scale": 14.0,
    "step_skipped": 1.0,
  }


def test_metrics_show_that_every_step_of_a_run_is_skipped():
  policy = ols.DynamicLossScale(init_scale=4.0)

  def step(state, finite_and_steps):
    finite, steps = finite_and_steps
    state = policy.adjust(state, finite)
    return state, ols.loss_scale_metrics(state, policy=policy, steps=steps)

  steps = np.array([1, 0, 0, 0, 1, 0], bool), np.arange(1, 7)
  run = jax.jit(lambda state: jax.lax.scan(step, state, steps)[1])
  assert "callback" not in str(jax.make_jaxpr(run)(policy.init()))
  metrics = run(policy.init())
  assert metrics["step_skipped"].tolist() == [0, 1, 1, 1, 0, 1]
  assert metrics["skips_at_min_scale"].tolist() == [0, 0, 1, 1, 0, 1]
  shares = np.float32([0, 1 / 2, 2 / 3, 3 / 4, 3 / 5, 4 / 6])
  np.testing.assert_array_equal(metrics["skip_rate"], shares)


@pytest.mark.parametrize(
  "policy, floor",
  [
    ("dynamic", 1.0),
    ("headroom", 2.0**-24),
    (2.0**10, 2.0**10),
    (ols.DynamicLossScale(min_scale=0.3), np.float32(0.3)),
  ],
  ids=str,
)
def test_metrics_use_the_min_scale_of_each_policy(policy, floor):
  state = ols.DynamicLossScale().adjust(ols.DynamicLossScale().init(), False)
  for scale, skips in (floor, 1), (2 * floor, 0):
    at_scale = ols.set_loss_scale(state, scale)
    metrics = ols.loss_scale_metrics(at_scale, policy=policy)
    assert metrics["skips_at_min_scale"] == skips


def test_metrics_of_mapped_states_and_before_the_first_step_are_defined():
  policy = ols.DynamicLossScale()
  measure = jax.jit(ols.loss_scale_metrics, static_argnames="policy")
  start = measure(policy.init(), policy=policy, steps=0)
  assert (start["skip_rate"], start["skips_at_min_scale"]) == (0, 0)
  each = jax.jit(jax.vmap(lambda x: policy.adjust(policy.init(), x)))
  metrics = measure(each(np.array([True, False])), policy=policy, steps=2)
  assert metrics["skip_rate"].tolist() == [0, 0.5]
  assert all(x.shape == (2,) for x in metrics.values())
  assert all(not x.weak_type for x in metrics.values())


@pytest.mark.parametrize(
  "options, error, message",
  [
    ({"policy": "dynmic"}, TypeError, "^policy must .*got policy = 'dynmic'.$"),
    ({"steps": -1}, ValueError, "steps must be an integer in"),
    ({"steps": "10"}, TypeError, "got steps = '10'"),
  ],
)
def test_metrics_name_an_argument_that_is_wrong(options, error, message):
  with pytest.raises(error, match=message):
    ols.loss_scale_metrics(ols.FixedLossScale(1.0).init(), **options)


def test_the_log2_is_exact_for_every_power_of_two():
  log2_of = jax.jit(
    lambda scale: ols.loss_scale_metrics(
      ols.FixedLossScale(1.0).init()._replace(loss_scale=scale)
    )["log2_loss_scale"]
  )
  for k in range(-126, 127):
    assert log2_of(np.float32(2.0**k)) == k
  np.testing.assert_allclose(log2_of(np.float32(3)), np.log2(3), rtol=1e-6)


def test_select_if_applied_says_what_to_do_with_a_state_that_is_mapped():
  policy = ols.DynamicLossScale()
  adjust = lambda finite: policy.adjust(policy.init(), finite)
  state = jax.jit(jax.vmap(adjust))(np.array([True, False, True]))
  new, old = np.ones(3, np.float32), np.zeros(3, np.float32)
  message = r"got last_finite of shape \(3,\).*or map it: jax.vmap"
  with pytest.raises(ValueError, match=message):
    ols.select_if_applied(state, new, old)
  # As the message says.
  got = jax.jit(jax.vmap(ols.select_if_applied))(state, new, old)
  assert got.tolist() == [1, 0, 1]
