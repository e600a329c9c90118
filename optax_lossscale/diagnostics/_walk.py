"""Walks through a jaxpr and all that it calls, without computing anything."""

from collections.abc import Iterator
import itertools
import math
from typing import Any, NamedTuple

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import _risks, _sources

# What these hold only says how two numbers become one.
_COMBINERS = ("arg", "cum", "reduce", "scatter", "select_and", "sort", "top_k")


class Known:
  """What is known of variables before anything is computed."""

  def __init__(self) -> None:
    self._numbers: dict[Any, float] = {}
    self._terms: dict[Any, int] = {}

  def number(self, atom: Any) -> float | None:
    """The number that a scalar is, if it is a constant."""
    if not isinstance(atom, core.Literal):
      return self._numbers.get(atom)
    aval: Any = atom.aval
    return float(atom.val) if aval.shape == () else None

  def terms(self, atom: Any) -> int:
    """How many terms a value is the sum of; 1 if it is none."""
    return 1 if isinstance(atom, core.Literal) else self._terms.get(atom, 1)

  def learn(self, eqn: core.JaxprEqn) -> None:
    """Remembers that the result of an equation is a sum."""
    for var in eqn.outvars[:1]:
      self._terms[var] = _risks.terms_in_sum(eqn)

  def within(self, outer: list[Any], inner: list[Any]) -> "Known":
    """What is known in a jaxpr that is called with these values."""
    known = Known()
    for atom, var in zip(outer, inner, strict=True):
      number = self.number(atom)
      if number is not None:
        known._numbers[var] = number
    return known


class Step(NamedTuple):
  """An equation that was met on the way.

  Attributes:
    eqn: the equation.
    place: where it stands.
    known: what is known of the variables around it.
    times: how often it runs.
    branches: pairs of a ``cond`` and its branch, in which it stands.
    note: what cannot be known of it; often empty.
  """

  eqn: core.JaxprEqn
  place: _sources.Place
  known: Known
  times: int
  branches: tuple[tuple[int, int], ...]
  note: str = ""


class Walk:
  """A walk through jaxprs; ``steps`` holds all that was met."""

  def __init__(self, closed: core.ClosedJaxpr) -> None:
    self.steps: list[Step] = []
    self._conds = itertools.count()
    self._walk(closed.jaxpr, _sources.Place(), Known(), 1, ())

  def _walk(
    self,
    jaxpr: core.Jaxpr,
    place: _sources.Place,
    known: Known,
    times: int,
    branches: tuple[tuple[int, int], ...],
  ) -> None:
    for eqn in jaxpr.eqns:
      step = Step(eqn, place.at(eqn, jaxpr), known, times, branches)
      inner = list(_inside(step, self._conds))
      self.steps.append(step._replace(note=_note(eqn, inner)))
      known.learn(eqn)
      for closed, its in inner:
        self._walk(closed.jaxpr, its.place, its.known, its.times, its.branches)


def _inside(
  step: Step, conds: Iterator[int]
) -> Iterator[tuple[core.ClosedJaxpr, Step]]:
  """The jaxprs that an equation runs, and what is known of each."""
  eqn, name, params = step.eqn, step.eqn.primitive.name, step.eqn.params
  called = _jaxprs.called_jaxpr(eqn)
  if called is not None:
    known = step.known.within(eqn.invars, called.jaxpr.invars)
    yield called, step._replace(known=known)
  elif name == "scan":
    inner = params["jaxpr"]
    known = step.known.within(
      eqn.invars[: params["num_consts"]],
      inner.jaxpr.invars[: params["num_consts"]],
    )
    times = step.times * params["length"]
    yield inner, step._replace(known=known, times=times)
  elif name == "cond":
    number = next(conds)
    for i, branch in enumerate(params["branches"]):
      known = step.known.within(eqn.invars[1:], branch.jaxpr.invars)
      branches = (*step.branches, (number, i))
      yield branch, step._replace(known=known, branches=branches)
  elif name == "shard_map":
    manual = _jaxprs.manual_axes(eqn)
    sizes = dict(params["mesh"].shape)
    times = step.times * math.prod(sizes[axis] for axis in manual)
    inner = _jaxprs.closed(params["jaxpr"])
    yield inner, step._replace(known=Known(), times=times)
  elif not name.startswith(_COMBINERS):
    for inner in _jaxprs.held_jaxprs(eqn):
      yield inner, step._replace(known=Known())


_KNOWN = {"cond", "scan", "shard_map"}


def _note(eqn: core.JaxprEqn, inner: list[Any]) -> str:
  """What of an equation cannot be known from shapes."""
  name = eqn.primitive.name
  if name == "while":
    return "a while loop, of which one iteration is counted"
  if name.startswith("ragged_dot"):
    return f"{name}, which is not counted"
  is_known = name in _KNOWN or _jaxprs.called_jaxpr(eqn) is not None
  if inner and not is_known:
    return f"{name}, of which what is inside is counted once"
  return ""
