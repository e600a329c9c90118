"""Of thirteen sound models of six libraries, no place stands out."""

from helpers import float32_models
import jax
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.diagnostics import compare_precision

# The others take a minute and more, each.
QUICK = {"GRU, Flax linen", "LSTM, Haiku", "BatchNorm, Equinox"}
all_models = pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      n, marks=pytest.mark.slow if n in QUICK else pytest.mark.nightly
    )
    for n in float32_models.NAMES
  ],
)


@all_models
def test_no_place_of_a_sound_model_stands_out(name):
  model = float32_models.make(name)
  fun = lambda arrays: model.value_and_grad(arrays, ols.autocast)
  for effects in "all", "worst":
    report = compare_precision(
      fun, model.arrays, effects=effects, progress=False
    )
    assert report.worst(3) == report.overflowing == ()


@all_models
def test_the_error_of_a_model_is_that_of_autocast(name):
  model = float32_models.make(name)
  as_it_is = lambda loss_fn: loss_fn
  gradients = lambda cast: lambda arrays: model.value_and_grad(arrays, cast)[2]
  trained = gradients(ols.autocast)
  report = compare_precision(
    trained, model.arrays, effects="worst", progress=False
  )
  with jax.default_matmul_precision("highest"):
    exact = flat(jax.jit(gradients(as_it_is))(model.arrays))
  half = flat(jax.jit(trained)(model.arrays))
  error = np.linalg.norm(half - exact) / np.linalg.norm(exact)
  assert report.error == pytest.approx(error, rel=0.01)


def flat(tree):
  return np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])
