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

from optax_lossscale._jaxprs import _avals, _eqns

T = TypeVar("T")


class Scan(NamedTuple):
  """A ``scan``. Its inputs are constants, then the carry, then what it slices.

  Its outputs are the carry, and then what it stacks.

  Attributes:
    body: the jaxpr of one iteration.
    num_consts: how many inputs are constants.
    num_carry: how many are the carry.
    length: how many iterations there are.
    reverse: whether the last slice comes first.
  """

  body: _eqns.ClosedJaxpr
  num_consts: int
  num_carry: int
  length: int
  reverse: bool

  def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The inputs as constants, carry and slices."""
    carry_end = self.num_consts + self.num_carry
    return (
      inputs[: self.num_consts],
      inputs[self.num_consts : carry_end],
      inputs[carry_end:],
    )


class While(NamedTuple):
  """A ``while_loop``.

  Its inputs are the constants of the condition, those of the body, the carry.

  Attributes:
    condition: the jaxpr of the condition, of its constants and the carry. What
      it returns is no scalar if the loop was mapped by ``vmap``.
    body: the jaxpr of one iteration, of its constants and the carry.
    cond_nconsts: how many constants the condition has.
    body_nconsts: how many the body has.
  """

  condition: _eqns.ClosedJaxpr
  body: _eqns.ClosedJaxpr
  cond_nconsts: int
  body_nconsts: int

  def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The inputs as constants of the condition, of the body, and the carry."""
    cond_end = self.cond_nconsts
    body_end = cond_end + self.body_nconsts
    return inputs[:cond_end], inputs[cond_end:body_end], inputs[body_end:]


class Cond(NamedTuple):
  """A ``cond`` or ``switch``. Its inputs are the index, then the operands.

  Attributes:
    branches: the jaxprs, each of all operands.
  """

  branches: tuple[_eqns.ClosedJaxpr, ...]


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

  body: _eqns.ClosedJaxpr
  mesh: Any
  in_specs: tuple[Any, ...]
  out_specs: tuple[Any, ...]
  manual_axes: frozenset[Any]
  check_vma: bool

  @property
  def num_devices(self) -> int:
    """How many devices run it."""
    axis_sizes = dict(self.mesh.shape)
    return math.prod(axis_sizes[axis] for axis in self.manual_axes)

  def list_varying_axes(self, aval: Any) -> tuple[Any, ...]:
    """The axes along which devices may hold different values of a type."""
    axes = (
      _avals.get_aval_varying_axes(aval) if self.check_vma else self.manual_axes
    )
    return tuple(name for name in self.mesh.axis_names if name in axes)

  def wrap_fun(
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

  body: _eqns.ClosedJaxpr


HigherOrderOp = Scan | While | Cond | ShardMap | Call


def parse_higher_order(eqn: core.JaxprEqn) -> HigherOrderOp | None:
  """What an equation calls, repeats or chooses; None if it is not known.

  What an equation of hijax calls is its forward pass: if it has a derivative of
  its own, that is lost.
  """
  parse = _PARSERS.get(eqn.primitive.name, _parse_call)
  return parse(eqn)


def is_control_flow(eqn: core.JaxprEqn) -> bool:
  """Whether an equation is a loop, a branch or a ``shard_map``, and no call."""
  return eqn.primitive.name in _PARSERS


def has_hijax_scan(closed_jaxpr: _eqns.ClosedJaxpr) -> bool:
  """Whether a scan stands in a jaxpr that the flag ``jax_scan3`` made."""
  eqns = closed_jaxpr.jaxpr.eqns
  return any(map(_is_hijax_scan, eqns)) or any(
    has_hijax_scan(subjaxpr)
    for eqn in eqns
    for subjaxpr in _eqns.subjaxprs(eqn)
  )


def _is_hijax_scan(eqn: core.JaxprEqn) -> bool:
  is_hijax = _eqns.get_hi_primitive(eqn) is not None
  return is_hijax and _eqns.get_canonical_name(eqn) == "scan"


def is_scan_dropped_by_jit() -> bool:
  """Whether ``jit`` leaves scans out of a program, under the present flags.

  It does in JAX 0.12 under the flag ``jax_scan3``.
  """
  add_one = lambda x, _: (x + 1, None)
  carry = jax.jit(lambda x: lax.scan(add_one, x, length=1)[0])(jnp.zeros(()))
  return float(carry) != 1.0


def get_bodies(hop: HigherOrderOp) -> list[_eqns.ClosedJaxpr]:
  """The jaxprs that it runs, or may run."""
  return [body for body, _ in pair_bodies_with_inputs(hop, ())]


def pair_bodies_with_inputs(
  hop: HigherOrderOp, inputs: Sequence[T]
) -> list[tuple[_eqns.ClosedJaxpr, Sequence[T]]]:
  """The jaxprs, each with those inputs of the equation that it is given first.

  Of what is sliced or sharded, each is given a part.
  """
  match hop:
    case While():
      cond_consts, body_consts, carry = hop.split(inputs)
      body_inputs = [*cond_consts, *carry], [*body_consts, *carry]
      return list(zip((hop.condition, hop.body), body_inputs, strict=True))
    case Cond():
      return [(branch, inputs[1:]) for branch in hop.branches]
    case _:
      return [(hop.body, inputs)]


def call_in_eqn_context(eqn: core.JaxprEqn, fun: Callable[[], Any]) -> Any:
  """What a function returns that is called where an equation runs its jaxprs.

  What it traces within a ``shard_map`` may exchange data between the devices.
  """
  # Asked of each equation: to look for others, JAX may have to trace.
  shard_map = (
    parse_shard_map(eqn) if eqn.primitive.name == "shard_map" else None
  )
  if shard_map is None:
    return fun()
  results: list[Any] = []

  def body() -> tuple[()]:
    results.append(fun())
    return ()

  with _eqns.get_eqn_ctx_manager(eqn):
    jax.make_jaxpr(shard_map.wrap_fun(body, in_specs=(), out_specs=()))()
  return results[0]


def _parse_call(eqn: core.JaxprEqn) -> Call | None:
  # The jaxpr that an object has with it knows its lines.
  body = _eqns.get_call_jaxpr(eqn) or _eqns.lower_hijax(eqn)
  return None if body is None else Call(body)


def parse_scan(eqn: core.JaxprEqn) -> Scan | None:
  """The parts of a ``scan``; None if it is not understood."""
  bodies = list(_eqns.subjaxprs(eqn))
  length, reverse = eqn.params.get("length"), eqn.params.get("reverse")
  if len(bodies) != 1 or length is None or not isinstance(reverse, bool):
    return None
  body = bodies[0].jaxpr
  num_unsliced = _count_unsliced(eqn.invars, body.invars, length)
  num_carry = _count_unsliced(eqn.outvars, body.outvars, length)
  if num_unsliced is None or num_carry is None or num_unsliced < num_carry:
    return None
  return Scan(bodies[0], num_unsliced - num_carry, num_carry, length, reverse)


def _count_unsliced(
  outer_vars: list[Any], body_vars: list[Any], length: int
) -> int | None:
  """How many of these come as a whole, if the others are all sliced."""
  if len(outer_vars) != len(body_vars):
    return None
  pairs = [
    (_eqns.get_shape(a), _eqns.get_shape(b))
    for a, b in zip(outer_vars, body_vars, strict=True)
  ]
  num_unsliced = next(
    (i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)
  )
  is_consistent = all(a == (length, *b) for a, b in pairs[num_unsliced:])
  return num_unsliced if is_consistent else None


def parse_while(eqn: core.JaxprEqn) -> While | None:
  """The parts of a ``while_loop``; None if it is not understood."""
  condition = eqn.params.get("cond_jaxpr")
  body = eqn.params.get("body_jaxpr")
  if condition is None or body is None:
    return None
  condition, body = (
    _eqns.close_jaxpr(condition),
    _eqns.close_jaxpr(body),
  )
  num_carry = len(eqn.outvars)
  cond_nconsts = len(condition.jaxpr.invars) - num_carry
  body_nconsts = len(body.jaxpr.invars) - num_carry
  has_valid_arity = cond_nconsts + body_nconsts + num_carry == len(eqn.invars)
  num_outputs = len(condition.jaxpr.outvars), len(body.jaxpr.outvars)
  has_valid_arity = has_valid_arity and num_outputs == (1, num_carry)
  if min(cond_nconsts, body_nconsts) < 0 or not has_valid_arity:
    return None
  return While(condition, body, cond_nconsts, body_nconsts)


def parse_cond(eqn: core.JaxprEqn) -> Cond | None:
  """The branches of a ``cond``; None if it is not understood."""
  branches = tuple(_eqns.subjaxprs(eqn))
  has_same_signatures = all(
    len(branch.jaxpr.invars) == len(eqn.invars) - 1
    and len(branch.jaxpr.outvars) == len(eqn.outvars)
    for branch in branches
  )
  return Cond(branches) if branches and has_same_signatures else None


def parse_shard_map(eqn: core.JaxprEqn) -> ShardMap | None:
  """The parts of a ``shard_map``; None if it is not understood."""
  bodies = list(_eqns.subjaxprs(eqn))
  params: Any = eqn.params
  if len(bodies) != 1:
    return None
  # The second is its name up to JAX 0.9: remove it once jax >= 0.10.
  manual_axes = params.get("newly_manual_axes", params.get("manual_axes"))
  fields = (
    params.get("mesh"),
    params.get("in_specs"),
    params.get("out_specs"),
    manual_axes,
    params.get("check_vma"),
  )
  if any(field is None for field in fields) or not _eqns.has_same_signature(
    bodies[0], eqn
  ):
    return None
  return ShardMap(bodies[0], *fields)


_PARSERS = {
  "cond": parse_cond,
  "scan": parse_scan,
  "shard_map": parse_shard_map,
  "while": parse_while,
}
