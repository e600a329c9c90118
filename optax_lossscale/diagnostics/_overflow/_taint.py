"""Attribute nonfinite entries of arrays to the eqns that they come from.

Each nonfinite entry carries a set of taint bits, one bit for each origin. Bits
follow entries instead of whole arrays, so an inf in one row of a batch is never
attributed to an overflow in another row. The taint of an eqn's outputs is
measured, so no primitive needs a rule:

* Evaluate the eqn with all tainted entries of its operands replaced by neutral
  numbers. Output entries that are still nonfinite originate in this eqn.
* For each origin, evaluate the eqn with only the entries of this origin left.
  Output entries that are nonfinite then come from this origin.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple
import weakref

import numpy as np

from optax_lossscale.diagnostics._overflow import _report, _taint_arrays

# If all other bits are in use, further origins share the last one.
_BITS = [1 << i for i in range(32)]
# An eqn is evaluated once for each of this many origins, and once for the rest.
_MAX_SEPARATE_BITS = 4


class TaintedArray:
  """A value in a jaxpr, with the origins of its nonfinite entries.

  Attributes:
    array: the array; None if nothing reads it.
    taint: uint32 of the same shape, on the host; None if the array is finite.
  """

  def __init__(self, array: Any, taint: np.ndarray | None = None):
    self.array = array
    self.taint = taint

  @functools.cached_property
  def taint_bits(self) -> int:
    """The bits of all origins in this array."""
    if self.taint is None:
      return 0
    return int(np.bitwise_or.reduce(self.taint, axis=None))


class _OriginEntry(NamedTuple):
  origin: _report.Overflow
  is_constant: bool


class ExecutedEqn(NamedTuple):
  """An eqn that was evaluated.

  Attributes:
    run: evaluates the eqn for other operands; None if it has effects, and must
      not run again.
    inputs: the operands. A literal is part of the eqn, so it has no taint.
    neutral_value: the number that replaces tainted entries, to test whether the
      eqn overflows without them; None if no number is neutral.
    describe_origin: returns the report on this eqn, from an output and the mask
      of the entries that this eqn made nonfinite.
  """

  run: Callable[..., list[Any]] | None
  inputs: list[TaintedArray]
  neutral_value: float | None
  describe_origin: Callable[[Any, np.ndarray], _report.Overflow]


class OriginTable:
  """The origins that were found, and their taint bits."""

  def __init__(self) -> None:
    # A dict is ordered: the first origin that was found is the first one
    # reported.
    self._entry_by_bit: dict[int, _OriginEntry] = {}
    self._tainted_arrays: weakref.WeakSet[TaintedArray] = weakref.WeakSet()

  def register_array(self, array: Any, taint: np.ndarray) -> TaintedArray:
    """Return an array with its taint, whose bits stay in use while it lives."""
    value = TaintedArray(array, taint)
    self._tainted_arrays.add(value)
    return value

  def derive_array(
    self,
    array: Any,
    values: Sequence[TaintedArray],
    derive_taint: Callable[..., np.ndarray],
  ) -> TaintedArray:
    """Return an array with the taint that is derived from other values.

    Args:
      array: the result of moving entries of the values, such as a slice.
      values: the values, all of one shape.
      derive_taint: moves the entries of the taint arrays in the same way.

    Returns:
      The array, without taint if no value has any.
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
    """Add an origin, and return its bit.

    Args:
      origin: the origin.
      is_constant: whether it is an inf that no eqn computed, such as a mask. It
        is reported only if there is no other origin.

    Returns:
      The bit.
    """
    # Out of bits, an origin joins a similar one, or else the shared last bit.
    # It is then reported as the first origin of this bit.
    bit = (
      self._get_free_bit() or self._find_similar_origin_bit(origin) or _BITS[-1]
    )
    self._entry_by_bit.setdefault(bit, _OriginEntry(origin, is_constant))
    return bit

  def _get_free_bit(self) -> int:
    """Return a bit that no origin has; 0 if there is none."""
    # If no bit is free, drop the origins whose bits no live array carries.
    # Their infs were masked out, so they can no longer reach a result.
    if self._entry_by_bit.keys() >= set(_BITS[:-1]):
      used_bits = join_taint_bits(list(self._tainted_arrays))
      self._entry_by_bit = {
        b: f for b, f in self._entry_by_bit.items() if b & used_bits
      }
    return next((bit for bit in _BITS[:-1] if bit not in self._entry_by_bit), 0)

  def _find_similar_origin_bit(self, origin: _report.Overflow) -> int:
    """Return the bit of an origin of the same primitive and source line.

    This is usually the same eqn in another iteration of a loop.
    """
    key = origin.primitive, origin.source_line
    for bit, entry in self._entry_by_bit.items():
      if (entry.origin.primitive, entry.origin.source_line) == key:
        return bit
    return 0

  def select_reported_origins(
    self, values: list[TaintedArray]
  ) -> list[_report.Overflow]:
    """Return the origins of these values, in the order of their discovery."""
    taint_bits = join_taint_bits(values)
    # An inf in a literal, a constant or an argument is usually a mask. It is
    # reported only if there is nothing else.
    entries = [f for b, f in self._entry_by_bit.items() if b & taint_bits]
    reported_entries = [f for f in entries if not f.is_constant] or entries
    return [f.origin for f in reported_entries]

  def taint_outputs(
    self, op: ExecutedEqn, outs: list[Any], finite_mask: list[bool]
  ) -> list[TaintedArray]:
    """Add taint to the outputs of an eqn.

    A nonfinite entry originates in this eqn if it is also nonfinite with
    neutral numbers in place of all tainted entries. It comes from an earlier
    origin if it is nonfinite with only the entries of this origin left.

    Args:
      op: the eqn.
      outs: its outputs.
      finite_mask: whether each output is finite.

    Returns:
      The outputs, with taint on those that are not finite.
    """
    input_bits = join_taint_bits(op.inputs)
    outs_all_masked, outs_by_origin = _rerun_with_taint_masked(
      op, input_bits, outs
    )
    # All nonfinite arrays are tainted, except literals: if no operand is
    # tainted, a nonfinite operand is an inf that is written in the program.
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
      # All outputs of an eqn share one origin.
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
    """Combine compiled outputs with the taint of the interpreted ones.

    XLA may round differently when it fuses eqns, so a nonfinite entry of the
    compiled program may be finite in the interpreter, and have no taint. It
    gets the bits of the whole array, or else the fallback bits.

    Args:
      outs: the outputs of the compiled call, loop or branch.
      finite_mask: whether each of them is finite.
      values: the same outputs, evaluated eqn by eqn.
      taint_bits: the bits for an output without any taint.

    Returns:
      The compiled outputs with taint.
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
    """Return the bits of all infs that are written in the program."""
    return sum(
      b for b, entry in self._entry_by_bit.items() if entry.is_constant
    )

  def _get_fallback_bits(self, taint_bits: int) -> int:
    """Return the bits for an entry that no single origin explains.

    Constants are left out if there are other origins, since they are intended.
    """
    return taint_bits & ~self._get_constant_bits() or taint_bits


def _rerun_with_taint_masked(
  op: ExecutedEqn, taint_bits: int, outs: list[Any]
) -> tuple[list[Any] | None, dict[int, list[Any]]]:
  """Evaluate an eqn again, without the tainted entries of its operands.

  Returns:
    The outputs with neutral numbers in place of all tainted entries, or None if
    no number is neutral; and by group of bits, the outputs with only the
    entries of this group left, if there are several groups.
  """
  if not taint_bits:  # There is nothing to replace.
    return outs, {}
  run = op.run
  if run is None:
    return None, {}
  # Without a neutral number, an eqn is still evaluated for each origin. The
  # replacement may then make an entry nonfinite, which only adds a bit.
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
  """Split bits into groups: a few single bits, and one group of the others.

  The eqn is evaluated once for each group.
  """
  bits = [bit for bit in _BITS if bit & taint_bits]
  remaining_bits = sum(bits[_MAX_SEPARATE_BITS:])
  return [
    *bits[:_MAX_SEPARATE_BITS],
    *([remaining_bits] if remaining_bits else []),
  ]


def join_taint_bits(values: list[TaintedArray]) -> int:
  """Return the bits of all origins in the values."""
  return functools.reduce(int.__or__, (value.taint_bits for value in values), 0)
