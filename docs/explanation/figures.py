"""Draw the figures of how_loss_scaling_works.md: a network that reads digits.

The network was trained in float32 for 60 steps. It acts as one of 1,024
workers, so its loss is divided by 1,024. The gradients of ``offsets``, which
are zeros added to the activations, are the gradients of the activations.
"""

import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_lossscale as ols
from optax_lossscale import plots

WORKERS = 1024
SIZES = (64, 128, 128, 10)

digits = load_digits()
images, labels = jnp.float32(digits.data / 16), jnp.asarray(digits.target)
offsets = [jnp.zeros((len(images), n)) for n in SIZES[1:]]


def init_params(key):
  keys = jax.random.split(key, len(SIZES) - 1)
  return [
    (jax.random.normal(key, (m, n)) * np.sqrt(2 / m), jnp.zeros(n))
    for key, m, n in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
  ]


def loss_fn(params, offsets, dtype):
  """Compute the loss of one worker, with the network in dtype."""
  params, offsets, x = jax.tree.map(
    lambda x: x.astype(dtype), (params, offsets, images)
  )
  layers = zip(params, offsets, strict=True)
  for layer, ((weight, bias), offset) in enumerate(layers):
    x = jax.nn.relu(x) if layer > 0 else x
    x = x @ weight + bias + offset
  losses = optax.softmax_cross_entropy_with_integer_labels(
    x.astype(jnp.float32), labels
  )
  return losses.mean() / WORKERS


def train(tx, dtype, steps):
  """Return the params after some steps, and the metrics of each step."""

  def step(carry, _):
    params, opt_state = carry
    grads = ols.grad(loss_fn, opt_state)(params, offsets, dtype)
    updates, opt_state = tx.update(grads, opt_state, params)
    carry = optax.apply_updates(params, updates), opt_state
    return carry, ols.loss_scale_metrics(opt_state)

  params = init_params(jax.random.key(0))
  carry = params, tx.init(params)
  (params, _), history = jax.jit(
    lambda carry: jax.lax.scan(step, carry, length=steps)
  )(carry)
  return params, history


@functools.cache
def float32_params():
  tx = ols.with_loss_scaling(optax.adam(1e-3), 1.0)
  return train(tx, jnp.float32, 60)[0]


@functools.partial(jax.jit, static_argnames="dtype")
def gradients_of(params, scale_state, dtype):
  args = params, [x.astype(dtype) for x in offsets], dtype
  return ols.grad(loss_fn, scale_state, argnums=(0, 1))(*args)


def gradients(dtype, loss_scale=1.0):
  """Return the gradients of weights and biases, and of the activations."""
  scale_state = ols.FixedLossScale(loss_scale).init()
  return gradients_of(float32_params(), scale_state, dtype)


def draw_gradients():
  _, activations = gradients(jnp.float32)
  axes = plots.plot_exponents(activations)
  axes.set_title("Gradients of the activations")
  histogram = plots.exponent_histogram(activations)
  is_lost = histogram.exponents < -25  # half of the smallest number of float16
  lost = histogram.counts[is_lost].sum() / histogram.counts.sum()
  print(f"{lost:.0%} of the non-zero gradients are zero in float16.")
  assert lost > 0.5


def draw_scaled_gradients():
  _, activations = gradients(jnp.float32)
  _, rows = plt.subplots(2, figsize=(8, 6), layout="constrained", sharex=True)
  for axes, log2_scale in zip(rows, (15, 40), strict=True):
    plots.plot_exponents(activations, loss_scale=2.0**log2_scale, ax=axes)
    axes.set_title(f"loss scale 2**{log2_scale}")


def flatten(tree):
  return np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])


def flatten_weights(grads):
  return flatten([weight for weight, _ in grads])


def draw_errors():
  """Draw underflow and error in float16 over the loss scale."""
  weights, activations = gradients(jnp.float32)
  expected = flatten_weights(weights)
  is_nonzero = flatten(activations) != 0
  log2_scales = np.arange(0, 45)
  errors, underflow = [], []
  for log2_scale in log2_scales:
    weights, activations = gradients(jnp.float16, 2.0 ** float(log2_scale))
    error = np.linalg.norm(flatten_weights(weights) - expected)
    errors.append(error / np.linalg.norm(expected))
    underflow.append(np.mean(flatten(activations)[is_nonzero] == 0))
  draw_over_scales(log2_scales, np.array(errors), np.array(underflow))


def draw_over_scales(log2_scales, errors, underflow):
  is_finite = np.isfinite(errors)
  last_finite = log2_scales[is_finite].max()
  _, (top, bottom) = plt.subplots(
    2, figsize=(8, 5), layout="constrained", sharex=True
  )
  top.plot(log2_scales, 100 * underflow, "o-", markersize=4)
  top.set(ylabel="% underflow", title="Gradients in float16")
  bottom.plot(log2_scales[is_finite], errors[is_finite], "o-", markersize=4)
  bottom.set(
    yscale="log",
    xlabel="binary logarithm of the loss scale",
    ylabel="relative error",
  )
  for axes in (top, bottom):
    axes.axvspan(last_finite + 0.5, 44.5, color="tab:red", alpha=0.15)
    axes.grid(alpha=0.3)
  bottom.text(
    (last_finite + 45) / 2,
    0.5,
    "overflow",
    ha="center",
    transform=bottom.get_xaxis_transform(),
  )
  best = errors[is_finite].min()
  good = log2_scales[is_finite][errors[is_finite] < 1.1 * best]
  print(f"relative error without scaling: {errors[0]:.3f}, at best: {best:.3f}")
  print(f"within 10% of the best: from 2**{good.min()} to 2**{good.max()}")
  assert errors[0] > 10 * best and good.max() - good.min() > 8


def draw_a_dynamic_scale():
  policy = ols.DynamicLossScale(init_scale=2.0**40, growth_interval=20)
  tx = ols.with_loss_scaling(optax.adam(1e-3), policy)
  _, history = train(tx, jnp.float16, 200)
  axes = plots.plot_loss_scale(history)
  axes.set_title("DynamicLossScale")
  skipped = int(history["total_notfinite"][-1])
  print(f"{skipped} of 200 steps skipped")
  assert 0 < skipped < 30
