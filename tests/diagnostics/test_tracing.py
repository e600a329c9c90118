"""Whatever its shape, a step is reported like its gradient.

The values with tags become outputs of its trace: nothing is compiled for that.
The slow tests compare the reports.
"""

import functools
import re
from unittest import mock

from flax import nnx
from helpers import (
  hijax,
  parametrize_slow,
  step_mistakes,
  train_steps,
  whole_steps,
)
from helpers.train_steps import make_step
from helpers.whole_steps import BATCH, CAST, LARGE, PARAMS, SMALL
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _tags
from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import (
  _tracing,
  check_step,
  compare_precision,
  count_flops,
  find_overflow,
)

# Some steps contain the same mistake as those of users.
pytestmark = pytest.mark.filterwarnings(
  "ignore:The loss scale is inside optax.MultiSteps"
)

compare = functools.partial(compare_precision, progress=False)
GRADS = np.ones(2, np.float32)
# Steps that run the matmuls of the gradient twice.
TWICE = {"accumulated", "an ensemble", "an ensemble of jits"}
# Outside of the wrapper, MultiSteps keeps a NaN, which is another problem.
CHECKED = [x for x in whole_steps.NAMES if x != "with MultiSteps outside"]


def trace(step, args):
  return _tracing.trace("test", step, args, {}, allow_abstract=False)


# Reports compile few operations for it.
make_linear_step = functools.partial(
  make_step,
  loss_fn=train_steps.linear_loss_fn,
  tx=train_steps.make_tx(policy=SMALL),
)


def list_grads(step, args):
  """Return the names of the gradients that become outputs."""
  return [output.name for output in trace(step, args).grad_outputs]


@functools.cache
def compare_gradient():
  fun, args = whole_steps.make_grad_fn(SMALL)
  return compare(fun, *args), count_flops(fun, *args)


@functools.cache
def find_gradient_overflow():
  fun, args = whole_steps.make_grad_fn(LARGE)
  return find_overflow(fun, *args)


def strip_name(name):
  """Return the path of the weights alone."""
  return name.split(" at ")[0].split("/")[-1]


@pytest.mark.parametrize("name", whole_steps.NAMES)
def test_the_gradients_of_a_step_of_any_shape_become_outputs(name):
  traced = trace(*whole_steps.make_step(name, SMALL))
  if name == "with checkpoint" and getattr(jax.config, "jax_remat3", False):
    # With this flag it is a hijax primitive, which declares its outputs.
    assert traced.unreached_locations == ["checkpoint"]
    return
  assert traced.unreached_locations == []
  assert [x.name for x in traced.grad_outputs] == sorted(PARAMS)


# The nightly tests have further shapes, whose gradients become outputs in the
# same way as those of one of these.
SLOW = {
  "plain", "with checkpoint", "in a scan of one", "accumulated", "an ensemble",
  "with an additional Optax optimizer", "on the host", "with NNX in place",
  "with Equinox", "with unchecked shard_map",
}  # fmt: skip


@parametrize_slow("name", (), CHECKED, SLOW)
def test_a_step_of_any_shape_is_checked_like_its_gradient(name):
  """Its layer `centers` loses precision, and nothing else is wrong."""
  expected, gradient_report = compare_gradient()
  step, args = whole_steps.make_step(name, ols.DynamicLossScale(2.0**6))
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
  half = check.flops.flops_by_dtype["float16"]
  assert half == gradient_report.total_flops * (2 if name in TWICE else 1)
  has_other_matmuls = name == "with an additional Optax optimizer"
  assert (check.flops.fraction == 1) != has_other_matmuls


@parametrize_slow("name", (), whole_steps.NAMES, SLOW - {"accumulated"})
def test_an_overflow_in_a_step_of_any_shape_is_that_of_its_gradient(name):
  step, args = whole_steps.make_step(name, LARGE)
  hit, expected = find_overflow(step, *args), find_gradient_overflow()
  for field in "primitive", "kind", "source_line", "backward":
    assert getattr(hit, field) == getattr(expected, field)


@pytest.mark.slow
def test_an_overflow_of_the_forward_pass_names_the_iteration_of_its_epoch():
  """Its loss is inf, and the step returns none."""
  step, (params, state, batch) = make_linear_step()

  def epoch(params, state, batches):
    body = lambda carry, batch: (step(*carry, batch), None)
    return lax.scan(body, (params, state), batches)[0]

  hit = find_overflow(epoch, params, state, jnp.stack([batch, 1e6 * batch]))
  assert "scan[1]" in hit.eqn_path
  assert hit.source_line.endswith("(linear_loss_fn)") and not hit.backward


@pytest.mark.slow
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


def test_each_report_says_that_gradients_in_a_while_are_not_analyzed():
  steps, args = step_mistakes.UNCHECKED["steps in a while loop"].make()
  note = "Not analyzed: gradients inside while at states.py:"
  with pytest.warns(UserWarning, match=f"found no inf or NaN. {note}"):
    assert find_overflow(steps, *args) is None
  report = compare(steps, *args)
  assert report.target == "results"
  for one in report, count_flops(steps, *args):
    (line,) = [x for x in str(one).splitlines()[1:3] if note in x]
    assert "pass a single step" in line


def test_gradients_that_cannot_become_outputs_are_located(monkeypatch):
  step, args = make_step()
  ruled = jax.custom_jvp(lambda *args: step(*args))
  ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[:2]))
  (location,) = set(trace(ruled, args).unreached_locations)
  assert location.startswith("custom_jvp_call")
  # If JAX refuses to trace the body of a loop again.
  monkeypatch.setattr(_eqns, "trace_replacement_eqns", lambda fun, eqn: None)
  traced = trace(*whole_steps.make_step("in a scan of one", SMALL))
  (location,) = set(traced.unreached_locations)
  assert location.startswith("scan at whole_st")


@pytest.mark.parametrize(
  "change, count",
  [(lambda grads: grads, 0), (lambda grads: {"w": 2 * grads["w"]}, 1)],
)
def test_gradients_become_outputs_once_unless_they_change(change, count):
  step, args = make_step(lambda *args: change(train_steps.compute_grads(*args)))
  kinds = [output.kind for output in trace(step, args).outputs]
  assert (kinds.count("grads"), kinds.count("unscaled")) == (1, count)


def test_a_nan_of_the_optimizer_is_found_if_updates_are_checked():
  divide = optax.stateless(lambda grads, _: grads / 0)
  tx = ols.with_loss_scaling(divide, SMALL, check_updates=True)
  step = lambda grads, state: tx.update(grads, state)[1]
  assert find_overflow(step, GRADS, tx.init(GRADS)).primitive == "div"


NAMES_OF_TWO = [f"[{i}]/{name}" for i in range(2) for name in sorted(PARAMS)]


def test_a_shared_jit_of_the_update_is_analyzed_at_each_call():
  tx = ols.with_loss_scaling(optax.sgd(0.1), SMALL)
  update = jax.jit(tx.update)

  def step(params, state, batch):
    for factor in 1.0, 1e6:
      grads = ols.grad(CAST, state)(params, factor * batch)
      updates, state = update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params

  args = PARAMS, tx.init(PARAMS), BATCH
  assert list_grads(step, args) == NAMES_OF_TWO


def test_objects_changed_in_place_count_as_results():
  """The model and a metric change, by an optimizer of Flax alone."""
  model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  average = nnx.metrics.Average("norm")

  @nnx.jit
  def step(model, optimizer, average, batch):
    grads = nnx.grad(lambda model: jnp.mean(model(batch)))(model)
    optimizer.update(model, grads)
    average.update(norm=optax.tree.norm(grads))

  outputs = trace(step, (model, optimizer, average, train_steps.BATCH)).outputs
  changed = [x.name.split(".")[:2] for x in outputs if x.kind == "argument"]
  assert ["model", "kernel"] in changed and ["average", "total"] in changed


def test_arguments_may_change_their_structure():
  def step(params, batch):
    params["seen"] = batch.pop("x")
    return jnp.sum(params["seen"] @ params["first"])

  found = count_flops(step, {**PARAMS}, {"x": BATCH})
  assert found.total_flops == 2 * 8 * 6 * 4


def test_a_model_bound_to_a_step_is_changed_like_an_argument():
  """Trainers bind it once; outside of the trace it would be ruined."""
  step, (model, optimizer, batch) = whole_steps.make_step(
    "with NNX in place", SMALL
  )
  bound = functools.partial(functools.partial(step, model), optimizer=optimizer)
  before = model.first[...]
  traced = _tracing.trace(
    "test", bound, (), {"batch": batch}, allow_abstract=False
  )
  assert [x.name for x in traced.grad_outputs] == sorted(PARAMS)
  assert count_flops(bound, batch=batch).fraction == 1
  assert jnp.array_equal(before, model.first[...])
  bound(batch=batch)
  assert not jnp.array_equal(before, model.first[...])


@pytest.mark.slow
def test_a_metric_that_an_earlier_step_made_nan_is_not_named():
  def find(policy, mean):
    step, args = make_linear_step(
      make_result=lambda old, new, mean: (*new, 0.9 * mean),
      tx=train_steps.make_tx(policy=policy),
      extra=(np.float32(mean),),
    )
    return find_overflow(step, *args)

  assert find(SMALL, np.nan) is None
  hit = find(LARGE, np.nan)
  assert hit == find(LARGE, 1.0) and hit.backward


def test_a_nonfinite_inner_state_that_update_receives_is_named():
  tx = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), SMALL)
  state = tx.init(GRADS)
  nan_state = jax.tree.map(lambda x: np.nan * x, state.inner_state)
  state = state._replace(inner_state=nan_state)
  hit = find_overflow(tx.update, GRADS, state)
  assert hit.primitive == "argument" and "inner_state" in hit.eqn_path


def test_faults_that_reach_update_are_named_before_others():
  tx = ols.with_loss_scaling(optax.sgd(0.1), SMALL)

  def step(grads, factor):
    metric = jnp.log(0 * factor)
    return metric, tx.update(factor * grads, tx.init(grads))

  large, small = np.float32(1e38), np.float32(1)
  hit = find_overflow(step, 9 * GRADS, large)
  assert [x.primitive for x in (hit, *hit.other_origins)] == ["mul", "log"]
  assert find_overflow(step, GRADS, small).primitive == "log"


def test_other_checkpoint_names_are_ignored():
  def step(w, x):
    return jnp.sum(checkpoint_name(x @ w, "optax_lossscale"))

  assert list_grads(step, (PARAMS["first"], BATCH)) == []


def test_a_key_may_contain_the_separator_of_tags():
  loss = lambda params, x: jnp.mean((x @ params["a|b"]) ** 2)
  step, args = make_step(
    loss_fn=loss, params={"a|b": PARAMS["first"]}, batch=BATCH
  )
  assert list_grads(step, args) == ["a|b"]


def test_tags_are_found_if_name_is_a_hijax_primitive():
  with hijax.enable_flags("jax_remat3"):
    step, args = whole_steps.make_step("in a scan of one", LARGE)
    assert list_grads(step, args) == sorted(PARAMS)


def test_eager_computations_are_not_tagged():
  """Marks are for jaxprs; a computation that runs at once has none."""
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  with mock.patch.object(_tags, "checkpoint_name") as named:
    tx.update(GRADS, tx.init(GRADS), GRADS)
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
