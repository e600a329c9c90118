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

from optax_lossscale.diagnostics._overflow import _bits, _report

# The last bit is for all that finds no bit of its own.
_BITS = [1 << i for i in range(32)]
_MOST_ALONE = 4


class Value:
  """An array on the way through a jaxpr.

  Attributes:
    array: the array.
    marks: None if it is finite, else uint32 of the same shape, on the host.
  """

  def __init__(self, array: Any, marks: np.ndarray | None = None):
    self.array = array
    self.marks = marks

  @functools.cached_property
  def bits(self) -> int:
    """All bits that are set in the marks."""
    if self.marks is None:
      return 0
    return int(np.bitwise_or.reduce(self.marks, axis=None))


class _Found(NamedTuple):
  origin: _report.Overflow
  is_constant: bool


class Operation(NamedTuple):
  """An operation that was carried out.

  Attributes:
    run: carries it out, on arrays in place of those of the inputs; None if it
      must not be done again.
    inputs: the values that it read. A number that is written there is part of
      it, and has no marks.
    neutral: what to put in place of an entry that is not finite, to see whether
      the others are enough to make an inf; None if that cannot be told.
    describe: what to remember of it, for an output and its new entries.
  """

  run: Callable[..., list[Any]] | None
  inputs: list[Value]
  neutral: float | None
  describe: Callable[[Any, np.ndarray], _report.Overflow]


class Origins:
  """The origins that were found, and the marks that stand for them."""

  def __init__(self) -> None:
    # In the order in which they were found.
    self._by_bit: dict[int, _Found] = {}
    self._marked: weakref.WeakSet[Value] = weakref.WeakSet()

  def value(self, array: Any, marks: np.ndarray) -> Value:
    """A value whose marks are known to be in use."""
    value = Value(array, marks)
    self._marked.add(value)
    return value

  def made(
    self, array: Any, values: Sequence[Value], make: Callable[..., np.ndarray]
  ) -> Value:
    """What was made of the arrays of values, with marks made likewise.

    Args:
      array: what was made.
      values: what it was made of, all of one shape.
      make: what makes the marks, of those of each value.

    Returns:
      The value, without marks if none of the values has any.
    """
    marked = [value.marks for value in values if value.marks is not None]
    if not marked:
      return Value(array)
    none = _bits.empty_taint(marked[0])
    marks = [none if v.marks is None else v.marks for v in values]
    return self.value(array, make(*marks))

  def add(self, origin: _report.Overflow, is_constant: bool = False) -> int:
    """The bit of a new origin.

    Args:
      origin: what to remember.
      is_constant: whether it is an infinity that was written there, such as
        that of a mask. It is named only if there is nothing else.

    Returns:
      The bit.
    """
    bit = self._free_bit() or self._bit_of_one_like(origin) or _BITS[-1]
    self._by_bit.setdefault(bit, _Found(origin, is_constant))
    return bit

  def _free_bit(self) -> int:
    """A bit without an origin, or that no value carries; 0 if there is none."""
    if self._by_bit.keys() >= set(_BITS[:-1]):
      used = bits_of_all(list(self._marked))
      self._by_bit = {b: f for b, f in self._by_bit.items() if b & used}
    return next((bit for bit in _BITS[:-1] if bit not in self._by_bit), 0)

  def _bit_of_one_like(self, origin: _report.Overflow) -> int:
    """The bit of an origin on the same line, as in another iteration."""
    kind = origin.primitive, origin.source_line
    for bit, found in self._by_bit.items():
      if (found.origin.primitive, found.origin.source_line) == kind:
        return bit
    return 0

  def named(self, values: list[Value]) -> list[_report.Overflow]:
    """The origins of these values, in the order in which they were found."""
    bits = bits_of_all(values)
    found = [f for b, f in self._by_bit.items() if b & bits]
    told = [f for f in found if not f.is_constant] or found
    return [f.origin for f in told]

  def mark(
    self, op: Operation, outs: list[Any], finite: list[bool]
  ) -> list[Value]:
    """Marks what an operation has returned.

    An entry is marked as this operation's own if it is not finite although the
    inputs are, or with neutral numbers in place of what is not. It carries the
    mark of an origin if it is not finite with the entries of this origin alone.

    Args:
      op: the operation.
      outs: what it returned.
      finite: whether each of these is finite.

    Returns:
      The values, with marks on those that are not finite.
    """
    known = bits_of_all(op.inputs)
    clean, alone = _run_again(op, known, outs)
    # Without marks, it is an inf that is written there.
    finite_inputs = [_bits.all_finite(value.array) for value in op.inputs]
    writes_inf = not known and not all(finite_inputs)
    own = 0
    values = []
    for i, out in enumerate(outs):
      if finite[i]:
        values.append(Value(out))
        continue
      marks, is_own = _bits.attribute_taint(
        out,
        clean[i] if clean else None,
        {bit: arrays[i] for bit, arrays in alone.items()},
        self._rest(known),
        self._constants(),
      )
      if is_own.any():
        is_constant = writes_inf and not _bits.has_nan(out)
        own = own or self.add(op.describe(out, is_own), is_constant)
        marks[is_own] = own
      values.append(self.value(out, marks))
    return values

  def agree(
    self,
    outs: list[Any],
    finite: list[bool],
    values: list[Value],
    known: int,
  ) -> list[Value]:
    """What was returned at once, with the marks that were found step by step.

    XLA may round otherwise when it does several operations at once. So an entry
    may lack a mark, and is then marked with all bits that are known.
    """
    agreed = []
    for out, is_finite, value in zip(outs, finite, values, strict=True):
      if is_finite:
        agreed.append(Value(out))
        continue
      bits = value.bits or self._rest(known)
      agreed.append(
        self.value(out, _bits.fill_untainted(value.marks, out, bits))
      )
    return agreed

  def _constants(self) -> int:
    """The bits of the infinities that were written where they are."""
    return sum(b for b, found in self._by_bit.items() if found.is_constant)

  def _rest(self, known: int) -> int:
    """What an entry is marked with that no origin makes alone."""
    return known & ~self._constants() or known


def _run_again(
  op: Operation, known: int, outs: list[Any]
) -> tuple[list[Any] | None, dict[int, list[Any]]]:
  """What the operation returns without what is not finite, or with parts of it.

  Returns:
    What it returns with neutral numbers in place of all marked entries, if that
    tells anything, and what it returns with the marked entries of some bits
    alone, if there are several.
  """
  if not known:
    return outs, {}
  run = op.run
  if run is None:
    return None, {}
  neutral = 1.0 if op.neutral is None else op.neutral

  def keeping(bit: int) -> list[Any]:
    keep = lambda v: _bits.mask_other_origins(v.array, v.marks, bit, neutral)
    return run(*map(keep, op.inputs))

  clean = None if op.neutral is None else keeping(0)
  groups = _groups(known)
  return clean, {b: keeping(b) for b in groups if len(groups) > 1}


def _groups(known: int) -> list[int]:
  """The bits that are known, of which all but a few share a group.

  The operation is carried out once for each group.
  """
  bits = [bit for bit in _BITS if bit & known]
  rest = sum(bits[_MOST_ALONE:])
  return [*bits[:_MOST_ALONE], *([rest] if rest else [])]


def bits_of_all(values: list[Value]) -> int:
  """All bits that are set in any of the values."""
  return functools.reduce(int.__or__, (value.bits for value in values), 0)
