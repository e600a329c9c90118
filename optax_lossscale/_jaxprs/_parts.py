"""What an equation calls, repeats or chooses."""

from typing import NamedTuple

from jax.extend import core

from optax_lossscale._jaxprs._equations import (
  called_jaxpr,
  ClosedJaxpr,
  hi_primitive,
)
from optax_lossscale._jaxprs._hijax import (
  BEHAVES_LIKE,
  hi_call_of,
  hi_scan_of,
  HiScan,
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


class Call(NamedTuple):
  """A ``jit``, a ``checkpoint`` or a rule: it is given all of the inputs.

  Attributes:
    body: the jaxpr that is called.
  """

  body: ClosedJaxpr


Part = Scan | HiScan | While | Cond | ShardMap | Call


def part_of(eqn: core.JaxprEqn) -> Part | None:
  """What an equation calls, repeats or chooses; None if it is not known."""
  looks = scan_of, while_of, cond_of, shard_map_of, hi_scan_of, _call_of
  parts = (look(eqn) for look in looks)
  return next((part for part in parts if part is not None), None)


def bodies_of(part: Part) -> tuple[ClosedJaxpr, ...]:
  """The jaxprs that it runs, or may run."""
  match part:
    case While():
      return part.condition, part.body
    case Cond():
      return part.branches
    case _:
      return (part.body,)


def _call_of(eqn: core.JaxprEqn) -> Call | None:
  primitive = hi_primitive(eqn)
  if primitive is None:
    called = called_jaxpr(eqn)
  else:
    # What other primitives of hijax do with their jaxpr is not known.
    is_known = type(primitive).__name__ in BEHAVES_LIKE
    called = hi_call_of(eqn) if is_known else None
  return None if called is None else Call(called)
