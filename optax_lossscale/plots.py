"""Plots of gradient exponents, loss scales and matmul precision."""

from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks, _state, diagnostics
from optax_lossscale.diagnostics import _dtype_limits, _leaves

__all__ = [
  "ExponentHistogram",
  "exponent_histogram",
  "plot_exponents",
  "plot_loss_scale",
  "plot_precision",
]


def __dir__() -> list[str]:
  return __all__


class ExponentHistogram(NamedTuple):
  """The number of entries in each binade, as `exponent_histogram` returns it.

  Attributes:
    exponents: int array of floor(log2(magnitude)), ascending and without gaps.
    counts: int array of the same length: the number of entries with each
      exponent.
    zero_count: the number of entries that are zero.
    nonfinite_count: the number of entries that are inf or NaN.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import plots
    >>> plots.exponent_histogram(jnp.array([jnp.nan, 0.0])).nonfinite_count
    1
  """

  exponents: np.ndarray
  counts: np.ndarray
  zero_count: int
  nonfinite_count: int


@_arrays.allow_transfers
def exponent_histogram(tree: Any) -> ExponentHistogram:
  """Counts the entries of a tree by binade.

  Call it outside ``jit``. Each leaf is counted on its device or devices, and
  only the counts are transferred to the host. It does not need matplotlib.

  Args:
    tree: a pytree of gradients, or of any other float or complex arrays.

  Returns:
    An :class:`ExponentHistogram` of all leaves together. A subnormal float32
    number counts as zero if the device flushes it to zero.

  Raises:
    TypeError: if called under ``jit``.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import plots
    >>> histogram = plots.exponent_histogram([jnp.array([0.5, 0.6, 2.0, 0.0])])
    >>> print(histogram.exponents, histogram.counts, histogram.zero_count)
    [-1  0  1] [2 0 1] 1
  """
  leaf_stats = _leaves.measure_grads(
    tree, "exponent_histogram", _leaves.count_exponents
  )
  counts, zero_count, nonfinite_count = np.zeros(_leaves.NUM_BINADES, int), 0, 0
  for _, _, (leaf_counts, zeros, nonfinite) in leaf_stats:
    counts += np.asarray(leaf_counts, int)
    zero_count += int(zeros)
    nonfinite_count += int(nonfinite)
  (nonempty,) = np.nonzero(counts)
  bin_range = (
    slice(nonempty[0], nonempty[-1] + 1) if nonempty.size else slice(0)
  )
  exponents = np.arange(_leaves.MIN_EXPONENT, _leaves.MAX_EXPONENT + 1)[
    bin_range
  ]
  return ExponentHistogram(
    exponents, counts[bin_range], zero_count, nonfinite_count
  )


@_arrays.allow_transfers
def plot_exponents(
  grads: Any,
  dtype: Any = jnp.float16,
  loss_scale: Any = 1.0,
  *,
  ax: Any = None,
) -> Any:
  """Plots a histogram of gradient magnitudes over the range of a dtype.

  It is modeled on the figure of Micikevicius et al. that motivates loss
  scaling. It shows the percentage of entries in each binade, unscaled and
  multiplied by the loss scale, and the ranges in which numbers of the dtype are
  normal, subnormal, zero or infinite.

  Args:
    grads: a pytree of true gradients. Compute them in float32 if you can.
    dtype: a float dtype of at most 32 bits.
    loss_scale: a number, or a pytree that holds exactly one
      :class:`LossScaleState`.
    ax: the matplotlib axes to draw on, by default the axes of a new figure.

  Returns:
    The matplotlib axes.

  Raises:
    ImportError: if matplotlib is not installed.
    TypeError: if an argument is of the wrong type, or under ``jit``.
    ValueError: if ``loss_scale`` is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> from matplotlib.figure import Figure
    >>> from optax_lossscale import plots
    >>> ax = plots.plot_exponents(
    ...   jnp.array([1e-8, 0.0]), loss_scale=128.0, ax=Figure().subplots())
    >>> ax.get_title()
    '50.0% of the unscaled entries are zero'

  References:
    Micikevicius et al, `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018
  """
  dtype = _checks.as_float_dtype(dtype, max_bits=32)
  if _state.has_loss_scale(loss_scale):
    loss_scale = _state.get_loss_scale_state(loss_scale).loss_scale
  _checks.check_scale("loss_scale", loss_scale)
  limits = _dtype_limits.get_cast_thresholds(dtype)
  histogram = exponent_histogram(grads)
  ax = _get_axes(ax, "plot_exponents")

  num_entries = (
    histogram.counts.sum() + histogram.zero_count + histogram.nonfinite_count
  )
  percentages = 100 * histogram.counts / max(num_entries, 1)
  shift = np.log2(float(loss_scale))
  _shade_dtype_ranges(ax, dtype, limits)
  style = {"width": 1.0, "align": "edge"}
  ax.bar(
    histogram.exponents, percentages, color="gray", label="unscaled", **style
  )
  if shift:
    label = f"multiplied by the loss scale, $2^{{{shift:.4g}}}$"
    outline = {"fill": False, "edgecolor": "tab:blue", **style}
    ax.bar(histogram.exponents + shift, percentages, label=label, **outline)
  lowest = min([np.log2(limits.underflow_threshold) - 10, *histogram.exponents])
  highest = max(
    [np.log2(limits.overflow_threshold) + 4, *histogram.exponents + shift + 1]
  )
  ax.set_xlim(lowest, highest)
  ax.set_xlabel("log₂ of the magnitude")
  ax.set_ylabel("% of the entries")
  zero_fraction = histogram.zero_count / max(num_entries, 1)
  ax.set_title(f"{zero_fraction:.1%} of the unscaled entries are zero")
  ax.legend(fontsize="small")
  return ax


def _shade_dtype_ranges(
  ax: Any, dtype: np.dtype, limits: _dtype_limits.CastThresholds
) -> None:
  """Shade the ranges where a dtype is zero, subnormal, normal or inf."""
  # The outer ranges extend beyond the limits of the axis.
  off_axis = 2 * _leaves.MAX_EXPONENT
  edges = itertools.pairwise([-off_axis, *np.log2(limits), off_axis])
  zero, subnormal = f"zero in {dtype}", "subnormal: loses bits"
  labels = zero, subnormal, "normal", "overflow"
  colors = "tab:red", "gold", "tab:green", "tab:purple"
  for span, color, label in zip(edges, colors, labels, strict=True):
    ax.axvspan(*span, color=color, alpha=0.15, linewidth=0, label=label)


@_arrays.allow_transfers
def plot_loss_scale(history: Any, *, ax: Any = None) -> Any:
  """Plots the loss scale over the steps, and marks skipped steps.

  Args:
    history: one of these:

      * a sequence of the states after each step, each a
        :class:`LossScaleState` or a pytree that holds exactly one;
      * a sequence of dicts with ``"loss_scale"``, as
        :func:`~optax_lossscale.loss_scale_metrics` returns them;
      * one state or dict whose leaves are arrays over steps, as ``lax.scan``
        returns it;
      * an array of scales.

      Skipped steps are marked for states, and for dicts with
      ``"last_finite"``.
    ax: the matplotlib axes to draw on, by default the axes of a new figure.

  Returns:
    The matplotlib axes.

  Raises:
    ImportError: if matplotlib is not installed.
    ValueError: if ``history`` holds no scales, or an element of it does not
      hold exactly one state.

  Examples:
    >>> import jax.numpy as jnp
    >>> from matplotlib.figure import Figure
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import plots
    >>> policy = ols.DynamicLossScale()
    >>> states = [policy.init()]
    >>> for finite in [True, False, True]:
    ...   states.append(policy.adjust(states[-1], jnp.array(finite)))
    >>> ax = plots.plot_loss_scale(states, ax=Figure().subplots())
    >>> ax.get_ylabel()
    'loss scale after the step'
  """
  scales, skip_mask = _read_history(history)
  ax = _get_axes(ax, "plot_loss_scale")
  steps = np.arange(scales.size)
  ax.step(steps, scales, where="post", color="tab:blue", label="loss scale")
  if skip_mask.any():
    label = f"skipped steps: {skip_mask.sum()} of {skip_mask.size}"
    ax.plot(
      steps[skip_mask], scales[skip_mask], "x", color="tab:red", label=label
    )
  ax.set_yscale("log", base=2)
  ax.set_xlabel("step")
  ax.set_ylabel("loss scale after the step")
  ax.grid(alpha=0.3)
  ax.legend()
  return ax


def _read_history(history: Any) -> tuple[np.ndarray, np.ndarray]:
  """Return the scales and the mask of steps that were skipped, as numpy arrays.

  Steps of unknown outcome count as not skipped.
  """
  metrics = _as_stacked_metrics(history)
  if "loss_scale" not in metrics:
    raise ValueError(
      'history must hold "loss_scale", as the metrics of loss_scale_metrics do,'
      f" got {', '.join(map(repr, metrics)) or 'nothing'}."
    )
  history = jax.device_get(dict(metrics))
  scales = np.asarray(history["loss_scale"], np.float32)
  if scales.ndim != 1 or not scales.size:
    raise ValueError(
      "history must hold one scale for each step, got scales of shape"
      f" {scales.shape}."
    )
  finite_mask = history.get("last_finite", np.ones_like(scales))
  return scales, ~np.asarray(finite_mask, bool)


def _as_stacked_metrics(history: Any) -> Mapping[str, Any]:
  """Return a history as a dict of sequences or arrays over steps."""
  is_list = isinstance(history, Sequence) and not hasattr(history, "_fields")
  # The state of a chain of optimizers is a tuple, too, but only one of its
  # elements holds a loss scale.
  is_list = is_list and len({*map(_state.has_loss_scale, history)}) < 2
  history = [*map(_as_metrics, history)] if is_list else _as_metrics(history)
  if is_list and all(isinstance(metrics, Mapping) for metrics in history):
    # For an empty sequence this is a dict of empty lists, which the caller
    # rejects.
    keys = {"loss_scale", "last_finite"}.intersection(*history)
    return {key: [metrics[key] for metrics in history] for key in keys}
  return history if isinstance(history, Mapping) else {"loss_scale": history}


def _as_metrics(x: Any) -> Any:
  """Return the fields of the state in a tree, or the tree if it has none."""
  if not _state.has_loss_scale(x):
    return x
  return _state.get_loss_scale_state(x)._asdict()


_MAX_HEIGHT = 40.0  # in binades; infinite headroom is clipped to it
_NORMAL_COLOR, _OUTLIER_COLOR = "tab:gray", "tab:red"

_Rows = list[diagnostics.LayerPrecision]


@_arrays.allow_transfers
def plot_precision(
  report: diagnostics.PrecisionComparison, *, axes: Any = None
) -> Any:
  """Plots the error and the headroom of each layer in half precision.

  The upper plot shows the error of the results if only this layer runs in half
  precision. The lower plot shows the headroom: the
  number of binades between the largest magnitude and the largest number of the
  dtype. Layers are in program order. Outliers and layers that overflow are red
  and labeled.

  Args:
    report: the result of
      :func:`~optax_lossscale.diagnostics.compare_precision`.
    axes: two matplotlib axes to draw on, by default the axes of a new figure.

  Returns:
    The two matplotlib axes.

  Raises:
    ImportError: if matplotlib is not installed.
    TypeError: if ``report`` is not a ``PrecisionComparison``.

  Examples:
    >>> import jax.numpy as jnp
    >>> from matplotlib.figure import Figure
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics, plots
    >>> report = diagnostics.compare_precision(
    ...   ols.autocast(jnp.dot), jnp.eye(4), jnp.ones((4, 2)), progress=False)
    >>> top, bottom = plots.plot_precision(report, axes=Figure().subplots(2))
  """
  if not isinstance(report, diagnostics.PrecisionComparison):
    raise TypeError(
      "report must be a PrecisionComparison, as compare_precision returns it,"
      f" got report = {report!r}."
    )
  axes = _get_axes(axes, "plot_precision", rows=2)
  top, bottom = axes
  rows = sorted(report.layers, key=lambda row: row.program_index)
  highlighted_names = {*report.outliers, *report.overflowing}
  colors = [
    _OUTLIER_COLOR if row.name in highlighted_names else _NORMAL_COLOR
    for row in rows
  ]
  _draw_isolated_errors(top, rows, colors, report.dtype)
  _draw_headroom(bottom, rows, colors, report.dtype)
  _annotate_outliers(top, rows, highlighted_names)
  return axes


def _draw_isolated_errors(
  ax: Any, rows: _Rows, colors: list[str], dtype: str
) -> None:
  """Draw a bar for the isolated error of each row, on a log axis."""
  # Zero and infinite errors get the height of the limits of the axis.
  errors = [row.isolated_error or 0.0 for row in rows]
  finite_errors = [x for x in errors if 0 < x < math.inf]
  low, high = (
    min(finite_errors, default=1e-4) / 3,
    10 * max([*finite_errors, 1.0]),
  )
  heights = [min(max(x, low), high) for x in errors]
  hatches = ["//" if x == math.inf else "" for x in errors]
  ax.bar(range(len(rows)), heights, color=colors, hatch=hatches)
  ax.set_yscale("log")
  ax.set_ylim(low, high)
  ax.set_ylabel(f"error if only this\nlayer is in {dtype}")
  if any(hatches):
    ax.set_title("hatched: inf or NaN in the results", fontsize="small")


def _draw_headroom(ax: Any, rows: _Rows, colors: list[str], dtype: str) -> None:
  """Draw a bar for the headroom of each row, and shade the backward pass."""
  # The headroom is unknown if the layer was not measured.
  headrooms = [row.log2_headroom or 0.0 for row in rows]
  heights = np.clip(headrooms, -_MAX_HEIGHT, _MAX_HEIGHT)
  ax.bar(range(len(rows)), heights, color=colors)
  ax.axhline(0, color="black", linewidth=0.8)
  first_backward = next((i for i, row in enumerate(rows) if row.backward), None)
  if first_backward is not None:
    style = {"color": "tab:blue", "alpha": 0.1, "linewidth": 0}
    ax.axvspan(first_backward - 0.5, len(rows) - 0.5, label="backward", **style)
    ax.legend(fontsize="small", loc="upper right")
  ax.set_xlabel("layers, in program order")
  ax.set_ylabel(f"log2 headroom\nin {dtype}")


def _annotate_outliers(
  ax: Any, rows: _Rows, highlighted_names: set[str]
) -> None:
  """Label each highlighted layer once, next to its highest bar."""
  labels = dict.fromkeys(
    row.name for row in rows if row.name in highlighted_names
  )
  style = {
    "va": "top",
    "color": _OUTLIER_COLOR,
    "fontsize": "small",
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    "xycoords": ("data", "axes fraction"),
    "textcoords": "offset points",
  }
  for level, name in enumerate(labels):
    bars = [i for i, row in enumerate(rows) if row.name == name]
    i = max(bars, key=lambda i: rows[i].isolated_error or 0.0)
    # Labels are at eight levels, so that neighbors don't overlap.
    position = i, 0.93 - 0.1 * (level % 8)
    alignment, shift = ("right", -8) if 2 * i > len(rows) else ("left", 8)
    ax.annotate(name, position, xytext=(shift, 0), ha=alignment, **style)


def _get_axes(axes: Any, caller: str, rows: int = 1) -> Any:
  """Return the axes of the user, or the axes of a new figure.

  Args:
    axes: the user's argument, or None.
    caller: the public function, for messages.
    rows: the number of axes in the new figure, from top to bottom.

  Returns:
    The user's argument; or matplotlib axes, an array of them for several rows.

  Raises:
    ImportError: if matplotlib is not installed.
  """
  if axes is not None:
    return axes
  try:
    from matplotlib import pyplot as plt
  except ImportError as error:
    raise ImportError(
      f"{caller} needs matplotlib, which is not installed. Run `pip install"
      " matplotlib`."
    ) from error
  size = 8, 2.5 + rows
  return plt.subplots(rows, figsize=size, layout="constrained", sharex=True)[1]
