"""Pictures of gradients and loss scales, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _leaves, _limits

__all__ = [
  "ExponentHistogram",
  "exponent_histogram",
  "plot_exponents",
  "plot_loss_scale",
]

# The smallest and the largest floor(log2) of a float64, subnormals included.
_LOWEST, _HIGHEST = -1074, 1023


class ExponentHistogram(NamedTuple):
  """How many entries there are in each binade.

  Attributes:
    exponents: int array of floor(log2(magnitude)), ascending and without gaps.
    counts: int array of the same length: how many entries have this exponent.
    zero_count: how many entries are zero.
    nonfinite_count: how many entries are inf or NaN.
  """

  exponents: np.ndarray
  counts: np.ndarray
  zero_count: int
  nonfinite_count: int


def exponent_histogram(tree: Any) -> ExponentHistogram:
  """Counts the entries of a tree by binade.

  Call it outside ``jit``. Each leaf is counted where it is, sharded or not, and
  only the counts are read back. It does not need matplotlib.

  Args:
    tree: a pytree of gradients, or of any other float or complex arrays.

  Returns:
    An :class:`ExponentHistogram` of all leaves together. A subnormal float32
    number counts as zero if the device takes it for zero.

  Raises:
    TypeError: if called under ``jit``.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import plots
    >>> found = plots.exponent_histogram([jnp.array([0.5, 0.6, 2.0, 0.0])])
    >>> print(found.exponents, found.counts, found.zero_count)
    [-1  0  1] [2 0 1] 1
  """
  measured = _leaves.measure_grads(tree, "exponent_histogram", _count_exponents)
  found = [counts for _, _, counts in measured]
  total = np.zeros(_HIGHEST - _LOWEST + 1, np.int64)
  for counts, _, _ in found:
    total += np.asarray(counts, np.int64)
  (used,) = np.nonzero(total)
  span = slice(used[0], used[-1] + 1) if used.size else slice(0)
  return ExponentHistogram(
    np.arange(_LOWEST, _HIGHEST + 1)[span],
    total[span],
    zero_count=sum(int(zeros) for _, zeros, _ in found),
    nonfinite_count=sum(int(nonfinite) for _, _, nonfinite in found),
  )


def plot_exponents(
  grads: Any,
  dtype: Any = jnp.float16,
  loss_scale: Any = 1.0,
  *,
  ax: Any = None,
) -> Any:
  """Draws how large gradients are, and which of them a dtype can hold.

  The picture is like the one with which Micikevicius et al. showed why losses
  are scaled. It shows the share of entries in each binade, as they are and
  times the loss scale, and the ranges in which numbers of the dtype are normal,
  subnormal, zero or infinite.

  Args:
    grads: a pytree of true gradients. Compute them in float32 if you can.
    dtype: a float dtype of at most 32 bits.
    loss_scale: a number, or a pytree that holds exactly one
      :class:`LossScaleState`.
    ax: the matplotlib axes to draw on, by default those of a new figure.

  Returns:
    The matplotlib axes.

  Raises:
    ImportError: if matplotlib is not installed.
    TypeError: if an argument is of the wrong type, or under ``jit``.
    ValueError: if ``loss_scale`` is out of range.

  References:
    Micikevicius et al, `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018
  """
  dtype = _limits.as_small_float(dtype)
  scale = _limits.as_scale(loss_scale)
  limits = _limits.limits_of(dtype)
  found = exponent_histogram(grads)
  if ax is None:
    ax = _new_axes("plot_exponents")

  size = found.counts.sum() + found.zero_count + found.nonfinite_count
  shares = 100 * found.counts / max(size, 1)
  shift = np.log2(scale)
  _draw_bands(ax, dtype, limits)
  style = {"width": 1.0, "align": "edge"}
  ax.bar(found.exponents, shares, color="gray", label="as they are", **style)
  if scale != 1:
    ax.bar(
      found.exponents + shift,
      shares,
      fill=False,
      edgecolor="tab:blue",
      label=f"times the loss scale, {_power_of_two(shift)}",
      **style,
    )
  ax.set_xlim(
    min([np.log2(limits.zero) - 10, *found.exponents]),
    max([np.log2(limits.inf) + 4, *found.exponents + shift + 1]),
  )
  ax.set_xlabel("log₂ of the magnitude")
  ax.set_ylabel("% of the entries")
  ax.set_title(f"{found.zero_count / max(size, 1):.1%} are zero as they are")
  ax.legend(fontsize="small")
  return ax


def plot_loss_scale(history: Any, *, ax: Any = None) -> Any:
  """Draws the loss scale over the steps, and the steps that were skipped.

  Args:
    history: what :func:`~optax_lossscale.loss_scale_metrics` returned after
      each step, as a sequence of dicts, or as one dict of arrays, such as
      ``lax.scan`` returns. It must hold ``"loss_scale"``, and skipped steps are
      drawn if it holds ``"last_finite"``. Or an array of scales.
    ax: the matplotlib axes to draw on, by default those of a new figure.

  Returns:
    The matplotlib axes.

  Raises:
    ImportError: if matplotlib is not installed.
    ValueError: if ``history`` holds no scales.
  """
  scales, skipped = _read_history(history)
  if ax is None:
    ax = _new_axes("plot_loss_scale")
  steps = np.arange(scales.size)
  ax.step(steps, scales, where="post", color="tab:blue", label="loss scale")
  if skipped is not None and skipped.any():
    label = f"skipped steps: {skipped.sum()} of {skipped.size}"
    ax.plot(steps[skipped], scales[skipped], "x", color="tab:red", label=label)
  ax.set_yscale("log", base=2)
  ax.set_xlabel("step")
  ax.set_ylabel("loss scale after the step")
  ax.grid(alpha=0.3)
  ax.legend()
  return ax


@_leaves.reduce_on_device
def _count_exponents(xp: Any, leaf: Any) -> tuple[Any, Any, Any]:
  """Counts by exponent from _LOWEST to _HIGHEST, of zeros, of inf and NaN."""
  size = _leaves.magnitude(xp, leaf)
  finite = xp.isfinite(leaf)
  counted = finite & (size > 0)
  _, exponents = xp.frexp(xp.where(counted, size, 1))
  index = xp.where(counted, exponents - 1 - _LOWEST, -1)
  zeros = _leaves.count(xp, size == 0)
  nonfinite = _leaves.count(xp, ~finite)
  length = _HIGHEST - _LOWEST + 1
  if xp is np:
    return np.bincount(index[counted], minlength=length), zeros, nonfinite

  # One sum for each exponent that occurs, since a scatter would gather a
  # sharded array.
  def count_one(i: jax.Array, counts: jax.Array) -> jax.Array:
    return counts.at[i].set(_leaves.count(xp, index == i))

  first = xp.min(xp.where(counted, index, length), initial=length)
  last = xp.max(index, initial=-1)
  counts = lax.fori_loop(
    first, last + 1, count_one, jnp.zeros(length, jnp.uint32)
  )
  return counts, zeros, nonfinite


def _draw_bands(ax: Any, dtype: np.dtype, limits: _limits.Limits) -> None:
  """Colours the ranges where a dtype is zero, subnormal, normal or inf."""
  zero, normal, inf = np.log2(limits)
  far = 2 * _HIGHEST  # The outer bands go on beyond the part that is shown.
  bands = (
    (-far, zero, "tab:red", f"zero in {dtype}"),
    (zero, normal, "gold", "subnormal: loses bits"),
    (normal, inf, "tab:green", "normal"),
    (inf, far, "tab:purple", "overflow"),
  )
  for start, end, color, label in bands:
    ax.axvspan(start, end, color=color, alpha=0.15, linewidth=0, label=label)


def _read_history(history: Any) -> tuple[np.ndarray, np.ndarray | None]:
  """The scales, and whether each step was skipped, or None; numpy arrays."""
  if isinstance(history, Sequence) and all(
    isinstance(metrics, Mapping) for metrics in history
  ):
    # Nothing is left of an empty sequence, which is an error below.
    keys = {"loss_scale", "last_finite"}.intersection(*history)
    history = {key: [metrics[key] for metrics in history] for key in keys}
  if not isinstance(history, Mapping):
    history = {"loss_scale": history}
  if "loss_scale" not in history:
    raise ValueError(
      'history must hold "loss_scale", as what loss_scale_metrics returns does,'
      f" got {', '.join(map(repr, history)) or 'nothing'}."
    )
  history = jax.device_get(dict(history))
  scales = np.asarray(history["loss_scale"], np.float32)
  if scales.ndim != 1 or not scales.size:
    raise ValueError(
      "history must hold a scale for each step, got scales of shape"
      f" {scales.shape}."
    )
  if "last_finite" not in history:
    return scales, None
  return scales, ~np.asarray(history["last_finite"], bool)


def _new_axes(caller: str) -> Any:
  try:
    from matplotlib import pyplot as plt
  except ImportError as error:
    raise ImportError(
      f"{caller} needs matplotlib, which is not installed. Run `pip install"
      " matplotlib`."
    ) from error
  return plt.subplots(figsize=(8, 3.5), layout="constrained")[1]


def _power_of_two(log2: float) -> str:
  return f"$2^{{{log2:.4g}}}$"
