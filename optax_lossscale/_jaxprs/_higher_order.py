"""Higher-order primitives: what an equation calls, repeats or chooses."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core

from optax_lossscale._jaxprs._equations import (
  called_jaxpr,
  ClosedJaxpr,
  context_of,
  lowered,
)
from optax_lossscale._jaxprs._loops import (
  Cond,
  cond_of,
  Scan,
  scan_of,
  shard_map_of,
  ShardMap,
  While,
  while_of,
)

T = TypeVar("T")


class Call(NamedTuple):
  """A ``jit``, a ``checkpoint`` or a rule: it is given all of the inputs.

  Attributes:
    body: the jaxpr that is called.
  """

  body: ClosedJaxpr


HigherOrder = Scan | While | Cond | ShardMap | Call


def higher_order_of(eqn: core.JaxprEqn) -> HigherOrder | None:
  """What an equation calls, repeats or chooses; None if it is not known.

  What an equation of hijax calls is its forward pass: if it has a derivative of
  its own, that is lost.
  """
  look = _LOOKS.get(eqn.primitive.name, _call_of)
  return look(eqn)


def bodies_of(call: HigherOrder) -> list[ClosedJaxpr]:
  """The jaxprs that it runs, or may run."""
  return [body for body, _ in given_to_bodies(call, ())]


def given_to_bodies(
  call: HigherOrder, inputs: Sequence[T]
) -> list[tuple[ClosedJaxpr, Sequence[T]]]:
  """The jaxprs, each with those inputs of the equation that it is given first.

  Of what is sliced or sharded, each is given a part.
  """
  match call:
    case While():
      of_condition, of_body, carry = call.split(inputs)
      given = [*of_condition, *carry], [*of_body, *carry]
      return list(zip((call.condition, call.body), given, strict=True))
    case Cond():
      return [(branch, inputs[1:]) for branch in call.branches]
    case _:
      return [(call.body, inputs)]


def where_it_runs(eqn: core.JaxprEqn, fun: Callable[[], Any]) -> Any:
  """What a function returns that is called where an equation runs its jaxprs.

  What it traces within a ``shard_map`` may exchange data between the devices.
  """
  # Asked of each equation: to look for others, JAX may have to trace.
  call = shard_map_of(eqn) if eqn.primitive.name == "shard_map" else None
  if call is None:
    return fun()
  returned: list[Any] = []

  def body() -> tuple[()]:
    returned.append(fun())
    return ()

  with context_of(eqn):
    jax.make_jaxpr(call.with_body(body, in_specs=(), out_specs=()))()
  return returned[0]


def _call_of(eqn: core.JaxprEqn) -> Call | None:
  # The jaxpr that an object has with it knows its lines.
  body = called_jaxpr(eqn) or lowered(eqn)
  return None if body is None else Call(body)


_LOOKS = {
  "cond": cond_of,
  "scan": scan_of,
  "shard_map": shard_map_of,
  "while": while_of,
}
