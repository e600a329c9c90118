"""Walks through a jaxpr and all that it calls, without computing anything."""

from collections.abc import Iterator
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._precision import _risks

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

  def within(self, outer: list[Any], inner: _jaxprs.ClosedJaxpr) -> "Known":
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
  if isinstance(const, jax.core.Tracer):
    return None  # A solver closes over what was traced around it.
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
  place: _jaxprs.Place
  known: Known
  times: int
  branches: tuple[tuple[int, int], ...]
  runs_others: bool = False
  note: str = ""


class Walk:
  """A walk through jaxprs; ``steps`` holds all that was met."""

  def __init__(self, closed: _jaxprs.ClosedJaxpr) -> None:
    self.steps: list[Step] = []
    self._conds = itertools.count()
    known = Known().within([], closed)
    self._walk(closed.jaxpr, None, _jaxprs.Place(), known, 1, ())

  def _walk(
    self,
    jaxpr: core.Jaxpr,
    used: list[bool] | None,
    place: _jaxprs.Place,
    known: Known,
    times: int,
    branches: tuple[tuple[int, int], ...],
  ) -> None:
    # XLA leaves out what is not needed, too.
    for eqn, unread in _jaxprs.needed_equations(jaxpr, used):
      step = Step(eqn, place.at(eqn, jaxpr), known, times, branches)
      inside = _inside(step, self._conds)
      runs_others = bool(inside.steps)
      self.steps.append(
        step._replace(runs_others=runs_others, note=inside.note)
      )
      known.learn(eqn)
      its_used = None
      if inside.returns_the_same:
        its_used = [var not in unread for var in eqn.outvars]
      for closed, it in inside.steps:
        self._walk(
          closed.jaxpr, its_used, it.place, it.known, it.times, it.branches
        )


class _Inside(NamedTuple):
  """The jaxprs that an equation runs, and what is known in each.

  Attributes:
    steps: pairs of a jaxpr and a step, of which only the equation is another.
    note: what cannot be known; often empty.
    returns_the_same: whether the outputs of each are those of the equation.
  """

  steps: list[tuple[_jaxprs.ClosedJaxpr, Step]]
  note: str = ""
  returns_the_same: bool = False


def _inside(step: Step, conds: Iterator[int]) -> _Inside:
  eqn, within = step.eqn, step.known.within
  called = _jaxprs.called_jaxpr(eqn)
  cond, mapped = _jaxprs.cond_of(eqn), _jaxprs.shard_map_of(eqn)
  if called is not None:
    it = step._replace(known=within(eqn.invars, called))
    return _Inside([(called, it)], returns_the_same=True)
  if cond is not None:
    number = next(conds)
    steps = []
    for i, branch in enumerate(cond.branches):
      known = within(eqn.invars[1:], branch)
      branches = (*step.branches, (number, i))
      steps.append((branch, step._replace(known=known, branches=branches)))
    return _Inside(steps, returns_the_same=True)
  if mapped is not None:
    sizes = dict(mapped.mesh.shape)
    count = math.prod(sizes[axis] for axis in mapped.manual_axes)
    known = within(eqn.invars, mapped.body)
    it = step._replace(known=known, times=step.times * count)
    return _Inside([(mapped.body, it)], returns_the_same=True)
  return _inside_a_loop(step) or _inside_of_others(step)


def _inside_a_loop(step: Step) -> _Inside | None:
  eqn, within = step.eqn, step.known.within
  scan, hi_scan = _jaxprs.scan_of(eqn), _jaxprs.hi_scan_of(eqn)
  if scan is not None:
    known = within(eqn.invars[: scan.consts], scan.body)
    it = step._replace(known=known, times=step.times * scan.length)
    return _Inside([(scan.body, it)])
  if hi_scan is not None:
    it = step._replace(
      known=within([], hi_scan.body), times=step.times * hi_scan.length
    )
    return _Inside([(hi_scan.body, it)])
  loop = _jaxprs.while_of(eqn)
  if loop is None:
    return None
  note = "a while loop, of which one iteration is counted"
  both = loop.condition, loop.body
  its = [(jaxpr, step._replace(known=within([], jaxpr))) for jaxpr in both]
  return _Inside(its, note)


def _inside_of_others(step: Step) -> _Inside:
  """What is inside of a primitive of hijax, or of one that nobody knows."""
  eqn, within = step.eqn, step.known.within
  name = _jaxprs.name_of(eqn)
  called = _jaxprs.hi_call_of(eqn)
  if called is not None:
    it = step._replace(known=within(eqn.invars, called))
    return _Inside([(called, it)], returns_the_same=True)
  if name.startswith(_COMBINERS):
    return _Inside([])
  held = [*_jaxprs.held_jaxprs(eqn), *_jaxprs.hidden_jaxprs(eqn)]
  its = [(jaxpr, step._replace(known=within([], jaxpr))) for jaxpr in held]
  if its:
    return _Inside(its, f"{name}, of which what is inside is counted once")
  if _jaxprs.hi_primitive(eqn) is not None:
    return _Inside([], f"{name}, of which nothing is known")
  is_counted = _jaxprs.flops_of(eqn) is not None
  if _jaxprs.is_matrix_product(eqn) and not is_counted:
    return _Inside([], f"{name}, which is not counted")
  return _Inside([])
