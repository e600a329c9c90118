"""Cotangents are never summed in half precision, in any transformation.

A `vmap` that comes later turns what moves data into something else: an index
into a gather, whose transpose adds up, and an array that all members share into
a broadcast, whose transpose is a sum.
"""

import functools
import itertools

from helpers import autocast_ops, half_eqns, parametrize_slow
from helpers.bits import assert_functions_close
from helpers.jax_limits import can_run_in_jax
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _primitives

MANY = 4096
A = 2 * normal(4, 4, seed=1)
W = jnp.eye(4)

# Losses of a weight and an index or a mask, of which each member of a `vmap`
# has its own, or all have the same. The cotangents of all members are added.
LOSSES = {
  "index": lambda w, i: (A @ w)[i].sum(),
  "dynamic slice": lambda w, i: lax.dynamic_slice_in_dim(A @ w, i, 1).sum(),
  "dynamic update": lambda w, i: lax.dynamic_update_slice(
    jnp.ones((4, 4)), (A @ w)[:1], (i, 0)
  ).sum(),
  "concatenate": lambda w, i: jnp.concatenate([A @ w, (A @ w) * i]).sum(),
  "stack": lambda w, i: jnp.stack([A @ w, A @ (w + i)]).sum(),
  "select": lambda w, i: lax.select(jnp.eye(4) > i, A @ w, A @ (w + i)).sum(),
  "split": lambda w, i: sum(
    (1 + n * i) * x.sum() for n, x in enumerate(lax.split(A @ w, (2, 2)))
  ),
  "unstack": lambda w, i: sum(
    (1 + n * i) * x.sum() for n, x in enumerate(jnp.unstack(A @ w))
  ),
}


def vmap_over_members(fun):
  return lambda w, i: jax.vmap(fun, (None, 0))(w, i).sum()


def assert_sums_are_wide(gradient, *args):
  """Assert that only matmuls, of all that add or spread data, are float16."""
  jaxpr = jax.make_jaxpr(gradient)(*args)
  assert half_eqns.list_half_sums(jaxpr) == set()


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_of_many_members_is_summed_in_half_precision(name):
  half = jax.grad(vmap_over_members(ols.autocast(LOSSES[name])))
  assert_sums_are_wide(half, W, np.zeros(MANY, int))


# Every contraction primitive, as a function of two operands.
PRODUCTS = {
  "dot_general": lambda a, b: a @ b,
  "conv_general_dilated": lambda a, b: lax.conv(
    a[None, None], b[None, None, :3, :3], (1, 1), "SAME"
  ),
  "ragged_dot_general": lambda a, b: lax.ragged_dot(
    a, jnp.stack([b, 2 * b]), jnp.array([1, 3])
  ),
}
# A moved value is batched, if either operand is.
BATCHINGS = [
  *itertools.product(PRODUCTS, [(0, None), (None, 0), (0, 0), (None, None)]),
  *itertools.product(autocast_ops.DATA_MOVEMENT, [(0, 0), (None, None)]),
]
QUICK_BATCHINGS = [("slice", (0, 0)), ("dot_general", (0, None))]


def test_each_contraction_primitive_is_tested():
  assert set(autocast_ops.DATA_MOVEMENT) == _primitives.DATA_MOVEMENT
  assert set(autocast_ops.EXCHANGES) == _primitives.PERMUTING_COLLECTIVES
  assert set(PRODUCTS) == set(_primitives.CONTRACTION_PREDICATES)


@parametrize_slow("case", QUICK_BATCHINGS, BATCHINGS, ids=str)
def test_batching_moved_values_makes_no_sum_in_half_precision(case):
  name, axes = case

  def model(a, b):
    moved = autocast_ops.DATA_MOVEMENT.get(name, lambda h: h)
    h = moved(PRODUCTS.get(name, jnp.matmul)(a, b))
    return jnp.sum(jnp.sin(h) * jnp.cos(jnp.sum(a * b)))

  stacked = [
    x if axis is None else jnp.stack([x, x + 1, x + 2])
    for x, axis in zip((A, W), axes, strict=True)
  ]

  def members(fun, a, b):
    if axes == (None, None):  # Values that all members share are closed over.
      return jax.vmap(lambda s: s * fun(a, b))(jnp.arange(3.0)).sum()
    return jax.vmap(fun, axes)(a, b).sum()

  def first_derivative(cast, a, b):
    fun = functools.partial(members, cast(model))
    return jax.grad(fun, (0, 1))(a, b)

  def second_derivative(cast, a, b):
    inner = jax.grad(cast(model), (0, 1))
    penalty = lambda a, b: sum(jnp.sum(g**2) for g in inner(a, b))
    fun = functools.partial(members, penalty)
    return jax.grad(fun, (0, 1))(a, b)

  for derivative in (first_derivative, second_derivative):
    as_written = functools.partial(derivative, lambda fun: fun)
    if not can_run_in_jax(jax.eval_shape, as_written, *stacked):
      continue
    half = jax.make_jaxpr(functools.partial(derivative, ols.autocast))(*stacked)
    sums = half_eqns.list_half_sums(half)
    # The narrow operand of a matmul is read forward and backward. Only where
    # the gradient itself is differentiated, these two cotangents are added.
    allowed = {"add_any"} if derivative is second_derivative else set()
    assert sums <= allowed


@parametrize_slow("exchange", ["ppermute"], ["ppermute", "all_to_all"])
def test_an_exchange_between_members_of_a_vmap_is_in_float32(exchange):
  def local(w, x):
    h = A @ w
    if exchange == "ppermute":
      return x * lax.ppermute(h, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])
    return x * lax.all_to_all(h, "i", 0, 0)

  def loss(w, cast):
    fun = jax.vmap(cast(local), (None, 0), axis_name="i")
    return fun(w, jnp.arange(4.0)).sum()

  half = functools.partial(jax.grad(loss), cast=ols.autocast)
  assert_sums_are_wide(half, W)
  full = functools.partial(jax.grad(loss), cast=lambda fun: fun)
  half, full = jax.jit(half)(W), jax.jit(full)(W)
  np.testing.assert_allclose(half, full, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_rule_may_return_what_is_neither_mapped_nor_read(is_inside):
  """As a parameter next to a result. JAX refuses to read it since 0.12."""
  fun = jax.custom_vjp(lambda w, x: (jnp.tanh(w @ x), w))

  def backward(residuals, g):
    w, x = residuals
    d = g[0] * (1 - jnp.tanh(w @ x) ** 2)
    return jnp.outer(d, x) + g[1], w.T @ d

  fun.defvjp(lambda w, x: (fun(w, x), (w, x)), backward)

  def loss(fun, w, x):
    h, _ = jax.vmap(lambda x: fun(w, x), out_axes=(0, None))(x)
    return jnp.mean(h**2)

  full = functools.partial(loss, fun)
  inner = functools.partial(loss, ols.autocast(fun))
  half = ols.autocast(full) if is_inside else inner
  x = 2 * normal(3, 4)
  assert_functions_close(jax.grad(half), jax.grad(full), A, x)
