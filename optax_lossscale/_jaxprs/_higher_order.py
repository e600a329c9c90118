"""Parses higher-order primitives: loops, branches, calls and ``shard_map``.

The parameters that count constants, carry and slices have different names in
each version of JAX. The parsers derive the counts from shapes instead: an input
that a scan passes to each iteration unchanged has the shape that the body
reads, and an input that the scan slices has one more axis. If the counts are
inconsistent, a parser returns None, and callers treat the equation as opaque.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core

from optax_lossscale._jaxprs import _eqns, _primitives

T = TypeVar("T")


class Scan(NamedTuple):
  """A ``scan``.

  Its inputs are constants, the initial carry and arrays to slice, in this
  order. Its outputs are the final carry and stacked arrays.

  Attributes:
    body: the jaxpr of one iteration.
    num_consts: the number of inputs that are constants.
    num_carry: the number of inputs and outputs that are the carry.
    length: the number of iterations.
    reverse: whether the first iteration reads the last slices.
  """

  body: _eqns.ClosedJaxpr
  num_consts: int
  num_carry: int
  length: int
  reverse: bool

  def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """Split the inputs into constants, carry and arrays to slice."""
    carry_end = self.num_consts + self.num_carry
    return (
      inputs[: self.num_consts],
      inputs[self.num_consts : carry_end],
      inputs[carry_end:],
    )


class While(NamedTuple):
  """A ``while_loop``.

  Its inputs are the constants of the condition, the constants of the body and
  the initial carry, in this order. Its outputs are the final carry.

  Attributes:
    condition: the jaxpr of the condition, which takes its constants and the
      carry. It returns an array instead of a scalar if ``vmap`` mapped the
      loop.
    body: the jaxpr of one iteration, which takes its constants and the carry.
    cond_nconsts: the number of constants of the condition.
    body_nconsts: the number of constants of the body.
  """

  condition: _eqns.ClosedJaxpr
  body: _eqns.ClosedJaxpr
  cond_nconsts: int
  body_nconsts: int

  @property
  def num_carry(self) -> int:
    """The number of inputs and outputs that are the carry."""
    return len(self.body.jaxpr.outvars)

  def split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """Split the inputs into both kinds of constants and the carry."""
    body_end = self.cond_nconsts + self.body_nconsts
    return (
      inputs[: self.cond_nconsts],
      inputs[self.cond_nconsts : body_end],
      inputs[body_end:],
    )


class Cond(NamedTuple):
  """A ``cond`` or ``switch``. Its inputs are an index and operands.

  Attributes:
    branches: the jaxprs, each of which takes all operands.
  """

  branches: tuple[_eqns.ClosedJaxpr, ...]


class ShardMap(NamedTuple):
  """A ``shard_map``.

  Attributes:
    body: the jaxpr that each device runs.
    mesh: the mesh.
    in_specs: a ``PartitionSpec`` for each input.
    out_specs: a ``PartitionSpec`` for each output.
    manual_axes: the mesh axes over which it maps.
    check_vma: whether types include the axes over which a value varies.
  """

  body: _eqns.ClosedJaxpr
  mesh: Any
  in_specs: tuple[Any, ...]
  out_specs: tuple[Any, ...]
  manual_axes: frozenset[Any]
  check_vma: bool

  @property
  def num_devices(self) -> int:
    """The number of devices that run the body."""
    # Along the other axes of the mesh, XLA partitions the arrays, so devices
    # share one run of the body.
    axis_sizes = dict(self.mesh.shape)
    return math.prod(axis_sizes[axis] for axis in self.manual_axes)

  def list_varying_axes(self, aval: Any) -> tuple[Any, ...]:
    """Return the axes over which a value may vary, in the order of the mesh."""
    axes = (
      _primitives.get_aval_varying_axes(aval)
      if self.check_vma
      else self.manual_axes
    )
    return tuple(name for name in self.mesh.axis_names if name in axes)

  def wrap_fun(
    self, fun: Callable[..., Any], in_specs: Any, out_specs: Any
  ) -> Callable[..., Any]:
    """Apply ``shard_map`` with the same mesh to another function."""
    return jax.shard_map(
      fun,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=self.manual_axes,
      check_vma=self.check_vma,
    )


class Call(NamedTuple):
  """A ``jit``, ``checkpoint`` or function with a custom derivative.

  Attributes:
    body: the jaxpr that is called with all inputs.
  """

  body: _eqns.ClosedJaxpr


HigherOrderOp = Scan | While | Cond | ShardMap | Call


def parse_higher_order(eqn: core.JaxprEqn) -> HigherOrderOp | None:
  """Parse a higher-order equation.

  For an equation of hijax the body is the forward pass: a custom derivative is
  not part of it.

  Returns:
    The parts of the equation; None if it has no sub-jaxprs or is not
    recognized.
  """
  return _PARSERS.get(eqn.primitive.name, _parse_call)(eqn)


def is_control_flow(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation is a loop, a branch or a ``shard_map``."""
  return eqn.primitive.name in _PARSERS


def get_bodies(hop: HigherOrderOp | None) -> list[_eqns.ClosedJaxpr]:
  """Return the jaxprs that a higher-order equation runs, or may run.

  None is an equation that runs none.
  """
  return [body for body, _ in pair_bodies_with_inputs(hop, ())]


def pair_bodies_with_inputs(
  hop: HigherOrderOp | None, inputs: Sequence[T]
) -> list[tuple[_eqns.ClosedJaxpr, Sequence[T]]]:
  """Pair each jaxpr with the inputs of the equation that it receives.

  Args:
    hop: the parts of the equation.
    inputs: the inputs of the equation, or a property of each input.

  Returns:
    The jaxprs, in the order of :func:`get_bodies`, each with an entry for each
    input of the jaxpr. These are the whole arrays, where a scan passes a slice
    and a ``shard_map`` a shard; and the initial carry of a loop, where later
    iterations receive another one: see :func:`mask_carry`.
  """
  match hop:
    case None:
      return []
    case While(condition, body):
      cond_consts, body_consts, carry = hop.split(inputs)
      return [
        (condition, [*cond_consts, *carry]),
        (body, [*body_consts, *carry]),
      ]
    case Cond(branches):
      return [(branch, inputs[1:]) for branch in branches]
    case _:
      return [(hop.body, inputs)]


def mask_carry(
  hop: HigherOrderOp | None, inputs: Sequence[T | None]
) -> list[T | None]:
  """Replace the carry among the inputs of an equation by None.

  The other inputs are the same in each iteration of a loop, so a property of
  them (such as being a weight, or a known constant) also holds in its body.
  """
  match hop:
    case Scan():
      consts, carry, slices = hop.split(inputs)
      return [*consts, *[None] * len(carry), *slices]
    case While():
      *consts, carry = hop.split(inputs)
      return [*itertools.chain(*consts), *[None] * len(carry)]
    case _:
      return list(inputs)


def call_in_eqn_context(eqn: core.JaxprEqn, fun: Callable[[], Any]) -> Any:
  """Call a function in the context in which an equation runs its jaxprs.

  Within a ``shard_map`` the mesh axes are bound, so the function may trace
  collectives over them.

  Returns:
    The result of the function.
  """
  # The name is compared first, since parsing other equations may trace.
  shard_map = (
    parse_shard_map(eqn) if eqn.primitive.name == "shard_map" else None
  )
  if shard_map is None:
    return fun()
  # JAX binds the axes while it traces the body of a `shard_map`. The traced
  # jaxpr is dropped: only the result of the function is of interest.
  results: list[Any] = []

  def body() -> tuple[()]:
    results.append(fun())
    return ()

  with _eqns.get_eqn_ctx_manager(eqn):
    jax.make_jaxpr(shard_map.wrap_fun(body, in_specs=(), out_specs=()))()
  return results[0]


def _parse_call(eqn: core.JaxprEqn) -> Call | None:
  """Parse a call, or lower a hijax primitive; None for all others."""
  # The jaxpr of a hijax primitive is preferred to a lowered one, since it has
  # the user's source lines.
  body = _eqns.get_call_jaxpr(eqn) or _eqns.lower_hijax(eqn)
  return None if body is None else Call(body)


def parse_scan(eqn: core.JaxprEqn) -> Scan | None:
  """Parse a ``scan``; None if it is not recognized."""
  bodies = list(_eqns.subjaxprs(eqn))
  length, reverse = eqn.params.get("length"), eqn.params.get("reverse")
  if len(bodies) != 1 or length is None or not isinstance(reverse, bool):
    return None
  body = bodies[0].jaxpr
  # The outputs are carry and stacked arrays, without constants. So the
  # difference between the two counts is the number of constants.
  num_unsliced = _count_unsliced(eqn.invars, body.invars, length)
  num_carry = _count_unsliced(eqn.outvars, body.outvars, length)
  if num_unsliced is None or num_carry is None or num_unsliced < num_carry:
    return None
  return Scan(bodies[0], num_unsliced - num_carry, num_carry, length, reverse)


def _count_unsliced(
  outer_vars: list[Any], body_vars: list[Any], length: int
) -> int | None:
  """Count the leading variables that have the same shape inside and outside.

  Args:
    outer_vars: the inputs or outputs of a scan.
    body_vars: the inputs or outputs of its body.
    length: the number of iterations.

  Returns:
    The count; None if a further variable doesn't have one more axis outside,
    whose size is the number of iterations.
  """
  if len(outer_vars) != len(body_vars):
    return None
  pairs = [
    (_eqns.get_shape(a), _eqns.get_shape(b))
    for a, b in zip(outer_vars, body_vars, strict=True)
  ]
  # A slice has fewer axes than its array, so the shapes differ in each case,
  # even if the size of an axis is the number of iterations.
  num_unsliced = next(
    (i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)
  )
  is_consistent = all(a == (length, *b) for a, b in pairs[num_unsliced:])
  return num_unsliced if is_consistent else None


def parse_while(eqn: core.JaxprEqn) -> While | None:
  """Parse a ``while_loop``; None if it is not recognized."""
  condition = eqn.params.get("cond_jaxpr")
  body = eqn.params.get("body_jaxpr")
  if condition is None or body is None:
    return None
  condition, body = map(_eqns.close_jaxpr, (condition, body))
  # All outputs of the equation are the carry. Both jaxprs take it as their last
  # inputs, so the remaining inputs are constants.
  num_carry = len(eqn.outvars)
  cond_nconsts = len(condition.jaxpr.invars) - num_carry
  body_nconsts = len(body.jaxpr.invars) - num_carry
  is_consistent = (
    min(cond_nconsts, body_nconsts) >= 0
    and cond_nconsts + body_nconsts + num_carry == len(eqn.invars)
    and len(condition.jaxpr.outvars) == 1
    and len(body.jaxpr.outvars) == num_carry
  )
  hop = While(condition, body, cond_nconsts, body_nconsts)
  return hop if is_consistent else None


def parse_cond(eqn: core.JaxprEqn) -> Cond | None:
  """Parse a ``cond``; None if it is not recognized."""
  branches = tuple(_eqns.subjaxprs(eqn))
  has_same_signatures = all(
    len(branch.jaxpr.invars) == len(eqn.invars) - 1
    and len(branch.jaxpr.outvars) == len(eqn.outvars)
    for branch in branches
  )
  return Cond(branches) if branches and has_same_signatures else None


def parse_shard_map(eqn: core.JaxprEqn) -> ShardMap | None:
  """Parse a ``shard_map``; None if it is not recognized."""
  bodies = list(_eqns.subjaxprs(eqn))
  params: Any = eqn.params
  # The second name is that of JAX < 0.10: remove it once jax >= 0.10.
  manual_axes = params.get("newly_manual_axes", params.get("manual_axes"))
  fields = (
    params.get("mesh"),
    params.get("in_specs"),
    params.get("out_specs"),
    manual_axes,
    params.get("check_vma"),
  )
  is_complete = len(bodies) == 1 and all(x is not None for x in fields)
  if not is_complete or not _eqns.has_same_signature(bodies[0], eqn):
    return None
  return ShardMap(bodies[0], *fields)


# Keyed by the primitive's own name: a scan of hijax is not one of these.
_PARSERS = {
  "cond": parse_cond,
  "scan": parse_scan,
  "shard_map": parse_shard_map,
  "while": parse_while,
}
