"""Cotangents are never summed in half precision, in any transformation.

A `vmap` that comes later turns what moves data into something else: an index
into a gather, whose transpose adds up, and an array that all members share into
a broadcast, whose transpose is a sum.
"""

import functools
import inspect
import itertools

from helpers import autocast_ops, half_eqns, parametrize_slow, sharding
from helpers.bits import assert_close, assert_functions_close
from helpers.jax_limits import can_run_in_jax
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
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


def shard_map_over_members(fun):
  mesh = sharding.make_mesh((4,), ("data",))
  local = lambda w, i: lax.psum(vmap_over_members(fun)(w, i), "data")
  specs = P(), P("data")
  return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())


AROUND = vmap_over_members, shard_map_over_members


def assert_sums_are_wide(gradient, *args):
  """Assert that only matmuls, of all that add or spread data, are float16."""
  jaxpr = jax.make_jaxpr(gradient)(*args)
  assert half_eqns.list_half_sums(jaxpr) == set()


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_of_many_members_is_summed_in_half_precision(name):
  half = jax.grad(vmap_over_members(ols.autocast(LOSSES[name])))
  assert_sums_are_wide(half, W, np.zeros(MANY, int))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("around", AROUND, ids=lambda f: f.__name__)
def test_the_gradients_of_many_members_add_up(name, around):
  loss, i = LOSSES[name], jnp.zeros(MANY, int)
  half = jax.grad(lambda w: around(ols.autocast(loss))(w, i) / MANY)
  full = jax.grad(lambda w: around(loss)(w, i) / MANY)
  assert_sums_are_wide(half, W)
  # The second operation by operation: what XLA of JAX 0.8.0 makes of two of
  # them is the transpose of their gradient.
  np.testing.assert_allclose(jax.jit(half)(W), full(W), rtol=2e-3, atol=2e-3)


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


# Rules with an output that `vmap` does not map, such as a parameter that a
# function returns next to its result. The cotangent of such an output would be
# counted once for each row. So JAX refuses it since 0.12, unless it is known to
# be zero.
X = 2 * normal(3, 4)


def rule(**options):
  def its_name(w, x):
    return jnp.tanh(w @ x), w

  def backward(kept, g):
    w, x = kept
    d = g[0] * (1 - jnp.tanh(w @ x) ** 2)
    return jnp.outer(d, x) + g[1], w.T @ d

  fun = jax.custom_vjp(its_name)
  fun.defvjp(lambda w, x: (its_name(w, x), (w, x)), backward, **options)
  return fun


def add_inner_vmap(fun, uses):
  """A loss with a `vmap` within `autocast`, or within the bare function."""

  def loss(w, x):
    h, same = jax.vmap(lambda x: fun(w, x), out_axes=(0, None))(x)
    return jnp.mean(h**2) + (0.01 * jnp.sum(same**2) if uses else 0)

  return loss


# From a function to a loss, and the same loss with float16 matmuls.
WHERE = {
  "inside": lambda fun, uses: ols.autocast(add_inner_vmap(fun, uses)),
  "outside": lambda fun, uses: add_inner_vmap(ols.autocast(fun), uses),
}
each_way = parametrize_slow("where", ["inside"], WHERE)


@each_way
def test_another_output_may_be_neither_mapped_nor_read(where):
  fun = rule()
  half, full = WHERE[where](fun, uses=False), add_inner_vmap(fun, uses=False)
  assert_functions_close(jax.grad(half), jax.grad(full), A, X)


@each_way
def test_programs_that_jax_rejects_raise_the_error_of_jax(where):
  fun = rule()

  def outcome(loss):
    try:
      return jax.jit(jax.grad(loss))(A, X)
    except ValueError as error:
      return str(error)

  losses = WHERE[where](fun, uses=True), add_inner_vmap(fun, uses=True)
  half, full = map(outcome, losses)
  if isinstance(full, str):
    assert "custom_vjp function its_name" in half
    assert half == full
  else:
    assert_close(half, full)


@each_way
def test_a_rule_may_request_generic_batching(where):
  options = inspect.signature(jax.custom_vjp.defvjp).parameters
  if "generic_batching" not in options:
    pytest.skip(f"JAX {jax.__version__} has no generic batching.")
  fun = rule(generic_batching=True)
  half, full = WHERE[where](fun, uses=True), add_inner_vmap(fun, uses=True)
  assert_functions_close(jax.grad(half), jax.grad(full), A, X)
