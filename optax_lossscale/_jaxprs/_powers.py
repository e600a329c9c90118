"""In which power a factor stands in the values of a program.

A gradient of a loss that was multiplied by a scale has the scale in the first
power, and what it is divided by takes it away. Where this cannot be told, the
power is not known: of a sum of two powers, or an exponential.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any, Literal, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _interpret,
  _operations,
  _outputs,
  _places,
  _walk,
)

# What is zero has each power; None is one that is not known.
Exponent = int | Literal["any"] | None

# What these return is as many times larger as what they are given.
_KEEP_THE_POWER = _operations.KEEP | {
  "abs", "add", "add_any", "all_to_all", "complex", "concatenate", "conj",
  "cumsum", "dynamic_update_slice", "expand_dims", "gather", "imag", "max",
  "min", "neg", "pad", "pcast", "pmax", "pmin", "ppermute", "psum",
  "psum_invariant", "real", "reduce_max", "reduce_min", "reduce_scatter",
  "reduce_sum", "reduce_window_sum", "rem", "scatter", "scatter-add",
  "select_and_scatter_add", "stack", "sub",
}  # fmt: skip
_MULTIPLY = {"mul", *_operations.CONTRACTS}


class Power(NamedTuple):
  """What is known of a value.

  Attributes:
    exponent: the power in which the factor stands in it.
    is_scaled: whether the factor came into it in a backward pass.
    is_gradient: whether it was made in a backward pass at all.
  """

  exponent: Exponent = 0
  is_scaled: bool = False
  is_gradient: bool = False


# What is told of a value with a name; it returns what is known from there on.
Named = Callable[[str, Power], Power]


def powers_of(
  closed: _equations.ClosedJaxpr, inputs: Sequence[Power], named: Named
) -> None:
  """Follows a factor through a program.

  Args:
    closed: the jaxpr.
    inputs: what is known of its inputs.
    named: is told each name that a value has, with what is known of the value,
      and returns what is known from there on. In a loop it may be told again.
  """

  def is_one(eqn: core.JaxprEqn) -> bool:
    return (
      _outputs.given_name(eqn) is not None
      or _places.Place().within(eqn).backward
    )

  _Follower(named, _walk.Search(is_one, _equations.held_jaxprs)).run(
    closed, inputs, False
  )


class _Follower(NamedTuple):
  """Follows a factor through jaxprs.

  Attributes:
    named: what is told of each name.
    matters: finds names and equations of a backward pass. What holds neither,
      and is given no factor, is only looked at as a whole.
  """

  named: Named
  matters: _walk.Search

  def run(
    self,
    closed: _equations.ClosedJaxpr,
    inputs: Sequence[Power],
    is_backward: bool,
  ) -> list[Power]:
    step = functools.partial(self._equation, is_backward=is_backward)
    return _interpret.interpret(closed, inputs, step, written=_written)

  def _equation(
    self, eqn: core.JaxprEqn, inputs: list[Power], is_backward: bool
  ) -> Sequence[Power]:
    is_backward = is_backward or _places.Place().within(eqn).backward
    name = _outputs.given_name(eqn)
    if name is not None:
      return [self.named(name, *inputs)]
    are_plain = all(x.exponent in (0, "any") for x in inputs)
    call = None
    if not are_plain or self.matters.inside_of(eqn):
      call = _higher_order.higher_order_of(eqn)
    if call is not None:
      return self._enter(call, inputs, is_backward)
    return _computed(eqn, inputs, is_backward)

  def _enter(
    self,
    call: _higher_order.HigherOrder,
    inputs: list[Power],
    is_backward: bool,
  ) -> list[Power]:
    run = functools.partial(self.run, is_backward=is_backward)
    match call:
      case _higher_order.Scan():
        consts, first, slices = call.split(inputs)
        step = lambda carry: run(call.body, [*consts, *carry, *slices])
        return _repeated(step, first)
      case _higher_order.While():
        _, consts, first = call.split(inputs)
        return _repeated(lambda x: run(call.body, [*consts, *x]), first)
      case _higher_order.Cond(branches):
        return _either(run(branch, inputs[1:]) for branch in branches)
      case _:
        return run(call.body, inputs)


def _repeated(
  step: Callable[[Sequence[Power]], list[Power]], first: Sequence[Power]
) -> list[Power]:
  """What a loop returns: until another round tells no more of its carry."""
  carry = list(first)
  while True:
    outs = step(carry)
    after = _either([carry, outs[: len(carry)]])
    if after == carry:
      return outs
    carry = after


def _either(many: Iterable[Sequence[Power]]) -> list[Power]:
  """What is known of values that are one of several."""
  return [
    Power(
      _same(x.exponent for x in powers),
      any(x.is_scaled for x in powers),
      any(x.is_gradient for x in powers),
    )
    for powers in zip(*many, strict=True)
  ]


def _computed(
  eqn: core.JaxprEqn, inputs: list[Power], is_backward: bool
) -> list[Power]:
  pairs = list(zip(eqn.invars, inputs, strict=True))
  exponents = [x.exponent for atom, x in pairs if _is_inexact(atom)]
  is_gradient = is_backward or any(x.is_gradient for x in inputs)
  is_scaled = any(x.is_scaled for x in inputs)
  powers = []
  for i, out in enumerate(eqn.outvars):
    # An equation that moves several arrays returns as many.
    own = exponents
    if len(eqn.outvars) == len(exponents) > 1:
      own = exponents[i : i + 1]
    exponent = _exponent(eqn, own) if _is_inexact(out) else 0
    has_it = is_backward and exponent not in (0, "any")
    powers.append(Power(exponent, is_scaled or has_it, is_gradient))
  return powers


def _exponent(eqn: core.JaxprEqn, of_inputs: Sequence[Exponent]) -> Exponent:
  name = eqn.primitive.name
  if name in _KEEP_THE_POWER:
    return _same(of_inputs)
  if name in _MULTIPLY or name == "div":
    left, right = of_inputs[0], of_inputs[-1]
    if "any" in (left, right):
      return "any"
    if isinstance(left, int) and isinstance(right, int):
      return left - right if name == "div" else left + right
    return None
  return 0 if all(x in (0, "any") for x in of_inputs) else None


def _same(exponents: Iterable[Exponent]) -> Exponent:
  """The power of what is one of these, or their sum."""
  found = set(exponents) - {"any"}
  return next(iter(found), "any") if len(found) <= 1 else None


def _is_inexact(atom: Any) -> bool:
  dtype = getattr(atom.aval, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _written(value: Any, atom: Any, eqn: core.JaxprEqn | None) -> Power:
  del eqn
  is_zero = isinstance(atom, core.Literal) and _is_inexact(atom) and value == 0
  return Power("any" if is_zero else 0)
