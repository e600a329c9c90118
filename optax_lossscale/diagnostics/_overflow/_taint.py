"""Marks on entries that are not finite: which operations they come from.

Each such entry of an array carries a set of bits, one for each origin. Marks
follow the entries and not the arrays, so that an inf in one place is never
blamed on what happened in another.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple
import weakref

import numpy as np

from optax_lossscale.diagnostics._overflow import _report, _taint_arrays

# The last bit is for all that finds no bit of its own.
_BITS = [1 << i for i in range(32)]
_MAX_SEPARATE_BITS = 4


class TaintedArray:
  """An array on the way through a jaxpr.

  Attributes:
    array: the array.
    taint: None if it is finite, else uint32 of the same shape, on the host.
  """

  def __init__(self, array: Any, taint: np.ndarray | None = None):
    self.array = array
    self.taint = taint

  @functools.cached_property
  def taint_bits(self) -> int:
    """All bits that are set in the marks."""
    if self.taint is None:
      return 0
    return int(np.bitwise_or.reduce(self.taint, axis=None))


class _OriginEntry(NamedTuple):
  origin: _report.Overflow
  is_constant: bool


class ExecutedEqn(NamedTuple):
  """An operation that was carried out.

  Attributes:
    run: carries it out, on arrays in place of those of the inputs; None if it
      must not be done again.
    inputs: the values that it read. A number that is written there is part of
      it, and has no marks.
    neutral_value: what to put in place of an entry that is not finite, to see
      whether the others are enough to make an inf; None if that cannot be told.
    describe_origin: what to remember of it, for an output and its new entries.
  """

  run: Callable[..., list[Any]] | None
  inputs: list[TaintedArray]
  neutral_value: float | None
  describe_origin: Callable[[Any, np.ndarray], _report.Overflow]


class OriginTable:
  """The origins that were found, and the marks that stand for them."""

  def __init__(self) -> None:
    # In the order in which they were found.
    self._entry_by_bit: dict[int, _OriginEntry] = {}
    self._tainted_arrays: weakref.WeakSet[TaintedArray] = weakref.WeakSet()

  def register_array(self, array: Any, taint: np.ndarray) -> TaintedArray:
    """A value whose marks are known to be in use."""
    value = TaintedArray(array, taint)
    self._tainted_arrays.add(value)
    return value

  def derive_array(
    self,
    array: Any,
    values: Sequence[TaintedArray],
    derive_taint: Callable[..., np.ndarray],
  ) -> TaintedArray:
    """What was made of the arrays of values, with marks made likewise.

    Args:
      array: what was made.
      values: what it was made of, all of one shape.
      derive_taint: what makes the marks, of those of each value.

    Returns:
      The value, without marks if none of the values has any.
    """
    nonempty_taints = [
      value.taint for value in values if value.taint is not None
    ]
    if not nonempty_taints:
      return TaintedArray(array)
    empty_taint = _taint_arrays.empty_taint(nonempty_taints[0])
    taints = [empty_taint if v.taint is None else v.taint for v in values]
    return self.register_array(array, derive_taint(*taints))

  def add_origin(
    self, origin: _report.Overflow, is_constant: bool = False
  ) -> int:
    """The bit of a new origin.

    Args:
      origin: what to remember.
      is_constant: whether it is an infinity that was written there, such as
        that of a mask. It is named only if there is nothing else.

    Returns:
      The bit.
    """
    bit = (
      self._get_free_bit() or self._find_similar_origin_bit(origin) or _BITS[-1]
    )
    self._entry_by_bit.setdefault(bit, _OriginEntry(origin, is_constant))
    return bit

  def _get_free_bit(self) -> int:
    """A bit without an origin, or that no value carries; 0 if there is none."""
    if self._entry_by_bit.keys() >= set(_BITS[:-1]):
      used_bits = join_taint_bits(list(self._tainted_arrays))
      self._entry_by_bit = {
        b: f for b, f in self._entry_by_bit.items() if b & used_bits
      }
    return next((bit for bit in _BITS[:-1] if bit not in self._entry_by_bit), 0)

  def _find_similar_origin_bit(self, origin: _report.Overflow) -> int:
    """The bit of an origin on the same line, as in another iteration."""
    key = origin.primitive, origin.source_line
    for bit, entry in self._entry_by_bit.items():
      if (entry.origin.primitive, entry.origin.source_line) == key:
        return bit
    return 0

  def select_origins(
    self, values: list[TaintedArray]
  ) -> list[_report.Overflow]:
    """The origins of these values, in the order in which they were found."""
    taint_bits = join_taint_bits(values)
    entries = [f for b, f in self._entry_by_bit.items() if b & taint_bits]
    reported_entries = [f for f in entries if not f.is_constant] or entries
    return [f.origin for f in reported_entries]

  def taint_outputs(
    self, op: ExecutedEqn, outs: list[Any], finite_mask: list[bool]
  ) -> list[TaintedArray]:
    """Marks what an operation has returned.

    An entry is marked as this operation's own if it is not finite although the
    inputs are, or with neutral numbers in place of what is not. It carries the
    mark of an origin if it is not finite with the entries of this origin alone.

    Args:
      op: the operation.
      outs: what it returned.
      finite_mask: whether each of these is finite.

    Returns:
      The values, with marks on those that are not finite.
    """
    input_bits = join_taint_bits(op.inputs)
    outs_all_masked, outs_by_origin = _rerun_masked(op, input_bits, outs)
    # Without marks, it is an inf that is written there.
    input_finite_mask = [
      _taint_arrays.all_finite(value.array) for value in op.inputs
    ]
    is_literal_inf = not input_bits and not all(input_finite_mask)
    own_bit = 0
    values = []
    for i, out in enumerate(outs):
      if finite_mask[i]:
        values.append(TaintedArray(out))
        continue
      taint, is_own = _taint_arrays.attribute_taint(
        out,
        outs_all_masked[i] if outs_all_masked else None,
        {bit: arrays[i] for bit, arrays in outs_by_origin.items()},
        self._get_fallback_bits(input_bits),
        self._get_constant_bits(),
      )
      if is_own.any():
        is_constant = is_literal_inf and not _taint_arrays.has_nan(out)
        own_bit = own_bit or self.add_origin(
          op.describe_origin(out, is_own), is_constant
        )
        taint[is_own] = own_bit
      values.append(self.register_array(out, taint))
    return values

  def reconcile(
    self,
    outs: list[Any],
    finite_mask: list[bool],
    values: list[TaintedArray],
    taint_bits: int,
  ) -> list[TaintedArray]:
    """What was returned at once, with the marks that were found step by step.

    XLA may round otherwise when it does several operations at once. So an entry
    may lack a mark, and is then marked with all bits that are known.
    """
    reconciled_values = []
    for out, is_finite, value in zip(outs, finite_mask, values, strict=True):
      if is_finite:
        reconciled_values.append(TaintedArray(out))
        continue
      bits = value.taint_bits or self._get_fallback_bits(taint_bits)
      reconciled_values.append(
        self.register_array(
          out, _taint_arrays.fill_untainted(value.taint, out, bits)
        )
      )
    return reconciled_values

  def _get_constant_bits(self) -> int:
    """The bits of the infinities that were written where they are."""
    return sum(
      b for b, entry in self._entry_by_bit.items() if entry.is_constant
    )

  def _get_fallback_bits(self, taint_bits: int) -> int:
    """What an entry is marked with that no origin makes alone."""
    return taint_bits & ~self._get_constant_bits() or taint_bits


def _rerun_masked(
  op: ExecutedEqn, taint_bits: int, outs: list[Any]
) -> tuple[list[Any] | None, dict[int, list[Any]]]:
  """What the operation returns without what is not finite, or with parts of it.

  Returns:
    What it returns with neutral numbers in place of all marked entries, if that
    tells anything, and what it returns with the marked entries of some bits
    alone, if there are several.
  """
  if not taint_bits:
    return outs, {}
  run = op.run
  if run is None:
    return None, {}
  neutral_value = 1.0 if op.neutral_value is None else op.neutral_value

  def rerun_keeping(bit: int) -> list[Any]:
    mask_array = lambda v: _taint_arrays.mask_other_origins(
      v.array, v.taint, bit, neutral_value
    )
    return run(*map(mask_array, op.inputs))

  outs_all_masked = None if op.neutral_value is None else rerun_keeping(0)
  bit_groups = _group_bits(taint_bits)
  return outs_all_masked, {
    b: rerun_keeping(b) for b in bit_groups if len(bit_groups) > 1
  }


def _group_bits(taint_bits: int) -> list[int]:
  """The bits that are known, of which all but a few share a group.

  The operation is carried out once for each group.
  """
  bits = [bit for bit in _BITS if bit & taint_bits]
  remaining_bits = sum(bits[_MAX_SEPARATE_BITS:])
  return [
    *bits[:_MAX_SEPARATE_BITS],
    *([remaining_bits] if remaining_bits else []),
  ]


def join_taint_bits(values: list[TaintedArray]) -> int:
  """All bits that are set in any of the values."""
  return functools.reduce(int.__or__, (value.taint_bits for value in values), 0)
