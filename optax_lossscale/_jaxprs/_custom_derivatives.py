"""Rewrites ``custom_jvp`` and ``custom_vjp`` equations, including their rules.

The equation of a function with a custom derivative contains Python functions,
the rule, which JAX calls when it differentiates. A rewrite keeps the equation
and wraps each of these functions, as JAX's own passes do it, so JAX runs no
rule earlier or more often than without the rewrite. The primitives of hijax
contain the same functions as attributes.

JAX calls a rule after the trace that defined it has ended. A wrapper must
therefore not close over tracers of that trace.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core, linear_util
from jax.interpreters import ad

from optax_lossscale._jaxprs import _eqns, _weights


class CustomRule(NamedTuple):
  """The custom derivative of an equation.

  Attributes:
    primitive_name: ``custom_jvp_call``, ``custom_vjp_call``, or ``custom_lin``,
      which is the tangent of a ``custom_vjp_call``.
    num_consts: the number of leading inputs without a derivative: arrays that
      the user's function closes over, or the residuals of a tangent; None if
      unknown.
    symbolic_zeros: whether the rule receives symbolic zeros for the tangents of
      unperturbed inputs.
  """

  primitive_name: str
  num_consts: int | None
  symbolic_zeros: bool


class RuleTransform(NamedTuple):
  """The transforms that :func:`transform_custom_rule` applies to an equation.

  JAX calls rules later, so ``map_jaxpr`` and ``map_call`` may be called after
  the rewrite has ended.

  Attributes:
    map_body: transforms the primal jaxpr, which runs where nothing is
      differentiated. Takes the weight paths of the inputs of the jaxpr.
    map_jaxpr: transforms the jaxpr that a function of the rule was traced to.
      Returns the jaxpr and the weight paths of its outputs.
    map_call: calls a Python function of the rule under the transform. Takes the
      call, the arrays that the function receives, and their weight paths, with
      those of the leaves of the result. Returns the result of the function and
      the weight paths of its leaves.
  """

  map_body: Callable[[_eqns.ClosedJaxpr, _weights.WeightPaths], Any]
  map_jaxpr: Callable[
    [_eqns.ClosedJaxpr, _weights.WeightPaths],
    tuple[Any, Sequence[_weights.WeightPath]],
  ]
  map_call: Callable[
    [Callable[[], Any], Sequence[Any], _weights.WeightPaths],
    tuple[Any, Sequence[_weights.WeightPath]],
  ]


def get_custom_rule(eqn: core.JaxprEqn) -> CustomRule | None:
  """Return the custom derivative of an equation; None if it has none."""
  primitive_name = _eqns.get_primitive_name(eqn)
  if primitive_name not in _RULE_TRANSFORMS:
    return None
  hi_prim: Any = _eqns.get_hi_primitive(eqn)
  params = eqn.params if hi_prim is None else hi_prim.params
  if primitive_name == "custom_lin":
    # A tangent of hijax has the tree of its residuals, all others a count.
    residuals_tree = eqn.params.get("residuals_tree")
    num_consts = (
      residuals_tree.num_leaves if residuals_tree else eqn.params.get("num_res")
    )
  elif hi_prim is not None:
    # The first two arguments of a hijax primitive are arrays that are closed
    # over: by the function and its rule, and by the rule only.
    num_consts = len(jax.tree.leaves(hi_prim.in_avals[:2]))
  else:
    num_consts = eqn.params.get("num_consts")
  symbolic_zeros = bool(params.get("symbolic_zeros"))
  return CustomRule(primitive_name, num_consts, symbolic_zeros)


def transform_custom_rule(
  eqn: core.JaxprEqn,
  rule: CustomRule,
  transform: RuleTransform,
  paths: _weights.WeightPaths,
) -> core.JaxprEqn | None:
  """Transform the body and the rule of an equation with a custom derivative.

  Args:
    eqn: the equation.
    rule: its rule, by :func:`get_custom_rule`.
    transform: the transforms.
    paths: the weight paths of the inputs of the equation.

  Returns:
    The new equation; None if the equation doesn't have the expected parameters.
  """
  hi_prim = _eqns.get_hi_primitive(eqn) or eqn.params.get("_prim")
  transform_plain, transform_hijax = _RULE_TRANSFORMS[rule.primitive_name]
  if rule.num_consts is None or len(list(_eqns.subjaxprs(eqn))) > 1:
    return None
  try:
    new_params = (
      transform_plain(eqn, rule, transform, paths)
      if hi_prim is None
      else transform_hijax(hi_prim, rule, transform, paths)
    )
    return _eqns.replace_params(eqn, hi_prim, new_params)
  except (AttributeError, KeyError):  # This JAX has other parameter names.
    return None


def _transform_custom_jvp(
  eqn: core.JaxprEqn,
  rule: CustomRule,
  transform: RuleTransform,
  paths: _weights.WeightPaths,
) -> dict[str, Any]:
  """Return the new parameters of a ``custom_jvp_call``."""
  jvp_fun: Any = eqn.params["jvp_jaxpr_fun"]
  primal_paths = paths.inputs[rule.num_consts :]
  transform_once = _memoize_by_jaxpr(transform.map_jaxpr)

  def new_jvp_fun(*zero_mask: bool) -> Any:
    # JAX passes which tangents are zero; the jaxpr has no inputs for these.
    jaxpr, consts, *extras = jvp_fun.call_wrapped(*zero_mask)
    tangent_paths = [
      path
      for path, is_zero in zip(primal_paths, zero_mask, strict=False)
      if not is_zero
    ]
    new_jaxpr, _ = transform_once(
      jaxpr, consts, (*primal_paths, *tangent_paths)
    )
    return new_jaxpr, consts, *extras

  return {
    "call_jaxpr": transform.map_body(eqn.params["call_jaxpr"], paths),
    "jvp_jaxpr_fun": _wrap_init_like(jvp_fun, new_jvp_fun),
  }


def _transform_custom_vjp(
  eqn: core.JaxprEqn,
  rule: CustomRule,
  transform: RuleTransform,
  paths: _weights.WeightPaths,
) -> dict[str, Any]:
  """Return the new parameters of a ``custom_vjp_call``."""
  fwd: Any = eqn.params["fwd_jaxpr_thunk"]
  bwd: Any = eqn.params["bwd"]
  out_trees: Any = eqn.params["out_trees"]
  primal_paths = paths.inputs[rule.num_consts :]
  transform_once = _memoize_by_jaxpr(transform.map_jaxpr)
  # The weight paths of the residuals that fwd computes. JAX calls fwd before
  # bwd, so `new_fwd` fills the list before bwd reads it. A residual that is an
  # input of fwd is no output of its jaxpr.
  computed_paths: list[_weights.WeightPath] = []

  def new_fwd(*perturbed_mask: bool) -> Any:
    jaxpr, consts = fwd.call_wrapped(*perturbed_mask)
    new_jaxpr, out_paths = transform_once(jaxpr, consts, primal_paths)
    computed_paths[:] = out_paths[: len(out_paths) - len(eqn.outvars)]
    return new_jaxpr, consts

  def get_bwd_paths() -> _weights.WeightPaths:
    # For each residual the index of the input that it is; None if computed.
    *_, forwarded_inputs = out_trees()
    computed_iter = iter(computed_paths)
    input_paths = dict(enumerate(primal_paths))
    residual_paths = tuple(
      next(computed_iter, None) if i is None else input_paths.get(i)
      for i in forwarded_inputs
    )
    return _weights.WeightPaths(residual_paths, primal_paths)

  new_bwd = _wrap_call(bwd.call_wrapped, transform.map_call, get_bwd_paths)
  return {
    "call_jaxpr": transform.map_body(eqn.params["call_jaxpr"], paths),
    "fwd_jaxpr_thunk": _wrap_init_like(fwd, new_fwd),
    "bwd": _wrap_init_like(bwd, new_bwd),
  }


def _transform_custom_lin(
  eqn: core.JaxprEqn,
  rule: CustomRule,
  transform: RuleTransform,
  paths: _weights.WeightPaths,
) -> dict[str, Any]:
  """Return the new parameters of a ``custom_lin``.

  It is in a jaxpr if a rule or the user calls ``jax.jvp``.
  """
  bwd: Any = eqn.params["bwd"]
  zero_mask: Any = eqn.params["in_zeros"]
  tangent_paths = iter(paths.inputs[rule.num_consts :])
  out_paths = tuple(
    None if has_zero_tangent else next(tangent_paths, None)
    for has_zero_tangent in zero_mask
  )
  bwd_paths = _weights.WeightPaths(paths.inputs[: rule.num_consts], out_paths)
  new_bwd = _wrap_call(bwd.call_wrapped, transform.map_call, lambda: bwd_paths)
  return {"bwd": _wrap_init_like(bwd, new_bwd)}


def _memoize_by_jaxpr(
  map_jaxpr: Callable[[_eqns.ClosedJaxpr, _weights.WeightPaths], Any],
) -> Any:
  """Return a function that transforms each jaxpr of a rule only once.

  JAX caches by the identity of jaxprs: for equal jaxprs it would trace, compile
  and store the derivative several times.
  """
  cache: dict[core.Jaxpr, Any] = {}

  def transform_once(
    jaxpr: core.Jaxpr, consts: Any, input_paths: tuple[_weights.WeightPath, ...]
  ) -> Any:
    if jaxpr not in cache:
      new_jaxpr, out_paths = map_jaxpr(
        _eqns.with_consts(jaxpr, consts), _weights.WeightPaths(input_paths)
      )
      cache[jaxpr] = new_jaxpr.jaxpr, out_paths
    return cache[jaxpr]

  return transform_once


def _wrap_call(
  fun: Callable[..., Any],
  map_call: Callable[..., Any],
  get_paths: Callable[[], _weights.WeightPaths],
) -> Callable[..., Any]:
  """Wrap a Python function of a rule so that it runs under the transform.

  Args:
    fun: the function.
    map_call: see :class:`RuleTransform`, whose ``map_body`` has tracers.
    get_paths: returns the weight paths of the first arrays that the function
      receives, and of its outputs. It is called when JAX calls the function.
  """

  @functools.wraps(fun)
  def new_fun(*args: Any) -> Any:
    call = functools.partial(fun, *args)
    return map_call(call, flatten_with_zeros(args), get_paths())[0]

  return new_fun


def _wrap_init_like(original: Any, fun: Callable[..., Any]) -> Any:
  """Wrap a function as JAX does, with the debug info of the original one."""
  return linear_util.wrap_init(fun, debug_info=original.debug_info)


def _transform_hijax_custom_jvp(
  hi_prim: Any,
  _: CustomRule,
  transform: RuleTransform,
  paths: _weights.WeightPaths,
) -> dict[str, Any]:
  """Return the new parameters of a hijax primitive of ``custom_jvp``."""
  # The rule receives primals, then tangents.
  rule_paths = _weights.WeightPaths((*paths.inputs, *paths.inputs))
  return {
    "traced": _retrace(hi_prim.traced, transform, paths),
    "jvp_rule": _wrap_call(
      hi_prim.jvp_rule, transform.map_call, lambda: rule_paths
    ),
  }


def _transform_hijax_custom_vjp(
  hi_prim: Any,
  _: CustomRule,
  transform: RuleTransform,
  paths: _weights.WeightPaths,
) -> dict[str, Any]:
  """Return the new parameters of a hijax primitive of ``custom_vjp``."""
  fwd, map_call = hi_prim.fwd, transform.map_call
  # JAX calls fwd before bwd, so `new_fwd` fills the list before bwd reads it.
  residual_paths: list[_weights.WeightPath] = []

  @functools.wraps(fwd)
  def new_fwd(perturbed_mask: Any, *args: Any) -> Any:
    result, out_paths = map_call(
      functools.partial(fwd, perturbed_mask, *args),
      flatten_with_zeros(args),
      _weights.WeightPaths(paths.inputs),
    )
    residual_paths[:] = out_paths[len(flatten_with_zeros(result[0])) :]
    return result

  # The second argument is for the rule only, and is no input of the function.
  num_shared, num_rule_only = (
    len(flatten_with_zeros(x)) for x in hi_prim.in_avals[:2]
  )
  primal_paths = paths.inputs[num_shared + num_rule_only :]
  body_paths = _weights.WeightPaths((*paths.inputs[:num_shared], *primal_paths))
  return {
    "traced": _retrace(hi_prim.traced, transform, body_paths),
    "fwd": new_fwd,
    **_transform_hijax_bwd(
      hi_prim,
      transform,
      lambda: _weights.WeightPaths(tuple(residual_paths), primal_paths),
    ),
  }


def _transform_hijax_custom_lin(
  hi_prim: Any,
  rule: CustomRule,
  transform: RuleTransform,
  paths: _weights.WeightPaths,
) -> dict[str, Any]:
  """Return the new parameters of the tangent of a hijax primitive."""
  bwd_paths = _weights.WeightPaths(paths.inputs[: rule.num_consts])
  return _transform_hijax_bwd(hi_prim, transform, lambda: bwd_paths)


def _transform_hijax_bwd(
  hi_prim: Any,
  transform: RuleTransform,
  get_paths: Callable[[], _weights.WeightPaths],
) -> dict[str, Any]:
  """Return the new parameters of a hijax primitive that contains a bwd rule."""
  if "remat_rules" not in hi_prim.params:  # Remove this once jax >= 0.12.
    raise KeyError("Before JAX 0.12 the rules of hijax primitives differ.")
  # JAX would prefer the other two to bwd if they were set, and they compute the
  # same cotangents without the transform.
  new_bwd = _wrap_call(hi_prim.bwd, transform.map_call, get_paths)
  return {"bwd": new_bwd, "bwd_accums": None, "remat_rules": None}


def _retrace(
  traced: Any, transform: RuleTransform, paths: _weights.WeightPaths
) -> Any:
  """Return the ``Traced`` of a jitted function, with its jaxpr transformed."""
  new_jaxpr = transform.map_body(traced.jaxpr, paths)

  def fun(*args: Any, **kwargs: Any) -> Any:
    outs = core.jaxpr_as_fun(new_jaxpr)(*flatten_with_zeros((args, kwargs)))
    return jax.tree.unflatten(traced.out_tree, outs)

  fun.__name__ = traced.fun_name
  avals = [v.aval for v in traced.jaxpr.jaxpr.invars]
  args, kwargs = jax.tree.unflatten(traced.in_tree, avals)
  return jax.jit(fun).trace(*args, **kwargs)


def flatten_with_zeros(tree: Any) -> list[Any]:
  """Flatten a tree in which symbolic zeros count as leaves."""
  return jax.tree.leaves(tree, is_leaf=is_symbolic_zero)


def is_symbolic_zero(x: Any) -> bool:
  """Return whether x is a symbolic zero, for which JAX has no array."""
  return isinstance(x, (ad.Zero, SymbolicZero))


# For each canonical name, the transforms of a plain and of a hijax primitive.
_RULE_TRANSFORMS = {
  "custom_jvp_call": (_transform_custom_jvp, _transform_hijax_custom_jvp),
  "custom_lin": (_transform_custom_lin, _transform_hijax_custom_lin),
  "custom_vjp_call": (_transform_custom_vjp, _transform_hijax_custom_vjp),
}
