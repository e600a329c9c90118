"""Run a loop up to its next iteration that returns an inf or a NaN.

Most of the time of ``find_overflow`` is compilation, so each ``scan`` and
``while_loop`` is compiled once, as a ``while_loop`` with the iteration count in
its carry. With the flag ``stop_at_nonfinite``, this program starts at any
iteration and stops after the first one with a nonfinite output. The interpreter
(``_taint_interpreter``) then evaluates only this iteration eqn by eqn.
"""

from collections.abc import Callable, Sequence
import functools
import operator
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _higher_order

AnyLoop = _higher_order.Scan | _higher_order.While
RunFn = Callable[..., list[Any]]
# Takes the slice with a given index out of an array.
TakeFn = Callable[[Any, Any], Any]

# A loop runs only a few times, so it pays to optimize less: compilation takes
# half of the time. By default, XLA may drop a conversion to float16 and back,
# and with it the overflow of the conversion.
_COMPILER_OPTIONS = {
  "xla_backend_optimization_level": 0,
  "xla_allow_excess_precision": False,
}


class StopPoint(NamedTuple):
  """The iteration after which a loop has stopped.

  Attributes:
    num_iterations: the number of iterations that have run, from the start of
      the loop.
    carry: the carry before the last iteration.
    outs: the outputs of the body in the last iteration.
  """

  num_iterations: int
  carry: Sequence[Any]
  outs: list[Any]


class StoppableLoop(Protocol):
  """A ``scan`` or a ``while_loop`` that can stop."""

  def run_all(self, *inputs: Any) -> list[Any]:
    """Run all iterations, and return the outputs of the loop."""

  def advance(self, num_iterations: int, inputs: Sequence[Any]) -> StopPoint:
    """Run one or more iterations.

    The loop continues while the outputs of the body are finite. The caller must
    not call this method after the last iteration.

    Args:
      num_iterations: the number of iterations that have run.
      inputs: the inputs of the loop, with the carry after these iterations.

    Returns:
      The iteration after which the loop has stopped.
    """


class CompiledScan:
  """A ``scan`` as one compiled program."""

  def __init__(self, scan: _higher_order.Scan):
    self._scan = scan
    self._run = jax.jit(self._run_loop, compiler_options=_COMPILER_OPTIONS)

  def run_all(self, *inputs: Any) -> list[Any]:
    _, _, carry, ys, _ = self._run(False, 0, inputs)
    return [*carry, *ys]

  def advance(self, num_iterations: int, inputs: Sequence[Any]) -> StopPoint:
    num_iterations, prev_carry, carry, _, rows = self._run(
      True, num_iterations, tuple(inputs)
    )
    return StopPoint(int(num_iterations), prev_carry, [*carry, *rows])

  def _run_loop(
    self, stop_at_nonfinite: Any, num_iterations: Any, inputs: Any
  ) -> Any:
    scan = self._scan
    # A while_loop, since a scan cannot stop early. Its state holds the carry
    # before the last iteration, too, so that the interpreter can repeat it.
    consts, init_carry, slices = scan.split(inputs)
    take_slice = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
    eval_body = core.jaxpr_as_fun(scan.body)

    def cond_fun(state: Any) -> Any:
      (num_iterations, *_), is_finite = state
      return (num_iterations < scan.length) & (is_finite | ~stop_at_nonfinite)

    def body_fun(state: Any) -> Any:
      (num_iterations, _, prev_carry, ys), _ = state
      loop_inputs = [*consts, *prev_carry, *slices]
      outs = eval_body(
        *get_body_inputs(scan, num_iterations, loop_inputs, take_slice)
      )
      i = get_iteration_index(scan, num_iterations)
      update_row = functools.partial(
        lax.dynamic_update_index_in_dim, index=i, axis=0
      )
      rows = zip(ys, outs[scan.num_carry :], strict=True)
      ys = [update_row(array, row) for array, row in rows]
      new_state = num_iterations + 1, prev_carry, outs[: scan.num_carry], ys
      return new_state, all_finite(outs)

    row_avals: list[Any] = [
      v.aval for v in scan.body.jaxpr.outvars[scan.num_carry :]
    ]
    # Allocate the stacked outputs, as ``scan`` does. Rows of iterations that
    # have not run are zero.
    ys = [
      lax.full((scan.length, *aval.shape), 0, aval.dtype) for aval in row_avals
    ]
    init_state = (
      (num_iterations, list(init_carry), list(init_carry), ys),
      jnp.array(True),
    )
    (num_iterations, *carries, ys), _ = lax.while_loop(
      cond_fun, body_fun, init_state
    )
    # The interpreter needs the body outputs of the last iteration, not all
    # rows.
    rows = [
      take_slice(x, get_iteration_index(scan, num_iterations - 1)) for x in ys
    ]
    return num_iterations, *carries, ys, rows


class CompiledWhile:
  """A ``while_loop`` as one compiled program."""

  def __init__(self, loop: _higher_order.While):
    self._loop = loop
    self._run = jax.jit(self._run_loop, compiler_options=_COMPILER_OPTIONS)

  def run_all(self, *inputs: Any) -> list[Any]:
    return self._run(False, 0, inputs)[2]

  def advance(self, num_iterations: int, inputs: Sequence[Any]) -> StopPoint:
    num_iterations, prev_carry, _, outs = self._run(
      True, num_iterations, tuple(inputs)
    )
    return StopPoint(int(num_iterations), prev_carry, outs)

  def _run_loop(
    self, stop_at_nonfinite: Any, num_iterations: Any, inputs: Any
  ) -> Any:
    cond_consts, body_consts, init_carry = self._loop.split(inputs)
    eval_cond = core.jaxpr_as_fun(self._loop.condition)
    eval_body = core.jaxpr_as_fun(self._loop.body)

    def cond_fun(state: Any) -> Any:
      (_, _, carry, _), is_finite = state
      (pred,) = eval_cond(*cond_consts, *carry)
      return jnp.any(pred) & (is_finite | ~stop_at_nonfinite)

    def body_fun(state: Any) -> Any:
      (num_iterations, _, prev_carry, _), _ = state
      (pred,) = eval_cond(*cond_consts, *prev_carry)
      outs = carry = eval_body(*body_consts, *prev_carry)
      # Under ``vmap``, the predicate has a value for each row, and the carry of
      # a row that has ended stays unchanged.
      if pred.ndim:
        pairs = zip(outs, prev_carry, strict=True)
        carry = [_arrays.select_rows(pred, *pair) for pair in pairs]
      # Check the carry in addition to the outputs: the carry of a row that has
      # ended may hold an inf where the output of the body is finite.
      return (num_iterations + 1, prev_carry, carry, outs), all_finite(
        [*outs, *carry]
      )

    init_carry = list(init_carry)
    state = (
      (num_iterations, init_carry, init_carry, init_carry),
      jnp.array(True),
    )
    return lax.while_loop(cond_fun, body_fun, state)[0]


class SingleIterationLoop:
  """A loop that stops after each iteration.

  It serves loops inside ``shard_map`` and on an explicit mesh, where
  :class:`CompiledScan` and :class:`CompiledWhile` would not have the types that
  the loop was traced with.

  Attributes:
    run_all: a function that runs all iterations, and returns the outputs of the
      loop.
  """

  def __init__(
    self, loop: AnyLoop, run_all: RunFn, run_body: RunFn, take_slice: TakeFn
  ):
    self.run_all = run_all
    self._loop = loop
    self._run_body = run_body
    self._take_slice = take_slice

  def advance(self, num_iterations: int, inputs: Sequence[Any]) -> StopPoint:
    _, carry, _ = split_loop_inputs(self._loop, inputs)
    operands = get_body_inputs(
      self._loop, num_iterations, inputs, self._take_slice
    )
    return StopPoint(num_iterations + 1, carry, self._run_body(*operands))


def split_loop_inputs(
  loop: AnyLoop, inputs: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
  """Split the inputs of a loop into body constants, carry and slices."""
  if isinstance(loop, _higher_order.Scan):
    consts, carry, slices = loop.split(inputs)
    return consts, carry, slices
  _, consts, carry = loop.split(inputs)
  return consts, carry, ()


def get_body_inputs(
  loop: AnyLoop, num_iterations: int, inputs: Sequence[Any], take_slice: TakeFn
) -> list[Any]:
  """Return the inputs of the body after a number of iterations."""
  consts, carry, slices = split_loop_inputs(loop, inputs)
  i = get_iteration_index(loop, num_iterations)
  return [*consts, *carry, *(take_slice(x, i) for x in slices)]


def get_iteration_index(loop: AnyLoop, num_iterations: Any) -> Any:
  """Return the index of the iteration that follows a number of iterations.

  A reverse scan begins with the last slice, so the backward pass of an
  iteration has the same index as the iteration itself.
  """
  if isinstance(loop, _higher_order.Scan) and loop.reverse:
    return loop.length - 1 - num_iterations
  return num_iterations


def all_finite(arrays: Sequence[Any]) -> Any:
  """Return whether all floats in these arrays are finite, under tracing."""
  floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
  flags = [jnp.isfinite(_arrays.upcast_for_reduction(x)).all() for x in floats]
  return functools.reduce(operator.and_, flags, jnp.array(True))
