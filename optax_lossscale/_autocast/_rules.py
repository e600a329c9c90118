"""Makes equations anew that hold more than jaxprs: rules, and hijax objects.

A function with a derivative of its own holds a rule, which is a Python function
that JAX calls when it differentiates. The new function has a new rule, which
calls the old one, with its products in half. Primitives of hijax hide their
jaxprs in an object, and are made anew by the public functions that make them.

A rule is called when the trace that made it is gone. So it closes over the old
equation alone, and never over a rewriter, which knows of that trace.
"""

from collections.abc import Callable, Sequence, Set
import functools
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _refusals

Function = Callable[..., list[Any]]
# Calls a function that closes over some arrays, with its products in half. It
# is given these arrays, and the paths of them and of what the function returns;
# it also returns the paths of the latter.
Call = Callable[[Callable[[], Any], Sequence[Any], _jaxprs.Paths], Any]


class Tools(NamedTuple):
  """What it takes to make an equation anew.

  Attributes:
    function: makes a function of a jaxpr, with its products in half.
    call: calls what a rule asks for, which may be at any time.
    paths: the names of those inputs of the equation that are weights.
    guarded: the variables that refuse to be differentiated.
  """

  function: Callable[[_jaxprs.ClosedJaxpr], Function]
  call: Call
  paths: _jaxprs.Paths
  guarded: Set[Any]


def make_anew(
  eqn: core.JaxprEqn, rule: _jaxprs.Rule, tools: Tools
) -> Function | None:
  """Makes an equation with a rule anew.

  Returns:
    A function of the same inputs that takes its place, or None if the equation
    is not understood.
  """
  return _MAKE[rule.kind](eqn, rule, tools)


def _custom_jvp(
  eqn: core.JaxprEqn, its_rule: _jaxprs.Rule, tools: Tools
) -> Function | None:
  """Makes a function anew that has a ``custom_jvp``."""
  called = _jaxprs.body_of_rule(eqn, its_rule)
  if called is None:
    return None
  fun: Any = jax.custom_jvp(_named_as(eqn, tools.function(called)))
  old, call, paths = _jaxprs.function(eqn), tools.call, tools.paths

  def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    perturbed = [
      i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)
    ]
    of_perturbed = of_some(old, primals, perturbed)
    some = [primals[i] for i in perturbed], [tangents[i] for i in perturbed]
    # Of both, the same weights.
    inputs = (*paths.inputs, *paths.of(perturbed))
    return call(
      lambda: jax.jvp(of_perturbed, *some),
      [*primals, *some[1]],
      _jaxprs.Paths(inputs),
    )[0]

  fun.defjvp(rule, symbolic_zeros=True)
  return fun


def _custom_vjp(
  eqn: core.JaxprEqn, its_rule: _jaxprs.Rule, tools: Tools
) -> Function | None:
  """Makes a function anew that has a ``custom_vjp``."""
  called = _jaxprs.body_of_rule(eqn, its_rule)
  consts = its_rule.consts
  if called is None or consts is None:
    return None
  fun: Any = jax.custom_vjp(_named_as(eqn, tools.function(called)))
  old, call, paths = _jaxprs.function(eqn), tools.call, tools.paths
  floats = {
    i
    for i, atom in enumerate(eqn.invars)
    if i >= consts
    and is_float(atom.aval)
    and not _jaxprs.is_one_of(atom, tools.guarded)
  }
  rule = _refusals.Rule(eqn, called.jaxpr, floats)
  # Of the residuals, by which derivatives were asked for.
  of_residuals: dict[tuple[int, ...], tuple[_jaxprs.Path, ...]] = {}

  def derive(values: Sequence[Any], chosen: set[int]) -> tuple[Any, Any]:
    (out, pull_back), found = call(
      lambda: _vjp(old, values, sorted(chosen)), values, paths
    )
    of_residuals[tuple(sorted(chosen))] = tuple(found[len(out) :])
    # The backward pass is given arrays. In their structure it sees which of the
    # arguments were chosen.
    is_chosen = [0 if i in chosen else None for i in range(len(values))]
    return out, (pull_back, is_chosen)

  def forward(*args: Any) -> tuple[Any, Any]:
    values = [arg.value for arg in args]
    perturbed = {i for i, arg in enumerate(args) if arg.perturbed}
    return rule.ask(functools.partial(derive, values), perturbed)

  def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
    pull_back, is_chosen = residuals
    chosen = tuple(i for i, c in enumerate(is_chosen) if c is not None)
    full = [_jaxprs.for_pull_back(cotangent) for cotangent in cotangents]
    its_paths = _jaxprs.Paths(of_residuals.get(chosen, ()), paths.of(chosen))
    arrays = jax.tree.leaves(pull_back)
    found, _ = call(lambda: pull_back(full), arrays, its_paths)
    left = iter(found)
    return tuple(None if c is None else next(left) for c in is_chosen)

  # What JAX 0.12 has for `vmap`. A rule that asks for it is one of hijax there.
  asked = {"generic_batching": True} if its_rule.batches_itself else {}
  fun.defvjp(forward, backward, symbolic_zeros=True, **asked)
  return fun


def _vjp(old: Function, values: Sequence[Any], chosen: list[int]) -> Any:
  return jax.vjp(of_some(old, values, chosen), *(values[i] for i in chosen))


def _custom_lin(
  eqn: core.JaxprEqn, rule: _jaxprs.Rule, tools: Tools
) -> Function | None:
  """Makes a tangent anew whose transpose is the rule of a ``custom_vjp``.

  It stands where a rule, or the user, takes a ``jax.jvp`` of such a function.
  """
  call, paths, count = tools.call, tools.paths, rule.consts or 0
  pull_back = transpose_of(eqn, rule)
  its_paths = _jaxprs.Paths(paths.inputs[:count], paths.inputs[count:])
  zeros = lambda *_: _jaxprs.zeros_of(eqn.outvars)

  def backward(residuals: Any, cotangents: Any) -> Any:
    pull = lambda: pull_back(residuals, cotangents)
    return None, tuple(call(pull, residuals, its_paths)[0])

  linear: Any = jax.custom_vjp(zeros)
  linear.defvjp(lambda residuals, _: (zeros(), residuals), backward)

  def fun(*args: Any) -> Any:
    residuals, tangents = args[:count], args[count:]
    of_perturbed = lambda *perturbed: linear(residuals, perturbed)
    start = _jaxprs.zeros_of(eqn.invars[count:])
    return jax.jvp(of_perturbed, start, list(tangents))[1]

  return fun


def transpose_of(eqn: core.JaxprEqn, rule: _jaxprs.Rule) -> Callable[..., Any]:
  """The backward pass of a tangent, of its residuals and cotangents."""
  old = _jaxprs.function(eqn)
  types = [v.aval for v in eqn.invars[rule.consts :]]

  def pull_back(residuals: Any, cotangents: Any) -> Any:
    linear = lambda *tangents: old(*residuals, *tangents)
    return jax.linear_transpose(linear, *types)(list(cotangents))

  return pull_back


def _named_as(eqn: core.JaxprEqn, fun: Function) -> Function:
  """The function, which has the name of the user's in JAX's messages."""
  named = lambda *args: fun(*args)
  named.__name__ = _jaxprs.function_name(eqn)
  return named


def of_some(
  fun: Function, args: Sequence[Any], chosen: Sequence[int]
) -> Function:
  """The function of some of its arguments; the others stay as they are."""

  def of_chosen(*some: Any) -> list[Any]:
    full = list(args)
    for i, x in zip(chosen, some, strict=True):
      full[i] = x
    return fun(*full)

  return of_chosen


def is_float(array: Any) -> bool:
  """Whether an array, or its type, is one that has derivatives."""
  dtype = getattr(array, "dtype", jnp.int32)
  return jnp.issubdtype(dtype, jnp.inexact)


def _checkpoint(
  eqn: core.JaxprEqn, rule: _jaxprs.Rule, tools: Tools
) -> Function | None:
  """Makes a ``checkpoint`` of hijax anew."""
  body: Any = _jaxprs.body_of_rule(eqn, rule)
  anew: Any = rule.checkpoint
  return body and anew(_named_as(eqn, tools.function(body)))


_MAKE = {
  "custom_jvp_call": _custom_jvp,
  "custom_lin": _custom_lin,
  "custom_vjp_call": _custom_vjp,
  "remat2": _checkpoint,
}
