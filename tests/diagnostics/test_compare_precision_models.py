"""``compare_precision`` on models: it finds the bad layers and no others."""

from helpers import float32_models, parametrize_slow, planted_layers
from helpers.bits import cosine, relative_error
import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale.diagnostics import compare_precision

# At least so much, gradients are called the same.
COSINE = 0.9999


def compare(fun, *args, **kwargs):
  return compare_precision(fun, *args, progress=False, **kwargs)


def compare_planted(model, dtype=jnp.float16, **kwargs):
  trained = model.grad(lambda fun: ols.autocast(fun, dtype))
  return compare(trained, *model.args, **kwargs)


def find_smallest_cosine(reference, other):
  """Return the cosine; for a tuple of results, the smallest one."""
  if type(reference) is tuple:
    return min(map(cosine, reference, other))
  return cosine(reference, other)


# These models differ most in where their fault is and in its kind; the others
# run at night.
SLOW_PLANTED = {
  "custom_vjp_backward",
  "custom_vjp_forward",
  "in_cond",
  "in_scan_of_checkpoints",
  "in_shard_map_of_explicit_axes",
  "in_while",
  "logits",
  "nnx_offset",
  "pixels",
  "several_overflow",
}
planted_models = parametrize_slow(
  "name", (), planted_layers.NAMES, SLOW_PLANTED
)


@planted_models
def test_a_bad_matmul_is_named_and_its_name_repairs_the_gradients(name):
  model = planted_layers.make_model(name)
  report = compare_planted(model)
  assert any(map(model.is_planted, report.layers[:2]))
  assert report.outliers

  names = report.overflowing + report.outliers
  repair = lambda fun: ols.autocast(fun, keep_float32=names)
  # Matmuls of activations and cotangents have no weights, so lines name them.
  lines = [row.source_line for row in report.layers if row.name in names]
  repair_outside = lambda fun: ols.autocast(fun, keep_float32=lines)

  def reference(*args):
    with jax.default_matmul_precision("highest"):
      return model.grad()(*args)

  half = model.grad(ols.autocast)
  repaired = model.grad(repair), repair_outside(model.grad())
  functions = reference, half, *repaired
  all_of_them = model.jit(lambda *args: [fun(*args) for fun in functions])
  exact, before, inside, outside = all_of_them(*model.args)
  assert not find_smallest_cosine(exact, before) >= COSINE
  assert find_smallest_cosine(exact, inside) >= COSINE
  assert find_smallest_cosine(exact, outside) >= COSINE


@planted_models
def test_the_same_model_without_the_fault_has_no_outlier(name):
  model = planted_layers.make_model(name, fault=False)
  report = compare_planted(model)
  assert report.outliers == report.overflowing == ()
  assert report.is_accurate


@pytest.mark.slow
def test_bfloat16_has_different_thresholds():
  """In bfloat16 all errors are larger, those of bad layers and the rest."""
  for fault in False, True:
    model = planted_layers.make_model("one_matmul", fault)
    report = compare_planted(model, dtype=jnp.bfloat16)
    assert len(report.outliers) == fault


# The others take a minute and more, each.
SLOW = {"LSTM, Haiku"}
# The gradients of their first layers are what is left of large sums, in all
# layers alike.
HAVE_SMALL_SUMS = {"ResNet, Flax linen", "MobileNet, Keras"}
sound_models = pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name, marks=pytest.mark.slow if name in SLOW else pytest.mark.nightly
    )
    for name in float32_models.NAMES
  ],
)


@sound_models
def test_a_sound_model_has_no_outlier_and_its_error_is_the_real_one(name):
  model = float32_models.make_model(name)
  gradients = lambda cast: lambda arrays: model.value_and_grad(arrays, cast)[2]
  trained = gradients(ols.autocast)
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(gradients(lambda fun: fun))(model.arrays)
  half = jax.jit(trained)(model.arrays)
  error = relative_error(exact, half)
  errors = map(relative_error, *map(jax.tree.leaves, (exact, half)))
  report = compare(trained, model.arrays)
  assert report.outliers == report.overflowing == ()
  left_out = report.ill_conditioned_arrays
  if not left_out:
    assert report.error == pytest.approx(error, rel=0.1)
  # XLA does not round the same values in both programs: the errors without
  # `jit` differ from those with it as much.
  factor = 3 if name in HAVE_SMALL_SUMS else 1.25
  real_errors = dict(zip(report.array_errors, errors, strict=True))
  for array, reported in report.array_errors.items():
    if array not in left_out:
      real = real_errors[array] + 1e-6
      assert real / factor < reported + 1e-6 < real * factor, array
  if report.inaccurate_arrays:
    assert name in HAVE_SMALL_SUMS
  if name in HAVE_SMALL_SUMS:
    assert report.inaccurate_arrays or left_out
  smallest = 0.06 / factor
  assert all(real_errors[x] > smallest for x in report.inaccurate_arrays)
