"""The reports take each training step that the pages and examples show."""

import inspect
import runpy

import equinox as eqx
from flax import nnx
from helpers import markdown, ROOT
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _judged, diagnostics

pytestmark = pytest.mark.slow

PAGES = {
  "README": ROOT / "README.md",
  "frameworks": ROOT / "docs" / "frameworks.md",
}


def steps_of(page):
  """Each step that a page defines, with a copy of its arguments."""
  names = {"__name__": "__main__"}
  found = []
  for block in markdown.blocks(PAGES[page]):
    exec(compile(block, str(PAGES[page]), "exec"), names)
    if "def train_step(" in block:
      step = names["train_step"]
      args = [names[name] for name in inspect.signature(step).parameters]
      # What was donated, or changed in place, is made anew by a copy.
      found.append((step, jax.tree.map(lambda x: x, args)))
  return found


def grads_given(step, args, monkeypatch):
  """What update is given, by running all operations one by one."""
  found = []
  with monkeypatch.context() as patch, jax.disable_jit():
    patch.setattr(
      _judged, "marked_tree", lambda kind, tree: found.append(tree) or tree
    )
    step(*jax.tree.map(lambda x: x, args))
  return [np.float64(x) for x in jax.tree.leaves(found)]


def relative_error(exact, half):
  norm = lambda arrays: np.sqrt(sum(np.sum(np.square(x)) for x in arrays))
  return norm([a - b for a, b in zip(exact, half, strict=True)]) / norm(exact)


@pytest.mark.parametrize("page", PAGES)
def test_the_error_of_a_step_is_that_of_its_gradient(page, monkeypatch):
  steps = steps_of(page)
  assert len(steps) == {"README": 1, "frameworks": 7}[page]
  compared = 0
  for step, args in steps:
    half = grads_given(step, args, monkeypatch)
    with monkeypatch.context() as patch:
      patch.setattr(ols, "autocast", lambda fun, *_, **__: fun)
      exact = grads_given(step, args, monkeypatch)
    if relative_error(exact, half) > 0:  # with autocast, then
      report = diagnostics.compare_precision(step, *args, progress=False)
      assert report.compared == "gradients"
      expected = relative_error(exact, half)
      assert report.error == pytest.approx(expected, rel=0.05)
      compared += 1
  assert compared == {"README": 1, "frameworks": 6}[page]


def example(name):
  return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def linen():
  names = example("flax_linen")
  x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
  model = names["ConvNet"]()
  variables = model.init(jax.random.key(1), x)
  state = names["StatsState"].create(
    apply_fn=model.apply,
    tx=ols.with_loss_scaling(optax.adam(1e-3)),
    **variables,
  )
  args = state, x, jnp.arange(4)
  grad = ols.grad(names["loss_fn"], state, has_aux=True)
  return names["train_step"], args, grad, (state.params, *args)


def in_nnx():
  names = example("first_hour")
  model = names["ViT"](nnx.Rngs(0))
  optimizer = names["make_optimizer"](model, "float16")
  average = jax.tree.map(jnp.asarray, nnx.state(model, nnx.Param))
  data = jax.random.normal(jax.random.key(0), (4, 8, 8)), jnp.arange(4)
  cast = ols.autocast(names["loss_fn"])
  grad = ols.grad(cast, optimizer, using=nnx.value_and_grad)
  step = names["make_train_step"]("float16")
  return step, (model, average, optimizer, *data), grad, (model, *data)


def in_equinox():
  names = example("equinox_mlp")
  model = eqx.nn.MLP(64, 10, 128, 1, key=jax.random.key(0))
  tx = ols.with_loss_scaling(optax.adam(1e-3))
  state = tx.init(eqx.filter(model, eqx.is_inexact_array))
  data = jax.random.normal(jax.random.key(0), (4, 64)), jnp.arange(4)
  cast = ols.autocast(names["loss_fn"])
  grad = ols.grad(cast, state, using=eqx.filter_value_and_grad)
  step = names["make_train_step"](tx)
  return step, (model, state, *data), grad, (model, *data)


@pytest.mark.parametrize("make", [linen, in_nnx, in_equinox])
def test_the_reports_of_an_example_are_those_of_its_gradient(make):
  step, args, grad, its_args = make()
  found = diagnostics.precision_report(step, *args)
  expected = diagnostics.precision_report(grad, *its_args)
  assert found.total_flops == expected.total_flops
  assert found.share == expected.share
  assert diagnostics.find_overflow(step, *args) is None
  # The images are what `its_args` ends with, before the labels.
  args, its_args = (
    [*some[:-2], 1e30 * some[-2], some[-1]] for some in (args, its_args)
  )
  hit = diagnostics.find_overflow(step, *args)
  expected_hit = diagnostics.find_overflow(grad, *its_args)
  assert (hit.primitive, hit.scope) == (
    expected_hit.primitive,
    expected_hit.scope,
  )


def test_the_two_optimizers_of_the_gan_are_both_looked_at():
  names = example("gan")
  key = jax.random.key(0)
  g, d = (names["init_mlp"](key, sizes) for sizes in [(4, 8, 2), (2, 8, 1)])
  states = names["G_TX"].init(g), names["D_TX"].init(d)
  step = names["train_step"]
  assert diagnostics.find_overflow(step, g, d, *states, key) is None
  for i in range(2):
    large = [*states]
    large[i] = ols.set_loss_scale(large[i], 2.0**100)
    assert diagnostics.find_overflow(step, g, d, *large, key).backward
