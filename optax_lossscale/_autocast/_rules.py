"""Makes equations anew that hold more than jaxprs: rules, and hijax objects.

A function with a derivative of its own holds a rule, which is a Python function
that JAX calls when it differentiates. The new function has a new rule, which
calls the old one, with its products in half. Primitives of hijax hide their
jaxprs in an object, and are made anew by the public functions that make them.

A rule is called when the trace that made it is gone. So it closes over the old
equation alone, and never over a rewriter, which knows of that trace.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _refusals

Function = Callable[..., list[Any]]


class Tools(NamedTuple):
  """What it takes to make an equation anew.

  Attributes:
    function: makes a function of a jaxpr, with its products in half.
    call: calls a function with its products in half, given arrays that it
      closes over, and their paths and those of what it returns. It also returns
      the paths of the latter that are weights. Rules may do so at any time.
    paths: the names of those inputs of the equation that are weights.
    guarded: the variables that refuse to be differentiated.
  """

  function: Callable[[_jaxprs.ClosedJaxpr], Function]
  call: Callable[[Callable[[], Any], Sequence[Any], _jaxprs.Paths], Any]
  paths: _jaxprs.Paths
  guarded: set[Any]


# Makes an equation anew: a function of the same inputs that takes its place, or
# None if the equation is not understood.
Make = Callable[[core.JaxprEqn, Tools], Function | None]


def how_to_make(eqn: core.JaxprEqn) -> Make | None:
  """What makes this equation anew, if it must be made anew."""
  primitive = _jaxprs.hi_primitive(eqn)
  if primitive is None:
    return _RULES.get(eqn.primitive.name)
  return _OF_HIJAX.get(type(primitive).__name__)


def custom_jvp(eqn: core.JaxprEqn, tools: Tools) -> Function | None:
  """Makes a function anew that has a ``custom_jvp``."""
  called = _body(eqn)
  if called is None:
    return None
  fun: Any = jax.custom_jvp(_named_as(eqn, tools.function(called)))
  old, call, paths = _jaxprs.function(eqn), tools.call, tools.paths

  def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    moved = [
      i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)
    ]
    of_moved = of_some(old, primals, moved)
    some = [primals[i] for i in moved], [tangents[i] for i in moved]
    inputs = (*paths.inputs, *paths.of(moved))  # of both, the same weights
    return call(
      lambda: jax.jvp(of_moved, *some),
      [*primals, *some[1]],
      _jaxprs.Paths(inputs),
    )[0]

  fun.defjvp(rule, symbolic_zeros=True)
  return fun


def custom_vjp(eqn: core.JaxprEqn, tools: Tools) -> Function | None:
  """Makes a function anew that has a ``custom_vjp``."""
  called = _body(eqn)
  # What the user's function closes over has no derivative.
  consts = _count_consts(eqn)
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
    moved = {i for i, arg in enumerate(args) if arg.perturbed}
    return rule.ask(functools.partial(derive, values), moved)

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
  is_generic = getattr(_jaxprs.hi_primitive(eqn), "generic_batching", False)
  asked = {"generic_batching": True} if is_generic else {}
  fun.defvjp(forward, backward, symbolic_zeros=True, **asked)
  return fun


def _vjp(old: Function, values: Sequence[Any], chosen: list[int]) -> Any:
  return jax.vjp(of_some(old, values, chosen), *(values[i] for i in chosen))


def custom_lin(eqn: core.JaxprEqn, tools: Tools) -> Function | None:
  """Makes a tangent anew whose transpose is the rule of a ``custom_vjp``.

  It stands where a rule, or the user, takes a ``jax.jvp`` of such a function.
  """
  call, paths, pull_back = tools.call, tools.paths, transpose_of(eqn)
  count = eqn.params["num_res"]
  its_paths = _jaxprs.Paths(paths.inputs[:count], paths.inputs[count:])
  zeros = lambda *_: _jaxprs.zeros_of(eqn.outvars)

  def backward(residuals: Any, cotangents: Any) -> Any:
    pull = lambda: pull_back(residuals, cotangents)
    return None, tuple(call(pull, residuals, its_paths)[0])

  linear: Any = jax.custom_vjp(zeros)
  linear.defvjp(lambda residuals, _: (zeros(), residuals), backward)

  def fun(*args: Any) -> Any:
    residuals, tangents = args[:count], args[count:]
    of_moved = lambda *moved: linear(residuals, moved)
    start = _jaxprs.zeros_of(eqn.invars[count:])
    return jax.jvp(of_moved, start, list(tangents))[1]

  return fun


def transpose_of(eqn: core.JaxprEqn) -> Callable[..., Any]:
  """The backward pass of a tangent, of its residuals and cotangents."""
  count, old = eqn.params["num_res"], _jaxprs.function(eqn)
  types = [v.aval for v in eqn.invars[count:]]

  def pull_back(residuals: Any, cotangents: Any) -> Any:
    linear = lambda *tangents: old(*residuals, *tangents)
    return jax.linear_transpose(linear, *types)(list(cotangents))

  return pull_back


def _count_consts(eqn: core.JaxprEqn) -> int | None:
  """How many first inputs are what the user's function closes over."""
  primitive = _jaxprs.hi_primitive(eqn)
  if primitive is None:
    return eqn.params.get("num_consts")
  # In hijax these are two arguments before all others.
  arguments = getattr(primitive, "in_avals", ())
  return len(jax.tree.leaves(arguments[:2]))


def _body(eqn: core.JaxprEqn) -> _jaxprs.ClosedJaxpr | None:
  """What a function with a rule computes where nothing is differentiated."""
  return _jaxprs.called_jaxpr(eqn) or _jaxprs.lowered(eqn)


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


def _checkpoint_of_hijax(eqn: core.JaxprEqn, tools: Tools) -> Function | None:
  parts = _attributes(eqn, "jaxpr", "policy")
  if parts is None:
    return None
  jaxpr, policy = parts
  # Not there before JAX 0.11: remove the default once jax >= 0.11.
  prevent_cse = getattr(_jaxprs.hi_primitive(eqn), "prevent_cse", True)
  fun = _named_as(eqn, tools.function(_jaxprs.closed(jaxpr)))
  return jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)


def _scan_of_hijax(eqn: core.JaxprEqn, tools: Tools) -> Function | None:
  names = "jaxpr", "extensives", "length", "reverse", "unroll"
  parts = _attributes(eqn, *names)
  if parts is None:
    return None
  jaxpr, are_sliced, length, reverse, unroll = parts
  body = tools.function(_jaxprs.closed(jaxpr))
  sliced = [i for i, is_sliced in enumerate(are_sliced) if is_sliced]

  def fun(*args: Any) -> list[Any]:
    # Its carry is kept in references, which are among the other arguments.
    def step(carry: tuple[()], slices: list[Any]) -> tuple[Any, Any]:
      return carry, of_some(body, args, sliced)(*slices)

    slices = [args[i] for i in sliced]
    return lax.scan(step, (), slices, length, reverse, unroll)[1]

  return fun


def _attributes(eqn: core.JaxprEqn, *names: str) -> list[Any] | None:
  """What an object of hijax holds under these names, if it has them all."""
  primitive = _jaxprs.hi_primitive(eqn)
  if not all(hasattr(primitive, name) for name in names):
    return None
  return [getattr(primitive, name) for name in names]


_RULES: dict[str, Make] = {
  "custom_lin": custom_lin,
  "custom_jvp_call": custom_jvp,
  "custom_vjp_call": custom_vjp,
}
_OF_HIJAX: dict[str, Make] = {
  "CustomJVPTraced": custom_jvp,
  "CustomVJPTraced": custom_vjp,
  "RematTraced": _checkpoint_of_hijax,
  "Scan3": _scan_of_hijax,
}
