"""Mistakes in how gradients are scaled, unscaled and changed."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import optax

from helpers.train_steps import (
  accumulate,
  apply_updates,
  BATCH,
  compute_grads,
  compute_scaled_grads,
  compute_unscaled_grads,
  jit_step,
  loss_fn,
  make_tx,
  map_grads,
  PARAMS,
  prepare_step,
  prepare_two_layers,
  prepare_wrapped,
  scan_steps,
  TWO_LAYERS,
  TX,
  where,
)
import optax_lossscale as ols

_DEFAULT_TX = make_tx(policy="dynamic")
_NUMBERS = np.random.default_rng(0)
_FIRST_PARAMS = {"w": jnp.eye(4)}


def _add_grads(change, other, *, unscaled=False):
  """Return a function that adds other gradients to those of a scaled loss."""

  def differentiate(loss, params, opt_state):
    first = (compute_scaled_grads if unscaled else compute_grads)(
      loss, params, opt_state
    )
    second = other(loss, params, opt_state)
    total = jax.tree.map(lambda a, b: a + change * b, first, second)
    return ols.unscale_grads(total, opt_state) if unscaled else total

  return differentiate


def _penalty(params):
  return 1e-2 * jnp.sum(params["w"] ** 2)


def _penalty_grads(loss, params, opt_state):
  return jax.grad(_penalty)(params)


def _change_scaled_loss(change):
  """Return a function that differentiates what a scaled loss is changed to."""

  def differentiate(loss, params, opt_state):
    scaled = lambda p: change(ols.scale_loss(loss(p), opt_state), p)
    return ols.unscale_grads(jax.grad(scaled)(params), opt_state)

  return differentiate


def unscale_twice(loss, params, opt_state):
  grads = compute_grads(loss, params, opt_state)
  return ols.unscale_grads(grads, opt_state)


def _accumulate_in_while_loop(differentiate):
  """Accumulate in a loop whose number of iterations is not known."""

  def accumulated(loss, params, opt_state):
    def add(_, total):
      grads = differentiate(loss, params, opt_state)
      return jax.tree.map(jnp.add, total, grads)

    zeros = jax.tree.map(jnp.zeros_like, params)
    count = jnp.where(params["w"][0, 0] > -9e9, 3, 2)
    return lax.fori_loop(0, count, add, zeros)

  return accumulated


def _sharpness_aware(differentiate_second):
  def differentiate(loss, params, opt_state):
    grads = compute_grads(loss, params, opt_state)
    moved = jax.tree.map(lambda p, g: p + 0.05 * g, params, grads)
    return differentiate_second(loss, moved, opt_state)

  return differentiate


def _scaled_by_hand(loss, params, opt_state):
  """Without a tag on the gradients."""
  scale = ols.get_loss_scale_state(opt_state).loss_scale
  grads = jax.grad(lambda params: scale * loss(params))(params)
  return jax.tree.map(lambda g: g / scale, grads)


def _penalized_gradient(loss, params, opt_state):
  """A gradient of a gradient, each of a scaled loss."""

  def penalized(params):
    norm = optax.tree.norm(compute_grads(loss, params, opt_state))
    return loss(params) + 1e-3 * norm

  return compute_grads(penalized, params, opt_state)


def _retry_with_lower_scale(loss, params, opt_state):
  grads = compute_grads(loss, params, opt_state)
  scale = opt_state.loss_scale_state.loss_scale
  lower = ols.set_loss_scale(opt_state, scale / 2**8)
  others = compute_grads(loss, params, lower)
  return where(ols.all_finite(grads), grads, others)


def _compress(g):
  """Return a gradient as int8 with a separate scale."""
  unit = jnp.max(jnp.abs(g)) / 127
  return jnp.round(g / unit).astype(jnp.int8) * unit


def _clip_by_norm(*args):
  grads = compute_grads(*args)
  norm = optax.tree.norm(grads)
  return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)


def _unscaled_head(loss, params, opt_state):
  """One of two layers is differentiated without a loss scale."""
  loss_of = lambda name: lambda x: loss({**params, name: x})
  first = compute_grads(loss_of("w"), params["w"], opt_state)
  return {"w": first, "head": jax.grad(loss_of("head"))(params["head"])}


def make_closed_step(policy, differentiate=compute_grads):
  """The state of the optimizer is not an argument."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), policy)
  state = tx.init(PARAMS)

  def step(params, batch):
    grads = differentiate(lambda p: loss_fn(p, batch), params, state)
    return apply_updates(tx, grads, params, state)

  return step, (PARAMS, BATCH)


def guarded(is_wanted):
  """Return a function that makes a step with a branch around ``update``."""

  def update(tx, grads, *old):
    apply = lambda: apply_updates(tx, grads, *old)
    return lax.cond(is_wanted(grads), apply, lambda: old)

  return prepare_step(update=update)


@ols.autocast
def _frozen_loss_fn(params, batch):
  hidden = batch @ params["w"] + 1e30 * params["frozen"]
  return jnp.mean(hidden**2)


def _ignore_frozen(loss, params, state):
  """The gradient of the frozen part overflows, and is not used."""
  params = params | {"frozen": jnp.zeros(4)}
  return {"w": compute_grads(loss, params, state)["w"]}


class _Hyperparameters(NamedTuple):
  loss_scale: Any


def _make_weighted_step():
  """An argument called ``loss_scale`` is the weight of the loss."""

  def step(params, state, hyperparameters, batch):
    weighted = lambda p: hyperparameters.loss_scale * loss_fn(p, batch)
    grads = compute_grads(weighted, params, state)
    return apply_updates(TX, grads, params, state)

  return jit_step(step, _Hyperparameters(jnp.float32(0.5)))


def _draw_batch(loss, params, state):
  """Each run of the step has another batch, from the host."""
  draw = lambda: _NUMBERS.normal(size=BATCH.shape).astype(np.float32)
  shape = jax.ShapeDtypeStruct(BATCH.shape, jnp.float32)
  batch = io_callback(draw, shape, ordered=True)
  return ols.grad(loss_fn, state)(params, batch)


def _make_update_step():
  """The gradients are arguments of the step."""
  step = lambda grads, state: TX.update(grads, state)
  return step, (PARAMS, TX.init(PARAMS))


_WRITE = "ols.value_and_grad(loss_fn, opt_state)"
_NOT_TAKEN = "they are in a branch that was not taken"

# The steps with each mistake, by a part of its cause and of its fix.
MISTAKES = {
  ("gradients of an unscaled loss", _WRITE): {
    "unscaled loss": prepare_step(compute_unscaled_grads),
    "unscaled loss with scaled gradients expected": prepare_step(
      compute_unscaled_grads, tx=make_tx(grads_are_scaled=True)
    ),
    "unscaled losses of micro-batches": prepare_step(
      accumulate(compute_unscaled_grads)
    ),
    "unscaled loss with a constant state": functools.partial(
      make_closed_step, ols.DynamicLossScale(2.0**6), compute_unscaled_grads
    ),
    "unscaled losses in a while loop": prepare_step(
      _accumulate_in_while_loop(compute_unscaled_grads)
    ),
  },
  ("gradients of an unscaled loss (head)", _WRITE): {
    "unscaled loss of one layer": prepare_two_layers(_unscaled_head)
  },
  ("never unscaled", "ols.unscale_grads(grads"): {
    "never unscaled": prepare_step(compute_scaled_grads)
  },
  ("double if the loss scale halves", "Drop unscale_grads"): {
    "unscaled twice": prepare_step(unscale_twice),
    "loss over itself": prepare_step(
      _change_scaled_loss(lambda loss, _: loss / lax.stop_gradient(loss))
    ),
  },
  ("clipped while they were scaled", "Clip inside of with_loss_scaling"): {
    "clipped while scaled": prepare_step(
      compute_scaled_grads,
      tx=optax.chain(
        optax.clip_by_global_norm(1e-3), make_tx(grads_are_scaled=True)
      ),
    )
  },
  ("cast to half precision after they were unscaled", "float32"): {
    "cast to float16 after unscaling": prepare_step(
      map_grads(lambda g: g.astype(jnp.float16))
    )
  },
  # At the default scale such a term is 2**15 times too small, so that half of
  # the scale changes little.
  ("depend on the loss scale", "Change them after"): {
    "penalty after scaling": prepare_step(
      _change_scaled_loss(lambda loss, params: loss + _penalty(params)),
      tx=_DEFAULT_TX,
    ),
    "penalty before unscaling": prepare_step(
      _add_grads(1, _penalty_grads, unscaled=True), tx=_DEFAULT_TX
    ),
  },
  (
    "An overflow is hidden from update",
    "Pass the gradients to update unchanged",
  ): {
    "nan_to_num": prepare_step(map_grads(jnp.nan_to_num)),
    "nan_to_num of micro-batches": prepare_step(
      accumulate(map_grads(jnp.nan_to_num))
    ),
    "mask of finite gradients": prepare_step(
      map_grads(lambda g: jnp.where(jnp.isfinite(g), g, 0))
    ),
    "mask of small gradients": prepare_step(
      map_grads(lambda g: jnp.where(jnp.abs(g) < 1e3, g, 0))
    ),
    # This makes an inf finite, but not a NaN.
    "clipped gradients": prepare_step(
      map_grads(lambda g: jnp.clip(g, -1, 1)), batch=BATCH**2
    ),
    "zero_nans and clip": prepare_step(
      tx=optax.chain(optax.zero_nans(), optax.clip(1.0), TX)
    ),
  },
  (
    "update does not run if the gradients overflow",
    "Call update outside of the branch",
  ): {
    "branch on finite gradients": guarded(ols.all_finite),
    "branch on a small norm": guarded(
      lambda grads: optax.tree.norm(grads) < 1e6
    ),
    "apply_if_finite": prepare_step(tx=optax.apply_if_finite(TX, 5)),
  },
  ("skips this step although its gradients are finite", "grads_finite="): {
    "skipped by an argument": prepare_step(
      update=functools.partial(apply_updates, grads_finite=False)
    ),
    "skipped by an argument of float32": prepare_step(
      update=functools.partial(apply_updates, grads_finite=np.float32(0))
    ),
  },
  ("something cuts off the scaled loss", "Don't clip the scaled loss"): {
    # At the largest number of float16.
    "clamped loss": prepare_step(
      _change_scaled_loss(lambda loss, _: jnp.minimum(loss, 65_504.0)),
      tx=make_tx(policy=2.0**20),
    )
  },
  ("The loss does not depend on the parameters", "don't close over others"): {
    "loss over the first parameters": prepare_step(
      lambda loss, params, state: compute_grads(loss, _FIRST_PARAMS, state)
    ),
    "loss over the first parameters in a scan": prepare_wrapped(
      scan_steps,
      prepare_step(
        lambda loss, params, state: compute_grads(loss, _FIRST_PARAMS, state)
      ),
    ),
    "loss over the first head": prepare_two_layers(
      lambda loss, params, state: compute_grads(
        loss, params | {"head": TWO_LAYERS["head"]}, state
      )
    ),
  },
}


def _make_accumulating_step():
  """Scaled gradients are added up over several calls, as in PyTorch."""
  tx = make_tx(grads_are_scaled=True)

  def step(params, state, total, batch):
    loss = lambda params: loss_fn(params, batch)
    grads = compute_scaled_grads(loss, params, state)
    total = jax.tree.map(jnp.add, total, grads)
    params, state = apply_updates(tx, total, params, state)
    return params, state, optax.tree.zeros_like(total)

  state = tx.init(PARAMS)
  loss = lambda params: loss_fn(params, 1.1 * BATCH)
  total = compute_scaled_grads(loss, PARAMS, state)
  return step, (PARAMS, state, total, BATCH)


LOOKALIKES = {
  "cast to float16 of scaled gradients": prepare_step(
    map_grads(lambda g: g.astype(jnp.float16), compute_scaled_grads),
    tx=make_tx(grads_are_scaled=True),
  ),
  "two scaled losses and a penalty": prepare_step(
    _add_grads(0.5, _add_grads(1, _penalty_grads))
  ),
  "scaled by hand": prepare_step(_scaled_by_hand),
  "sharpness-aware": prepare_step(_sharpness_aware(compute_grads)),
  "sharpness-aware by hand": prepare_step(_sharpness_aware(_scaled_by_hand)),
  "gradient of a gradient": prepare_step(_penalized_gradient),
  "clipped by norm": prepare_step(_clip_by_norm),
  "compressed gradients": prepare_step(map_grads(_compress)),
  "other names of checkpoints": prepare_step(
    map_grads(lambda g: jax.ad_checkpoint.checkpoint_name(g, "mine"))
  ),
  "micro-batches in a while loop": prepare_step(
    _accumulate_in_while_loop(compute_grads)
  ),
  "retry with a lower scale": prepare_step(_retry_with_lower_scale),
  "frozen part that overflows": prepare_step(
    _ignore_frozen, loss_fn=_frozen_loss_fn
  ),
  "float32 gradients without a scale": prepare_step(
    compute_unscaled_grads,
    loss_fn=lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2),
  ),
  "float32 gradients that never overflow": prepare_step(
    loss_fn=lambda params, x: jnp.mean((x @ params["w"]) ** 2)
  ),
  "batches from a callback": prepare_step(_draw_batch),
  "argument called loss_scale": _make_weighted_step,
  "sum of scaled gradients of earlier calls": _make_accumulating_step,
}

UNCHECKED = {
  "gradients as arguments": (_make_update_step, "how the loss is scaled"),
  "scale by hand": (
    prepare_step(
      lambda loss, params, _: jax.grad(lambda p: 1024.0 * loss(p))(params),
      tx=make_tx(policy=1024.0, grads_are_scaled=True),
    ),
    "how the loss is scaled",
  ),
  "branch on gradients that overflow": (
    guarded(lambda grads: ~ols.all_finite(grads)),
    _NOT_TAKEN,
  ),
  "branch that is never taken": (
    guarded(lambda grads: jnp.array(0)),
    _NOT_TAKEN,
  ),
}
