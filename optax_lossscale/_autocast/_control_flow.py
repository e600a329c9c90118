"""Evaluates an equation that calls functions, with each of them replaced."""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, Protocol

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
import numpy as np

from optax_lossscale import _jaxprs


class Replacement(Protocol):
  """What takes the place of the functions that an equation calls."""

  def function(self, jaxpr: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """What takes the place of a jaxpr: a function of its inputs."""

  def call(self, fun: Callable[[], Any]) -> Any:
    """What the function returns, which takes the place of ``fun``."""


def evaluate(
  eqn: core.JaxprEqn, args: Sequence[Any], new: Replacement
) -> list[Any]:
  """Evaluates an equation of one of the ``PRIMITIVES``.

  Args:
    eqn: the equation.
    args: a value for each of its inputs.
    new: what takes the place of the functions that it calls.

  Returns:
    The values of its outputs.
  """
  return PRIMITIVES[eqn.primitive.name](eqn, args, new)


def _scan(
  eqn: core.JaxprEqn, args: Sequence[Any], new: Replacement
) -> list[Any]:
  params = eqn.params
  body = new.function(params["jaxpr"])
  consts, args = _split(args, params["num_consts"])
  carry, slices = _split(args, params["num_carry"])

  def step(carry: Any, slices: Any) -> tuple[Any, Any]:
    return _split(body(*consts, *carry, *slices), len(carry))

  options = {name: params[name] for name in ("length", "reverse", "unroll")}
  carry, ys = lax.scan(step, carry, slices, **options)
  return [*carry, *ys]


def _while(
  eqn: core.JaxprEqn, args: Sequence[Any], new: Replacement
) -> list[Any]:
  params = eqn.params
  condition = new.function(params["cond_jaxpr"])
  body = new.function(params["body_jaxpr"])
  cond_consts, args = _split(args, params["cond_nconsts"])
  body_consts, carry = _split(args, params["body_nconsts"])
  return lax.while_loop(
    lambda carry: condition(*cond_consts, *carry)[0],
    lambda carry: body(*body_consts, *carry),
    carry,
  )


def _cond(
  eqn: core.JaxprEqn, args: Sequence[Any], new: Replacement
) -> list[Any]:
  branches = [new.function(branch) for branch in eqn.params["branches"]]
  platforms = eqn.params.get("branches_platforms")
  if platforms is None:
    return lax.switch(args[0], branches, *args[1:])
  # What `lax.platform_dependent` makes: one branch for some platforms each, and
  # one for all others. Only one of them can be compiled.
  named = {
    name: branch
    for names, branch in zip(platforms, branches, strict=True)
    for name in names or ("default",)
  }
  return lax.platform_dependent(*args[1:], **named)


def _shard_map(
  eqn: core.JaxprEqn, args: Sequence[Any], new: Replacement
) -> list[Any]:
  params = eqn.params
  body = new.function(_jaxprs.closed(params["jaxpr"]))
  mapped = jax.shard_map(
    lambda *args: tuple(body(*args)),
    mesh=params["mesh"],
    in_specs=params["in_specs"],
    out_specs=params["out_specs"],
    axis_names=_jaxprs.shard_map_of(eqn).manual_axes,
    check_vma=params["check_vma"],
  )
  return list(mapped(*args))


def _custom_jvp(
  eqn: core.JaxprEqn, args: Sequence[Any], new: Replacement
) -> list[Any]:
  # JAX refuses to differentiate with respect to constants. So they stay such.
  consts, args = _split(args, eqn.params["num_consts"])
  old = functools.partial(_jaxprs.function(eqn), *consts)
  body = new.function(eqn.params["call_jaxpr"])
  fun = jax.custom_jvp(lambda *args: body(*consts, *args))

  def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    moved = [not isinstance(t, SymbolicZero) for t in tangents]
    of_moved, some = _function_of_some(old, primals, moved)
    some_tangents = list(itertools.compress(tangents, moved))
    return new.call(lambda: jax.jvp(of_moved, some, some_tangents))

  # The rule is the one that the equation has, with its functions replaced.
  fun.defjvp(rule, symbolic_zeros=True)
  return fun(*args)


def _custom_vjp(
  eqn: core.JaxprEqn, args: Sequence[Any], new: Replacement
) -> list[Any]:
  consts, args = _split(args, eqn.params["num_consts"])
  old = functools.partial(_jaxprs.function(eqn), *consts)
  body = new.function(eqn.params["call_jaxpr"])
  fun = jax.custom_vjp(lambda *args: body(*consts, *args))

  def forward(*args: Any) -> tuple[Any, Any]:
    moved = [arg.perturbed for arg in args]
    of_moved, some = _function_of_some(old, [a.value for a in args], moved)
    out, pull_back = new.call(lambda: jax.vjp(of_moved, *some))
    # The backward pass is given arrays. In their structure it sees what moved.
    return out, (pull_back, [0 if m else None for m in moved])

  def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
    pull_back, moved = residuals
    full = [_instantiated(cotangent) for cotangent in cotangents]
    found = iter(new.call(lambda: pull_back(full)))
    return tuple(None if m is None else next(found) for m in moved)

  fun.defvjp(forward, backward, symbolic_zeros=True)
  return fun(*args)


def _function_of_some(
  fun: Callable[..., Any], args: Sequence[Any], moved: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
  """The function of those arguments that have a derivative, and these.

  Some rules refuse a derivative with respect to the others.
  """

  def of_moved(*some: Any) -> Any:
    given = iter(some)
    return fun(
      *(next(given) if m else x for m, x in zip(moved, args, strict=True))
    )

  return of_moved, list(itertools.compress(args, moved))


def _instantiated(cotangent: Any) -> Any:
  if not isinstance(cotangent, SymbolicZero):
    return cotangent
  return np.zeros(cotangent.shape, cotangent.dtype)


def _split(items: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
  return list(items[:count]), list(items[count:])


PRIMITIVES = {
  "cond": _cond,
  "custom_jvp_call": _custom_jvp,
  "custom_vjp_call": _custom_vjp,
  "scan": _scan,
  "shard_map": _shard_map,
  "while": _while,
}
