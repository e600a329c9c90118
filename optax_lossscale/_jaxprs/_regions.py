"""Which equations and which checked values could make a value nonfinite.

Some values of a program are *checked*: a flag tells whether they are finite.
The *region* of a checked value consists of the equations between it and the
checked values that it reads. If a value is not finite, but all checked values
that it reads are, an inf or a NaN originates in its region. By default, the
checked values are the results of matmuls, what the body of a loop returns, and
as many others as necessary to keep regions small.
"""

from collections.abc import Collection
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _walk,
)

# The position of an equation, an input or a value (see `_state_threading.Path`)
# followed, for a value, by the index of the output plus `OUTPUT`. The outputs
# of a jaxpr follow its equations: they have the index of a further equation.
Key = tuple[int, ...]
# The equations, checked values and arguments that a value reads.
Sources = frozenset[Key]
# Larger than the index of any equation, body or iteration, so that the outputs
# of an equation come after its bodies.
OUTPUT = 1 << 40
# The first entry of the key of an argument.
ARGUMENT = -1
# Regions of more equations are split.
_MAX_REGION_SIZE = 128


class Regions(_walk.Dataflow):
  """The checked values of a program, and what they read.

  Only floats read anything: an integer is never nonfinite.

  Attributes:
    reads: for each checked value, the set of all equations of its region, and
      of the checked values and arguments that the region reads. Outputs of the
      program have an entry, too; it is empty for constants.
    loops: the positions of the loops.
    visits: the equation at each position, in program order.
  """

  def __init__(self, closed_jaxpr: _eqns.ClosedJaxpr) -> None:
    super().__init__()
    self.reads: dict[Key, Sources] = {}
    self.loops: set[Key] = set()
    self.visits: dict[Key, _walk.EqnVisit] = {}
    self._checked: set[Key] = set()
    inputs = [
      Sources({(ARGUMENT, i)}) if is_inexact(var) else _walk.NOTHING
      for i, var in enumerate(closed_jaxpr.jaxpr.invars)
    ]
    # Values are selected in the first round, and their regions are found in the
    # second.
    for _ in range(2):
      self.reads.clear()
      outs = self.propagate_jaxpr(closed_jaxpr, inputs)
    self.reads |= {get_output_key(i): out for i, out in enumerate(outs)}

  def list_sources(self, key: Key) -> list[Key]:
    """Return the checked values and arguments that a value reads."""
    return sorted(self.reads.get(key, _walk.NOTHING) - self.visits.keys())

  def list_region(self, key: Key) -> list[Key]:
    """Return the positions of the equations in the region of a value."""
    return sorted(self.reads.get(key, _walk.NOTHING) & self.visits.keys())

  def list_loops(self, key: Key) -> list[Key]:
    """Return the positions of the loops around a key, the outermost first."""
    prefixes = (key[: i + 1] for i in range(0, len(key) - 2, 2))
    return [prefix for prefix in prefixes if prefix in self.loops]

  def is_argument_output(self, index: int) -> bool:
    """Return whether an output of the program is one of its arguments."""
    sources = self.reads[get_output_key(index)]
    return len(sources) == 1 and all(map(is_argument, sources))

  def find_outputs(self, sources: Collection[Key]) -> set[int]:
    """Return the indices of the outputs that depend on any of these keys.

    Loops and branches are followed, but no integer, predicate or Ref.

    Args:
      sources: positions of equations, or arguments.
    """
    found, new = set[Key](), set(sources)
    while new:
      new = {
        key for key, reads in self.reads.items() if not reads.isdisjoint(new)
      } - found
      found |= new
    return {key[1] - OUTPUT for key in filter(is_output, found)}

  def propagate_eqn(
    self, visit: _walk.EqnVisit, operands: list[Sources]
  ) -> list[Sources]:
    self.visits[visit.path] = visit
    return super().propagate_eqn(visit, operands)

  def transfer(
    self, visit: _walk.EqnVisit, operands: list[Sources]
  ) -> list[Sources]:
    eqn, path = visit.eqn, visit.path
    sources = Sources({path}).union(*operands)
    is_selected = (
      _primitives.is_matmul(eqn)
      or len(sources & self.visits.keys()) > _MAX_REGION_SIZE
    )
    return [
      self._check((*path, OUTPUT + i), sources, is_selected=is_selected)
      if is_inexact(var)
      else _walk.NOTHING
      for i, var in enumerate(eqn.outvars)
    ]

  def propagate_loop(
    self,
    visit: _walk.EqnVisit,
    loop: _higher_order.Scan | _higher_order.While,
    operands: list[Sources],
  ) -> list[Sources]:
    self.loops.add(visit.path)
    outs = super().propagate_loop(visit, loop, operands)
    # The carry may be finite again after the last iteration. Without any
    # iteration it is the initial one.
    return [
      self._check(
        (*visit.path, OUTPUT + i),
        sources,
        is_selected=i < loop.num_carry and is_inexact(var),
      )
      for i, (sources, var) in enumerate(
        zip(outs, visit.eqn.outvars, strict=True)
      )
    ]

  def end_iteration(
    self, jaxpr: core.Jaxpr, path: Key, outs: list[Sources]
  ) -> list[Sources]:
    # Check the outputs, so that no region leaves an iteration. An output that
    # is an input, or a checked value, needs no flag.
    is_computed = lambda sources, var: (
      var not in jaxpr.invars and not self.visits.keys().isdisjoint(sources)
    )
    return [
      self._check(
        (*path, len(jaxpr.eqns), OUTPUT + i),
        sources,
        is_selected=is_computed(sources, var),
      )
      for i, (sources, var) in enumerate(zip(outs, jaxpr.outvars, strict=True))
    ]

  def _check(self, key: Key, sources: Sources, *, is_selected: bool) -> Sources:
    """Check a value if it is selected, now or before.

    Returns:
      What a reader of the value reads: the value itself if it is checked.
    """
    if not is_selected and key not in self._checked:
      return sources
    self._checked.add(key)
    self.reads[key] = self.reads.get(key, _walk.NOTHING) | sources
    return Sources({key})


def get_output_key(index: int) -> Key:
  """Return the key of an output of the program."""
  return OUTPUT, OUTPUT + index


def get_eqn_path(key: Key) -> Key:
  """Return the position of an equation, by its own key or that of a result."""
  return key if len(key) % 2 else key[:-1]


def is_output(key: Key) -> bool:
  """Return whether a key is that of an output of the program."""
  return key[0] == OUTPUT


def is_argument(key: Key) -> bool:
  """Return whether a key is that of an argument of the program."""
  return key[0] == ARGUMENT


def is_checked_value(key: Key) -> bool:
  """Return whether a key is that of a value within the program."""
  return key[-1] >= OUTPUT and not is_output(key)


def is_inexact(atom: Any) -> bool:
  """Return whether a variable or literal is a float or complex array."""
  # Writes into a Ref are not followed.
  dtype = getattr(atom.aval, "dtype", jnp.bool_)
  return jnp.issubdtype(dtype, jnp.inexact) and not _eqns.is_ref(atom.aval)
