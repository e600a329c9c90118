"""Steps with models of several layers, and with other dtypes.

Losses of one matmul are in ``helpers.usual_losses``.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.train_steps import (
  ADAM,
  BATCH,
  half_loss_fn,
  loss_fn,
  make_step,
  make_tx,
  PARAMS,
  prepare_step,
  prepare_two_layers,
  two_layers_loss_fn,
)
import optax_lossscale as ols

ADAM_TX = make_tx(ADAM)
_NUMBERS = np.random.default_rng(0)


def _normal(*shape, scale=0.5):
  return np.asarray(scale * _NUMBERS.normal(size=shape), np.float32)


@ols.keep_float32
def _route(weights, x):
  return jax.nn.softmax(x @ weights)


def _mix_experts(params, x):
  """The router stays in float32, and balances the load of the experts."""
  probs = _route(params["router"], x)
  gates, chosen = lax.top_k(probs, 2)
  hidden = jax.nn.gelu(jnp.einsum("bi,eij->bej", x, params["up"]))
  outputs = jnp.einsum("bej,ejk->bek", hidden, params["down"])
  picked = jnp.take_along_axis(outputs, chosen[..., None], 1)
  load = jnp.mean(jax.nn.one_hot(chosen[:, 0], 4), 0)
  balance = 4 * jnp.sum(load * jnp.mean(probs, 0))
  outputs = jnp.sum(gates[..., None] * picked, 1)
  return jnp.mean((outputs - 1) ** 2) + 0.01 * balance


def _elementwise_loss_fn(params, x):
  """A model without a matmul, in float16 by hand."""
  half_params, x = optax.tree.cast((params, x), jnp.float16)
  out = jnp.tanh(x * half_params["scale"] + half_params["shift"])
  return jnp.mean((out.astype(jnp.float32) - 1) ** 2)


def _penalized_critic_loss_fn(params, real):
  """The critic of a WGAN, whose loss contains a gradient."""

  def critic(params, x):
    return jnp.sum(jax.nn.softplus(x @ params["hidden"]) @ params["out"])

  slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, real)
  norms = jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12)
  distance = critic(params, 0.5 + real[::-1] ** 2) - critic(params, real)
  return distance / len(real) + jnp.mean((norms - 1) ** 2)


def _printing_loss_fn(params, batch):
  loss = jnp.mean((batch @ params["w"]) ** 2)
  jax.debug.print("loss {}", loss)
  return loss


def _ratio_loss_fn(params, batch):
  """The first step of GRPO: the value of each ratio is one."""
  log_probs = jax.nn.log_softmax(batch @ params["w"])
  ratio = jnp.exp(log_probs - lax.stop_gradient(log_probs))
  return -jnp.mean(ratio * batch)


def _anchored_loss_fn(params, batch):
  """A penalty pulls towards old parameters, as elastic weights do."""
  penalty = jnp.sum((params["w"] - PARAMS["w"]) ** 2)
  return jnp.mean((batch @ params["w"]) ** 2) + 1e-2 * penalty


def _prepare_loss(loss_fn, **kwargs):
  return prepare_step(loss_fn=ols.autocast(loss_fn), tx=ADAM_TX, **kwargs)


def _mixed_loss_fn(params, batch):
  """The bias is in float32, and the matrix is not."""
  bias = params["bias"].astype(jnp.float16)
  hidden = batch.astype(jnp.float16) @ params["w"] + bias
  return jnp.mean((hidden.astype(jnp.float32) - 1) ** 2)


def _make_x64_step():
  """Float32 parameters and inputs where JAX's default is float64."""
  mean = jnp.mean(jnp.asarray(BATCH, jnp.float64), 0)
  return make_step(tx=ADAM_TX, batch=(BATCH - mean).astype(jnp.float32))


def _compute_half_grads(loss, master_params, opt_state):
  half_params = optax.tree.cast(master_params, jnp.float16)
  return ols.grad(loss, opt_state)(half_params)


HALF_PARAMS = {"w": PARAMS["w"].astype(np.float16)}

STEPS = {
  "mixture of experts": _prepare_loss(
    _mix_experts,
    params={
      "router": _normal(4, 4),
      "up": _normal(4, 4, 4),
      "down": _normal(4, 4, 4),
    },
  ),
  "elementwise": prepare_step(
    loss_fn=_elementwise_loss_fn,
    tx=ADAM_TX,
    params={"scale": np.ones(4, np.float32), "shift": np.zeros(4, np.float32)},
  ),
  "gradient penalty": _prepare_loss(
    _penalized_critic_loss_fn,
    params={"hidden": _normal(4, 8), "out": _normal(8, 1)},
  ),
  "print in the loss": _prepare_loss(_printing_loss_fn),
  # Losses whose value says nothing of the parameters.
  "ratio to itself": _prepare_loss(_ratio_loss_fn),
  "anchored": _prepare_loss(_anchored_loss_fn),
  # The optimizer runs outside of ``jit``.
  "jitted loss": lambda: (
    (made := make_step(loss_fn=jax.jit(loss_fn)))[0].__wrapped__,
    made[1],
  ),
  "x64": _make_x64_step,
  "float16 params": prepare_step(
    loss_fn=half_loss_fn, tx=ADAM_TX, params=HALF_PARAMS
  ),
  "mixed params": prepare_step(
    loss_fn=_mixed_loss_fn,
    tx=ADAM_TX,
    params={**HALF_PARAMS, "bias": np.zeros(4, np.float32)},
  ),
  "bfloat16 params": prepare_step(
    loss_fn=half_loss_fn,
    params=optax.tree.cast(PARAMS, jnp.bfloat16),
    tx=make_tx(policy=1.0),
  ),
  # A fixed scale of 1 only skips.
  "bfloat16": prepare_two_layers(
    loss_fn=ols.autocast(two_layers_loss_fn, jnp.bfloat16),
    tx=make_tx(ADAM, 1.0),
  ),
  "float32 layer": prepare_two_layers(
    loss_fn=ols.autocast(two_layers_loss_fn, keep_float32="head")
  ),
  # Float16 gradients of float16 copies; updates of the copies in float32.
  "float32 master copies": prepare_step(
    _compute_half_grads, loss_fn=half_loss_fn, tx=ADAM_TX
  ),
}
