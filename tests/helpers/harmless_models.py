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


PROGRAMS = {}  # each makes a function and its arguments


def register_program(*args):
  """Adds a function of these arguments; or what returns both, without any."""

  def register(fun):
    PROGRAMS[fun.__name__] = (lambda: (fun, *args)) if args else fun
    return fun

  return register


def total(x):
  return jnp.sum(x.astype(jnp.float32))


@register_program(W)
@jax.value_and_grad
def plain(w):
  return total(jnp.tanh(X @ w))


@register_program(X)
@jax.value_and_grad
def masked_softmax(x):
  logits = jnp.where(CAUSAL, x.T @ x, -jnp.inf)
  return total(jax.nn.softmax(logits) ** 2)


@register_program(X)
def a_mask_too_large_for_float16(x):
  logits = x.T @ x + (1 - CAUSAL.astype(F16)) * -6e4 * 4
  return jax.nn.softmax(jnp.where(CAUSAL, logits, -jnp.inf))


@register_program(X)
def a_mask_of_logarithms(x):
  return jax.nn.softmax(x.T @ x + jnp.log(CAUSAL.astype(F16)))


@register_program(X, jnp.where(CAUSAL, 0, -jnp.inf).astype(F16))
def a_mask_among_the_arguments(x, mask):
  return jax.nn.softmax(x.T @ x + mask)


@register_program(X)
def where_that_is_not_taken(x):
  return jnp.where(x > 0, jnp.log(x), 0) + jnp.where(x > 9, 1 / (x - x), 1)


@register_program(X)
@jax.grad
def where_guarded_twice(x):
  safe = jnp.where(x > 0, x, 1)
  return total(jnp.where(x > 0, jnp.log(safe), 0))


@register_program(X)
def part_that_is_cut_off(x):
  return jnp.concatenate([jnp.exp(x * 20), x])[3:]


@register_program(jnp.ones(3, F16))
def scan_that_recovers(x):
  def body(x, i):
    x = jnp.where(i == 2, jnp.inf, x).astype(F16)
    return jnp.minimum(x, 10), 1 / x

  return lax.scan(body, x, jnp.arange(5))


@register_program(X)
@jax.jit
@jax.value_and_grad
def largest_of_a_window(x):
  return total(nn.max_pool(x[..., None], (2,)))


@register_program(X)
def only_an_integer_is_made_of_it(x):
  return jnp.argmax(jnp.exp(x * 20), axis=-1) * 1.5


@register_program()
def a_scale_that_fits():
  opt_state = ols.with_loss_scaling(optax.sgd(0.1), 64.0).init(W)
  loss_fn = lambda w, x: total(nn.softmax(x @ w) ** 2)
  return jax.jit(ols.value_and_grad(loss_fn, opt_state)), W, X


@register_program(jnp.arange(3))
def nothing_but_integers(x):
  return x + 1
