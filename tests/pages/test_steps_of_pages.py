"""The reports take each training step that the pages show."""

import inspect

from helpers import markdown, ROOT
import jax
import numpy as np
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
    assert diagnostics.find_overflow(step, *args) is None
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
