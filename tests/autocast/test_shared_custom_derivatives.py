"""Functions with custom rules that several calls share.

JAX traces such a function once, and differentiates what it traced once for each
call: each time with respect to other arguments.
"""

import functools
import itertools

import equinox as eqx
from helpers import custom_rules, parametrize_slow
from helpers.bits import assert_close, assert_functions_close
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

W = 2 * normal(4, 4, seed=0)
X = 2 * normal(4, 4, seed=1)


def custom_vjp_with_symbolic_zeros():
  fun = jax.custom_vjp(lambda x, w: x @ w)
  fun.defvjp(
    lambda x, w: (x.value @ w.value, (x.value, w.value)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
    symbolic_zeros=True,
  )
  return fun


def equinox_custom_vjp():
  @eqx.filter_custom_vjp
  def fun(both):
    return both[0] @ both[1]

  @fun.def_fwd
  def forward(perturbed, both):
    return both[0] @ both[1], None

  @fun.def_bwd
  def backward(kept, g, perturbed, both):
    return g @ both[1].T, both[0].T @ g

  return lambda x, w: fun((x, w))


RULES = {
  "custom_vjp": custom_rules.make_matmul_with_vjp,
  "symbolic zeros": custom_vjp_with_symbolic_zeros,
  "custom_jvp": custom_rules.make_matmul_with_jvp,
  "Equinox": equinox_custom_vjp,
}


def in_a_scan_of_checkpoints(fun):
  """As in a stack of layers, of which some are frozen."""
  policy = jax.checkpoint_policies.dots_saveable

  @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
  def block(x, w):
    return fun(x, w), None

  return lambda x, w: lax.scan(block, x, w[None])[0]


SHARED_BY = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
  "scan of dots_saveable": in_a_scan_of_checkpoints,
  "jit of scan": lambda f: jax.jit(
    lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, length=1)[0]
  ),
  "jit of cond": lambda f: jax.jit(
    lambda x, w: lax.cond(x[0, 0] > -99, f, lambda x, w: x, x, w)
  ),
  "jit of vmap": lambda f: jax.jit(
    lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0]
  ),
}

# From the shared function to a loss of two arguments.
LOSSES = {
  "swapped": lambda f: lambda w, x: jnp.sum(f(x, w) ** 2 + f(w, x) ** 3),
  "in a row": lambda f: lambda w, x: jnp.sum(f(jnp.tanh(f(x, w)), w) ** 2),
  "partly frozen": lambda f: (
    lambda w, x: (
      jnp.sum(f(x, lax.stop_gradient(w)) ** 2)
      + jnp.sum(f(lax.stop_gradient(x), w) ** 3)
    )
  ),
}


def check(rule, share, make_loss, argnums):
  loss = make_loss(share(rule()))
  half, full = (jax.grad(f, argnums) for f in (ols.autocast(loss), loss))
  # And where the gradient is taken inside.
  functions = full, half, ols.autocast(full)
  run_all = jax.jit(lambda *args: [fun(*args) for fun in functions])
  expected, *actual = run_all(W, X)
  for grads in actual:
    assert_close(grads, expected)


ARGNUMS = (0, 1), 0, 1
CASES = list(itertools.product(RULES, SHARED_BY, LOSSES, ARGNUMS))
# Each pair of values of two parameters is in one of these rows. The nightly
# tests have all other combinations.
PAIRS = [
  (rule, share, [*LOSSES][(i + j) % 3], ARGNUMS[(i + 2 * j) % 3])
  for i, rule in enumerate(RULES)
  for j, share in enumerate(SHARED_BY)
]


@parametrize_slow("case", PAIRS[:1], CASES, PAIRS, ids=str)
def test_a_shared_rule_has_the_gradient_of_each_call(case):
  rule, share, loss, argnums = case
  check(RULES[rule], SHARED_BY[share], LOSSES[loss], argnums)


def skip_if_all_is_said_to_move():
  """With two of its upgrade flags JAX 0.12 says so to a rule in a checkpoint.

  So what the rule closes over seems to move, and the answer is JAX's error.
  """
  flags = "jax_remat3", "jax_custom_vjp3"
  if all(getattr(jax.config, flag, False) for flag in flags):
    pytest.skip("JAX 0.12 says that all arguments of the rule move.")


@parametrize_slow("share", [jax.jit], [jax.jit, jax.checkpoint])
def test_values_that_a_rule_closes_over_cannot_be_differentiated(share):
  if share is jax.checkpoint:
    skip_if_all_is_said_to_move()

  def loss(w, x):
    fun = jax.custom_vjp(lambda x: x @ w)
    fun.defvjp(lambda x: (x @ w, w), lambda w, g: (g @ w.T,))
    return jnp.sum(share(fun)(x) ** 2)

  half = ols.autocast(loss)
  for gradient in (jax.grad(half), ols.autocast(jax.grad(loss))):
    with pytest.raises(Exception, match="closed-over value"):
      gradient(W, X)
  assert_close(jax.grad(half, 1)(W, X), jax.grad(loss, 1)(W, X))


def test_a_rule_may_raise_for_values_that_equinox_guards():
  @eqx.filter_custom_vjp
  def fun(w, x):
    return x @ w

  fun.def_fwd(lambda perturbed, w, x: (x @ w, None))
  fun.def_bwd(lambda kept, g, perturbed, w, x: x.T @ g)
  shared = eqx.filter_jit(fun)
  loss = lambda w: jnp.sum(shared(w, X) ** 2) + jnp.sum(shared(2 * w, X))
  # In any order: a rule that has failed once fails again.
  for f in (loss, ols.autocast(loss)):
    jax.make_jaxpr(jax.grad(f))(W)
  half, full = jax.grad(ols.autocast(loss)), jax.grad(loss)
  assert_functions_close(half, full, W)


def make_refusing_rule():
  """Multiply a matmul by a mask, whose derivative the rule refuses."""

  def forward(x, w, mask):
    if mask.perturbed:
      raise NotImplementedError("The mask has no derivative.")
    return (x.value @ w.value) * mask.value, (x.value, w.value, mask.value)

  def backward(kept, g):
    x, w, mask = kept
    return (g * mask) @ w.T, x.T @ (g * mask), None

  fun = jax.custom_vjp(lambda x, w, mask: (x @ w) * mask)
  fun.defvjp(forward, backward, symbolic_zeros=True)
  return fun


def test_a_rule_may_raise_a_custom_error():
  shared = jax.jit(make_refusing_rule())
  layer = lambda x, mask: shared(x, W, mask)
  loss = lambda x, mask: jnp.sum(layer(jnp.tanh(layer(x, mask)), mask) ** 2)
  half = ols.autocast(loss)
  assert_functions_close(jax.grad(half), jax.grad(loss), X, W)
  for argnums in (1, (0, 1)):
    with pytest.raises(NotImplementedError, match="The mask has no derivative"):
      jax.grad(half, argnums)(X, W)


def test_a_rule_that_raised_for_one_derivative_still_gives_another():
  fun = make_refusing_rule()
  loss = lambda x, w, mask: jnp.sum(fun(x, w, mask) ** 2)
  half = jax.jit(ols.autocast(loss))  # So that JAX keeps the rule.
  with pytest.raises(NotImplementedError, match="The mask has no derivative"):
    jax.grad(half, (0, 1, 2))(X, W, X)
  assert_functions_close(jax.grad(half), jax.grad(loss), X, W, X)


def test_a_rule_that_raises_may_be_shared_by_calls_with_other_tangents():
  shared = jax.jit(make_refusing_rule())

  def loss(w, keep=lambda fun: fun):
    layer = keep(lambda x, w: shared(x, w, X))
    return jnp.sum(layer(jnp.tanh(layer(X, w)), w) ** 2) + jnp.sum(X @ w)

  kept = lambda w: loss(w, ols.keep_float32)
  for fun, tolerance in ((loss, 0.01), (kept, 2e-3)):
    half, full = jax.grad(ols.autocast(fun)), jax.grad(loss)
    assert_functions_close(half, full, W, tolerance=tolerance)
