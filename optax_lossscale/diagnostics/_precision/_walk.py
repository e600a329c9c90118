"""Walks through a jaxpr and all that it calls, without computing anything."""

from collections.abc import Iterator, Sequence
import itertools
import math
from typing import NamedTuple

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._precision import _known

# What these hold only says how two numbers become one.
_COMBINERS = ("arg", "cum", "reduce", "scatter", "select_and", "sort", "top_k")


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
  known: _known.Known
  times: int
  branches: tuple[tuple[int, int], ...]
  runs_others: bool = False
  note: str = ""


class Walk:
  """A walk through jaxprs; ``steps`` holds all that was met."""

  def __init__(self, closed: _jaxprs.ClosedJaxpr) -> None:
    self.steps: list[Step] = []
    self._conds = itertools.count()
    known = _known.Known().within([], closed)
    self._walk(closed.jaxpr, None, _jaxprs.Place(), known, 1, ())

  def _walk(
    self,
    jaxpr: core.Jaxpr,
    used: list[bool] | None,
    place: _jaxprs.Place,
    known: _known.Known,
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
  eqn = step.eqn
  called = _jaxprs.called_jaxpr(eqn)
  cond, mapped = _jaxprs.cond_of(eqn), _jaxprs.shard_map_of(eqn)
  if called is not None:
    return _Inside([_into(called, step, eqn.invars)], returns_the_same=True)
  if cond is not None:
    number = next(conds)
    steps = []
    for i, branch in enumerate(cond.branches):
      it = step._replace(branches=(*step.branches, (number, i)))
      steps.append(_into(branch, it, eqn.invars[1:]))
    return _Inside(steps, returns_the_same=True)
  if mapped is not None:
    sizes = dict(mapped.mesh.shape)
    count = math.prod(sizes[axis] for axis in mapped.manual_axes)
    its = [_into(mapped.body, step, eqn.invars, count)]
    return _Inside(its, returns_the_same=True)
  return _inside_a_loop(step) or _inside_of_others(step)


def _into(
  closed: _jaxprs.ClosedJaxpr,
  step: Step,
  inputs: Sequence[_jaxprs.Atom] = (),
  times: int = 1,
) -> tuple[_jaxprs.ClosedJaxpr, Step]:
  """A jaxpr, and the step into it.

  Args:
    closed: the jaxpr.
    step: the step that has led to the equation.
    inputs: what of the equation is read by the first inputs of the jaxpr.
    times: how often the equation runs it.
  """
  known = step.known.within(inputs, closed)
  return closed, step._replace(known=known, times=step.times * times)


def _inside_a_loop(step: Step) -> _Inside | None:
  eqn = step.eqn
  scan, hi_scan = _jaxprs.scan_of(eqn), _jaxprs.hi_scan_of(eqn)
  if scan is not None:
    consts = eqn.invars[: scan.consts]
    return _Inside([_into(scan.body, step, consts, scan.length)])
  if hi_scan is not None:
    return _Inside([_into(hi_scan.body, step, times=hi_scan.length)])
  loop = _jaxprs.while_of(eqn)
  if loop is None:
    return None
  its = [_into(closed, step) for closed in (loop.condition, loop.body)]
  return _Inside(its, "a while loop, of which one iteration is counted")


def _inside_of_others(step: Step) -> _Inside:
  """What is inside of a primitive of hijax, or of one that nobody knows."""
  eqn = step.eqn
  name = _jaxprs.name_of(eqn)
  called = _jaxprs.hi_call_of(eqn)
  if called is not None:
    return _Inside([_into(called, step, eqn.invars)], returns_the_same=True)
  if name.startswith(_COMBINERS):
    return _Inside([])
  held = list(_jaxprs.held_jaxprs(eqn))
  its = [_into(closed, step) for closed in held]
  if its:
    return _Inside(its, f"{name}, of which what is inside is counted once")
  if _jaxprs.hi_primitive(eqn) is not None:
    return _Inside([], f"{name}, of which nothing is known")
  is_counted = _jaxprs.flops_of(eqn) is not None
  if _jaxprs.is_matrix_product(eqn) and not is_counted:
    return _Inside([], f"{name}, which is not counted")
  return _Inside([])
