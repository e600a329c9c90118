"""Run a loop up to its first iteration that returns an inf or a NaN.

Nearly all of the time of a diagnosis is compilation. So a loop is compiled
once: one program runs all of its iterations, or those up to the next iteration
whose result is not finite, from wherever the caller has come to.
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
Run = Callable[..., list[Any]]
# What takes a slice out of an array, by its number.
Take = Callable[[Any, Any], Any]

# A loop runs a few times, and so compiles in half of the time. If XLA dropped a
# conversion to float16 and back, an overflow would go with it.
_OPTIONS = {
  "xla_backend_optimization_level": 0,
  "xla_allow_excess_precision": False,
}


class Stop(NamedTuple):
  """The iteration after which a loop has stopped.

  Attributes:
    done: the number of iterations that have run, since the loop began.
    carry: the carry that the last iteration was given.
    outs: the outputs of the body in the last iteration.
  """

  done: int
  carry: Sequence[Any]
  outs: list[Any]


class Loop(Protocol):
  """A ``scan`` or a ``while_loop`` that can stop."""

  def whole(self, *inputs: Any) -> list[Any]:
    """Run all iterations, and return the outputs of the loop."""

  def advance(self, count: int, inputs: Sequence[Any]) -> Stop:
    """Run one or more iterations.

    The loop runs on while the outputs of the body are finite. It has at least
    one iteration left.

    Args:
      count: the number of iterations that have run.
      inputs: the inputs of the loop, with the carry as it is after these.
    """


class CompiledScan:
  """A ``scan`` as one compiled program."""

  def __init__(self, scan: _higher_order.Scan):
    self._scan = scan
    self._run = jax.jit(self._program, compiler_options=_OPTIONS)

  def whole(self, *inputs: Any) -> list[Any]:
    _, _, carry, stacked, _ = self._run(False, 0, inputs)
    return [*carry, *stacked]

  def advance(self, count: int, inputs: Sequence[Any]) -> Stop:
    count, before, carry, _, rows = self._run(True, count, tuple(inputs))
    return Stop(int(count), before, [*carry, *rows])

  def _program(self, halts: Any, count: Any, inputs: Any) -> Any:
    scan = self._scan
    consts, first, slices = scan.split(inputs)
    take = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
    body = core.jaxpr_as_fun(scan.body)

    def goes_on(state: Any) -> Any:
      (count, *_), is_finite = state
      return (count < scan.length) & (is_finite | ~halts)

    def step(state: Any) -> Any:
      (count, _, before, stacked), _ = state
      now = [*consts, *before, *slices]
      outs = body(*body_inputs(scan, count, now, take))
      i = index_of(scan, count)
      put = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
      rows = zip(stacked, outs[scan.num_carry :], strict=True)
      stacked = [put(array, row) for array, row in rows]
      new = count + 1, before, outs[: scan.num_carry], stacked
      return new, are_finite(outs)

    kinds: list[Any] = [
      v.aval for v in scan.body.jaxpr.outvars[scan.num_carry :]
    ]
    stacked = [
      lax.full((scan.length, *kind.shape), 0, kind.dtype) for kind in kinds
    ]
    start = (count, list(first), list(first), stacked), jnp.array(True)
    (count, *carries, stacked), _ = lax.while_loop(goes_on, step, start)
    rows = [take(x, index_of(scan, count - 1)) for x in stacked]
    return count, *carries, stacked, rows


class CompiledWhile:
  """A ``while_loop`` as one compiled program."""

  def __init__(self, loop: _higher_order.While):
    self._loop = loop
    self._run = jax.jit(self._program, compiler_options=_OPTIONS)

  def whole(self, *inputs: Any) -> list[Any]:
    return self._run(False, 0, inputs)[2]

  def advance(self, count: int, inputs: Sequence[Any]) -> Stop:
    count, before, _, outs = self._run(True, count, tuple(inputs))
    return Stop(int(count), before, outs)

  def _program(self, halts: Any, count: Any, inputs: Any) -> Any:
    of_condition, of_body, first = self._loop.split(inputs)
    condition = core.jaxpr_as_fun(self._loop.condition)
    body = core.jaxpr_as_fun(self._loop.body)

    def goes_on(state: Any) -> Any:
      (_, _, carry, _), is_finite = state
      (flags,) = condition(*of_condition, *carry)
      return jnp.any(flags) & (is_finite | ~halts)

    def step(state: Any) -> Any:
      (count, _, before, _), _ = state
      (flags,) = condition(*of_condition, *before)
      outs = carry = body(*of_body, *before)
      if flags.ndim:  # ``vmap`` made many loops of one.
        pairs = zip(outs, before, strict=True)
        carry = [_arrays.select_rows(flags, *pair) for pair in pairs]
      # A row that has ended may hold an inf that the body makes finite.
      return (count + 1, before, carry, outs), are_finite([*outs, *carry])

    first = list(first)
    state = (count, first, first, first), jnp.array(True)
    return lax.while_loop(goes_on, step, state)[0]


class OneByOne:
  """A loop that stops after each iteration.

  Attributes:
    whole: a function that runs all iterations, and returns the outputs of the
      loop.
  """

  def __init__(self, loop: AnyLoop, whole: Run, body: Run, take: Take):
    self.whole = whole
    self._loop = loop
    self._body = body
    self._take = take

  def advance(self, count: int, inputs: Sequence[Any]) -> Stop:
    _, carry, _ = parts_of(self._loop, inputs)
    given = body_inputs(self._loop, count, inputs, self._take)
    return Stop(count + 1, carry, self._body(*given))


def parts_of(
  loop: AnyLoop, inputs: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
  """The inputs of a loop: constants of the body, the carry, and slices."""
  if isinstance(loop, _higher_order.Scan):
    consts, carry, slices = loop.split(inputs)
    return consts, carry, slices
  _, consts, carry = loop.split(inputs)
  return consts, carry, ()


def body_inputs(
  loop: AnyLoop, count: int, inputs: Sequence[Any], take: Take
) -> list[Any]:
  """The inputs of the body in the iteration after so many."""
  consts, carry, slices = parts_of(loop, inputs)
  i = index_of(loop, count)
  return [*consts, *carry, *(take(x, i) for x in slices)]


def index_of(loop: AnyLoop, count: Any) -> Any:
  """The number of the iteration after so many.

  A reverse scan begins with the last slice. So the backward pass over an
  iteration has the number of this iteration.
  """
  if isinstance(loop, _higher_order.Scan) and loop.reverse:
    return loop.length - 1 - count
  return count


def are_finite(arrays: Sequence[Any]) -> Any:
  """Whether all floats among these arrays are finite, while it is traced."""
  floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
  flags = [jnp.isfinite(_arrays.upcast_for_reduction(x)).all() for x in floats]
  return functools.reduce(operator.and_, flags, jnp.array(True))
