"""The reports of a whole step agree with the reports of its gradient."""

import collections
import functools
import re
from unittest import mock

from flax import nnx
from helpers import hijax, mark_slow_params, on_host, whole_steps
from helpers.effects import pass_through_host
from helpers.whole_steps import BATCH, CAST, LARGE, PARAMS, SMALL
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _tags
from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import (
  _eqn_stats,
  _tracing,
  check_step,
  compare_precision,
  find_overflow,
  precision_report,
)

# Some steps contain the same mistake as those of users.
pytestmark = pytest.mark.filterwarnings(
  "ignore:The loss scale is inside optax.MultiSteps"
)

compare = functools.partial(compare_precision, progress=False)
# Steps that run the matmuls of the gradient twice.
TWICE = {
  whole_steps.accumulated,
  whole_steps.an_ensemble,
  whole_steps.an_ensemble_of_jits,
}


@functools.cache
def compare_gradient():
  fun, args = whole_steps.make_grad_fn(SMALL)
  return compare(fun, *args), precision_report(fun, *args)


@functools.cache
def find_gradient_overflow():
  fun, args = whole_steps.make_grad_fn(LARGE)
  return find_overflow(fun, *args)


def strip_name(name):
  """Return the path of the weights alone."""
  return name.split(" at ")[0].split("/")[-1]


# Outside of the wrapper, MultiSteps keeps a NaN, which is another problem.
SOUND = [
  make
  for make in whole_steps.ALL
  if make is not whole_steps.with_multi_steps_outside
]


@pytest.mark.parametrize(
  "make",
  mark_slow_params({whole_steps.with_nnx_that_returns_nothing}, SOUND),
  ids=lambda make: make.__name__,
)
def test_a_step_of_any_shape_is_checked_like_its_gradient(make):
  """Its layer `centers` loses precision, and nothing else is wrong."""
  expected, gradient_report = compare_gradient()
  step, args = make(ols.DynamicLossScale(2.0**6))
  check = check_step(step, *args, progress=False)
  assert check.overflow is None
  (problem,) = (x for x in check.problems if x.keep_float32)
  assert list(map(strip_name, problem.keep_float32)) == ["centers"]
  found = check.comparison
  assert expected.target == "results" and found.target == "gradients"
  assert list(map(strip_name, expected.outliers)) == ["centers"]
  assert found.error == pytest.approx(expected.error, rel=0.05)
  errors = [expected.array_errors[name] for name in sorted(PARAMS)]
  assert [*found.array_errors.values()] == pytest.approx(errors, rel=0.05)
  half = sum(
    row.flops for row in check.precision.flops if row.operand_dtype == "float16"
  )
  assert half == gradient_report.total_flops * (2 if make in TWICE else 1)
  has_other_matmuls = make is whole_steps.with_an_additional_optax_optimizer
  assert (check.precision.fraction == 1) != has_other_matmuls


@pytest.mark.parametrize(
  "make",
  mark_slow_params({whole_steps.in_a_scan_of_one}, whole_steps.ALL),
  ids=lambda make: make.__name__,
)
def test_an_overflow_in_a_step_of_any_shape_is_that_of_its_gradient(make):
  step, args = make(LARGE)
  hit, expected = find_overflow(step, *args), find_gradient_overflow()
  for name in "primitive", "kind", "source_line", "backward":
    assert getattr(hit, name) == getattr(expected, name)


def test_an_overflow_of_the_forward_pass_alone_is_found():
  """Its loss is NaN, and the step returns none."""
  step, (params, state, batch) = whole_steps.jitted(SMALL)
  hit = find_overflow(step, params, state, 1e6 * batch)
  assert hit.source_line.endswith("(loss_fn)") and not hit.backward


def test_an_overflow_in_an_epoch_names_the_iteration():
  epoch, (params, state, _) = whole_steps.in_a_scan_of_one(SMALL)
  batches = jnp.stack([BATCH, 1e6 * BATCH])
  assert "scan[1]" in find_overflow(epoch, params, state, batches).eqn_path


def test_the_gradients_of_all_iterations_are_combined():
  """The error is that of all iterations, by one norm."""
  tx = ols.with_loss_scaling(optax.sgd(0.0), SMALL)
  w = jnp.eye(4)
  cast = ols.autocast(lambda w, x: jnp.sum(jnp.sin(x @ w)))

  def epoch(w, xs):
    def step(state, x):
      return tx.update(ols.grad(cast, state)(w, x), state, w)[1], None

    return lax.scan(step, tx.init(w), xs, reverse=True)[0]

  xs = jax.random.normal(jax.random.key(0), (3, 2, 4))
  grads = jax.vmap(ols.grad(cast, SMALL.init()), (None, 0))
  expected = compare(grads, w, xs).error
  assert compare(epoch, w, xs).error == pytest.approx(expected, rel=0.01)


def steps_in_a_while(params, state, batch, count):
  step, _ = whole_steps.plain(SMALL)
  body = lambda i, carry: step(*carry, batch)
  return lax.fori_loop(0, count, body, (params, state))


def test_each_report_says_that_gradients_in_a_while_are_not_analyzed():
  _, args = whole_steps.plain(SMALL)
  args = *args, jnp.int32(2)
  note = "radients inside while at test_tracing.py:"
  with pytest.warns(
    UserWarning, match=f"found no inf or NaN. Not analyzed: g{note}"
  ):
    assert find_overflow(steps_in_a_while, *args) is None
  report = compare(steps_in_a_while, *args)
  assert report.target == "results"
  for one in report, precision_report(steps_in_a_while, *args):
    (line,) = [x for x in str(one).splitlines() if f"g{note}" in x]
    assert line in str(one).splitlines()[1:3]
    assert "pass a single step" in line


@pytest.mark.slow
def test_an_update_on_the_host_is_analyzed_like_one_on_the_device():
  # A warning about code that is not analyzed would be an error here.
  step, args = whole_steps.plain(SMALL)
  assert find_overflow(on_host.run_on_host(jax.jit(step)), *args) is None
  step, args = whole_steps.plain(LARGE)
  hit = find_overflow(on_host.run_on_host(jax.jit(step)), *args)
  assert hit.primitive == find_overflow(step, *args).primitive


def test_gradients_that_cannot_be_recomputed_are_reported(monkeypatch):
  step, args = whole_steps.in_a_scan_of_one(SMALL)
  monkeypatch.setattr(_eqns, "trace_replacement_eqns", lambda fun, eqn: None)
  with pytest.warns(UserWarning, match="gradients inside scan at whole_st"):
    assert find_overflow(step, *args) is None


def test_gradients_within_a_rule_are_reported():
  step, args = whole_steps.plain(SMALL)
  ruled = jax.custom_jvp(lambda *args: step(*args))
  ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[:2]))
  with pytest.warns(UserWarning, match="gradients inside custom_jvp_call"):
    assert find_overflow(ruled, *args) is None


@pytest.mark.parametrize("has_effect", mark_slow_params([False], [False, True]))
def test_a_step_that_is_skipped_without_an_overflow_is_reported(has_effect):
  step, (params, state, batch) = whole_steps.plain(SMALL)

  def given(finite):
    new_batch = pass_through_host(batch) if has_effect else batch
    return step(params, state, new_batch, grads_finite=finite)

  with pytest.warns(UserWarning, match="update skips this step although its"):
    assert find_overflow(given, False) is None
  assert find_overflow(given, True) is None  # without a warning


@pytest.mark.parametrize(
  "change, count",
  [
    (lambda grads: grads, 0),
    (lambda grads: {**grads, "last": 2 * grads["last"]}, 1),
  ],
)
def test_gradients_become_outputs_once_unless_they_change(change, count):
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state):
    grads = change(ols.grad(CAST, state)(params, BATCH))
    return tx.update(grads, state, params)

  args = PARAMS, tx.init(PARAMS)
  traced = _tracing.trace("test", step, args, {}, allow_abstract=False)
  kinds = collections.Counter(output.kind for output in traced.outputs)
  assert (kinds["grads"], kinds["unscaled"]) == (len(PARAMS), count)


def test_a_nan_of_the_optimizer_is_found_if_updates_are_checked():
  params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
  divide = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / 0, g))
  tx = ols.with_loss_scaling(divide, check_updates=True)
  step = lambda grads, state: tx.update(grads, state, params)[1]
  assert find_overflow(step, grads, tx.init(params)).primitive == "div"


def test_several_optimizers_are_distinguished_and_the_worst_counts():
  tx = ols.with_loss_scaling(optax.sgd(0.1), SMALL)

  @jax.jit
  def step(one, other, batch):
    for cast in (
      CAST,
      ols.autocast(lambda p, x: jnp.mean((x @ p["first"]) ** 2)),
    ):
      one, other = other, one
      grads = ols.grad(cast, other[1])(other[0], batch)
      updates, state = tx.update(grads, other[1], other[0])
      other = optax.apply_updates(other[0], updates), state
    return one, other

  pair = PARAMS, tx.init(PARAMS)
  report = compare(step, pair, pair, BATCH)
  expected, _ = compare_gradient()
  assert report.error == pytest.approx(expected.error, rel=0.05)
  assert [*report.array_errors] == [
    f"[{i}]/{name}" for i in range(2) for name in sorted(PARAMS)
  ]
  assert (
    report.array_errors["[1]/first"] < 1e-3 < report.array_errors["[0]/first"]
  )


def test_a_shared_jit_of_the_update_is_analyzed_at_each_call():
  tx = ols.with_loss_scaling(optax.sgd(0.1), SMALL)
  update = jax.jit(tx.update)

  def step(params, state, batch):
    for factor in 1.0, 1e6:
      grads = ols.grad(CAST, state)(params, factor * batch)
      updates, state = update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params

  state = tx.init(PARAMS)
  assert len(compare(step, PARAMS, state, 1e-6 * BATCH).array_errors) == 6


def test_objects_changed_in_place_count_as_results():
  """With an optimizer that is not ours, too."""
  _, (model, _, batch) = whole_steps.with_nnx_in_place(SMALL)
  bare = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

  @nnx.jit
  def bare_step(model, optimizer, batch):
    cast = ols.autocast(lambda model: model(batch))
    optimizer.update(model, nnx.grad(cast)(model))

  _, expected = compare_gradient()
  report = precision_report(bare_step, model, bare, batch)
  assert report.total_flops == expected.total_flops
  assert find_overflow(bare_step, model, bare, 1e6 * batch).source_line
  assert find_overflow(bare_step, model, bare, batch) is None


def test_arguments_may_change_their_structure():
  def step(params, batch):
    params["seen"] = batch.pop("x")
    return jnp.sum(params["seen"] @ params["first"])

  found = precision_report(step, {**PARAMS}, {"x": BATCH})
  assert found.total_flops == 2 * 8 * 6 * 4


def test_a_model_bound_to_a_step_is_changed_like_an_argument():
  """Trainers bind it once; outside of the trace it would be ruined."""
  step, (model, optimizer, batch) = whole_steps.with_nnx_in_place(SMALL)
  bound = functools.partial(functools.partial(step, model), optimizer=optimizer)
  before = model.first[...]
  assert find_overflow(bound, batch=batch) is None
  report = compare(bound, batch=batch)
  assert report.target == "gradients"
  assert precision_report(bound, batch=batch).fraction == 1
  assert jnp.array_equal(before, model.first[...])
  bound(batch=batch)
  assert not jnp.array_equal(before, model.first[...])


def with_a_metric(policy):
  """A step in place that averages the norms of its gradients."""
  _, (model, optimizer, batch) = whole_steps.with_nnx_in_place(policy)
  average = nnx.metrics.Average("norm")

  def step(model, optimizer, average, batch):
    cast = ols.autocast(lambda model: model(batch))
    grads = ols.grad(cast, optimizer, using=nnx.value_and_grad)(model)
    optimizer.update(model, grads)
    average.update(norm=optax.tree.norm(grads))

  return step, model, optimizer, average, batch


@pytest.mark.slow
def test_a_metric_that_an_earlier_step_made_nan_is_not_named():
  step, model, optimizer, average, batch = with_a_metric(SMALL)
  average.update(norm=jnp.float32(jnp.nan))
  assert find_overflow(step, model, optimizer, average, batch) is None

  step, model, optimizer, average, batch = with_a_metric(LARGE)
  without = find_overflow(step, model, optimizer, average, batch)
  average.update(norm=jnp.float32(jnp.nan))
  hit = find_overflow(step, model, optimizer, average, batch)
  assert hit == without and hit.backward


@pytest.mark.parametrize("where", ["params", "batch", "inner_state"])
def test_a_nonfinite_argument_that_update_receives_is_named(where):
  tx = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), SMALL)
  step = functools.partial(whole_steps.train_step, tx)
  args = {"params": PARAMS, "state": tx.init(PARAMS), "batch": BATCH}
  if where == "inner_state":
    inner = jax.tree.map(lambda x: jnp.nan * x, args["state"].inner_state)
    args["state"] = args["state"]._replace(inner_state=inner)
  else:
    args[where] = jax.tree.map(lambda x: jnp.nan * x, args[where])
  hit = find_overflow(step, **args)
  assert hit.primitive == "argument" and where in hit.eqn_path


def test_faults_that_reach_update_are_named_before_others():
  def fun(policy, result):
    step, (params, state, batch) = whole_steps.by_hand(policy)

    def with_result(params, state, batch):
      return result(batch), step(params, state, batch)

    return find_overflow(with_result, params, state, batch)

  log_of_zero = lambda batch: jnp.log(0 * batch[0, 0])
  hit = fun(LARGE, log_of_zero)
  assert hit.backward and "log" in [x.primitive for x in hit.other_origins]
  assert fun(SMALL, log_of_zero).primitive == "log"


def test_equations_after_the_gradients_are_not_measured(monkeypatch):
  """A skipped step makes nothing of what the optimizer computes."""
  measured = []
  measure_eqn = _eqn_stats.measure_eqn

  def record_eqn(eqn, *args):
    measured.append(eqn.primitive.name)
    return measure_eqn(eqn, *args)

  monkeypatch.setattr(_eqn_stats, "measure_eqn", record_eqn)
  slow = optax.stateless(lambda g, _: jax.tree.map(jax.lax.erf_inv, g))
  tx = ols.with_loss_scaling(slow, LARGE)
  plain = functools.partial(whole_steps.train_step, tx)
  for step in plain, jax.jit(plain):
    assert find_overflow(step, PARAMS, tx.init(PARAMS), BATCH).backward
    assert measured and "erf_inv" not in measured
    measured.clear()


def test_other_checkpoint_names_are_ignored():
  def step(w, x):
    hidden = checkpoint_name(x @ w, "optax_lossscale")
    return jnp.sum(hidden)

  report = compare(ols.autocast(step), PARAMS["first"], BATCH)
  assert report.target == "results"


def test_a_key_may_contain_the_separator_of_tags():
  loss = ols.autocast(lambda params, x: jnp.mean((x @ params["a|b"]) ** 2))
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state, x):
    return tx.update(ols.grad(loss, state)(params, x), state, params)

  params = {"a|b": PARAMS["first"]}
  report = compare(step, params, tx.init(params), BATCH)
  assert list(report.array_errors) == ["a|b"]


def test_tags_are_found_if_name_is_a_hijax_primitive():
  with hijax.enable_flags("jax_remat3"):
    step, args = whole_steps.in_a_scan_of_one(LARGE)
    hit = find_overflow(step, *args)
  assert hit.primitive == find_gradient_overflow().primitive


def test_eager_computations_are_not_tagged():
  """Marks are for jaxprs; a computation that runs at once has none."""
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  with mock.patch.object(_tags, "checkpoint_name") as named:
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)
  named.assert_not_called()


def test_the_compiled_program_has_no_tags(monkeypatch):
  tx = ols.with_loss_scaling(optax.adam(0.1), max_norm=1.0, check_updates=True)
  args = PARAMS, tx.init(PARAMS), BATCH

  def step(params, state, batch):
    loss, grads = ols.value_and_grad(CAST, state)(params, batch)
    return loss, tx.update(grads, state, params)

  # JAX numbers functions by how many it has seen.
  lowered = lambda: re.sub(
    r"(@\w+?)_\d+\b",
    r"\1",
    jax.jit(lambda *args: step(*args)).lower(*args).as_text(),
  )
  with_marks = lowered()
  names = str(jax.make_jaxpr(step)(*args)).count("optax_lossscale|")
  assert names == 5 * len(PARAMS) + 7
  monkeypatch.setattr(_tags, "checkpoint_name", lambda x, name: x)
  assert with_marks == lowered()
