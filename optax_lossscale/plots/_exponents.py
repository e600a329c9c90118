"""How large gradients are: ``exponent_histogram`` and ``plot_exponents``."""

import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _leaves, _numbers
from optax_lossscale.plots import _figures

# The smallest and the largest floor(log2) of a float64, subnormals included.
_LOWEST, _HIGHEST = -1074, 1023
_BINADES = _HIGHEST - _LOWEST + 1


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
  counts, zeros, nonfinite = np.zeros(_BINADES, np.int64), 0, 0
  for _, _, of_leaf in measured:
    counts += np.asarray(of_leaf[0], np.int64)
    zeros += int(of_leaf[1])
    nonfinite += int(of_leaf[2])
  (used,) = np.nonzero(counts)
  span = slice(used[0], used[-1] + 1) if used.size else slice(0)
  exponents = np.arange(_LOWEST, _HIGHEST + 1)[span]
  return ExponentHistogram(exponents, counts[span], zeros, nonfinite)


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
  dtype = _numbers.as_small_float(dtype)
  scale = _numbers.as_scale(loss_scale)
  limits = _numbers.limits_of(dtype)
  found = exponent_histogram(grads)
  ax = _figures.axes_or_new(ax, "plot_exponents")

  size = found.counts.sum() + found.zero_count + found.nonfinite_count
  shares = 100 * found.counts / max(size, 1)
  shift = np.log2(scale)
  _draw_bands(ax, dtype, limits)
  style = {"width": 1.0, "align": "edge"}
  ax.bar(found.exponents, shares, color="gray", label="as they are", **style)
  if scale != 1:
    label = f"times the loss scale, $2^{{{shift:.4g}}}$"
    outline = {"fill": False, "edgecolor": "tab:blue", **style}
    ax.bar(found.exponents + shift, shares, label=label, **outline)
  lowest = min([np.log2(limits.zero) - 10, *found.exponents])
  highest = max([np.log2(limits.inf) + 4, *found.exponents + shift + 1])
  ax.set_xlim(lowest, highest)
  ax.set_xlabel("log₂ of the magnitude")
  ax.set_ylabel("% of the entries")
  ax.set_title(f"{found.zero_count / max(size, 1):.1%} are zero as they are")
  ax.legend(fontsize="small")
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
  if xp is np:
    return np.bincount(index[counted], minlength=_BINADES), zeros, nonfinite

  # One sum for each exponent that occurs, since a scatter would gather a
  # sharded array.
  def count_one(i: jax.Array, counts: jax.Array) -> jax.Array:
    return counts.at[i].set(_leaves.count(xp, index == i))

  first = xp.min(xp.where(counted, index, _BINADES), initial=_BINADES)
  last = xp.max(index, initial=-1)
  none = jnp.zeros(_BINADES, jnp.uint32)
  counts = lax.fori_loop(first, last + 1, count_one, none)
  return counts, zeros, nonfinite


def _draw_bands(ax: Any, dtype: np.dtype, limits: _numbers.Limits) -> None:
  """Colours the ranges where a dtype is zero, subnormal, normal or inf."""
  far = 2 * _HIGHEST  # The outer bands go on beyond the part that is shown.
  edges = itertools.pairwise([-far, *np.log2(limits), far])
  zero, subnormal = f"zero in {dtype}", "subnormal: loses bits"
  labels = zero, subnormal, "normal", "overflow"
  colors = "tab:red", "gold", "tab:green", "tab:purple"
  for span, color, label in zip(edges, colors, labels, strict=True):
    ax.axvspan(*span, color=color, alpha=0.15, linewidth=0, label=label)
