"""Functions with derivatives of their own, and what they compute.

Such an equation holds a rule: Python functions that JAX calls when it
differentiates. What the rule computes is changed where it is, as JAX's own
passes do it: the equation stays, and each function that it holds is wrapped. So
a rule is never asked for more than JAX asks it for. This holds for the objects
of hijax as well.

A rule is called when the trace that made it is gone. So what wraps it closes
over values alone, and never over what knows of that trace.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core, linear_util
from jax.interpreters import ad

from optax_lossscale._jaxprs import _equations, _weights


class Rule(NamedTuple):
  """A function with a rule.

  Attributes:
    kind: ``custom_jvp_call``, ``custom_vjp_call``, or ``custom_lin``, the
      tangent of the second.
    consts: how many first inputs have no derivative: what the user's function
      closes over, or the residuals of a tangent; None if it is not known.
    sees_perturbed: whether the rule is told which inputs are perturbed.
  """

  kind: str
  consts: int | None
  sees_perturbed: bool


class Change(NamedTuple):
  """How what a function with a rule computes is changed.

  Attributes:
    body: changes what it computes where nothing is differentiated. The paths
      are those of the inputs of the jaxpr.
    derivative: changes a jaxpr that a rule computes. It may be called at any
      time. It also returns the paths of the outputs.
    call: calls a Python function of some arrays, and changes what it computes,
      at any time. The paths are those of the arrays, and of the leaves of what
      the function returns; it also returns the latter.
  """

  body: Callable[[_equations.ClosedJaxpr, _weights.Paths], Any]
  derivative: Callable[
    [_equations.ClosedJaxpr, _weights.Paths],
    tuple[Any, Sequence[_weights.WeightPath]],
  ]
  call: Callable[
    [Callable[[], Any], Sequence[Any], _weights.Paths],
    tuple[Any, Sequence[_weights.WeightPath]],
  ]


def rule_of(eqn: core.JaxprEqn) -> Rule | None:
  """The rule of an equation; None if it has none."""
  kind = _equations.get_canonical_name(eqn)
  if kind not in _RULES:
    return None
  held: Any = _equations.get_hi_primitive(eqn)
  params = eqn.params if held is None else held.params
  if kind == "custom_lin":
    tree = eqn.params.get("residuals_tree")  # that of hijax
    consts = tree.num_leaves if tree else eqn.params.get("num_res")
  elif held is not None:  # These are its first two arguments.
    consts = len(jax.tree.leaves(held.in_avals[:2]))
  else:
    consts = eqn.params.get("num_consts")
  sees_perturbed = bool(params.get("symbolic_zeros"))
  return Rule(kind, consts, sees_perturbed)


def with_rule(
  eqn: core.JaxprEqn, change: Change, paths: _weights.Paths
) -> core.JaxprEqn | None:
  """The same equation, with what it and its rule compute changed.

  Args:
    eqn: an equation with a rule.
    change: how it is changed.
    paths: the names of those of its inputs that are weights.

  Returns:
    The equation; None if it does not hold what it should.
  """
  rule: Any = rule_of(eqn)
  held = _equations.get_hi_primitive(eqn) or eqn.params.get("_prim")
  of_plain, of_hijax = _RULES[rule.kind]
  if rule.consts is None or len(list(_equations.subjaxprs(eqn))) > 1:
    return None
  try:
    if held is None:
      parts = of_plain(eqn, rule, change, paths)
      return eqn.replace(params={**eqn.params, **parts})
    new = _equations.replace_hi_params(
      held, **of_hijax(held, rule, change, paths)
    )
  except (AttributeError, KeyError):  # Another JAX has another name for it.
    return None
  return _equations.replace_hi_primitive(eqn, held, new)


def _custom_jvp(
  eqn: core.JaxprEqn, rule: Rule, change: Change, paths: _weights.Paths
) -> dict[str, Any]:
  old: Any = eqn.params["jvp_jaxpr_fun"]
  of_primals = paths.inputs[rule.consts :]
  changed = _once(change.derivative)

  def tangents(*are_zero: bool) -> Any:
    jaxpr, consts, *others = old.call_wrapped(*are_zero)
    pairs = zip(of_primals, are_zero, strict=False)
    perturbed = [path for path, is_zero in pairs if not is_zero]
    new, _ = changed(jaxpr, consts, (*of_primals, *perturbed))
    return new, consts, *others

  return {
    "call_jaxpr": change.body(eqn.params["call_jaxpr"], paths),
    "jvp_jaxpr_fun": _instead_of(old, tangents),
  }


def _custom_vjp(
  eqn: core.JaxprEqn, rule: Rule, change: Change, paths: _weights.Paths
) -> dict[str, Any]:
  old: Any = eqn.params["fwd_jaxpr_thunk"]
  pull_back: Any = eqn.params["bwd"]
  trees: Any = eqn.params["out_trees"]
  call, count = change.call, len(eqn.outvars)
  of_primals = paths.inputs[rule.consts :]
  changed = _once(change.derivative)
  # Of the residuals that are computed. The others are inputs.
  of_computed: list[_weights.WeightPath] = []

  def forward(*are_perturbed: bool) -> Any:
    jaxpr, consts = old.call_wrapped(*are_perturbed)
    new, found = changed(jaxpr, consts, of_primals)
    of_computed[:] = found[: len(found) - count]
    return new, consts

  def backward(*args: Any) -> Any:
    *_, forwarded = trees()
    computed = iter(of_computed)
    of_inputs = dict(enumerate(of_primals))
    of_residuals = tuple(
      next(computed, None) if i is None else of_inputs.get(i) for i in forwarded
    )
    its_paths = _weights.Paths(of_residuals, of_primals)
    return call(lambda: pull_back.call_wrapped(*args), args, its_paths)[0]

  return {
    "call_jaxpr": change.body(eqn.params["call_jaxpr"], paths),
    "fwd_jaxpr_thunk": _instead_of(old, forward),
    "bwd": _instead_of(pull_back, backward),
  }


def _custom_lin(
  eqn: core.JaxprEqn, rule: Rule, change: Change, paths: _weights.Paths
) -> dict[str, Any]:
  """A tangent, where a rule or the user takes a ``jax.jvp``."""
  pull_back: Any = eqn.params["bwd"]
  call = change.call
  perturbed = iter(paths.inputs[rule.consts :])
  are_zero: Any = eqn.params["in_zeros"]
  outputs = tuple(None if zero else next(perturbed, None) for zero in are_zero)
  its_paths = _weights.Paths(paths.inputs[: rule.consts], outputs)

  def backward(*args: Any) -> Any:
    return call(lambda: pull_back.call_wrapped(*args), args, its_paths)[0]

  return {"bwd": _instead_of(pull_back, backward)}


def _once(
  derivative: Callable[[_equations.ClosedJaxpr, _weights.Paths], Any],
) -> Any:
  """Changes each jaxpr once, since JAX shares what is made of it."""
  made: dict[core.Jaxpr, Any] = {}

  def changed(
    jaxpr: core.Jaxpr, consts: Any, inputs: tuple[_weights.WeightPath, ...]
  ) -> Any:
    if jaxpr not in made:
      closed = _equations.with_consts(jaxpr, consts)
      new, outputs = derivative(closed, _weights.Paths(inputs))
      made[jaxpr] = new.jaxpr, outputs
    return made[jaxpr]

  return changed


def _instead_of(old: Any, new: Callable[..., Any]) -> Any:
  """A function as JAX holds it, with what is known of the one it replaces."""
  return linear_util.wrap_init(new, debug_info=old.debug_info)


def _custom_jvp_of_hijax(
  held: Any, _: Rule, change: Change, paths: _weights.Paths
) -> dict[str, Any]:
  old, call = held.jvp_rule, change.call

  @functools.wraps(old)
  def rule(primals: Any, tangents: Any) -> Any:
    arrays = [*leaves(primals), *leaves(tangents)]
    its_paths = _weights.Paths((*paths.inputs, *paths.inputs))
    return call(lambda: old(primals, tangents), arrays, its_paths)[0]

  return {"traced": _traced(held.traced, change, paths), "jvp_rule": rule}


def _custom_vjp_of_hijax(
  held: Any, rule: Rule, change: Change, paths: _weights.Paths
) -> dict[str, Any]:
  of_residuals: list[_weights.WeightPath] = []
  outputs = paths.inputs[rule.consts :]
  backward = _backward_of_hijax(held, change, of_residuals, outputs)
  old, call = held.fwd, change.call

  @functools.wraps(old)
  def forward(are_perturbed: Any, *args: Any) -> Any:
    fun = lambda: old(are_perturbed, *args)
    made, found = call(fun, leaves(args), _weights.Paths(paths.inputs))
    of_residuals[:] = found[len(leaves(made[0])) :]
    return made

  # What the rule alone is given has no place in the function.
  first, second = (len(leaves(x)) for x in held.in_avals[:2])
  of_body = (*paths.inputs[:first], *paths.inputs[first + second :])
  traced = _traced(held.traced, change, _weights.Paths(of_body))
  return {"traced": traced, "fwd": forward, **backward}


def _custom_lin_of_hijax(
  held: Any, rule: Rule, change: Change, paths: _weights.Paths
) -> dict[str, Any]:
  return _backward_of_hijax(held, change, paths.inputs[: rule.consts], ())


def _backward_of_hijax(
  held: Any,
  change: Change,
  of_residuals: Sequence[_weights.WeightPath],
  outputs: Any,
) -> dict[str, Any]:
  old, call = held.bwd, change.call
  if "remat_rules" not in held.params:  # Remove this once jax >= 0.12.
    raise KeyError("Before JAX 0.12 the rules of hijax primitives differ.")

  @functools.wraps(old)
  def backward(residuals: Any, cotangents: Any) -> Any:
    its_paths = _weights.Paths(tuple(of_residuals), outputs)
    fun = lambda: old(residuals, cotangents)
    return call(fun, leaves(residuals), its_paths)[0]

  # These are other ways to the same numbers, which JAX takes if there are any.
  return {"bwd": backward, "bwd_accums": None, "remat_rules": None}


def _traced(old: Any, change: Change, paths: _weights.Paths) -> Any:
  """What ``jax.jit`` has traced, with its jaxpr changed."""
  new = change.body(old.jaxpr, paths)

  def fun(*args: Any, **kwargs: Any) -> Any:
    made = core.jaxpr_as_fun(new)(*leaves((args, kwargs)))
    return jax.tree.unflatten(old.out_tree, made)

  fun.__name__ = old.fun_name
  types = [v.aval for v in old.jaxpr.jaxpr.invars]
  args, kwargs = jax.tree.unflatten(old.in_tree, types)
  return jax.jit(fun).trace(*args, **kwargs)


def leaves(tree: Any) -> list[Any]:
  """The leaves of a tree, those among them that JAX knows to be zero."""
  return jax.tree.leaves(tree, is_leaf=is_zero)


def is_zero(x: Any) -> bool:
  """Whether JAX knows that x is zero, and has no array for it."""
  return isinstance(x, (ad.Zero, SymbolicZero))


# What changes the rule of a plain equation, and of an object of hijax.
_RULES = {
  "custom_jvp_call": (_custom_jvp, _custom_jvp_of_hijax),
  "custom_lin": (_custom_lin, _custom_lin_of_hijax),
  "custom_vjp_call": (_custom_vjp, _custom_vjp_of_hijax),
}
