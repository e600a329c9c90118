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

from optax_lossscale._jaxprs._equations import (
  AnyJaxpr,
  ClosedJaxpr,
  equations_of,
  function,
  held_jaxprs,
  hi_primitive,
  with_fields,
  with_jaxprs,
)
from optax_lossscale._jaxprs._higher_order import (
  Call,
  Cond,
  higher_order_of,
  Scan,
  ShardMap,
  where_it_runs,
)
from optax_lossscale._jaxprs._lines import name_of
from optax_lossscale._jaxprs._places import Place, place_name
from optax_lossscale._jaxprs._types import as_varying, varying_of
from optax_lossscale._jaxprs._walk import Search

# What is returned of a value with this name: what a function makes of it; None
# if nothing is.
Look = Callable[[str], Callable[[Any], Any] | None]

# Other calls have a rule, which returns as much as the function.
_PLAIN_CALLS = {"closed_call", "jit", "remat2"}


class Opened(NamedTuple):
  """A jaxpr that returns its named values, too.

  Attributes:
    closed: the jaxpr. The values follow its other outputs.
    names: their names, in the order of the program.
    shut: where such values stand that cannot be returned, as in a ``while``.
    chosen: where branches stand that hold them, and may not be taken.
  """

  closed: ClosedJaxpr
  names: list[str]
  shut: list[str]
  chosen: list[str]


class _Made(NamedTuple):
  """What stands in the place of an equation, and what it returns beside."""

  eqns: list[core.JaxprEqn]
  values: Sequence[Any] = ()
  names: Sequence[str] = ()
  shut: Sequence[str] = ()
  chosen: Sequence[str] = ()


def with_named_outputs(closed: ClosedJaxpr, look: Look) -> Opened:
  """Makes outputs of all values with a name that is looked at.

  Args:
    closed: the jaxpr.
    look: what to return of a value with a name.

  Returns:
    An :class:`Opened`.
  """
  return _Opener(look).opened(closed, Place())


class _Opener:
  """Knows which jaxprs hold values with a name that is looked at."""

  def __init__(self, look: Look) -> None:
    self._look = look
    is_one = lambda eqn: self._look_at(eqn) is not None
    self._named = Search(is_one, held_jaxprs)

  def opened(self, closed: ClosedJaxpr, place: Place) -> Opened:
    """The jaxpr, which stands at this place, with its values returned."""
    jaxpr = closed.jaxpr
    made = [self._made(eqn, jaxpr, place) for eqn in jaxpr.eqns]
    values = [value for one in made for value in one.values]
    opened: Any = with_fields(
      closed,
      eqns=[eqn for one in made for eqn in one.eqns],
      outvars=[*jaxpr.outvars, *values],
      # It names each result, and further ones have no names.
      debug_info=jaxpr.debug_info._replace(result_paths=None),
    )
    return Opened(
      opened,
      [name for one in made for name in one.names],
      [where for one in made for where in one.shut],
      [where for one in made for where in one.chosen],
    )

  def _made(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, place: Place) -> _Made:
    look = self._look_at(eqn)
    if look is not None:
      return _looked_at(eqn, look)
    if not self._named.inside_of(eqn):
      return _Made([eqn])
    its_place = place.at(eqn, jaxpr)
    where = place_name(name_of(eqn), its_place.name)
    inside = functools.partial(self.opened, place=its_place)
    match higher_order_of(eqn):
      case Call(body) if eqn.primitive.name in _PLAIN_CALLS:
        return _call(eqn, inside(body))
      case Cond(branches):
        bodies = list(map(inside, branches))
        made = _made_anew(eqn, _choosing(bodies), bodies)
        made = made and made._replace(chosen=[where, *made.chosen])
      case Scan() as scan:
        bodies = [inside(scan.body)]
        made = _made_anew(eqn, _repeating(scan, bodies[0].closed), bodies)
      case ShardMap() as mapped:
        bodies = [where_it_runs(eqn, lambda: inside(mapped.body))]
        made = _made_anew(eqn, _on_devices(mapped, bodies[0].closed), bodies)
      case _:
        made = None
    return made or _Made([eqn], shut=[where])

  def _look_at(self, eqn: core.JaxprEqn) -> Callable[[Any], Any] | None:
    name = given_name(eqn)
    return None if name is None else self._look(name)


def given_name(eqn: core.JaxprEqn) -> str | None:
  """The name that ``checkpoint_name`` gives to a value; None of all else."""
  if name_of(eqn) != "name":
    return None
  params: Any = getattr(hi_primitive(eqn), "params", eqn.params)
  return params["name"]


def _looked_at(eqn: core.JaxprEqn, look: Callable[[Any], Any]) -> _Made:
  made = equations_of(lambda x: [*function(eqn)(x), look(x)], eqn)
  # There is none if the look returns what it is given.
  eqns, values = made or ([eqn], eqn.outvars)
  return _Made(eqns, values, [str(given_name(eqn))])


def _call(eqn: core.JaxprEqn, body: Opened) -> _Made:
  """The same call, of a jaxpr with more outputs."""
  count = len(eqn.outvars)
  values = [core.Var(v.aval) for v in body.closed.jaxpr.outvars[count:]]
  # A jit says of each output how it is laid out: of these, nothing.
  nothing = {
    k: (*v, *_params_of_jit()[k] * len(values))
    for k, v in eqn.params.items()
    if k.startswith("out_")
  }
  in_kind = lambda held: (
    body.closed if isinstance(held, ClosedJaxpr) else body.closed.jaxpr
  )
  eqn = with_jaxprs(eqn, in_kind).replace(outvars=[*eqn.outvars, *values])
  eqn = eqn.replace(params={**eqn.params, **nothing})
  return _Made([eqn], values, body.names, body.shut, body.chosen)


@functools.cache
def _params_of_jit() -> dict[str, Any]:
  """The parameters of a ``jit`` with one output, of which it says nothing."""
  (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(0.0).jaxpr.eqns
  return eqn.params


def _choosing(bodies: list[Opened]) -> Callable[..., list[Any]]:
  """A ``cond`` in which each branch also returns the values of all others."""

  def fun(index: Any, *operands: Any) -> list[Any]:
    count = len(bodies[0].closed.jaxpr.outvars) - len(bodies[0].names)
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
  axes = tuple(varying_of(kind))
  filled = jnp.full(kind.shape, fill, kind.dtype)
  return as_varying(filled, axes) if axes else filled


def _repeating(scan: Scan, body: ClosedJaxpr) -> Callable[..., list[Any]]:
  """A ``scan`` of another body, which returns more."""

  def fun(*inputs: Any) -> list[Any]:
    consts, first, slices = scan.split(inputs)

    def step(carry: Any, its_slices: Any) -> Any:
      outs = core.jaxpr_as_fun(body)(*consts, *carry, *its_slices)
      return outs[: scan.carry], outs[scan.carry :]

    last, stacked = lax.scan(
      step, list(first), list(slices), scan.length, scan.reverse
    )
    return [*last, *stacked]

  return fun


def _on_devices(
  mapped: ShardMap, body: ClosedJaxpr
) -> Callable[..., list[Any]]:
  """A ``shard_map`` that also returns an array with an entry of each device."""
  count = len(mapped.out_specs)
  kinds = [v.aval for v in body.jaxpr.outvars[count:]]
  devices = [
    jax.sharding.PartitionSpec(mapped.differs_over(kind)) for kind in kinds
  ]

  def fun(*inputs: Any) -> list[Any]:
    outs = core.jaxpr_as_fun(body)(*inputs)
    return [*outs[:count], *(x[None] for x in outs[count:])]

  out_specs = [*mapped.out_specs, *devices]
  return mapped.with_body(fun, mapped.in_specs, out_specs)


def _made_anew(
  eqn: core.JaxprEqn, fun: Callable[..., list[Any]], bodies: list[Opened]
) -> _Made | None:
  """The equations of a function that returns more than an equation."""
  made = equations_of(fun, eqn)
  if made is None:
    return None
  eqns, values = made
  written = iter(body.closed.jaxpr.debug_info for body in bodies)

  def as_written(held: AnyJaxpr) -> AnyJaxpr:
    # It says which function it was, up to which a traceback leads.
    return with_fields(held, debug_info=next(written))

  return _Made(
    [
      with_jaxprs(one, as_written) if one.primitive is eqn.primitive else one
      for one in eqns
    ],
    values,
    [name for body in bodies for name in body.names],
    [where for body in bodies for where in body.shut],
    [where for body in bodies for where in body.chosen],
  )
