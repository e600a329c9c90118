"""`autocast`: which equations run in half precision, and which as written."""

import functools

from helpers import jaxprs, parametrize_slow
from helpers.bits import assert_functions_close, assert_same_bits
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

X = jnp.float32(np.arange(12).reshape(3, 4) % 5 - 2)
W = jnp.float32(np.arange(16).reshape(4, 4) % 3 - 1)
# Small integers: float16 represents them and their matmuls exactly, so that a
# function must return the same bits, whatever runs in float16.


def program(fun):
  PROGRAMS[fun.__name__] = fun
  return fun


PROGRAMS = {
  "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda c: c @ w, jnp.sin, x),
  "scan": lambda x, w: lax.scan(
    lambda c, s: (c @ w, s * c), x, jnp.ones((3, 3, 4)), reverse=True, unroll=2
  ),
  "while_loop": lambda x, w: lax.while_loop(
    lambda c: jnp.sum((c[0] @ w) ** 2) < 1e4,
    lambda c: (c[0] @ w, c[1] + 1),
    (x, 0),
  ),
  "checkpoint": lambda x, w: jax.checkpoint(
    lambda x: jnp.abs(x @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
  )(x),
  "grouped_convolution": lambda x, w: lax.conv_general_dilated(
    x.reshape(1, 4, 3),
    w.reshape(4, 1, 4)[:, :, :3],
    (1,),
    "SAME",
    feature_group_count=4,
  ),
  "numpy_arguments": lambda x, w: x @ np.float32(np.eye(4)) @ w,
  "same_value_twice": lambda x, w: (x @ x.T, w @ w),
}


@program
def switch(x, w):
  branches = [lambda c, n=n: n * (c @ w) for n in range(3)]
  return lax.switch(1, branches, x), lax.switch(jnp.int32(5), branches, x)


@program
def jit(x, w):
  inner = jax.jit(lambda a, b, n: (a @ b, n), static_argnums=2)
  return inner(x, w, 2), inner(inner(x, w, 3)[0], w, 3)


@program
def scan_of_checkpoint(x, w):
  step = jax.checkpoint(lambda c, _: (c @ w, None), prevent_cse=False)
  return lax.scan(step, x, None, length=3)[0]


@program
def custom_jvp(x, w):
  fun = jax.custom_jvp(lambda x, w: x @ w)
  fun.defjvp(lambda x, t: (fun(*x), 3 * (t[0] @ x[1]) + x[0] @ t[1]))
  return fun(x, w)


@program
def custom_vjp(x, w):
  fun = jax.custom_vjp(lambda n, x, w: n * (x @ w), nondiff_argnums=(0,))
  fun.defvjp(
    lambda n, x, w: (n * (x @ w), (x, w)),
    lambda n, kept, g: (n * (g @ kept[1].T), kept[0].T @ g),
  )
  return fun(2, x, w)


@program
def custom_vjp_in_a_scan(x, w):
  return lax.scan(lambda c, _: (custom_vjp(c, w), None), x, length=2)[0]


@program
def custom_vjp_in_a_checkpoint(x, w):
  constant = np.eye(4, dtype=np.float32)  # The rule closes over it.
  fun = jax.custom_vjp(lambda x: x @ constant)
  fun.defvjp(lambda x: (x @ constant, None), lambda _, g: (g @ constant.T,))
  return jax.checkpoint(lambda x: custom_vjp(fun(x), w))(x)


def with_integers(x, w, i):
  return (x @ w, i)


def rule_with_integers_backward(kept, g):
  return 3 * (g[0] @ kept[1].T), kept[0].T @ g[0], None


@program
def custom_vjp_of_integers(x, w):
  fun = jax.custom_vjp(with_integers)
  forward = lambda x, w, i: ((x @ w, i), (x, w))
  fun.defvjp(forward, rule_with_integers_backward)
  return fun(x, w, jnp.arange(3))


@program
def custom_vjp_that_asks_what_moves(x, w):
  def forward(x, w, i):
    assert not i.perturbed
    return (x.value @ w.value, i.value), (x.value, w.value)

  fun = jax.custom_vjp(with_integers)
  fun.defvjp(forward, rule_with_integers_backward, symbolic_zeros=True)
  return fun(x, w, jnp.arange(3))


@program
def custom_jvp_that_asks_what_moves(x, w):
  def rule(primals, tangents):
    x, w, c = primals
    assert isinstance(tangents[2], SymbolicZero)
    moved = [t for t in tangents[:2] if not isinstance(t, SymbolicZero)]
    tangent = sum(t @ w if t.shape == x.shape else x @ t for t in moved)
    return fun(x, w, c), tangent

  fun = jax.custom_jvp(lambda x, w, c: x @ w + c)
  fun.defjvp(rule, symbolic_zeros=True)
  return fun(x, w, 1.0)


@program
def convolution(x, w):
  image, kernel = x.reshape(1, 3, 4, 1), w.reshape(2, 2, 1, 4)
  dims = ("NHWC", "HWIO", "NHWC")
  conv = functools.partial(lax.conv_general_dilated, dimension_numbers=dims)
  out = conv(image, kernel, (1, 1), "SAME")
  return lax.conv_transpose(out, w.reshape(2, 2, 4, 1), (2, 2), "SAME")


@program
def more_than_floats(x, w):
  order = jnp.argsort(x, axis=0)
  chosen = jnp.take_along_axis(x @ w, order, axis=0)
  mask = jnp.where(chosen > 0, chosen, -1e9)
  key = jax.random.split(jax.random.key(0))[0]
  return mask, order, jax.random.key_data(key), (x > 0).astype(jnp.int8)


QUICK = "scan", "custom_vjp", "convolution"
QUICK_GRADIENTS = "scan_of_checkpoint", "custom_vjp_in_a_checkpoint"


def mean_square(fun):
  """A loss that differentiates all float results of a function."""

  def loss(*args):
    leaves = jax.tree.leaves(fun(*args))
    floats = [x for x in leaves if x.dtype == jnp.float32]
    return sum(jnp.mean(jnp.clip(x, -8, 8) ** 2) for x in floats)

  return loss


@parametrize_slow("name", QUICK, PROGRAMS)
def test_all_matmuls_run_in_half_precision_and_the_result_is_equal(name):
  fun = PROGRAMS[name]
  skip_if_jax_cannot(jax.eval_shape, fun, X, W)
  half = ols.autocast(fun)
  count = jaxprs.count_matmuls_by_dtype(fun, X, W).total()
  assert jaxprs.count_matmuls_by_dtype(half, X, W) == {"float16": count}
  assert_same_bits(jax.jit(half)(X, W), jax.jit(fun)(X, W))


@parametrize_slow("name", QUICK_GRADIENTS, PROGRAMS)
def test_the_gradient_is_equal_and_its_matmuls_run_in_half_precision(name):
  fun = PROGRAMS[name]
  if name == "while_loop":  # It has a derivative in forward mode alone.
    gradient = lambda f: jax.jacfwd(mean_square(f))
  else:
    gradient = lambda f: jax.grad(mean_square(f), argnums=(0, 1))
  half, full = gradient(ols.autocast(fun)), gradient(fun)
  skip_if_jax_cannot(jax.eval_shape, full, X, W)
  assert set(jaxprs.count_matmuls_by_dtype(half, X, W)) == {"float16"}
  assert_functions_close(half, full, X, W)


@pytest.mark.parametrize("name", PROGRAMS)
def test_rewritten_jaxprs_pass_the_checks_of_jax(name):
  with jax.enable_checks(True):
    jax.make_jaxpr(ols.autocast(PROGRAMS[name]))(X, W)


def test_a_weakly_typed_matmul_stays_weakly_typed():
  def loop(n):
    weak = jnp.full((2, 2), 1.0) * 1.0  # As an array of Python numbers is.
    matmul = lambda x: lax.dot(x, x)
    return lax.fori_loop(0, n, lambda i, x: matmul(x), weak)

  assert jax.eval_shape(ols.autocast(loop), 2) == jax.eval_shape(loop, 2)
  assert_same_bits(jax.jit(ols.autocast(loop))(2), jax.jit(loop)(2))


# All that holds other functions, each once.
HOLDERS = [
  "cond", "jit", "scan_of_checkpoint", "custom_jvp", "custom_vjp_in_a_scan",
  "custom_vjp_in_a_checkpoint", "same_value_twice",
]  # fmt: skip


# JAX looks for leaks with the garbage collector, which is slow.
@parametrize_slow("name", ["jit"], HOLDERS)
def test_no_tracer_outlives_its_trace(name):
  loss = ols.autocast(mean_square(PROGRAMS[name]))
  with jax.checking_leaks():
    both = lambda *args: (loss(*args), jax.grad(loss, (0, 1))(*args))
    jax.make_jaxpr(both)(X, W)
