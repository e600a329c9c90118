"""Probes: histograms of cotangents in the backward pass.

A probe is an identity with a ``custom_vjp``: its backward pass returns the
cotangent unchanged, and counts its entries in 43 bins by exponent. The counts
are returned as the gradient of an additional argument, the counter. So they
pass through ``scan``, ``vmap`` and ``shard_map`` like any gradient, and are
added up.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._jaxprs import _primitives

# The bins: one for numbers that float16 rounds to zero; one for each float16
# binade in ascending order, of which the first ten are subnormal; one for
# finite numbers above the range of float16; and one for inf and NaN.
_MIN_EXPONENT, _MAX_EXPONENT = -24, 15
OVERFLOW_BIN = 1 + _MAX_EXPONENT - _MIN_EXPONENT + 1
NONFINITE_BIN = OVERFLOW_BIN + 1
NUM_BINS = NONFINITE_BIN + 1


def probe(x: jax.Array, counter: jax.Array) -> jax.Array:
  """Returns ``x``, and counts its cotangent by size in the backward pass.

  Overflow and underflow begin within the backward pass, where the cotangents of
  float16 activations are computed. The gradients of the parameters do not show
  either, since they are sums over batch and sequence, often in float32. A probe
  returns ``x`` unchanged. In the backward pass it counts how many numbers of
  the cotangent, with the loss scale in it, lie in each binade. The counts are
  returned as the gradient of ``counter``, so differentiate with respect to the
  counters as well. Give the counts to :func:`probe_update_kwargs`, for
  ``update``, and to :func:`probe_metrics`, for the log.

  If a counter is used more than once, autodiff adds up its gradients, and so
  the counts. One counter may therefore serve many probes, all layers of a
  ``scan``, or all members of a ``vmap``. If each of them should have its own,
  map over an array of counters.

  A probe works under ``jit``, ``scan``, ``vmap``, ``jax.checkpoint``,
  ``shard_map``, sharded ``jit`` and ``jax.export``, with symbolic shapes as
  well. It costs nothing if its counter is not differentiated. Forward-mode
  differentiation does not work.

  Args:
    x: a float or complex array, usually float16. In other dtypes, numbers that
      float16 rounds to zero are counted as zero, and numbers above its range
      are counted as too large.
    counter: the array from :func:`probe_counters` whose gradient the counts
      are. Its value has no meaning.

  Returns:
    ``x``.

  Raises:
    TypeError: if the dtype of ``x`` is not float or complex, or ``counter`` is
      not float32.
    ValueError: if ``counter`` is of the wrong shape.

  Examples:
    >>> import jax, optax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, counter, x):
    ...   y = diagnostics.probe(w.astype(jnp.float16) * x, counter)
    ...   return jnp.mean(y.astype(jnp.float32) ** 2)
    >>> tx = ols.with_loss_scaling(optax.sgd(0.5), ols.HeadroomLossScale())
    >>> w, counter = jnp.array([0.5, 0.0]), diagnostics.probe_counters()
    >>> opt_state = tx.init(w)
    >>> loss, (grad, counts) = ols.value_and_grad(
    ...   loss_fn, opt_state, argnums=(0, 1)
    ... )(w, counter, jnp.array([1.0, 0.5], jnp.float16))
    >>> kwargs = diagnostics.probe_update_kwargs(counts, opt_state)
    >>> updates, opt_state = tx.update(grad, opt_state, w, **kwargs)
    >>> metrics = diagnostics.probe_metrics(counts)
    >>> {name: x.item() for name, x in sorted(metrics.items())}
    {'amax': 32752.0, 'near_overflow_fraction': 0.5, 'nonfinite_fraction': 0.0,
     'zero_fraction': 0.5}
  """
  if not _arrays.is_array_like(x) or not _arrays.is_inexact(x):
    raise TypeError(f"x must be a float or complex array, got x = {x!r}.")
  _check_counters("counter", counter)
  if jnp.ndim(counter) != 1:
    raise ValueError(
      f"counter must be of shape ({NUM_BINS},), got shape {jnp.shape(counter)}."
      " Pass one counter to each probe; scan and vmap split an array of"
      " counters."
    )
  x, counter = jnp.asarray(x), jnp.asarray(counter)
  # Under shard_map all devices may share a counter. The transpose of this cast
  # is a sum over the devices, so the counter contains the counts of all of
  # them.
  x_axes, counter_axes = (
    _primitives.get_varying_axes(x),
    _primitives.get_varying_axes(counter),
  )
  counter = _primitives.cast_to_varying(counter, tuple(x_axes - counter_axes))
  return _probe(tuple(counter_axes - x_axes), x, counter)


def probe_counters(shape: int | Sequence[int] = ()) -> jax.Array:
  """Returns counters for :func:`probe`: float32 zeros, shape ``(*shape, 43)``.

  Args:
    shape: the shape of an array of counters, such as the number of layers of a
      ``scan``; by default that of a single counter.

  Returns:
    The counters. Pass them to the loss function, and differentiate with respect
    to them.

  Examples:
    >>> from optax_lossscale import diagnostics
    >>> print(diagnostics.probe_counters(12).shape)
    (12, 43)
  """
  shape = (shape,) if isinstance(shape, int) else shape
  return jnp.zeros((*shape, NUM_BINS), jnp.float32)


def probe_metrics(counts: Any) -> Any:
  """Returns metrics of the counts of probes, for the log.

  :func:`~optax_lossscale.value_and_grad` divides all gradients by the loss
  scale, and so the counts as well. This does not matter here, since only their
  ratios are used.

  Args:
    counts: the gradient of a counter, of an array of counters, or a pytree of
      them.

  Returns:
    For each array a dict of float32 arrays, of shape ``()`` for a single
    counter, or else of the shape that was passed to :func:`probe_counters`:

    * ``amax``: the top of the binade that holds the largest finite
      magnitude, with the loss scale in it. It is at most 65504, or 65536 for
      all numbers that are larger.
    * ``zero_fraction``: the fraction of zeros, underflowed or not.
    * ``near_overflow_fraction``: the fraction in the three highest binades, or
      above them.
    * ``nonfinite_fraction``: the fraction of inf and NaN.

    All fractions are 0 if nothing was counted.

  Raises:
    TypeError: if an array is not float32.
    ValueError: if one is of the wrong shape.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> x = jnp.array([2.0, 0.0, 1e5], jnp.float32)
    >>> loss_fn = lambda counter: jnp.sum(x * diagnostics.probe(x, counter))
    >>> counts = jax.grad(loss_fn)(diagnostics.probe_counters())
    >>> metrics = diagnostics.probe_metrics(counts)
    >>> print(metrics["amax"], f"{metrics['zero_fraction']:.2f}")
    65536.0 0.33
  """
  _check_counters("counts", counts)

  def compute_metrics(bin_counts: jax.Array) -> dict[str, jax.Array]:
    total = jnp.maximum(jnp.sum(bin_counts, axis=-1), jnp.float32(2**-126))
    high_bins = bin_counts[..., OVERFLOW_BIN - 3 : NONFINITE_BIN]
    return {
      "amax": estimate_finite_amax(bin_counts),
      "zero_fraction": bin_counts[..., 0] / total,
      "near_overflow_fraction": jnp.sum(high_bins, axis=-1) / total,
      "nonfinite_fraction": bin_counts[..., NONFINITE_BIN] / total,
    }

  return jax.tree.map(compute_metrics, counts)


def probe_update_kwargs(counts: Any, state: Any) -> dict[str, jax.Array]:
  """Returns arguments of ``update`` computed from the counts of probes.

  If a probe counted an inf or a NaN, the backward pass overflowed, and the step
  is skipped, even if all gradients are finite. The largest number that a probe
  counted matters to the policy as if it were a gradient.

  Args:
    counts: the gradient of a counter, of an array of counters, or a pytree of
      them, as :func:`~optax_lossscale.value_and_grad` returns them.
    state: the state that scaled the loss, before ``update``: a
      :class:`~optax_lossscale.LossScaleState`, or any pytree that holds exactly
      one.

  Returns:
    A dict of arguments, to be passed as ``update(..., **kwargs)``:

    * ``grads_finite``: whether no probe counted an inf or a NaN; bool, shape
      ``()``.
    * ``grads_amax``: the largest finite magnitude, without the loss scale: the
      top of its binade, as in :func:`probe_metrics`; float32, shape ``()``.

  Raises:
    TypeError: if an array is not float32.
    ValueError: if one is of the wrong shape, or ``state`` does not hold exactly
      one loss-scale state.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> state = ols.FixedLossScale(4.0).init()
    >>> x = jnp.array([2.0, 0.0])
    >>> loss_fn = lambda counter: jnp.sum(x * diagnostics.probe(x, counter))
    >>> counts = ols.grad(loss_fn, state)(diagnostics.probe_counters())
    >>> kwargs = diagnostics.probe_update_kwargs(counts, state)
    >>> print(kwargs["grads_finite"], kwargs["grads_amax"])
    True 3.9980469
  """
  _check_counters("counts", counts)
  loss_scale = _state.get_loss_scale_state(state).loss_scale
  grads_finite, grads_amax = jnp.bool_(True), jnp.float32(0)
  for leaf in jax.tree.leaves(counts):
    grads_finite &= ~jnp.any(leaf[..., NONFINITE_BIN] > 0)
    scaled_amax = jnp.max(estimate_finite_amax(leaf), initial=0)
    # With a scale below 1, the quotient may be too large for float32.
    unscaled_amax = jnp.minimum(scaled_amax / loss_scale, _arrays.FLOAT32_MAX)
    grads_amax = jnp.maximum(grads_amax, unscaled_amax)
  return {"grads_finite": grads_finite, "grads_amax": grads_amax}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probe(
  extra_counter_axes: Any, x: jax.Array, counter: jax.Array
) -> jax.Array:
  return x


def _probe_bwd(
  extra_counter_axes: Any, _: None, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return cotangent, _primitives.cast_to_varying(
    count_per_float16_bin(cotangent), extra_counter_axes
  )


_probe.defvjp(lambda extra_counter_axes, x, counter: (x, None), _probe_bwd)


def _check_counters(name: str, tree: Any) -> None:
  for leaf in jax.tree.leaves(tree):
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if not shape or shape[-1] != NUM_BINS:
      raise ValueError(
        f"{name} must be of shape (..., {NUM_BINS}), got shape {shape}."
        " Counters come from probe_counters()."
      )
    if dtype != jnp.float32:
      raise TypeError(
        f"{name} must be float32, got {dtype}, in which counts are not exact."
        " Don't cast the counters together with the parameters."
      )


def count_per_float16_bin(x: jax.Array) -> jax.Array:
  """Count the numbers in each bin; float32, shape ``(NUM_BINS,)``.

  The counts are integers until the end: a float32 counter that is incremented
  by 1 stops at 2**24.
  """
  # A symbolic size of `jax.export` may be arbitrarily large.
  is_small = isinstance(x.size, int) and x.size <= _checks.MAX_COUNT
  if x.ndim > 1 and not is_small:
    return jnp.sum(jax.vmap(count_per_float16_bin)(x), axis=0)
  if _arrays.is_complex(x.dtype):
    return count_per_float16_bin(x.real) + count_per_float16_bin(x.imag)
  bins = _compute_bins(x)
  # A scatter is fastest on CPU. On other devices, all threads would wait for
  # the same few bins. With an explicit sharding, JAX cannot scatter here.
  if any(jax.typeof(x).sharding.spec):
    counts = _count_by_comparison(bins)
  else:
    zeros = jnp.zeros((NUM_BINS,), jnp.int32)
    counts = lax.platform_dependent(
      bins, cpu=lambda x: zeros.at[x].add(1), default=_count_by_comparison
    )
  return counts.astype(jnp.float32)


def estimate_finite_amax(counts: jax.Array) -> jax.Array:
  """Return the largest float16 number in the highest nonempty bin."""
  # float16 numbers in a binade are 2**(e - 10) apart, subnormal ones 2**-24.
  exponents = np.arange(_MIN_EXPONENT, _MAX_EXPONENT + 1.0)
  bin_maxima = 2 ** (exponents + 1) - 2 ** np.maximum(
    exponents - 10, _MIN_EXPONENT
  )
  bin_maxima = jnp.array([0, *bin_maxima, 2**16], jnp.float32)
  is_nonempty = counts[..., :NONFINITE_BIN] > 0
  return jnp.max(jnp.where(is_nonempty, bin_maxima, jnp.float32(0)), axis=-1)


def _compute_bins(x: jax.Array) -> jax.Array:
  """Return the bin of each number, from its bits, which no device flushes."""
  if x.dtype == jnp.float64:
    float32_max = _arrays.FLOAT32_MAX
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -float32_max, float32_max), x)
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  exponent = (bits >> 23) & 0xFF
  bins = jnp.clip(exponent - (127 + _MIN_EXPONENT - 1), 0, OVERFLOW_BIN)
  return jnp.where(exponent == 0xFF, jnp.int32(NONFINITE_BIN), bins)


def _count_by_comparison(bins: jax.Array) -> jax.Array:
  bin_ids = lax.broadcasted_iota(jnp.int32, (NUM_BINS,) + (1,) * bins.ndim, 0)
  axes = tuple(range(1, bins.ndim + 1))
  return jnp.sum(bins[None] == bin_ids, axis=axes, dtype=jnp.int32)
