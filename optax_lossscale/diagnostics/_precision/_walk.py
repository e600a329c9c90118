"""Walks through a jaxpr and all that it calls, without computing anything."""

from collections.abc import Iterator, Sequence
import math
from typing import NamedTuple

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._precision import _known

# What these hold only says how two numbers become one.
_COMBINERS = ("arg", "cum", "reduce", "scatter", "select_and", "sort", "top_k")
# What these return is what each of their jaxprs returns.
_HAND_BACK = _jaxprs.Call, _jaxprs.Cond, _jaxprs.ShardMap


class Body(NamedTuple):
  """A jaxpr that is run, and what its equations have in common.

  Attributes:
    closed: the jaxpr.
    known: what is known of its variables.
    times: how often it runs.
    branches: of each ``cond`` around it, what stands for it, and the number of
      its branch.
  """

  closed: _jaxprs.ClosedJaxpr
  known: _known.Known
  times: int
  branches: tuple[tuple[object, int], ...]

  def into(
    self,
    closed: _jaxprs.ClosedJaxpr,
    inputs: Sequence[_jaxprs.Atom] = (),
    times: int = 1,
    branches: tuple[tuple[object, int], ...] = (),
  ) -> "Body":
    """A jaxpr that an equation in this one runs.

    Args:
      closed: the jaxpr.
      inputs: what of the equation is read by the first inputs of the jaxpr.
      times: how often the equation runs it.
      branches: the branch that it is, if the equation is a ``cond``.
    """
    known = self.known.within(inputs, closed)
    return Body(closed, known, self.times * times, self.branches + branches)


class Step(NamedTuple):
  """An equation that was met on the way.

  Attributes:
    eqn: the equation.
    place: where it stands.
    body: the jaxpr around it.
    runs_others: whether it only runs the jaxprs that it holds.
    note: what cannot be known of it; often empty.
  """

  eqn: core.JaxprEqn
  place: _jaxprs.Place
  body: Body
  runs_others: bool
  note: str


def steps_of(closed: _jaxprs.ClosedJaxpr) -> list[Step]:
  """All equations that are met on a walk through a jaxpr."""
  whole = Body(closed, _known.Known().within([], closed), 1, ())
  return list(_walk(whole, _jaxprs.Place(), None))


def _walk(
  body: Body, place: _jaxprs.Place, used: list[bool] | None
) -> Iterator[Step]:
  jaxpr = body.closed.jaxpr
  # XLA leaves out what is not needed, too.
  for eqn, unread in _jaxprs.needed_equations(jaxpr, used):
    part = _jaxprs.part_of(eqn)
    inside, note = _inside(eqn, part, body)
    its_place = place.at(eqn, jaxpr)
    yield Step(eqn, its_place, body, runs_others=bool(inside), note=note)
    body.known.learn(eqn)
    its_used = None
    if isinstance(part, _HAND_BACK):
      its_used = [var not in unread for var in eqn.outvars]
    for inner in inside:
      yield from _walk(inner, its_place, its_used)


def _inside(
  eqn: core.JaxprEqn, part: _jaxprs.Part | None, around: Body
) -> tuple[list[Body], str]:
  """What an equation runs, and what cannot be known of that; often empty."""
  match part:
    case _jaxprs.Call(body):
      return [around.into(body, eqn.invars)], ""
    case _jaxprs.Cond(branches):
      this, inputs = object(), eqn.invars[1:]
      pairs = enumerate(branches)
      its = [around.into(x, inputs, branches=((this, i),)) for i, x in pairs]
      return its, ""
    case _jaxprs.ShardMap() as mapped:
      sizes = dict(mapped.mesh.shape)
      count = math.prod(sizes[axis] for axis in mapped.manual_axes)
      return [around.into(mapped.body, eqn.invars, count)], ""
    case _jaxprs.Scan() | _jaxprs.HiScan() as scan:
      consts = eqn.invars[: scan.consts]
      return [around.into(scan.body, consts, scan.length)], ""
    case _jaxprs.While() as loop:
      its = list(map(around.into, _jaxprs.bodies_of(loop)))
      return its, "a while loop, of which one iteration is counted"
    case _:
      return _inside_of_unknown(eqn, around)


def _inside_of_unknown(
  eqn: core.JaxprEqn, around: Body
) -> tuple[list[Body], str]:
  """The same of an equation that nobody knows, or that runs no other."""
  name = _jaxprs.name_of(eqn)
  if name.startswith(_COMBINERS):
    return [], ""
  held = list(_jaxprs.held_jaxprs(eqn))
  note = ""
  if held:
    note = f"{name}, of which what is inside is counted once"
  elif _jaxprs.hi_primitive(eqn) is not None:
    note = f"{name}, of which nothing is known"
  elif _jaxprs.is_matrix_product(eqn) and _jaxprs.flops_of(eqn) is None:
    note = f"{name}, which is not counted"
  return list(map(around.into, held)), note
