"""Which equations and which checked values could make a value nonfinite.

Some values of a program are *checked*: a flag tells whether they are finite.
The *region* of a checked value consists of the equations between it and the
checked values that it reads. If a value is not finite, but all checked values
that it reads are, an inf or a NaN originates in its region. By default, the
checked values are the results of matmuls, what the body of a loop returns, and
as many others as necessary to keep regions small.
"""

from collections.abc import Callable, Collection, Sequence
import functools
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _tagged_values,
)

# The position of an equation, an input or a value (see `_state_threading.Path`)
# followed, for a value, by the index of the output plus `OUTPUT`. The outputs
# of a jaxpr follow its equations: they have the index of a further equation.
Key = tuple[int, ...]
# The equations, checked values, arguments and constants that a value reads.
Sources = frozenset[Key]
# Larger than the index of any equation, body or iteration, so that the outputs
# of an equation come after its bodies.
OUTPUT = 1 << 40
# The first entry of the key of an argument, and the entry in place of the index
# of the equation in the key of a constant.
ARGUMENT, CONSTANT = -2, -1
# Regions of more equations are split.
_MAX_REGION_SIZE = 128
_NOTHING = Sources()


class Regions(NamedTuple):
  """The checked values of a program, and what they read.

  Attributes:
    reads: for each checked value, the set of all equations of its region, of
      the checked values that the region reads, and of arguments and nonfinite
      constants. Outputs of the program have an entry, too.
    loops: the positions of the loops.
    eqns: the equation at each position, except calls, loops and branches.
  """

  reads: dict[Key, Sources]
  loops: set[Key]
  eqns: dict[Key, core.JaxprEqn]

  def list_sources(self, key: Key) -> list[Key]:
    """Return the checked values, arguments and constants that a value reads."""
    return sorted(self.reads.get(key, _NOTHING) - self.eqns.keys())

  def list_region(self, key: Key) -> list[Key]:
    """Return the positions of the equations in the region of a value."""
    return sorted(self.reads.get(key, _NOTHING) & self.eqns.keys())

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
    return set(map(get_output_index, filter(is_output, found)))


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
  inputs = [
    Sources({(ARGUMENT, i)}) if is_inexact(var) else _NOTHING
    for i, var in enumerate(closed_jaxpr.jaxpr.invars)
  ]
  # Values are selected in the first round, and their regions are found in the
  # second.
  for _ in range(2):
    analysis.reads.clear()
    outs = analysis.propagate(closed_jaxpr, inputs, ())
  analysis.reads |= {get_output_key(i): out for i, out in enumerate(outs)}
  return Regions(analysis.reads, analysis.loops, analysis.eqns)


class _Analysis:
  """An interpreter of jaxprs over what each value reads.

  Only floats read anything: an integer is never nonfinite.
  """

  def __init__(self, is_finite: Callable[[Any], bool]) -> None:
    self._is_finite = is_finite
    self._parse_higher_order = functools.cache(_higher_order.parse_higher_order)
    self._checked: set[Key] = set()
    self.reads: dict[Key, Sources] = {}
    self.loops: set[Key] = set()
    self.eqns: dict[Key, core.JaxprEqn] = {}

  def propagate(
    self, closed_jaxpr: _eqns.ClosedJaxpr, inputs: Sequence[Sources], path: Key
  ) -> list[Sources]:
    """Return what each output of a jaxpr reads.

    Args:
      closed_jaxpr: the jaxpr.
      inputs: what each input reads.
      path: its position.
    """
    jaxpr = closed_jaxpr.jaxpr
    env: dict[Any, Sources] = dict(zip(jaxpr.invars, inputs, strict=True))
    consts = zip(jaxpr.constvars, closed_jaxpr.consts, strict=True)
    for i, (var, const) in enumerate(consts):
      env[var] = self._read_const(const, (*path, CONSTANT, i))

    def read(atom: Any, key: Key) -> Sources:
      if isinstance(atom, core.Literal):
        return self._read_const(atom.val, key)
      return env[atom] if is_inexact(atom) else _NOTHING

    for i, eqn in enumerate(jaxpr.eqns):
      # With JAX's upgrade flags, a tag is a call.
      is_tag = _tagged_values.get_tag(eqn) is not None
      hop = None if is_tag else self._parse_higher_order(eqn)
      # A literal is a part of its equation, unless the equation is a call.
      operands = [
        _NOTHING
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

  def _read_const(self, const: Any, key: Key) -> Sources:
    return _NOTHING if self._is_finite(const) else Sources({key})

  def _check(
    self, key: Key, sources: Sources, *, is_selected: bool = True
  ) -> Sources:
    """Check a value if it is selected, now or before.

    Returns:
      What a reader of the value reads: the value itself if it is checked.
    """
    if not is_selected and key not in self._checked:
      return sources
    self._checked.add(key)
    self.reads[key] = self.reads.get(key, _NOTHING) | sources
    return Sources({key})

  def _propagate_eqn(
    self,
    eqn: core.JaxprEqn,
    hop: _higher_order.HigherOrderOp | None,
    inputs: list[Sources],
    path: Key,
  ) -> list[Sources]:
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
    self, eqn: core.JaxprEqn, inputs: list[Sources], path: Key
  ) -> list[Sources]:
    self.eqns[path] = eqn
    sources = Sources({path}).union(*inputs)
    is_selected = (
      _primitives.is_matmul(eqn)
      or len(sources & self.eqns.keys()) > _MAX_REGION_SIZE
    )
    return [
      self._check((*path, OUTPUT + i), sources, is_selected=is_selected)
      if is_inexact(var)
      else _NOTHING
      for i, var in enumerate(eqn.outvars)
    ]

  def _propagate_loop(
    self,
    eqn: core.JaxprEqn,
    loop: _higher_order.Scan | _higher_order.While,
    inputs: list[Sources],
    path: Key,
  ) -> list[Sources]:
    self.loops.add(path)
    body_index = len(_higher_order.get_bodies(loop)) - 1
    body_path = (*path, body_index)
    *_, consts, init, slices = (
      loop.split(inputs)
      if isinstance(loop, _higher_order.Scan)
      else (*loop.split(inputs), ())
    )
    carry = list(init)
    # The loop ends: each round adds a source, and their number is finite.
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
      self._check((*path, OUTPUT + i), sources) if is_inexact(var) else _NOTHING
      for i, (sources, var) in enumerate(zip(carry, eqn.outvars, strict=False))
    ]
    return [*results, *outs[len(carry) :]]

  def _check_body_outputs(
    self, jaxpr: core.Jaxpr, outs: list[Sources], path: Key
  ) -> list[Sources]:
    """Check the outputs of a loop body, so that no region leaves an iteration.

    An output that is an input, or a checked value, needs no flag.
    """
    is_computed = lambda sources, var: (
      var not in jaxpr.invars and not self.eqns.keys().isdisjoint(sources)
    )
    return [
      self._check(
        (*path, len(jaxpr.eqns), OUTPUT + i),
        sources,
        is_selected=is_computed(sources, var),
      )
      for i, (sources, var) in enumerate(zip(outs, jaxpr.outvars, strict=True))
    ]


def _join(outs: Sequence[Sources], others: Sequence[Sources]) -> list[Sources]:
  """Return the unions of the sets of two lists; the second may be longer."""
  return [a | b for a, b in zip(outs, others, strict=False)]


def is_inexact(atom: Any) -> bool:
  """Return whether a variable or literal is a float or complex array."""
  # Writes into a Ref are not followed.
  dtype = getattr(atom.aval, "dtype", jnp.bool_)
  return jnp.issubdtype(dtype, jnp.inexact) and not _eqns.is_ref(atom.aval)
