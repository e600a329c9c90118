"""Higher-order primitives: what an equation calls, repeats or chooses.

JAX calls the counts of constants, carry and slices differently in each version.
So they follow from shapes: what a loop is given as a whole has the shape that
its body reads, and what it slices has one axis more. If the parts do not add
up, the answer is None, and the caller takes the loop as a whole.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _equations, _types

T = TypeVar("T")


class Scan(NamedTuple):
  """A ``scan``. Its inputs are constants, then the carry, then what it slices.

  Its outputs are the carry, and then what it stacks.

  Attributes:
    body: the jaxpr of one iteration.
    consts: how many inputs are constants.
    carry: how many are the carry.
    length: how many iterations there are.
    reverse: whether the last slice comes first.
  """

  body: _equations.ClosedJaxpr
  consts: int
  carry: int
  length: int
  reverse: bool

  def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The inputs as constants, carry and slices."""
    carry = self.consts + self.carry
    return inputs[: self.consts], inputs[self.consts : carry], inputs[carry:]


class While(NamedTuple):
  """A ``while_loop``.

  Its inputs are the constants of the condition, those of the body, the carry.

  Attributes:
    condition: the jaxpr of the condition, of its constants and the carry. What
      it returns is no scalar if the loop was mapped by ``vmap``.
    body: the jaxpr of one iteration, of its constants and the carry.
    condition_consts: how many constants the condition has.
    body_consts: how many the body has.
  """

  condition: _equations.ClosedJaxpr
  body: _equations.ClosedJaxpr
  condition_consts: int
  body_consts: int

  def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The inputs as constants of the condition, of the body, and the carry."""
    first = self.condition_consts
    second = first + self.body_consts
    return inputs[:first], inputs[first:second], inputs[second:]


class Cond(NamedTuple):
  """A ``cond`` or ``switch``. Its inputs are the index, then the operands.

  Attributes:
    branches: the jaxprs, each of all operands.
  """

  branches: tuple[_equations.ClosedJaxpr, ...]


class ShardMap(NamedTuple):
  """A ``shard_map``.

  Attributes:
    body: the jaxpr that each device runs.
    mesh: the mesh.
    in_specs: a ``PartitionSpec`` for each input.
    out_specs: one for each output.
    manual_axes: the axes of the mesh along which it maps.
    check_vma: whether types tell what varies.
  """

  body: _equations.ClosedJaxpr
  mesh: Any
  in_specs: tuple[Any, ...]
  out_specs: tuple[Any, ...]
  manual_axes: frozenset[Any]
  check_vma: bool

  @property
  def devices(self) -> int:
    """How many devices run it."""
    sizes = dict(self.mesh.shape)
    return math.prod(sizes[axis] for axis in self.manual_axes)

  def differs_over(self, kind: Any) -> tuple[Any, ...]:
    """The axes along which devices may hold different values of a type."""
    over = _types.varying_of(kind) if self.check_vma else self.manual_axes
    return tuple(name for name in self.mesh.axis_names if name in over)

  def with_body(
    self, fun: Callable[..., Any], in_specs: Any, out_specs: Any
  ) -> Callable[..., Any]:
    """The same ``shard_map`` of another function."""
    return jax.shard_map(
      fun,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=self.manual_axes,
      check_vma=self.check_vma,
    )


class Call(NamedTuple):
  """A ``jit``, a ``checkpoint`` or a rule: it is given all of the inputs.

  Attributes:
    body: the jaxpr that is called.
  """

  body: _equations.ClosedJaxpr


HigherOrder = Scan | While | Cond | ShardMap | Call


def higher_order_of(eqn: core.JaxprEqn) -> HigherOrder | None:
  """What an equation calls, repeats or chooses; None if it is not known.

  What an equation of hijax calls is its forward pass: if it has a derivative of
  its own, that is lost.
  """
  look = _LOOKS.get(eqn.primitive.name, _call_of)
  return look(eqn)


def runs_its_jaxprs(eqn: core.JaxprEqn) -> bool:
  """Whether an equation is a loop, a branch or a ``shard_map``, and no call."""
  return eqn.primitive.name in _LOOKS


def holds_scan_of_hijax(closed: _equations.ClosedJaxpr) -> bool:
  """Whether a scan stands in a jaxpr that the flag ``jax_scan3`` made."""
  eqns = closed.jaxpr.eqns
  return any(map(_is_scan_of_hijax, eqns)) or any(
    holds_scan_of_hijax(held)
    for eqn in eqns
    for held in _equations.subjaxprs(eqn)
  )


def _is_scan_of_hijax(eqn: core.JaxprEqn) -> bool:
  is_object = _equations.get_hi_primitive(eqn) is not None
  return is_object and _equations.get_canonical_name(eqn) == "scan"


def jit_drops_scans() -> bool:
  """Whether ``jit`` leaves scans out of a program, under the present flags.

  It does in JAX 0.12 under the flag ``jax_scan3``.
  """
  add_one = lambda x, _: (x + 1, None)
  ones = jax.jit(lambda x: lax.scan(add_one, x, length=1)[0])(jnp.zeros(()))
  return float(ones) != 1.0


def bodies_of(call: HigherOrder) -> list[_equations.ClosedJaxpr]:
  """The jaxprs that it runs, or may run."""
  return [body for body, _ in given_to_bodies(call, ())]


def given_to_bodies(
  call: HigherOrder, inputs: Sequence[T]
) -> list[tuple[_equations.ClosedJaxpr, Sequence[T]]]:
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

  with _equations.get_eqn_ctx_manager(eqn):
    jax.make_jaxpr(call.with_body(body, in_specs=(), out_specs=()))()
  return returned[0]


def _call_of(eqn: core.JaxprEqn) -> Call | None:
  # The jaxpr that an object has with it knows its lines.
  body = _equations.get_call_jaxpr(eqn) or _equations.lower_hijax(eqn)
  return None if body is None else Call(body)


def scan_of(eqn: core.JaxprEqn) -> Scan | None:
  """The parts of a ``scan``; None if it is not understood."""
  bodies = list(_equations.subjaxprs(eqn))
  length, reverse = eqn.params.get("length"), eqn.params.get("reverse")
  if len(bodies) != 1 or length is None or not isinstance(reverse, bool):
    return None
  body = bodies[0].jaxpr
  whole_inputs = _count_whole(eqn.invars, body.invars, length)
  carry = _count_whole(eqn.outvars, body.outvars, length)
  if whole_inputs is None or carry is None or whole_inputs < carry:
    return None
  return Scan(bodies[0], whole_inputs - carry, carry, length, reverse)


def _count_whole(outer: list[Any], inner: list[Any], length: int) -> int | None:
  """How many of these come as a whole, if the others are all sliced."""
  if len(outer) != len(inner):
    return None
  pairs = [
    (_equations.get_shape(a), _equations.get_shape(b))
    for a, b in zip(outer, inner, strict=True)
  ]
  count = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
  are_slices = all(a == (length, *b) for a, b in pairs[count:])
  return count if are_slices else None


def while_of(eqn: core.JaxprEqn) -> While | None:
  """The parts of a ``while_loop``; None if it is not understood."""
  condition = eqn.params.get("cond_jaxpr")
  body = eqn.params.get("body_jaxpr")
  if condition is None or body is None:
    return None
  condition, body = (
    _equations.close_jaxpr(condition),
    _equations.close_jaxpr(body),
  )
  carry = len(eqn.outvars)
  condition_consts = len(condition.jaxpr.invars) - carry
  body_consts = len(body.jaxpr.invars) - carry
  is_whole = condition_consts + body_consts + carry == len(eqn.invars)
  outputs = len(condition.jaxpr.outvars), len(body.jaxpr.outvars)
  is_whole = is_whole and outputs == (1, carry)
  if min(condition_consts, body_consts) < 0 or not is_whole:
    return None
  return While(condition, body, condition_consts, body_consts)


def cond_of(eqn: core.JaxprEqn) -> Cond | None:
  """The branches of a ``cond``; None if it is not understood."""
  branches = tuple(_equations.subjaxprs(eqn))
  are_alike = all(
    len(branch.jaxpr.invars) == len(eqn.invars) - 1
    and len(branch.jaxpr.outvars) == len(eqn.outvars)
    for branch in branches
  )
  return Cond(branches) if branches and are_alike else None


def shard_map_of(eqn: core.JaxprEqn) -> ShardMap | None:
  """The parts of a ``shard_map``; None if it is not understood."""
  bodies = list(_equations.subjaxprs(eqn))
  params: Any = eqn.params
  if len(bodies) != 1:
    return None
  # The second is its name up to JAX 0.9: remove it once jax >= 0.10.
  axes = params.get("newly_manual_axes", params.get("manual_axes"))
  parts = (
    params.get("mesh"),
    params.get("in_specs"),
    params.get("out_specs"),
    axes,
    params.get("check_vma"),
  )
  if any(part is None for part in parts) or not _equations.has_same_signature(
    bodies[0], eqn
  ):
    return None
  return ShardMap(bodies[0], *parts)


_LOOKS = {
  "cond": cond_of,
  "scan": scan_of,
  "shard_map": shard_map_of,
  "while": while_of,
}
