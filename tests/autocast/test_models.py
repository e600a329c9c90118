"""Float32 models of other libraries, unchanged, with their products in half."""

import functools

from helpers import float32_models, product_flops, quick_alone
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

# One of each library.
QUICK = (
  "transformer, Flax linen",
  "ViT, Flax NNX",
  "MLP-mixer, Equinox",
  "LSTM, Haiku",
  "text, Keras",
  "rotary, plain JAX",
)
all_models = pytest.mark.parametrize(
  "name", quick_alone(QUICK, float32_models.NAMES)
)
make = functools.cache(float32_models.make)
make_shapes = functools.cache(float32_models.make_shapes)


def in_float16(fun):
  return ols.autocast(fun)


def in_bfloat16(fun):
  return ols.autocast(fun, jnp.bfloat16)


def as_written(fun):
  return fun


CASTS = in_float16, in_bfloat16


@functools.cache
def backward(name, cast):
  """The jaxpr of loss and gradients, and the shapes of what it returns."""
  model = make_shapes(name)
  fun = lambda arrays: model.value_and_grad(arrays, cast)
  return jax.make_jaxpr(fun, return_shape=True)(model.arrays)


@pytest.mark.slow
@all_models
def test_the_products_of_a_float32_model_run_in_half(name):
  model = make_shapes(name)
  fun = lambda arrays: model.loss(arrays, in_float16)
  assert product_flops.share_in_half(jax.make_jaxpr(fun)(model.arrays)) > 0.99
  for cast in CASTS:
    assert product_flops.share_in_half(backward(name, cast)[0]) > 0.99
  assert product_flops.share_in_half(backward(name, as_written)[0]) == 0


@all_models
def test_nothing_else_computes_in_half(name):
  for cast in CASTS:
    assert product_flops.arithmetic_in_half(backward(name, cast)[0]) == set()


@all_models
def test_no_product_is_computed_twice(name):
  written, _ = backward(name, as_written)
  rewritten, _ = backward(name, in_float16)
  assert product_flops.by_dtype(written).total() == (
    product_flops.by_dtype(rewritten).total()
  )
  assert product_flops.products(written) == product_flops.products(rewritten)


@all_models
def test_results_keep_their_structure_shapes_and_dtypes(name):
  _, written = backward(name, as_written)
  for cast in CASTS:
    _, rewritten = backward(name, cast)
    assert jax.tree.structure(rewritten) == jax.tree.structure(written)
    assert jax.tree.leaves(rewritten) == jax.tree.leaves(written)


@all_models
def test_a_jaxpr_grows_by_casts_alone(name):
  written = len(list(product_flops.equations(backward(name, as_written)[0])))
  rewritten = len(list(product_flops.equations(backward(name, in_float16)[0])))
  assert rewritten < 1.5 * written


@pytest.mark.slow
def test_tracing_is_linear_in_the_size_of_a_model():
  counts = [_count_equations(layers) for layers in (2, 4, 8)]
  assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0


@pytest.mark.slow
def test_a_scanned_stack_is_rewritten_once_however_deep_it_is():
  counts = []
  for layers in (2, 16):
    model = float32_models.make_shapes(
      "scanned stack, Flax linen", layers=layers
    )
    fun = lambda arrays, model=model: model.value_and_grad(arrays, in_float16)
    jaxpr = jax.make_jaxpr(fun)(model.arrays)
    counts.append(len(list(product_flops.equations(jaxpr))))
  assert counts[0] == counts[1]


def test_the_function_is_called_once_for_each_trace():
  calls = []

  def fun(w):
    calls.append(None)
    return jnp.sum(w @ w)

  jax.make_jaxpr(jax.grad(ols.autocast(fun)))(jnp.eye(3))
  assert len(calls) == 1


@pytest.mark.slow
@all_models
def test_gradients_and_loss_are_those_of_float32(name):
  error, loss_error = _errors(name, in_float16)
  # Products round both operands and the result, forward and backward.
  least, least_loss = _errors_of_rounding(name, jnp.float16)
  assert error < max(1e-4, 8 * least)
  assert loss_error < max(1e-3, 8 * least_loss)


@pytest.mark.slow
@all_models
def test_gradients_in_bfloat16_have_its_precision(name):
  error, loss_error = _errors(name, in_bfloat16)
  least, least_loss = _errors_of_rounding(name, jnp.bfloat16)
  assert error < max(1e-3, 8 * least)
  assert loss_error < max(1e-2, 8 * least_loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", float32_models.BY_HAND)
def test_gradients_are_as_good_as_by_hand(name):
  by_hand = float32_models.make(name, dtype=jnp.float16)
  result = _compute(by_hand, make(name).params, as_written)
  assert _errors(name, in_float16)[0] < 2 * _distance(name, result)[0]


def _compute(model, params, cast):
  _, *others = model.arrays
  fun = lambda params: model.value_and_grad((params, *others), cast)
  return jax.jit(fun)(params)


@functools.cache
def _written(name):
  return _compute(make(name), make(name).params, as_written)


@functools.cache
def _errors(name, cast):
  """How far the gradients turn, and how far the loss moves."""
  return _distance(name, _compute(make(name), make(name).params, cast))


def _errors_of_rounding(name, dtype):
  """The same, if the params are rounded, and all is computed in float32."""
  model = make(name)
  rounded = jax.tree.map(
    lambda x: x.astype(dtype).astype(x.dtype), model.params
  )
  return _distance(name, _compute(model, rounded, as_written))


def _distance(name, result):
  (loss, _, grads), (written_loss, _, written) = result, _written(name)
  a, b = (
    np.concatenate([np.asarray(x, np.float64).ravel() for x in tree])
    for tree in (grads, written)
  )
  cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
  return 1 - cosine, abs(float(loss / written_loss) - 1)


def _count_equations(layers):
  def fun(w, x):
    for _ in range(layers):
      x = jnp.tanh(jax.jit(jnp.dot)(x, w)) + x
    return jnp.sum(x)

  jaxpr = jax.make_jaxpr(jax.grad(ols.autocast(fun)))(jnp.eye(3), jnp.eye(3))
  return len(list(product_flops.equations(jaxpr)))
