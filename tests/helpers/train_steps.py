"""Building blocks of training steps, around one matmul.

All steps have arrays of the same few shapes, so that a report compiles its own
programs once for all of them.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

PARAMS = {"w": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)}
TWO_LAYERS = {**PARAMS, "head": np.eye(4, dtype=np.float32)}
BATCH = np.cos(np.arange(32, dtype=np.float32)).reshape(8, 4)
ADAM = optax.adam(1e-2)
POLICY = ols.DynamicLossScale(2.0**6)
TX = ols.with_loss_scaling(optax.sgd(0.1), POLICY)


@ols.autocast
def loss_fn(params, batch):
  return jnp.mean((jnp.tanh(batch @ params["w"]) - 1) ** 2)


@ols.autocast
def linear_loss_fn(params, batch):
  """Return a loss of few operations, which a report measures in little time."""
  return jnp.mean(batch @ params["w"])


def two_layers_loss_fn(params, batch):
  """Return the loss of ``TWO_LAYERS``, which is not cast."""
  hidden = jnp.tanh(batch @ params["w"])
  return jnp.mean((hidden @ params["head"] - 1) ** 2)


def half_loss_fn(params, batch):
  """Return the same loss of a model in the dtype of its parameters."""
  hidden = jnp.tanh(batch.astype(params["w"].dtype) @ params["w"])
  return jnp.mean((hidden.astype(jnp.float32) - 1) ** 2)


def compute_grads(loss, params, opt_state):
  """Return the gradients as this package computes them."""
  return ols.grad(loss, opt_state)(params)


def compute_scaled_grads(loss, params, opt_state):
  """Return the gradients of the scaled loss."""
  return jax.grad(lambda p: ols.scale_loss(loss(p), opt_state))(params)


def compute_unscaled_grads(loss, params, opt_state):
  """Return the gradients of a loss that is not scaled: a mistake."""
  del opt_state
  return jax.grad(loss)(params)


def map_grads(change, differentiate=compute_grads):
  """Return a function that changes each gradient before ``update``."""
  return lambda *args: jax.tree.map(change, differentiate(*args))


def accumulate(differentiate):
  """Return a function that adds the gradients of two micro-batches."""

  def accumulated(loss, params, opt_state):
    def add(total, _):
      grads = differentiate(loss, params, opt_state)
      return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return lax.scan(add, zeros, length=2)[0]

  return accumulated


def where(condition, new, old):
  return jax.tree.map(functools.partial(jnp.where, condition), new, old)


def apply_updates(tx, grads, params, opt_state, **kwargs):
  """Return the new parameters and the new state of the optimizer."""
  updates, opt_state = tx.update(grads, opt_state, params, **kwargs)
  return optax.apply_updates(params, updates), opt_state


def make_tx(inner=None, policy=POLICY, **kwargs):
  """Return an optimizer with loss scaling, by default SGD."""
  return ols.with_loss_scaling(inner or optax.sgd(0.1), policy, **kwargs)


def make_step(
  differentiate: Callable[..., Any] = compute_grads,
  make_result: Callable[..., Any] = lambda old, new: new,
  *,
  update: Callable[..., Any] = apply_updates,
  loss_fn: Callable[..., Any] = loss_fn,
  tx: Any = TX,
  params: Any = PARAMS,
  batch: Any = BATCH,
  extra: tuple[Any, ...] = (),
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Return a training step, and the arguments of a call.

  Args:
    differentiate: computes the gradients, from the loss as a function of the
      parameters, the parameters, and the state of the optimizer.
    make_result: computes the result from the old parameters and state, the new
      ones, and `extra`.
    update: returns the new parameters and state, as ``apply_updates`` does.
    loss_fn: the loss of the parameters and a batch.
    tx: the optimizer.
    params: the parameters.
    batch: the batch.
    extra: further arguments of the step, for `make_result`.
  """

  @jax.jit
  def step(params, opt_state, batch, *extra):
    loss = lambda params: loss_fn(params, batch)
    grads = differentiate(loss, params, opt_state)
    new = update(tx, grads, params, opt_state)
    return make_result((params, opt_state), new, *extra)

  return step, (params, tx.init(params), batch, *extra)


def prepare_step(*args, **kwargs):
  """Return a function that calls ``make_step`` with these arguments."""
  return functools.partial(make_step, *args, **kwargs)


def prepare_result(make_result, **kwargs):
  """Return a function that makes a step with another result."""
  return prepare_step(make_result=make_result, **kwargs)


def prepare_wrapped(wrap, make=make_step):
  """Return a function that makes a step and transforms it."""

  def make_wrapped():
    step, args = make()
    return wrap(step), args

  return make_wrapped


def select_result(select):
  """Return an ``update`` that chooses between what is new and what is old.

  Args:
    select: a function of whether the gradients are finite, and of the pairs of
      the new and of the old parameters and state.
  """

  def update(tx, grads, *old):
    new = apply_updates(tx, grads, *old)
    return select(ols.all_finite(grads), new, old)

  return update


prepare_two_layers = functools.partial(
  prepare_step, params=TWO_LAYERS, loss_fn=ols.autocast(two_layers_loss_fn)
)


def train(params, opt_state, batch, scale_state=None, tx=TX):
  """Return the new parameters and the new state after a step on a batch."""
  scale_state = opt_state if scale_state is None else scale_state
  grads = ols.grad(loss_fn, scale_state)(params, batch)
  return apply_updates(tx, grads, params, opt_state)


def jit_step(step, *args, tx=TX):
  """Return a jitted step, and its arguments: ``args`` before the batch."""
  return jax.jit(step), (PARAMS, tx.init(PARAMS), *args, BATCH)


def scan_steps(step, combine=lambda old, new: new):
  """Return an epoch of three steps on one batch."""

  def epoch(params, opt_state, batch):
    def body(carry, _):
      return combine(carry, step(*carry, batch)), None

    return lax.scan(body, (params, opt_state), length=3)[0]

  return jax.jit(epoch)


def make_population(step, args):
  """Return a step of two members, each with its loss scale."""
  *trained, batch = args
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), trained)
  return jax.jit(jax.vmap(step, (0, 0, None))), (*stacked, batch)
