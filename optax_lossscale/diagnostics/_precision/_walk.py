"""Walks through a jaxpr and all that it calls, without computing anything."""

from collections.abc import Iterator, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs

# What these hold only says how two numbers become one.
_COMBINERS = ("arg", "cum", "reduce", "scatter", "select_and", "sort", "top_k")
# What these return is what each of their jaxprs returns.
_HAND_BACK = _jaxprs.Call, _jaxprs.Cond, _jaxprs.ShardMap

Branches = tuple[tuple[core.JaxprEqn, int], ...]


class Body:
  """A jaxpr that is run, and what is known of it before anything is computed.

  Attributes:
    jaxpr: the jaxpr.
    times: how often it runs.
    branches: of each ``cond`` around it, its equation and the number of the
      branch.
  """

  def __init__(
    self,
    closed: _jaxprs.ClosedJaxpr,
    around: "Body | None" = None,
    inputs: Sequence[_jaxprs.Atom] = (),
    times: int = 1,
    branches: Branches = (),
  ) -> None:
    """A jaxpr that is run by an equation of another one.

    Args:
      closed: the jaxpr.
      around: the other one, if there is one.
      inputs: what of the equation is read by the first inputs of the jaxpr.
      times: how often the equation runs it.
      branches: the branch that it is, if the equation is a ``cond``.
    """
    self.jaxpr = closed.jaxpr
    self.times: int = times * around.times if around else times
    self.branches: Branches = branches
    if around:
      self.branches = (*around.branches, *branches)
    numbers = [around.number(atom) for atom in inputs] if around else []
    variables = [*self.jaxpr.invars[: len(numbers)], *self.jaxpr.constvars]
    numbers += map(_as_number, closed.consts)
    self._numbers = dict(zip(variables, numbers, strict=True))

  @functools.cached_property
  def _made_by(self) -> dict[Any, core.JaxprEqn]:
    """What makes each variable that is the first output of an equation."""
    return {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars[:1]}

  def number(self, atom: _jaxprs.Atom) -> float | None:
    """The number that all entries of a constant are, if it is one."""
    if isinstance(atom, core.Literal):
      return _as_number(atom.val)
    eqn = self._made_by.get(atom)
    if eqn is None:
      return self._numbers.get(atom)
    moves = eqn.primitive.name in _jaxprs.SPREAD
    return self.number(eqn.invars[0]) if moves else None

  def terms(self, atom: _jaxprs.Atom) -> int:
    """How many terms a value is the sum of; 1 if it is none."""
    is_literal = isinstance(atom, core.Literal)
    eqn = None if is_literal else self._made_by.get(atom)
    return 1 if eqn is None else _jaxprs.terms_in_sum(eqn)


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
  return list(_walk(Body(closed), _jaxprs.Place(), None))


def _walk(
  body: Body, place: _jaxprs.Place, used: list[bool] | None
) -> Iterator[Step]:
  # XLA leaves out what is not needed, too.
  for eqn, unread in _jaxprs.needed_equations(body.jaxpr, used):
    call = _jaxprs.higher_order_of(eqn)
    inside, note = _inside(eqn, call, body)
    its_place = place.at(eqn, body.jaxpr)
    yield Step(eqn, its_place, body, runs_others=bool(inside), note=note)
    its_used = None
    if isinstance(call, _HAND_BACK):
      its_used = [var not in unread for var in eqn.outvars]
    for inner in inside:
      yield from _walk(inner, its_place, its_used)


def _inside(
  eqn: core.JaxprEqn, call: _jaxprs.HigherOrder | None, around: Body
) -> tuple[list[Body], str]:
  """What an equation runs, and what cannot be known of that; often empty."""
  match call:
    case _jaxprs.Call(body):
      return [Body(body, around, eqn.invars)], ""
    case _jaxprs.Cond(branches):
      into = functools.partial(Body, around=around, inputs=eqn.invars[1:])
      pairs = enumerate(branches)
      return [into(x, branches=((eqn, i),)) for i, x in pairs], ""
    case _jaxprs.ShardMap() as mapped:
      sizes = dict(mapped.mesh.shape)
      count = math.prod(sizes[axis] for axis in mapped.manual_axes)
      return [Body(mapped.body, around, eqn.invars, count)], ""
    case _jaxprs.Scan() as scan:
      consts, _, _ = scan.split(eqn.invars)
      return [Body(scan.body, around, consts, scan.length)], ""
    case _jaxprs.While() as loop:
      its = [Body(body, around) for body in _jaxprs.bodies_of(loop)]
      return its, "a while loop, of which one iteration is counted"
  name = _jaxprs.name_of(eqn)
  is_combiner = name.startswith(_COMBINERS)
  held = [] if is_combiner else list(_jaxprs.held_jaxprs(eqn))
  note = ""
  if held:
    note = f"{name}, of which what is inside is counted once"
  elif _jaxprs.hi_primitive(eqn) is not None:
    note = f"{name}, of which nothing is known"
  elif _jaxprs.is_matrix_product(eqn) and _jaxprs.flops_of(eqn) is None:
    note = f"{name}, which is not counted"
  return [Body(closed, around) for closed in held], note


def _as_number(const: Any) -> float | None:
  """A real scalar as a number."""
  if isinstance(const, jax.core.Tracer):
    return None  # A solver closes over what was traced around it.
  is_real = jnp.issubdtype(jnp.result_type(const), jnp.floating)
  return float(const) if is_real and jnp.shape(const) == () else None
