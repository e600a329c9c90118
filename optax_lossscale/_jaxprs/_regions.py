"""Which equations and which checked values could make a value nonfinite.

Some values of a program are *checked*: a flag tells whether they are finite.
The *region* of a checked value consists of the equations between it and the
checked values that it reads. If a value is not finite, but all checked values
that it reads are, an inf or a NaN originates in its region. By default, the
checked values are the results of matmuls, what the body of a loop returns, and
as many others as necessary to keep regions small.

A set of equations, checked values and inputs is an int with a bit for each.
"""

from collections.abc import Callable, Collection, Sequence
import functools
import operator
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _avals,
  _eqns,
  _harvest,
  _higher_order,
  _primitives,
)

# The position of an equation, an input or a value (see `_state_threading.Path`)
# followed, for a value, by the index of the output plus `OUTPUT`. The outputs
# of a jaxpr follow its equations: they have the index of a further equation.
Key = tuple[int, ...]
# Larger than the index of any equation, body or iteration, so that the outputs
# of an equation come after its bodies.
OUTPUT = 1 << 40
# The first entry of the key of an argument, and the entry in place of the index
# of the equation in the key of a constant.
ARGUMENT, CONSTANT = -2, -1
# Regions of more equations are split.
_MAX_REGION_SIZE = 128


class Regions(NamedTuple):
  """The checked values of a program, and what they read.

  Attributes:
    reads: for each checked value, the set of all equations of its region, of
      the checked values that the region reads, and of arguments and nonfinite
      constants. Outputs of the program have an entry, too.
    keys: the key of each bit of a set.
    loops: the positions of the loops.
    eqns: the equation at each position, except calls, loops and branches.
  """

  reads: dict[Key, int]
  keys: list[Key]
  loops: set[Key]
  eqns: dict[Key, core.JaxprEqn]

  def list_sources(self, key: Key) -> list[Key]:
    """Return the checked values, arguments and constants that a value reads."""
    return [source for source in self._unpack(key) if source not in self.eqns]

  def list_region(self, key: Key) -> list[Key]:
    """Return the positions of the equations in the region of a value."""
    return [source for source in self._unpack(key) if source in self.eqns]

  def list_loops(self, key: Key) -> list[Key]:
    """Return the positions of the loops around a key, the outermost first."""
    prefixes = (key[: i + 1] for i in range(0, len(key) - 2, 2))
    return [prefix for prefix in prefixes if prefix in self.loops]

  def is_argument_output(self, index: int) -> bool:
    """Return whether an output of the program is one of its arguments."""
    sources = self._unpack(get_output_key(index))
    return len(sources) == 1 and is_argument(sources[0])

  def find_descendants(self, sources: Collection[Key]) -> set[Key]:
    """Return the checked values and outputs that depend on any of these keys.

    Loops and branches are followed, but no integer, predicate or Ref.

    Args:
      sources: positions of equations, or arguments.
    """
    indices = {key: i for i, key in enumerate(self.keys)}
    labels = sum(1 << indices[key] for key in sources if key in indices)
    found: set[Key] = set()
    while True:
      new = {key for key, reads in self.reads.items() if reads & labels} - found
      if not new:
        return found
      found |= new
      for key in new & indices.keys():
        labels |= 1 << indices[key]

  def _unpack(self, key: Key) -> list[Key]:
    labels, keys = self.reads.get(key, 0), []
    while labels:
      lowest = labels & -labels
      keys.append(self.keys[lowest.bit_length() - 1])
      labels ^= lowest
    return sorted(keys)


def get_output_key(index: int) -> Key:
  """Return the key of an output of the program."""
  return OUTPUT, OUTPUT + index


def get_output_index(key: Key) -> int:
  """Return the index of an output of the program."""
  return key[1] - OUTPUT


def is_output(key: Key) -> bool:
  """Return whether a key is that of an output of the program."""
  return key[0] == OUTPUT


def is_argument(key: Key) -> bool:
  """Return whether a key is that of an argument of the program."""
  return key[0] == ARGUMENT


def is_checked_value(key: Key) -> bool:
  """Return whether a key is that of a value within the program."""
  return key[-1] >= OUTPUT and not is_output(key)


def is_constant(key: Key) -> bool:
  """Return whether a key is that of a constant or a literal."""
  return key[-1] < 0 or CONSTANT in key


def find_regions(
  closed_jaxpr: _eqns.ClosedJaxpr,
  is_finite: Callable[[Any], bool],
) -> Regions:
  """Select the values of a program to check, and find their regions.

  Args:
    closed_jaxpr: the program.
    is_finite: returns whether a constant is finite.

  Returns:
    A :class:`Regions`.
  """
  analysis = _Analysis(is_finite)
  labels = [
    analysis.get_label((ARGUMENT, i)) if is_inexact(var) else 0
    for i, var in enumerate(closed_jaxpr.jaxpr.invars)
  ]
  # Values are selected in the first round, and their regions are found in the
  # second.
  for _ in range(2):
    analysis.reads.clear()
    outs = analysis.propagate(closed_jaxpr, labels, ())
  analysis.reads |= {get_output_key(i): out for i, out in enumerate(outs)}
  return Regions(
    analysis.reads, list(analysis.bits), analysis.loops, analysis.eqns
  )


class _Analysis:
  """An interpreter of jaxprs over sets, which are ints with a bit for each key.

  Only floats have labels: an integer is never nonfinite.
  """

  def __init__(self, is_finite: Callable[[Any], bool]) -> None:
    self._is_finite = is_finite
    self._parse_higher_order = functools.cache(_higher_order.parse_higher_order)
    self._checked: set[Key] = set()
    self._eqn_labels = 0
    self.bits: dict[Key, int] = {}
    self.reads: dict[Key, int] = {}
    self.loops: set[Key] = set()
    self.eqns: dict[Key, core.JaxprEqn] = {}

  def get_label(self, key: Key) -> int:
    """Return the set of a single key."""
    return 1 << self.bits.setdefault(key, len(self.bits))

  def propagate(
    self, closed_jaxpr: _eqns.ClosedJaxpr, inputs: Sequence[int], path: Key
  ) -> list[int]:
    """Return the set for each output of a jaxpr.

    Args:
      closed_jaxpr: the jaxpr.
      inputs: the set for each input.
      path: its position.
    """
    jaxpr = closed_jaxpr.jaxpr
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    consts = zip(jaxpr.constvars, closed_jaxpr.consts, strict=True)
    for i, (var, const) in enumerate(consts):
      env[var] = self._get_const_label(const, (*path, CONSTANT, i))

    def read(atom: Any, key: Key) -> int:
      if isinstance(atom, core.Literal):
        return self._get_const_label(atom.val, key)
      return env[atom] if is_inexact(atom) else 0

    for i, eqn in enumerate(jaxpr.eqns):
      # With JAX's upgrade flags, a tag is a call.
      is_tag = _harvest.get_tag(eqn) is not None
      hop = None if is_tag else self._parse_higher_order(eqn)
      # A literal is a part of its equation, unless the equation is a call.
      operands = [
        0
        if hop is None and isinstance(atom, core.Literal)
        else read(atom, (*path, i, -1 - k))
        for k, atom in enumerate(eqn.invars)
      ]
      outs = self._propagate_eqn(eqn, hop, operands, (*path, i))
      env.update(zip(eqn.outvars, outs, strict=True))
    return [
      read(atom, (*path, len(jaxpr.eqns), -1 - k))
      for k, atom in enumerate(jaxpr.outvars)
    ]

  def _get_const_label(self, const: Any, key: Key) -> int:
    return 0 if self._is_finite(const) else self.get_label(key)

  def _check(self, key: Key, labels: int, *, is_selected: bool = True) -> int:
    """Check a value if it is selected, now or before, and return its label."""
    if not is_selected and key not in self._checked:
      return labels
    self._checked.add(key)
    self.reads[key] = self.reads.get(key, 0) | labels
    return self.get_label(key)

  def _propagate_eqn(
    self,
    eqn: core.JaxprEqn,
    hop: _higher_order.HigherOrderOp | None,
    inputs: list[int],
    path: Key,
  ) -> list[int]:
    match hop:
      case None:
        return self._propagate_plain_eqn(eqn, inputs, path)
      case _higher_order.Scan() | _higher_order.While():
        return self._propagate_loop(eqn, hop, inputs, path)
      case _:
        bodies = _higher_order.pair_bodies_with_inputs(hop, inputs)
        outs = [
          self.propagate(body, body_inputs, (*path, i))
          for i, (body, body_inputs) in enumerate(bodies)
        ]
        return functools.reduce(_join, outs)

  def _propagate_plain_eqn(
    self, eqn: core.JaxprEqn, inputs: list[int], path: Key
  ) -> list[int]:
    self.eqns[path] = eqn
    own_label = self.get_label(path)
    self._eqn_labels |= own_label
    labels = functools.reduce(operator.or_, inputs, own_label)
    is_selected = (
      _primitives.is_matmul(eqn)
      or (labels & self._eqn_labels).bit_count() > _MAX_REGION_SIZE
    )
    return [
      self._check((*path, OUTPUT + i), labels, is_selected=is_selected)
      if is_inexact(var)
      else 0
      for i, var in enumerate(eqn.outvars)
    ]

  def _propagate_loop(
    self,
    eqn: core.JaxprEqn,
    loop: _higher_order.Scan | _higher_order.While,
    inputs: list[int],
    path: Key,
  ) -> list[int]:
    self.loops.add(path)
    body_index = len(_higher_order.get_bodies(loop)) - 1
    body_path = (*path, body_index)
    *_, consts, init, slices = (
      loop.split(inputs)
      if isinstance(loop, _higher_order.Scan)
      else (*loop.split(inputs), ())
    )
    carry = list(init)
    # The loop ends: each round adds a label, and their number is finite.
    while True:
      outs = self.propagate(loop.body, [*consts, *carry, *slices], body_path)
      outs = self._check_body_outputs(loop.body.jaxpr, outs, body_path)
      joined = _join(carry, outs)
      if joined == carry:
        break
      carry = joined
    # The carry may be finite again after the last iteration. Without any
    # iteration it is the initial one.
    results = [
      self._check((*path, OUTPUT + i), labels) if is_inexact(var) else 0
      for i, (labels, var) in enumerate(zip(carry, eqn.outvars, strict=False))
    ]
    return [*results, *outs[len(carry) :]]

  def _check_body_outputs(
    self, jaxpr: core.Jaxpr, outs: list[int], path: Key
  ) -> list[int]:
    """Check the outputs of a loop body, so that no region leaves an iteration.

    An output that is an input, or a checked value, needs no flag.
    """
    is_computed = lambda labels, var: (
      var not in jaxpr.invars and labels & self._eqn_labels != 0
    )
    return [
      self._check(
        (*path, len(jaxpr.eqns), OUTPUT + i),
        labels,
        is_selected=is_computed(labels, var),
      )
      for i, (labels, var) in enumerate(zip(outs, jaxpr.outvars, strict=True))
    ]


def _join(labels: Sequence[int], other_labels: Sequence[int]) -> list[int]:
  """Return the unions of the sets of two lists; the second may be longer."""
  return [a | b for a, b in zip(labels, other_labels, strict=False)]


def is_inexact(atom: Any) -> bool:
  """Return whether a variable or literal is a float or complex array."""
  # Writes into a Ref are not followed.
  dtype = getattr(atom.aval, "dtype", jnp.bool_)
  return jnp.issubdtype(dtype, jnp.inexact) and not _avals.is_ref(atom.aval)
