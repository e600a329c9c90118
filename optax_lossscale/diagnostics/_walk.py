"""Walks through a jaxpr and all that it calls, without computing anything."""

from collections.abc import Iterator
import itertools
import math
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import _risks, _sources

# What these hold only says how two numbers become one.
_COMBINERS = ("arg", "cum", "reduce", "scatter", "select_and", "sort", "top_k")


# The numbers in their results are those of their input.
_ONLY_MOVE = {"broadcast_in_dim", "copy", "pvary", "reshape", "squeeze"}


class Known:
  """What is known of variables before anything is computed."""

  def __init__(self) -> None:
    self._numbers: dict[Any, float] = {}
    self._terms: dict[Any, int] = {}

  def number(self, atom: Any) -> float | None:
    """The number that all entries of a constant are, if it is one."""
    if isinstance(atom, core.Literal):
      return _as_number(atom.val)
    return self._numbers.get(atom)

  def terms(self, atom: Any) -> int:
    """How many terms a value is the sum of; 1 if it is none."""
    return 1 if isinstance(atom, core.Literal) else self._terms.get(atom, 1)

  def learn(self, eqn: core.JaxprEqn) -> None:
    """Remembers what follows of the result of an equation."""
    for var in eqn.outvars[:1]:
      self._terms[var] = _risks.terms_in_sum(eqn)
      if eqn.primitive.name in _ONLY_MOVE:
        self._learn(var, self.number(eqn.invars[0]))

  def within(self, outer: list[Any], inner: core.ClosedJaxpr) -> "Known":
    """What is known in a jaxpr, of which these are the first inputs."""
    known = Known()
    for atom, var in zip(outer, inner.jaxpr.invars, strict=False):
      known._learn(var, self.number(atom))
    for var, const in zip(inner.jaxpr.constvars, inner.consts, strict=True):
      known._learn(var, _as_number(const))
    return known

  def _learn(self, var: Any, number: float | None) -> None:
    if number is not None:
      self._numbers[var] = number


def _as_number(const: Any) -> float | None:
  """A real scalar as a number."""
  is_real = jnp.issubdtype(jnp.result_type(const), jnp.floating)
  return float(const) if is_real and jnp.shape(const) == () else None


class Step(NamedTuple):
  """An equation that was met on the way.

  Attributes:
    eqn: the equation.
    place: where it stands.
    known: what is known of the variables around it.
    times: how often it runs.
    branches: pairs of a ``cond`` and its branch, in which it stands.
    runs_others: whether it only runs the jaxprs that it holds.
    note: what cannot be known of it; often empty.
  """

  eqn: core.JaxprEqn
  place: _sources.Place
  known: Known
  times: int
  branches: tuple[tuple[int, int], ...]
  runs_others: bool = False
  note: str = ""


class Walk:
  """A walk through jaxprs; ``steps`` holds all that was met."""

  def __init__(self, closed: core.ClosedJaxpr) -> None:
    self.steps: list[Step] = []
    self._conds = itertools.count()
    known = Known().within([], closed)
    self._walk(closed.jaxpr, None, _sources.Place(), known, 1, ())

  def _walk(
    self,
    jaxpr: core.Jaxpr,
    used: list[bool] | None,
    place: _sources.Place,
    known: Known,
    times: int,
    branches: tuple[tuple[int, int], ...],
  ) -> None:
    # XLA leaves out what is not needed, too.
    for eqn, unread in _jaxprs.needed_equations(jaxpr, used):
      step = Step(eqn, place.at(eqn, jaxpr), known, times, branches)
      inner = list(_inside(step, self._conds))
      note = _note(eqn, inner)
      self.steps.append(step._replace(runs_others=bool(inner), note=note))
      known.learn(eqn)
      for closed, it in inner:
        its_used = None
        if eqn.primitive.name != "scan" and not note:
          its_used = [var not in unread for var in eqn.outvars]
        self._walk(
          closed.jaxpr, its_used, it.place, it.known, it.times, it.branches
        )


def _inside(
  step: Step, conds: Iterator[int]
) -> Iterator[tuple[core.ClosedJaxpr, Step]]:
  """The jaxprs that an equation runs, and what is known of each."""
  eqn, name, params = step.eqn, step.eqn.primitive.name, step.eqn.params
  called = _jaxprs.called_jaxpr(eqn)
  within = step.known.within
  if called is not None:
    yield called, step._replace(known=within(eqn.invars, called))
  elif name == "scan":
    inner = params["jaxpr"]
    known = within(eqn.invars[: params["num_consts"]], inner)
    yield inner, step._replace(known=known, times=step.times * params["length"])
  elif name == "cond":
    number = next(conds)
    for i, branch in enumerate(params["branches"]):
      known = within(eqn.invars[1:], branch)
      branches = (*step.branches, (number, i))
      yield branch, step._replace(known=known, branches=branches)
  elif name == "shard_map":
    sizes = dict(params["mesh"].shape)
    count = math.prod(
      sizes[axis] for axis in _jaxprs.shard_map_of(eqn).manual_axes
    )
    inner = _jaxprs.closed(params["jaxpr"])
    known = within(eqn.invars, inner)
    yield inner, step._replace(known=known, times=step.times * count)
  elif not name.startswith(_COMBINERS):
    for inner in _jaxprs.held_jaxprs(eqn):
      yield inner, step._replace(known=within([], inner))


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
