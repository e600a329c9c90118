"""Makes outputs of the values in a jaxpr that have a name.

A name is one of ``jax.ad_checkpoint.checkpoint_name``. What calls, repeats or
chooses a jaxpr with such values returns them as well: a ``scan`` stacks them, a
branch without them returns zeros, a ``shard_map`` returns what each device has.
Of an integer, which zero could be, a branch without it returns -1. All other
equations stay the same objects, and keep their lines.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _lines,
  _places,
  _rules,
  _types,
  _walk,
)

# What is returned of a value with this name: what a function makes of it; None
# if nothing is.
Look = Callable[[str], Callable[[Any], Any] | None]


class NamedValue(NamedTuple):
  """A value that became an output.

  Attributes:
    name: its name.
    branches: for each ``cond`` around it, the outermost first, an identifier of
      the ``cond`` and the number of the branch.
  """

  name: str
  branches: tuple[tuple[int, int], ...] = ()


class WithOutputs(NamedTuple):
  """A jaxpr that returns its named values, too.

  Attributes:
    closed: the jaxpr. The values follow its other outputs.
    named: what they are, in the order of the program.
    unreached: where such values stand that cannot be returned, as in a
      ``while``.
    in_branches: where branches stand that hold them, and may not be taken.
  """

  closed: _equations.ClosedJaxpr
  named: list[NamedValue]
  unreached: list[str]
  in_branches: list[str]


class _Replacement(NamedTuple):
  """What stands in the place of an equation, and what it returns beside."""

  eqns: list[core.JaxprEqn]
  values: Sequence[Any] = ()
  named: Sequence[NamedValue] = ()
  unreached: Sequence[str] = ()
  in_branches: Sequence[str] = ()


def with_named_outputs(
  closed: _equations.ClosedJaxpr,
  look: Look,
  is_optional: Callable[[str], bool] = lambda name: False,
) -> WithOutputs:
  """Makes outputs of all values with a name that is looked at.

  Args:
    closed: the jaxpr.
    look: what to return of a value with a name.
    is_optional: whether a value with a name may be missed in silence.

  Returns:
    An :class:`WithOutputs`.
  """
  return _Outputs(look, is_optional).with_outputs(closed, _places.Place())


class _Outputs:
  """Knows which jaxprs hold values with a name that is looked at."""

  def __init__(self, look: Look, is_optional: Callable[[str], bool]) -> None:
    self._look = look
    is_one = lambda eqn: self._look_at(eqn) is not None
    self._named = _walk.EqnSearch(is_one, _equations.subjaxprs)
    is_required = lambda eqn: (
      is_one(eqn) and not is_optional(str(given_name(eqn)))
    )
    self._required = _walk.EqnSearch(is_required, _equations.subjaxprs)

  def with_outputs(
    self, closed: _equations.ClosedJaxpr, place: _places.Place
  ) -> WithOutputs:
    """The jaxpr, which stands at this place, with its values returned."""
    jaxpr = closed.jaxpr
    made = [self._made(eqn, jaxpr, place) for eqn in jaxpr.eqns]
    values = [value for one in made for value in one.values]
    with_outputs: Any = _equations.replace_jaxpr_fields(
      closed,
      eqns=[eqn for one in made for eqn in one.eqns],
      outvars=[*jaxpr.outvars, *values],
      # It names each result, and further ones have no names.
      debug_info=jaxpr.debug_info._replace(result_paths=None),
    )
    return WithOutputs(
      with_outputs,
      [value for one in made for value in one.named],
      [where for one in made for where in one.unreached],
      [where for one in made for where in one.in_branches],
    )

  def _made(
    self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, place: _places.Place
  ) -> _Replacement:
    look = self._look_at(eqn)
    if look is not None:
      return _looked_at(eqn, look)
    if not self._named.any_inside(eqn):
      return _Replacement([eqn])
    its_place = place.at(eqn, jaxpr)
    where = _places.place_name(_lines.get_op_name(eqn), its_place.name)
    inside = functools.partial(self.with_outputs, place=its_place)
    match _higher_order.parse_higher_order(eqn):
      case _higher_order.Call(body) if _returns_its_outputs(eqn):
        return _call(eqn, inside(body))
      case _higher_order.Cond(branches):
        bodies = [
          _in_branch(inside(branch), id(eqn), i)
          for i, branch in enumerate(branches)
        ]
        made = _made_anew(eqn, _choosing(bodies), bodies)
        made = made and made._replace(in_branches=[where, *made.in_branches])
      case _higher_order.Scan() as scan:
        bodies = [inside(scan.body)]
        made = _made_anew(eqn, _repeating(scan, bodies[0].closed), bodies)
      case _higher_order.ShardMap() as mapped:
        bodies = [
          _higher_order.call_in_eqn_context(eqn, lambda: inside(mapped.body))
        ]
        made = _made_anew(eqn, _on_devices(mapped, bodies[0].closed), bodies)
      case _:
        made = None
    is_missed = made is None and self._required.any_inside(eqn)
    return made or _Replacement([eqn], unreached=[where] if is_missed else [])

  def _look_at(self, eqn: core.JaxprEqn) -> Callable[[Any], Any] | None:
    name = given_name(eqn)
    return None if name is None else self._look(name)


def given_name(eqn: core.JaxprEqn) -> str | None:
  """The name that ``checkpoint_name`` gives to a value; None of all else."""
  if _lines.get_op_name(eqn) != "name":
    return None
  params: Any = getattr(_equations.get_hi_primitive(eqn), "params", eqn.params)
  return params["name"]


def _looked_at(eqn: core.JaxprEqn, look: Callable[[Any], Any]) -> _Replacement:
  def fun(x: Any) -> list[Any]:
    (named,) = _equations.eqn_as_fun(eqn)(x)
    return [named, look(named)]

  made = _equations.trace_replacement_eqns(fun, eqn)
  # There is none if the look returns what it is given.
  eqns, values = made or ([eqn], eqn.outvars)
  return _Replacement(eqns, values, [NamedValue(str(given_name(eqn)))])


def _in_branch(body: WithOutputs, cond: int, index: int) -> WithOutputs:
  """The branch of a ``cond``, whose values are told apart from the others."""
  named = [
    value._replace(branches=((cond, index), *value.branches))
    for value in body.named
  ]
  return body._replace(named=named)


def _returns_its_outputs(eqn: core.JaxprEqn) -> bool:
  """Whether a call returns what its jaxpr does, however much that is.

  A rule returns as much as its function, and an object of hijax what it says.
  """
  is_plain = _equations.get_hi_primitive(eqn) is None
  is_plain = is_plain and _equations.get_call_jaxpr(eqn) is not None
  return is_plain and _rules.rule_of(eqn) is None


def _call(eqn: core.JaxprEqn, body: WithOutputs) -> _Replacement:
  """The same call, of a jaxpr with more outputs."""
  count = len(eqn.outvars)
  values = [core.Var(v.aval) for v in body.closed.jaxpr.outvars[count:]]
  its_outputs = {
    k: (*v, *_of_outputs(k, values))
    for k, v in eqn.params.items()
    if k.startswith("out_")
  }
  in_kind = lambda held: (
    body.closed
    if isinstance(held, _equations.ClosedJaxpr)
    else body.closed.jaxpr
  )
  eqn = _equations.map_subjaxprs(eqn, in_kind).replace(
    outvars=[*eqn.outvars, *values]
  )
  eqn = eqn.replace(params={**eqn.params, **its_outputs})
  return _Replacement(
    [eqn], values, body.named, body.unreached, body.in_branches
  )


def _of_outputs(param: str, values: list[Any]) -> Any:
  """What a call says of further outputs: where they are, or nothing."""
  if param == "out_memory_spaces":
    return [v.aval.memory_space for v in values]
  return _params_of_jit()[param] * len(values)


@functools.cache
def _params_of_jit() -> dict[str, Any]:
  """The parameters of a ``jit`` with one output, of which it says nothing."""
  (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(0.0).jaxpr.eqns
  return eqn.params


def _choosing(bodies: list[WithOutputs]) -> Callable[..., list[Any]]:
  """A ``cond`` in which each branch also returns the values of all others."""

  def fun(index: Any, *operands: Any) -> list[Any]:
    count = len(bodies[0].closed.jaxpr.outvars) - len(bodies[0].named)
    own = [body.closed.jaxpr.outvars[count:] for body in bodies]

    def branch(i: int, *args: Any) -> list[Any]:
      outs = core.jaxpr_as_fun(bodies[i].closed)(*args)
      values = [[_nothing(v.aval) for v in its] for its in own]
      values[i] = outs[count:]
      return [*outs[:count], *(v for its in values for v in its)]

    branches = [functools.partial(branch, i) for i in range(len(bodies))]
    return lax.switch(index, branches, *operands)

  return fun


def _nothing(kind: Any) -> jax.Array:
  """What stands for a value that was not computed."""
  fill = -1 if jnp.issubdtype(kind.dtype, jnp.integer) else 0
  axes = tuple(_types.varying_of(kind))
  filled = jnp.full(kind.shape, fill, kind.dtype)
  return _types.as_varying(filled, axes) if axes else filled


def _repeating(
  scan: _higher_order.Scan, body: _equations.ClosedJaxpr
) -> Callable[..., list[Any]]:
  """A ``scan`` of another body, which returns more."""

  def fun(*inputs: Any) -> list[Any]:
    consts, first, slices = scan.split(inputs)

    def step(carry: Any, its_slices: Any) -> Any:
      outs = core.jaxpr_as_fun(body)(*consts, *carry, *its_slices)
      return outs[: scan.num_carry], outs[scan.num_carry :]

    last, stacked = lax.scan(
      step, list(first), list(slices), scan.length, scan.reverse
    )
    return [*last, *stacked]

  return fun


def _on_devices(
  mapped: _higher_order.ShardMap, body: _equations.ClosedJaxpr
) -> Callable[..., list[Any]]:
  """A ``shard_map`` that also returns an array with an entry of each device."""
  count = len(mapped.out_specs)
  kinds = [v.aval for v in body.jaxpr.outvars[count:]]
  devices = [
    jax.sharding.PartitionSpec(mapped.list_varying_axes(kind)) for kind in kinds
  ]

  def fun(*inputs: Any) -> list[Any]:
    outs = core.jaxpr_as_fun(body)(*inputs)
    return [*outs[:count], *(x[None] for x in outs[count:])]

  out_specs = [*mapped.out_specs, *devices]
  return mapped.wrap_fun(fun, mapped.in_specs, out_specs)


def _made_anew(
  eqn: core.JaxprEqn, fun: Callable[..., list[Any]], bodies: list[WithOutputs]
) -> _Replacement | None:
  """The equations of a function that returns more than an equation."""
  made = _equations.trace_replacement_eqns(fun, eqn)
  if made is None:
    return None
  eqns, values = made
  written = iter(body.closed.jaxpr.debug_info for body in bodies)

  def as_written(held: _equations.AnyJaxpr) -> _equations.AnyJaxpr:
    # It says which function it was, up to which a traceback leads.
    return _equations.replace_jaxpr_fields(held, debug_info=next(written))

  return _Replacement(
    [
      _equations.map_subjaxprs(one, as_written)
      if one.primitive is eqn.primitive
      else one
      for one in eqns
    ],
    values,
    [value for body in bodies for value in body.named],
    [where for body in bodies for where in body.unreached],
    [where for body in bodies for where in body.in_branches],
  )
