"""Unchanged float32 models of other libraries run with matmuls in float16."""

import functools

from helpers import (
  float32_models,
  half_eqns,
  jaxprs,
  parametrize_slow,
)
from helpers.bits import cosine
import jax
from jax.extend import core
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

# Importing a library and tracing its model is slow.
all_models = parametrize_slow("name", (), float32_models.NAMES)
# Where all gradients are computed in several dtypes; the others at night.
few_models = parametrize_slow(
  "name",
  (),
  float32_models.NAMES,
  ["BatchNorm, Equinox", "GRU, Flax linen", "LSTM, Haiku"],
)
make = functools.cache(float32_models.make_model)
make_shapes = functools.cache(float32_models.make_model_shapes)


def as_written(fun):
  return fun


def trace_backward(name, cast):
  """The jaxpr of loss and gradients, and the shapes of what it returns."""
  model = make_shapes(name)
  fun = lambda arrays: model.value_and_grad(arrays, cast)
  return jax.make_jaxpr(fun, return_shape=True)(model.arrays)


def count_flops(jaxpr, dtype=None):
  args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals]
  return diagnostics.count_flops(core.jaxpr_as_fun(jaxpr), *args, dtype=dtype)


def count_matmuls(jaxpr):
  return jaxprs.count_eqn_matmuls_by_dtype(jaxpr.eqns).total()


def count_eqns(jaxpr):
  return len(list(jaxprs.iter_eqns(jaxpr.eqns)))


@all_models
def test_autocast_changes_only_matmuls_and_casts_of_a_float32_model(name):
  """One test for all, since it takes long to trace a model."""
  written, results = trace_backward(name, as_written)
  expected = count_flops(written)
  assert set(expected.flops_by_dtype) == {"float32"}
  for dtype in jnp.float16, jnp.bfloat16:
    cast = ols.autocast(dtype=dtype)
    rewritten, its_results = trace_backward(name, cast)
    # Only matmuls compute in half precision, and each is computed once.
    found = count_flops(rewritten, dtype)
    assert found.fraction > 0.99
    assert found.total_flops == expected.total_flops
    assert half_eqns.list_half_arithmetic(rewritten) == set()
    assert count_matmuls(rewritten) == count_matmuls(written)
    assert count_eqns(rewritten) < 1.5 * count_eqns(written)
    # Results keep their structure, shapes and dtypes.
    assert jax.tree.structure(its_results) == jax.tree.structure(results)
    assert jax.tree.leaves(its_results) == jax.tree.leaves(results)


@pytest.mark.slow
def test_a_scanned_stack_is_rewritten_once_however_deep_it_is():
  counts = []
  for layers in (2, 16):
    model = float32_models.make_model_shapes(
      "scanned stack, Flax linen", layers=layers
    )
    fun = lambda arrays, model=model: model.value_and_grad(arrays, ols.autocast)
    jaxpr = jax.make_jaxpr(fun)(model.arrays)
    counts.append(count_eqns(jaxpr))
  assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("dtype", "at_least"),
  [(jnp.float16, (1e-4, 1e-3)), (jnp.bfloat16, (1e-3, 1e-2))],
)
@few_models
def test_gradients_and_loss_have_half_precision_accuracy(name, dtype, at_least):
  # Matmuls round both operands and the result, forward and backward.
  rounded = _compute_rounding_errors(name, dtype)
  triples = zip(_compute_errors(name, dtype), rounded, at_least, strict=True)
  assert all(error < max(least, 8 * x) for error, x, least in triples)


@pytest.mark.slow
@parametrize_slow(
  "name", (), float32_models.MODELS_WITH_DTYPE, ["GRU, Flax linen"]
)
def test_gradients_are_as_accurate_as_with_hand_written_casts(name):
  by_hand = float32_models.make_model(name, dtype=jnp.float16)
  result = _run_model(by_hand, make(name).params, as_written)
  assert (
    _compute_errors(name, jnp.float16)[0]
    < 2 * _compare_with_float32(name, result)[0]
  )


def _run_model(model, params, cast):
  _, *others = model.arrays
  fun = lambda params: model.value_and_grad((params, *others), cast)
  return jax.jit(fun)(params)


@functools.cache
def _compute_float32_result(name):
  return _run_model(make(name), make(name).params, as_written)


@functools.cache
def _compute_errors(name, dtype):
  """How far the gradients turn, and how far the loss moves."""
  return _compare_with_float32(
    name, _run_model(make(name), make(name).params, ols.autocast(dtype=dtype))
  )


def _compute_rounding_errors(name, dtype):
  """The same, if the params are rounded, and all is computed in float32."""
  model = make(name)
  rounded = jax.tree.map(
    lambda x: x.astype(dtype).astype(x.dtype), model.params
  )
  return _compare_with_float32(name, _run_model(model, rounded, as_written))


def _compare_with_float32(name, result):
  loss, _, grads = result
  written_loss, _, written_grads = _compute_float32_result(name)
  return 1 - cosine(written_grads, grads), abs(float(loss / written_loss) - 1)
