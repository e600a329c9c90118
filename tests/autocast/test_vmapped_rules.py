"""Rules with an output that `vmap` does not map.

Such is a parameter that a function returns beside its result. The cotangent of
such an output would be counted once for each row. So JAX refuses it since 0.12,
unless it is known to be zero.
"""

import inspect

import equinox.internal as eqxi
from helpers import hijax
from helpers.bits import assert_close
from helpers.jax_limits import skip_if_jax_cannot
import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _zeros

KEYS = jax.random.split(jax.random.key(0))
W = jax.random.normal(KEYS[0], (4, 4))
X = jax.random.normal(KEYS[1], (3, 4))


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


def inside(fun, uses):
  """A loss with a `vmap` within `autocast`, or within the bare function."""

  def loss(w, x):
    h, same = jax.vmap(lambda x: fun(w, x), out_axes=(0, None))(x)
    return jnp.mean(h**2) + (0.01 * jnp.sum(same**2) if uses else 0)

  return loss


# From a function to a loss, and the same with its products in half.
WHERE = {
  "inside": lambda fun, uses: ols.autocast(inside(fun, uses)),
  "outside": lambda fun, uses: inside(ols.autocast(fun), uses),
}


@pytest.mark.parametrize("where", WHERE)
def test_an_output_that_nobody_maps_or_reads_may_stand_beside(where):
  fun = rule()
  half = jax.jit(jax.grad(WHERE[where](fun, uses=False)))(W, X)
  assert_close(half, jax.grad(inside(fun, uses=False))(W, X))


@pytest.mark.parametrize("where", WHERE)
def test_what_jax_refuses_is_refused_in_the_words_of_jax(where):
  fun = rule()

  def outcome(loss):
    try:
      return jax.grad(loss)(W, X)
    except ValueError as error:
      return str(error)

  half, full = outcome(WHERE[where](fun, True)), outcome(inside(fun, True))
  if isinstance(full, str):
    assert "custom_vjp function its_name" in half
    assert half == full
  else:
    assert_close(half, full)


@pytest.mark.parametrize("where", WHERE)
def test_a_rule_that_asks_for_generic_batching_has_it(where):
  options = inspect.signature(jax.custom_vjp.defvjp).parameters
  if "generic_batching" not in options:
    pytest.skip(f"JAX {jax.__version__} has no generic batching.")
  fun = rule(generic_batching=True)
  half = jax.grad(WHERE[where](fun, uses=True))(W, X)
  assert_close(half, jax.grad(inside(fun, uses=True))(W, X))


def test_where_jax_takes_no_zeros_of_its_own_arrays_do(monkeypatch):
  monkeypatch.delattr(_zeros.ad, "Zero")
  _zeros._takes_zeros.cache_clear()
  fun = rule()
  loss = lambda f: lambda w, x: jnp.sum(f(w, x)[0] ** 2)
  try:
    half = jax.grad(loss(ols.autocast(fun)))(W, X[0])
  finally:
    _zeros._takes_zeros.cache_clear()
  assert_close(half, jax.grad(loss(fun))(W, X[0]))


@pytest.mark.slow
def test_a_checkpointed_loop_of_equinox_may_be_mapped():
  def loss(w, x):
    def steps(x):
      body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
      return eqxi.while_loop(
        lambda c: c[0] < 4,
        body,
        (0, x),
        kind="checkpointed",
        max_steps=4,
        checkpoints=2,
      )[1]

    return jnp.mean(jax.vmap(steps)(x) ** 2)

  if hijax.is_on("jax_custom_vjp3"):
    pytest.skip("With it, JAX cannot run anew what it has traced of this loop.")
  skip_if_jax_cannot(jax.grad(loss), W, X)
  full = jax.jit(jax.grad(loss))(W, X)
  assert_close(jax.jit(jax.grad(ols.autocast(loss)))(W, X), full)
