"""Finds the matmuls that autocast casts, also in rules and exported code."""

import re
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _custom_derivatives,
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _source_info,
  _walk,
  _weights,
)

# `keep_float32` runs a function in this name scope. The scope stays in the name
# stack of the equations when the function is transformed, so it also keeps the
# matmuls of the derivatives in float32.
KEEP_FLOAT32_SCOPE = "keep_float32"
# A line of StableHLO with a float32 matmul, except of precision HIGHEST.
_FLOAT32_MATMUL_RE = re.compile(
  r"stablehlo\.(?:dot_general|convolution)\b(?!.*HIGHEST).*-> tensor<[^>]*f32>"
)


def is_castable_matmul(eqn: core.JaxprEqn, dtype: Any) -> bool:
  """Return whether autocast may cast this matmul.

  Its result is float32. Its operands are float32 as well, except that one of
  them may have the dtype of the cast already, such as weights stored in
  float16.

  Args:
    eqn: the equation.
    dtype: the dtype to which autocast casts operands. With float32, only
      matmuls of two float32 operands count.
  """
  if not _primitives.is_matmul(eqn):
    return False
  operand_dtypes = get_operand_dtypes(eqn)
  return (
    jnp.float32 in operand_dtypes
    # In another half precision, an operand would lose its range or its bits.
    and all(x in (jnp.float32, dtype) for x in operand_dtypes)
    and has_float32_result(eqn)
    and _primitives.has_castable_dtypes(eqn)
    and not has_keep_float32_scope(eqn)
  )


def has_float32_result(eqn: core.JaxprEqn) -> bool:
  """Return whether the result of a matmul is float32."""
  aval: Any = eqn.outvars[0].aval
  return bool(aval.dtype == jnp.float32)


def get_operand_dtypes(eqn: core.JaxprEqn) -> list[Any]:
  """Return the dtypes of the two operands of a matmul."""
  # A third operand, if any, is the integer group sizes of a `ragged_dot`.
  avals: list[Any] = [v.aval for v in eqn.invars[:2]]
  return [aval.dtype for aval in avals]


def has_exported_matmul(eqn: core.JaxprEqn) -> bool:
  """Return whether this calls a ``jax.export`` function with float32 matmuls.

  An exported function is serialized StableHLO, which autocast can't rewrite.
  """
  text = _eqns.get_exported_mlir(eqn)
  return bool(_FLOAT32_MATMUL_RE.search(text)) and not has_keep_float32_scope(
    eqn
  )


def has_keep_float32_scope(eqn: core.JaxprEqn) -> bool:
  """Return whether the equation is part of a `keep_float32` function."""
  return _provenance.has_scope(eqn, KEEP_FLOAT32_SCOPE)


def subjaxprs_to_search(eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
  """Return the jaxprs inside an equation, except in `keep_float32` functions.

  A hijax primitive contains no jaxpr, and is lowered to one.
  """
  subjaxprs = list(_eqns.subjaxprs(eqn))
  lo_jaxpr = None if subjaxprs else _eqns.lower_hijax(eqn)
  subjaxprs += [] if lo_jaxpr is None else [lo_jaxpr]
  return [] if subjaxprs and has_keep_float32_scope(eqn) else subjaxprs


class MatmulSearch(_walk.EqnSearch):
  """Searches for matmuls that autocast may cast, once in each jaxpr.

  Args:
    dtype: the dtype to which autocast casts operands.
    include_rule_matmuls: whether an equation counts if its custom derivative
      may contain matmuls that the function does not.
  """

  def __init__(self, dtype: Any, *, include_rule_matmuls: bool = False) -> None:
    super().__init__(
      lambda eqn: (
        is_castable_matmul(eqn, dtype)
        or has_exported_matmul(eqn)
        or (include_rule_matmuls and can_have_rule_matmuls(eqn))
      ),
      subjaxprs_to_search,
    )

  def any_inside(self, eqn: core.JaxprEqn) -> bool:
    """Return whether there are matmuls in the jaxprs inside an equation."""
    search = super().any_inside
    # Lowering a hijax primitive may trace a rule, which may use mesh axes.
    return bool(_higher_order.call_in_eqn_context(eqn, lambda: search(eqn)))


def collect_cast_names(
  closed_jaxpr: _eqns.ClosedJaxpr,
) -> list[_provenance.EqnNames]:
  """Return the names of all matmuls that any `autocast` inside has cast."""
  visits = _walk.walk(closed_jaxpr, _eqns.subjaxprs)
  locations = [x.location for x in visits if _primitives.is_matmul(x.eqn)]
  return [
    location.names
    for location in locations
    if location.autocast_dtype is not None
  ]


def can_have_rule_matmuls(eqn: core.JaxprEqn) -> bool:
  """Return whether a rule may contain matmuls that its function does not.

  A ``custom_jvp`` of JAX or another library is assumed to have none, because
  these are activation functions such as ``relu``, or linear algebra.
  """
  rule = _custom_derivatives.get_custom_rule(eqn)
  if rule is None or rule.num_consts is None or has_keep_float32_scope(eqn):
    return False
  # A bwd rule of a library may contain any matmul, such as those of attention.
  return (
    rule.primitive_name != "custom_jvp_call"
    or not _source_info.is_library_rule(eqn)
  )


def trace_rule_grad(
  eqn: core.JaxprEqn,
) -> tuple[list[int], _eqns.ClosedJaxpr | None]:
  """Trace an equation and its gradient, which runs its custom derivative.

  Returns:
    The indices of the float inputs of the equation, and the jaxpr of the
    gradient with respect to these. The inputs of the jaxpr are the float
    inputs, followed by all inputs. It is None if the rule can't be traced.
  """
  float_indices = [
    i for i, atom in enumerate(eqn.invars) if _is_differentiable(atom.aval)
  ]
  avals = [atom.aval for atom in eqn.invars]

  # `jax.grad` with respect to the list of float inputs needs no rule for
  # integers, and the sum of all outputs makes each cotangent nonzero.
  def loss(float_args: list[Any], args: tuple[Any, ...]) -> Any:
    # Without the source line of the call, each equation has that of the rule.
    eqn_fun = _eqns.eqn_as_fun(_source_info.strip_source_info(eqn))
    all_args = list(args)
    for i, x in zip(float_indices, float_args, strict=True):
      all_args[i] = x
    return sum(
      jnp.sum(jnp.real(x)) for x in eqn_fun(*all_args) if _is_differentiable(x)
    )

  try:
    grad_jaxpr = jax.make_jaxpr(jax.grad(loss))(
      [avals[i] for i in float_indices], avals
    )
  except Exception:  # A rule may raise any error, or need mesh axes.
    return float_indices, None
  return float_indices, grad_jaxpr


def has_rule_matmuls(eqn: core.JaxprEqn, dtype: Any) -> bool:
  """Return whether a rule has matmuls to cast, or can't be inspected."""
  if not can_have_rule_matmuls(eqn):
    return False
  _, grad_jaxpr = trace_rule_grad(eqn)
  return grad_jaxpr is None or MatmulSearch(dtype).any_in_jaxpr(
    grad_jaxpr.jaxpr
  )


class RuleMatmuls(NamedTuple):
  """The matmuls of a function with a custom derivative.

  Attributes:
    locations: the location of the function itself, followed by the locations of
      the matmuls in the function and in its derivative.
    is_complete: whether the derivative could be traced.
  """

  locations: list[_provenance.EqnLocation]
  is_complete: bool


def find_rule_matmuls(
  eqn: core.JaxprEqn,
  location: _provenance.EqnLocation,
  paths: _weights.WeightPaths,
  dtype: Any,
  can_trace_rule: bool,
) -> RuleMatmuls:
  """Find the matmuls of a function with a custom derivative.

  Args:
    eqn: the equation that calls the function.
    location: the location of the equation.
    paths: the weight paths of its inputs.
    dtype: the dtype to which autocast casts operands.
    can_trace_rule: whether to trace the derivative.

  Returns:
    A :class:`RuleMatmuls`.
  """
  float_indices, grad_jaxpr = (
    trace_rule_grad(eqn) if can_trace_rule else ([], None)
  )
  get_subjaxprs = subjaxprs_to_search
  jaxprs_and_paths = [(x, paths) for x in get_subjaxprs(eqn)]
  if grad_jaxpr is not None:
    float_paths = tuple(paths.inputs[i] for i in float_indices if paths.inputs)
    # The outputs are the gradients of the float inputs, so they have the same
    # paths.
    input_paths = (*float_paths, *paths.inputs)
    jaxprs_and_paths.append(
      (grad_jaxpr, _weights.WeightPaths(input_paths, float_paths))
    )
  # The location itself lets a name select the function as a whole.
  locations = [location]
  for closed_jaxpr, inner_paths in jaxprs_and_paths:
    weights = _weights.ProgramWeights().get_jaxpr_weights(
      closed_jaxpr, inner_paths
    )
    visits = _walk.walk(
      closed_jaxpr, get_subjaxprs, weights=weights, root_location=location
    )
    locations += [
      x.location for x in visits if is_castable_matmul(x.eqn, dtype)
    ]
  return RuleMatmuls(locations, grad_jaxpr is not None)


def _is_differentiable(array: Any) -> bool:
  """Return whether an array or an aval has a float or complex dtype.

  Abstract tokens and the like have no dtype.
  """
  dtype = getattr(array, "dtype", jnp.int32)
  return jnp.issubdtype(dtype, jnp.inexact)
