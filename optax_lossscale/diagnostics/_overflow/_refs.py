"""Marks on what is kept in a Ref: it has another Ref beside it, of marks.

A ``scan`` of hijax keeps its carry in Refs, and so may a program.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._overflow import _bits, _marks, _report


def is_ref(x: Any) -> bool:
  """Whether this is a Ref, and no array."""
  return hasattr(jax.typeof(x), "inner_aval")


def follow(
  origins: _marks.Origins,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  outs: list[Any],
  describe: Callable[[Any, np.ndarray], _report.Overflow],
) -> list[_marks.Value] | None:
  """What a Ref is given, or what is read of it, with its marks.

  Args:
    origins: the origins up to now.
    eqn: the equation, which was carried out.
    inputs: the values that it read, after which the Ref's marks are changed.
    outs: what it returned.
    describe: what to remember of it, if it is an origin.

  Returns:
    A value for each output; None if there is nothing to follow.
  """
  name = eqn.primitive.name
  if name == "new_ref" and inputs[0].marks is not None:
    return [origins.in_ref(_marks.Value(outs[0]), inputs[0].marks)]
  if name == "addupdate":
    return _add(origins, eqn, inputs, describe)
  if name not in ("freeze", "get", "swap"):
    return None
  ref, *rest = inputs
  is_marked = name == "swap" and rest[0].marks is not None
  if ref.shadow is None and not is_marked:
    return None
  if ref.shadow is None:
    origins.in_ref(ref, _bits.no_marks(ref.array))
  known = ref.bits
  # The same is done with the marks: what an index is, the equation knows.
  arguments = [value.array for value in rest]
  if name == "swap":
    new = rest[0]
    marks = new.marks if is_marked else _bits.no_marks(new.array)
    arguments[0] = jnp.asarray(marks)
  marks = ref.shadow[...]
  if name != "freeze":
    (marks,) = _jaxprs.function(eqn)(ref.shadow, *arguments)
  values = [_marks.Value(outs[0], np.asarray(marks))]
  finite = [_bits.is_finite(outs[0])]
  return _marks.agree(origins, outs, finite, values, known) if known else None


def _add(
  origins: _marks.Origins,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  describe: Callable[[Any, np.ndarray], _report.Overflow],
) -> list[_marks.Value]:
  """What is added brings its marks, and what only the sum is has a new one."""
  ref, added, *index = inputs
  marks = _bits.no_marks(ref.array)
  if ref.shadow is not None:
    marks = np.array(ref.shadow[...])
  its_marks: Any = added.marks
  for bit in _bits.each_of(added.bits):
    # Where an index stands twice, marks would be added up, and be other ones.
    reached = jax.new_ref(jnp.zeros(marks.shape, jnp.uint32))
    has_bit = jnp.asarray(its_marks & np.uint32(bit) != 0, jnp.uint32)
    _jaxprs.function(eqn)(reached, has_bit, *(value.array for value in index))
    marks[np.asarray(reached[...]) > 0] |= np.uint32(bit)
  total = ref.array[...]
  is_own = _bits.not_finite(total) & (marks == 0)
  if is_own.any():
    marks[is_own] = origins.add(describe(total, is_own))
  origins.in_ref(ref, marks)
  return []
