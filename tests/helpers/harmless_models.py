"""Programs that meet an inf or a NaN on the way to a finite result."""

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

F16 = jnp.float16
X = jnp.linspace(-2, 2, 12, dtype=F16).reshape(3, 4)
W = jnp.eye(4, dtype=F16)
CAUSAL = jnp.tril(jnp.ones((4, 4), bool))


def total(x):
  return jnp.sum(x.astype(jnp.float32))


def plain():
  return jax.value_and_grad(lambda w: total(jnp.tanh(X @ w))), W


def masked_softmax():
  def fun(x):
    logits = jnp.where(CAUSAL, x.T @ x, -jnp.inf)
    return total(jax.nn.softmax(logits) ** 2)

  return jax.value_and_grad(fun), X


def a_mask_too_large_for_float16():
  def fun(x):
    logits = x.T @ x + (1 - CAUSAL.astype(F16)) * -6e4 * 4
    return jax.nn.softmax(jnp.where(CAUSAL, logits, -jnp.inf))

  return fun, X


def a_mask_of_logarithms():
  def fun(x):
    return jax.nn.softmax(x.T @ x + jnp.log(CAUSAL.astype(F16)))

  return fun, X


def a_mask_among_the_arguments():
  mask = jnp.where(CAUSAL, 0, -jnp.inf).astype(F16)
  return (lambda x, mask: jax.nn.softmax(x.T @ x + mask)), X, mask


def where_that_is_not_taken():
  def fun(x):
    return jnp.where(x > 0, jnp.log(x), 0) + jnp.where(x > 9, 1 / (x - x), 1)

  return fun, X


def where_guarded_twice():
  def fun(x):
    safe = jnp.where(x > 0, x, 1)
    return total(jnp.where(x > 0, jnp.log(safe), 0))

  return jax.grad(fun), X


def part_that_is_cut_off():
  def fun(x):
    x = jnp.concatenate([jnp.exp(x * 20), x])
    return x[3:]

  return fun, X


def scan_that_recovers():
  def body(x, i):
    x = jnp.where(i == 2, jnp.inf, x).astype(F16)
    return jnp.minimum(x, 10), 1 / x

  return (lambda x: lax.scan(body, x, jnp.arange(5))), jnp.ones(3, F16)


def largest_of_a_window():
  def fun(x):
    return total(nn.max_pool(x[..., None], (2,)))

  return jax.jit(jax.value_and_grad(fun)), X


def only_an_integer_is_made_of_it():
  return (lambda x: jnp.argmax(jnp.exp(x * 20), axis=-1) * 1.5), X


def a_scale_that_fits():
  opt_state = ols.with_loss_scaling(optax.sgd(0.1), 64.0).init(W)
  loss_fn = lambda w, x: total(nn.softmax(x @ w) ** 2)
  return jax.jit(ols.value_and_grad(loss_fn, opt_state)), W, X


def nothing_but_integers():
  return (lambda x: x + 1), jnp.arange(3)


PROGRAMS = {
  fun.__name__: fun
  for fun in (
    plain,
    masked_softmax,
    a_mask_too_large_for_float16,
    a_mask_of_logarithms,
    a_mask_among_the_arguments,
    where_that_is_not_taken,
    where_guarded_twice,
    part_that_is_cut_off,
    scan_that_recovers,
    largest_of_a_window,
    only_an_integer_is_made_of_it,
    a_scale_that_fits,
    nothing_but_integers,
  )
}
