"""``compare_precision`` finds the one bad layer of a model, and no other."""

from helpers import planted_layers, quick_alone
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.diagnostics import compare_precision

# At least so much, gradients are called the same.
COSINE = 0.9999
all_models = pytest.mark.parametrize(
  "name",
  quick_alone(["custom_vjp_forward", "one_product"], planted_layers.NAMES),
)


def compare(model, dtype=jnp.float16, **kwargs):
  trained = model.grad(lambda fun: ols.autocast(fun, dtype))
  return compare_precision(trained, *model.args, progress=False, **kwargs)


def cosine(reference, other):
  """The smallest one, of results that are returned one beside the other."""
  if type(reference) is tuple:
    return min(map(cosine, reference, other))
  a, b = flat(reference), flat(other)
  return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def flat(tree):
  return np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])


@all_models
def test_a_bad_product_is_named_and_its_name_repairs_the_gradients(name):
  model = planted_layers.make(name)
  report = compare(model)
  assert any(map(model.is_planted, report.products[:2]))
  (worst,) = report.worst(1)
  assert compare(model, effects="worst").worst(1) == (worst,)

  names = report.overflowing + report.standing_out
  repair = lambda fun: ols.autocast(fun, keep_float32=names)
  # Products of activations and cotangents have no weights, so lines name them.
  lines = [row.source for row in report.products if row.name in names]
  repair_outside = lambda fun: ols.autocast(fun, keep_float32=lines)

  def reference(*args):
    with jax.default_matmul_precision("highest"):
      return model.grad()(*args)

  half = model.grad(ols.autocast)
  repaired = model.grad(repair), repair_outside(model.grad())
  functions = reference, half, *repaired
  all_of_them = model.jit(lambda *args: [fun(*args) for fun in functions])
  exact, before, inside, outside = all_of_them(*model.args)
  assert not cosine(exact, before) >= COSINE
  assert cosine(exact, inside) >= COSINE
  assert cosine(exact, outside) >= COSINE


@all_models
def test_no_line_of_the_same_model_without_the_fault_stands_out(name):
  model = planted_layers.make(name, fault=False)
  for effects in "all", "worst":
    report = compare(model, effects=effects)
    assert report.worst(3) == report.overflowing == ()
    assert report.cosine >= COSINE


def test_bfloat16_has_other_bounds():
  """What is bad in float16 is worse there, and the rest is worse as well."""
  for fault in False, True:
    model = planted_layers.make("one_product", fault)
    report = compare(model, dtype=jnp.bfloat16)
    assert len(report.worst(3)) == fault
