"""``plot_loss_scale``: how the scale moved, and which steps were skipped."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optax_lossscale import _state
from optax_lossscale.plots import _figures


def plot_loss_scale(history: Any, *, ax: Any = None) -> Any:
  """Draws the loss scale over the steps, and the steps that were skipped.

  Args:
    history: the states after each step, each a :class:`LossScaleState` or a
      pytree that holds exactly one; or what
      :func:`~optax_lossscale.loss_scale_metrics` returned for them. They are a
      sequence, or one of them holds arrays, such as ``lax.scan`` returns. A
      dict must hold ``"loss_scale"``, and skipped steps are drawn if it holds
      ``"last_finite"``. Or an array of scales.
    ax: the matplotlib axes to draw on, by default those of a new figure.

  Returns:
    The matplotlib axes.

  Raises:
    ImportError: if matplotlib is not installed.
    ValueError: if ``history`` holds no scales, or a state is no single one.
  """
  scales, skipped = _read_history(history)
  ax = _figures.axes_or_new(ax, "plot_loss_scale")
  steps = np.arange(scales.size)
  ax.step(steps, scales, where="post", color="tab:blue", label="loss scale")
  if skipped.any():
    label = f"skipped steps: {skipped.sum()} of {skipped.size}"
    ax.plot(steps[skipped], scales[skipped], "x", color="tab:red", label=label)
  ax.set_yscale("log", base=2)
  ax.set_xlabel("step")
  ax.set_ylabel("loss scale after the step")
  ax.grid(alpha=0.3)
  ax.legend()
  return ax


def _read_history(history: Any) -> tuple[np.ndarray, np.ndarray]:
  """The scales, and whether each step is known to be skipped; numpy arrays."""
  is_list = isinstance(history, Sequence) and not hasattr(history, "_fields")
  # The state of a chain of optimizers is a tuple, too.
  is_list = is_list and len({*map(_state.holds_loss_scale, history)}) < 2
  history = [*map(_metrics, history)] if is_list else _metrics(history)
  if is_list and all(isinstance(metrics, Mapping) for metrics in history):
    # Nothing is left of an empty sequence, which is an error below.
    keys = {"loss_scale", "last_finite"}.intersection(*history)
    history = {key: [metrics[key] for metrics in history] for key in keys}
  elif not isinstance(history, Mapping):
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
  finite = history.get("last_finite", np.ones_like(scales))
  return scales, ~np.asarray(finite, bool)


def _metrics(x: Any) -> Any:
  """The fields of the state in a tree; what holds none, as it is."""
  if not _state.holds_loss_scale(x):
    return x
  return _state.get_loss_scale_state(x)._asdict()
