"""Imports fairseq's loss scaler."""

from typing import Any

from optax_lossscale import _state, _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._loss_scales import FairseqLossScale
from optax_lossscale.interop._reading import FieldSpec

_SETTINGS = {
  "fp16_init_scale": FieldSpec("init_scale", 2.0**7),
  "fp16_scale_window": FieldSpec("growth_interval"),
  "fp16_scale_tolerance": FieldSpec("tolerance", 0.0),
  "threshold_loss_scale": FieldSpec("threshold", None),
  "min_loss_scale": FieldSpec("min_scale", 1e-4),
}
_CHECKPOINT = {"loss_scale": FieldSpec("loss_scale")}


@_transfer_guard.allow_transfers
def from_fairseq(
  settings: Any, loss_scale: Any = None
) -> tuple[FairseqLossScale, _state.LossScaleState]:
  """The policy and state of fairseq's `DynamicLossScaler`.

  fairseq raises an error at its minimum scale. Our scale stays at the minimum,
  and :func:`~optax_lossscale.raise_if_stuck` raises an error if you call it.

  Args:
    settings: a dict of fairseq's arguments, or the object that holds them (its
      `args`; its other attributes are ignored): `fp16_init_scale` (128),
      `fp16_scale_window`, `fp16_scale_tolerance` (0), `threshold_loss_scale`
      (None) and `min_loss_scale` (1e-4). `fp16_scale_window` is required, since
      fairseq's default depends on the number of workers.
    loss_scale: the `loss_scale` of a checkpoint. fairseq saves no counts, so
      they restart at 0, as in fairseq.

  Returns:
    `(policy, state)`, with a :class:`FairseqLossScale`.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_fairseq(
    ...     {"fp16_scale_window": 256, "fp16_scale_tolerance": 0.25}, 1024.0)
    >>> policy.tolerance, state.loss_scale.item()
    (0.25, 1024.0)
  """
  caller = "from_fairseq"
  policy = FairseqLossScale(
    **_reading.read_fields(caller, "settings", settings, _SETTINGS)
  )
  if loss_scale is None:
    return _results.initial_result(policy)
  checkpoint = {"loss_scale": loss_scale}
  values = _reading.read_fields(caller, "the argument", checkpoint, _CHECKPOINT)
  return _results.resumed_result(caller, policy, values)
