"""Probes: which numbers occur in the backward pass."""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._jaxprs import _types

# There is a bin for what float16 takes for zero, one for each of its binades in
# ascending order (the first ten are those of its subnormal numbers), one for
# finite numbers that are too large for it, and one for inf and NaN.
_LOWEST, _HIGHEST = -24, 15
TOO_LARGE = 1 + _HIGHEST - _LOWEST + 1
NONFINITE = TOO_LARGE + 1
BINS = NONFINITE + 1


def probe(x: jax.Array, slot: jax.Array) -> jax.Array:
  """Returns ``x``, and counts its cotangent by size in the backward pass.

  Overflow and underflow begin within the backward pass, where the cotangents of
  float16 activations are computed. The gradients of the parameters do not show
  either, since they are sums over batch and sequence, often in float32. A probe
  returns ``x`` as it is. In the backward pass it counts how many numbers of the
  cotangent, with the loss scale in it, lie in each binade. The counts are
  returned as the gradient of ``slot``, so differentiate with respect to the
  slots as well. Give the counts to :func:`probe_evidence`, for ``update``, and
  to :func:`probe_metrics`, for the log.

  If a slot is used more than once, autodiff adds up its gradients, and so the
  counts. One slot may therefore serve many probes, all layers of a ``scan``, or
  all members of a ``vmap``. If each of them should have its own, map over an
  array of slots.

  A probe works under ``jit``, ``scan``, ``vmap``, ``jax.checkpoint``,
  ``shard_map``, sharded ``jit`` and ``jax.export``, with symbolic shapes as
  well. It costs nothing if its slot is not differentiated. Forward-mode
  differentiation does not work.

  Args:
    x: a float or complex array, usually float16. In other dtypes, what float16
      would take for zero is counted as zero, and what it would take for
      inf is counted as too large.
    slot: what the counts are the gradient of; from :func:`probe_slots`. Its
      value means nothing.

  Returns:
    ``x``.

  Raises:
    TypeError: if ``x`` is of no float or complex dtype, or ``slot`` is not
      float32.
    ValueError: if ``slot`` is of the wrong shape.

  Examples:
    >>> import jax, optax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, slot, x):
    ...   y = diagnostics.probe(w.astype(jnp.float16) * x, slot)
    ...   return jnp.mean(y.astype(jnp.float32) ** 2)
    >>> tx = ols.with_loss_scaling(optax.sgd(0.5), ols.HeadroomLossScale())
    >>> w, slot = jnp.array([0.5, 0.0]), diagnostics.probe_slots()
    >>> opt_state = tx.init(w)
    >>> loss, (grad, cotangents) = ols.value_and_grad(
    ...   loss_fn, opt_state, argnums=(0, 1)
    ... )(w, slot, jnp.array([1.0, 0.5], jnp.float16))
    >>> evidence = diagnostics.probe_evidence(cotangents, opt_state)
    >>> updates, opt_state = tx.update(grad, opt_state, w, **evidence)
    >>> metrics = diagnostics.probe_metrics(cotangents)
    >>> {name: x.item() for name, x in sorted(metrics.items())}
    {'largest': 32752.0, 'nonfinite_share': 0.0, 'top_share': 0.5,
     'zero_share': 0.5}
  """
  if not _arrays.is_array_like(x) or not _arrays.is_inexact(x):
    raise TypeError(f"x must be a float or complex array, got x = {x!r}.")
  _check_slots("slot", slot)
  if jnp.ndim(slot) != 1:
    raise ValueError(
      f"slot must be of shape ({BINS},), got shape {jnp.shape(slot)}."
      " Give each probe one slot, as scan and vmap do with an array of slots."
    )
  x, slot = jnp.asarray(x), jnp.asarray(slot)
  # Under shard_map all devices may share a slot. The transpose of this cast is
  # a sum over the devices, so that the slot counts for all of them.
  ours, slots = _types.varying(x), _types.varying(slot)
  slot = _types.as_varying(slot, tuple(ours - slots))
  return _probe(tuple(slots - ours), x, slot)


def probe_slots(*shape: int) -> jax.Array:
  """Returns slots for :func:`probe`: float32 zeros, shape ``(*shape, 43)``.

  Args:
    *shape: the shape of an array of slots, such as the number of layers of a
      ``scan``; none for a single slot.

  Returns:
    The slots. Pass them to the loss function, and differentiate with respect to
    them.

  Examples:
    >>> from optax_lossscale import diagnostics
    >>> print(diagnostics.probe_slots(12).shape)
    (12, 43)
  """
  return jnp.zeros((*shape, BINS), jnp.float32)


def probe_metrics(cotangents: Any) -> Any:
  """Returns what to log of the counts of probes.

  :func:`~optax_lossscale.value_and_grad` divides all gradients by the loss
  scale, and so the counts as well. This does not matter here, since only their
  ratios are used.

  Args:
    cotangents: the gradient of a slot, of an array of slots, or a pytree of
      them.

  Returns:
    For each array a dict of float32 arrays, of shape ``()`` for a single slot,
    or else of the shape that was given to :func:`probe_slots`:

    * ``largest``: the top of the binade that holds the largest finite
      magnitude, with the loss scale in it. It is at most 65504, or 65536 for
      all numbers that are larger.
    * ``zero_share``: the share of zeros, flushed or not.
    * ``top_share``: the share in the three highest binades, or above them.
    * ``nonfinite_share``: the share of inf and NaN.

    All shares are 0 if nothing was counted.

  Raises:
    TypeError: if an array is not float32.
    ValueError: if one is of the wrong shape.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> x = jnp.array([2.0, 0.0, 1e5], jnp.float32)
    >>> loss_fn = lambda slot: jnp.sum(x * diagnostics.probe(x, slot))
    >>> counts = jax.grad(loss_fn)(diagnostics.probe_slots())
    >>> metrics = diagnostics.probe_metrics(counts)
    >>> print(metrics["largest"], f"{metrics['zero_share']:.2f}")
    65536.0 0.33
  """
  _check_slots("cotangents", cotangents)

  def metrics(counts: jax.Array) -> dict[str, jax.Array]:
    total = jnp.maximum(jnp.sum(counts, axis=-1), jnp.float32(2**-126))
    top = counts[..., TOO_LARGE - 3 : NONFINITE]
    return {
      "largest": largest_in(counts),
      "zero_share": counts[..., 0] / total,
      "top_share": jnp.sum(top, axis=-1) / total,
      "nonfinite_share": counts[..., NONFINITE] / total,
    }

  return jax.tree.map(metrics, cotangents)


def probe_evidence(cotangents: Any, state: Any) -> dict[str, jax.Array]:
  """Returns the arguments of ``update`` that say what probes have counted.

  If a probe counted an inf or a NaN, the backward pass overflowed, and the step
  is skipped, even if all gradients are finite. The largest number that a probe
  counted matters to the policy as if it were a gradient.

  Args:
    cotangents: the gradient of a slot, of an array of slots, or a pytree of
      them, as :func:`~optax_lossscale.value_and_grad` returns them.
    state: the state that scaled the loss, before ``update``: a
      :class:`~optax_lossscale.LossScaleState`, or any pytree that holds exactly
      one.

  Returns:
    A dict of arguments, to be passed as ``update(..., **evidence)``:

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
    >>> loss_fn = lambda slot: jnp.sum(x * diagnostics.probe(x, slot))
    >>> cotangents = ols.grad(loss_fn, state)(diagnostics.probe_slots())
    >>> evidence = diagnostics.probe_evidence(cotangents, state)
    >>> print(evidence["grads_finite"], evidence["grads_amax"])
    True 3.9980469
  """
  _check_slots("cotangents", cotangents)
  loss_scale = _state.get_loss_scale_state(state).loss_scale
  finite, amax = jnp.bool_(True), jnp.float32(0)
  for counts in jax.tree.leaves(cotangents):
    finite &= ~jnp.any(counts[..., NONFINITE] > 0)
    largest = jnp.max(largest_in(counts), initial=0)
    # With a scale below 1, the quotient may be too large for float32.
    unscaled = jnp.minimum(largest / loss_scale, _arrays.FLOAT32_MAX)
    amax = jnp.maximum(amax, unscaled)
  return {"grads_finite": finite, "grads_amax": amax}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probe(more_axes: Any, x: jax.Array, slot: jax.Array) -> jax.Array:
  return x


def _probe_bwd(
  more_axes: Any, _: None, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return cotangent, _types.as_varying(count(cotangent), more_axes)


_probe.defvjp(lambda more_axes, x, slot: (x, None), _probe_bwd)


def _check_slots(name: str, tree: Any) -> None:
  for leaf in jax.tree.leaves(tree):
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if not shape or shape[-1] != BINS:
      raise ValueError(
        f"{name} must be of shape (..., {BINS}), got shape {shape}."
        " Slots come from probe_slots()."
      )
    if dtype != jnp.float32:
      raise TypeError(
        f"{name} must be float32, got {dtype}. Counts in it would not be exact;"
        " keep slots apart from parameters that are cast."
      )


def count(x: jax.Array) -> jax.Array:
  """How many numbers are in each bin; float32, shape ``(BINS,)``.

  It counts in integers. A float32 to which 1 is added again and again stops at
  2**24.
  """
  if isinstance(x.size, int):
    in_parts = x.size > _checks.LARGEST_COUNT
  else:  # A symbolic size, as `jax.export` has, may turn out to be any.
    in_parts = x.ndim > 1
  if in_parts:
    return jnp.sum(jax.vmap(count)(x), axis=0)
  if _arrays.is_complex(x.dtype):
    return count(x.real) + count(x.imag)
  bins = _bin(x)
  # To scatter into the counters is fastest on CPU. On other devices all threads
  # would wait for the same few counters. Explicit shardings cannot scatter.
  if any(jax.typeof(x).sharding.spec):
    counts = _count_by_comparing(bins)
  else:
    counts = lax.platform_dependent(
      bins, cpu=_count_by_scattering, default=_count_by_comparing
    )
  return counts.astype(jnp.float32)


def largest_in(counts: jax.Array) -> jax.Array:
  """The largest float16 number in the highest bin that is not empty."""
  # float16 numbers in a binade are 2**(e - 10) apart, subnormal ones 2**-24.
  e = np.arange(_LOWEST, _HIGHEST + 1.0)
  tops = 2 ** (e + 1) - 2 ** np.maximum(e - 10, _LOWEST)
  tops = jnp.array([0, *tops, 2**16], jnp.float32)
  is_used = counts[..., :NONFINITE] > 0
  return jnp.max(jnp.where(is_used, tops, jnp.float32(0)), axis=-1)


def _bin(x: jax.Array) -> jax.Array:
  """The bin of each number, from its bits, so that no number is flushed."""
  if x.dtype == jnp.float64:
    top = _arrays.FLOAT32_MAX
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x)
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  exponent = (bits >> 23) & 0xFF
  bins = jnp.clip(exponent - (127 + _LOWEST - 1), 0, TOO_LARGE)
  return jnp.where(exponent == 0xFF, jnp.int32(NONFINITE), bins)


def _count_by_scattering(bins: jax.Array) -> jax.Array:
  return jnp.zeros((BINS,), jnp.int32).at[bins].add(1)


def _count_by_comparing(bins: jax.Array) -> jax.Array:
  each = lax.broadcasted_iota(jnp.int32, (BINS,) + (1,) * bins.ndim, 0)
  axes = tuple(range(1, bins.ndim + 1))
  return jnp.sum(bins[None] == each, axis=axes, dtype=jnp.int32)
