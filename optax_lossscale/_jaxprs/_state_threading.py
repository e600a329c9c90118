"""Evaluate a jaxpr under a trace, and thread scalar state through it.

Reports add state to a program, such as a flag or a statistic for each matmul.
An equation in the body of a loop, a branch or a ``shard_map`` can change the
state only if the body takes it and returns it. So this module traces such
equations again with JAX's public functions: a loop carries the state of its
body, a branch returns the state of all branches, and the states of the devices
of a ``shard_map`` are merged. Calls are inlined. All other equations are
evaluated unchanged, and each keeps its context and its source info.

A program of a report runs several times, so prints are left out: equations that
call back to Python and return nothing.
"""

import abc
from collections.abc import Sequence
import copy
import functools
import re
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _walk,
)

# Pytrees of arrays, by key. The keys of one program can be sorted, since the
# state is a pytree itself.
State = dict[Any, Any]
# The position of an equation or a jaxpr in a program: the index of the
# outermost equation, the index of one of its bodies, the index of an equation
# in this body, and so on. Positions are in program order.
Path = tuple[int, ...]
_PRINT_RE = re.compile("callback|print")


class Frame(NamedTuple):
  """A jaxpr that is evaluated, and where it is called from.

  Attributes:
    closed_jaxpr: the jaxpr.
    path: its position: that of the calling equation, and the index among the
      bodies of the equation. Empty for the outermost jaxpr.
    location: the location of the calling equation.
    iterations: for each enclosing loop, the outermost loop first, the number
      of iterations before the current one; int32[] each.
    used_outputs: the mask of the outputs that are read; None if all of them
      are.
  """

  closed_jaxpr: _eqns.ClosedJaxpr
  path: Path = ()
  location: _provenance.EqnLocation = _provenance.EqnLocation()
  iterations: tuple[Any, ...] = ()
  used_outputs: Sequence[bool] | None = None

  def enter_iteration(self, index: Any) -> "Frame":
    """Return the frame of an iteration of a loop."""
    return self._replace(iterations=(*self.iterations, index))


class Visit(NamedTuple):
  """The evaluation of an equation.

  Attributes:
    eqn: the equation.
    frame: the jaxpr that contains it.
    path: its position.
    used_outputs: the mask of its outputs that are read.
  """

  eqn: core.JaxprEqn
  frame: Frame
  path: Path
  used_outputs: Sequence[bool]


class StateThreader(abc.ABC):
  """Evaluates jaxprs under a trace, and threads state through them.

  The methods change the dict ``state`` in place.

  Attributes:
    shared: a pytree of arrays that the methods of a subclass read, such as the
      inputs of the instrumentation. Within a ``shard_map`` it is replicated.
      The methods must not close over other traced arrays.
    parse_higher_order: parses a higher-order equation, and caches the result.
  """

  def __init__(self, shared: Any = ()) -> None:
    self.shared = shared
    self._print_search = _walk.EqnSearch(is_print, _eqns.subjaxprs)
    self.parse_higher_order = functools.cache(_higher_order.parse_higher_order)

  @abc.abstractmethod
  def select_keys(self, visit: Visit) -> list[Any] | None:
    """Return the keys of the state that the bodies of an equation change.

    Returns:
      The keys; None if the equation is to be evaluated as a whole, unless it
      contains a print.
    """

  @abc.abstractmethod
  def merge_devices(self, device_states: State) -> State:
    """Return the state after a ``shard_map``.

    Args:
      device_states: the states of the devices after it, stacked along a new
        first axis. Each device began with the state before it.
    """

  def lift_const(self, value: Any) -> Any:
    """Return the value that replaces a literal or a constant of a jaxpr."""
    return value

  def end_iteration(self, frame: Frame, outs: list[Any], state: State) -> None:
    """Change the state after an iteration of a loop.

    Args:
      frame: the body of the loop.
      outs: the outputs of the body: the new carry, then rows to stack. Under
        ``vmap``, members that have left a ``while_loop`` keep their old carry.
      state: the state.
    """
    del frame, outs, state  # By default, nothing changes.

  def eval_jaxpr(
    self, frame: Frame, inputs: Sequence[Any], state: State
  ) -> list[Any]:
    """Evaluate a jaxpr, and return its outputs; None for those not read."""
    closed_jaxpr = frame.closed_jaxpr
    jaxpr = closed_jaxpr.jaxpr
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, closed_jaxpr.consts, strict=True):
      env[var] = self.lift_const(const)

    def read(atom: Any) -> Any:
      if isinstance(atom, core.Literal):
        return self.lift_const(atom.val)
      return env.get(atom)

    for i, eqn, used_outputs in _eqns.live_eqns(jaxpr, frame.used_outputs):
      visit = Visit(eqn, frame, (*frame.path, i), used_outputs)
      outs = self.eval_eqn(visit, list(map(read, eqn.invars)), state)
      env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))

  def eval_eqn(
    self, visit: Visit, inputs: list[Any], state: State
  ) -> Sequence[Any]:
    """Evaluate an equation. Subclasses extend this method.

    Args:
      visit: the equation, and where it is.
      inputs: its inputs.
      state: the state.

    Returns:
      Its outputs.
    """
    eqn, frame = visit.eqn, visit.frame
    if is_print(eqn):
      return []
    keys = self.select_keys(visit)
    is_entered = keys is not None or self._print_search.any_inside(eqn)
    hop = self.parse_higher_order(eqn) if is_entered else None
    if hop is None:
      return _eqns.eqn_as_fun(eqn)(*inputs)
    inputs = _separate_recomputation(eqn, inputs)
    location = frame.location.locate(eqn, frame.closed_jaxpr.jaxpr)
    frames = [
      Frame(body, (*visit.path, i), location, frame.iterations)
      for i, body in enumerate(_higher_order.get_bodies(hop))
    ]
    if isinstance(hop, _higher_order.Call):
      frames = [frames[0]._replace(used_outputs=visit.used_outputs)]
    inner_state = {key: state[key] for key in keys or ()}
    # Trace with the mesh and other settings of the equation.
    with _eqns.get_eqn_ctx_manager(eqn):
      outs, inner_state = self._eval_bodies(hop, frames, inputs, inner_state)
    state.update(inner_state)
    return outs

  def _eval_bodies(
    self,
    hop: _higher_order.HigherOrderOp,
    frames: list[Frame],
    inputs: list[Any],
    state: State,
  ) -> tuple[list[Any], State]:
    match hop:
      case _higher_order.Scan():
        return self._eval_scan(hop, frames[0], inputs, state)
      case _higher_order.While():
        return self._eval_while(hop, frames, inputs, state)
      case _higher_order.Cond():
        return self._eval_cond(frames, inputs, state)
      case _higher_order.ShardMap():
        return self._eval_shard_map(hop, frames[0], inputs, state)
      case _:
        return self.eval_jaxpr(frames[0], inputs, state), state

  def _eval_scan(
    self,
    scan: _higher_order.Scan,
    frame: Frame,
    inputs: list[Any],
    state: State,
  ) -> tuple[list[Any], State]:
    consts, init_carry, slices = scan.split(inputs)

    def body_fun(loop_carry: Any, loop_slices: Any) -> tuple[Any, Any]:
      carry, state = loop_carry
      index, *body_slices = loop_slices
      body_frame = frame.enter_iteration(index)
      outs = self.eval_jaxpr(body_frame, [*consts, *carry, *body_slices], state)
      self.end_iteration(body_frame, outs, state)
      return (outs[: scan.num_carry], state), outs[scan.num_carry :]

    indices = jnp.arange(scan.length, dtype=jnp.int32)
    indices = indices[::-1] if scan.reverse else indices
    (carry, state), ys = lax.scan(
      body_fun,
      (list(init_carry), state),
      [indices, *slices],
      scan.length,
      scan.reverse,
    )
    return [*carry, *ys], state

  def _eval_while(
    self,
    loop: _higher_order.While,
    frames: list[Frame],
    inputs: list[Any],
    state: State,
  ) -> tuple[list[Any], State]:
    cond_frame, body_frame = frames
    cond_consts, body_consts, init_carry = loop.split(inputs)

    # The cond_fun of a while_loop cannot return state. So the body evaluates
    # the condition of the next iteration, and carries the predicate.
    def eval_cond(index: Any, carry: list[Any], state: State) -> Any:
      frame = cond_frame.enter_iteration(index)
      (pred,) = self.eval_jaxpr(frame, [*cond_consts, *carry], state)
      return index, pred, carry, state

    def body_fun(loop_carry: Any) -> Any:
      index, pred, carry, state = loop_carry
      frame = body_frame.enter_iteration(index)
      outs = self.eval_jaxpr(frame, [*body_consts, *carry], state)
      # Under ``vmap``, members that have left the loop keep their carry.
      if jnp.ndim(pred):
        expand = lambda x: jnp.expand_dims(pred, range(pred.ndim, jnp.ndim(x)))
        pairs = zip(outs, carry, strict=True)
        outs = [jnp.where(expand(new), new, old) for new, old in pairs]
      self.end_iteration(frame, outs, state)
      return eval_cond(index + 1, outs, state)

    init = eval_cond(jnp.int32(0), list(init_carry), state)
    is_running = lambda loop_carry: jnp.any(loop_carry[1])
    _, _, outs, state = lax.while_loop(is_running, body_fun, init)
    return outs, state

  def _eval_cond(
    self, frames: list[Frame], inputs: list[Any], state: State
  ) -> tuple[list[Any], State]:
    index, *operands = inputs

    def eval_branch(frame: Frame, state: State) -> tuple[list[Any], State]:
      return self.eval_jaxpr(frame, operands, state), state

    branches = [functools.partial(eval_branch, frame) for frame in frames]
    # A copy, since a single branch is called with the dict itself.
    return lax.switch(index, branches, dict(state))

  def _eval_shard_map(
    self,
    shard_map: _higher_order.ShardMap,
    frame: Frame,
    inputs: list[Any],
    state: State,
  ) -> tuple[list[Any], State]:
    axes = tuple(
      name
      for name in shard_map.mesh.axis_names
      if name in shard_map.manual_axes
    )

    def body_fun(
      shared: Any, iterations: Any, state: State, *args: Any
    ) -> tuple[list[Any], State]:
      # The states of the devices differ, so their types must vary.
      if shard_map.check_vma:
        state = jax.tree.map(
          lambda x: _primitives.cast_to_varying(x, axes), state
        )
      inner_threader = copy.copy(self)
      inner_threader.shared = shared
      outs = inner_threader.eval_jaxpr(
        frame._replace(iterations=iterations), args, state
      )
      return outs, jax.tree.map(lambda x: x[None], state)

    replicated, stacked = PartitionSpec(), PartitionSpec(axes)
    mapped_fun = shard_map.wrap_fun(
      body_fun,
      (replicated, replicated, replicated, *shard_map.in_specs),
      (list(shard_map.out_specs), stacked),
    )
    outs, device_states = mapped_fun(
      self.shared, frame.iterations, dict(state), *inputs
    )
    return outs, self.merge_devices(device_states)


def is_print(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation calls back to Python and returns nothing."""
  return not eqn.outvars and bool(_PRINT_RE.search(eqn.primitive.name))


def _separate_recomputation(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
  """Return the inputs of a ``checkpoint`` behind a barrier.

  Otherwise XLA would replace the recomputed values by those of the forward
  pass, and keep all of them in memory. JAX prevents it in the same way.
  """
  is_checkpoint = _eqns.get_primitive_name(eqn) == "checkpoint"
  if not is_checkpoint or _eqns.has_ref_operand(eqn):
    return inputs
  return lax.optimization_barrier(inputs)
