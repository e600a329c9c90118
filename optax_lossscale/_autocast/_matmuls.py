"""Which equations run in half precision, and where they may be hidden."""

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

# Functions marked with this scope keep their products in float32. The scope
# stays in the name stack of an equation, whatever transforms the function.
KEEP_FLOAT32_SCOPE = "keep_float32"
# A line with a product in float32, whose precision was not chosen.
_FLOAT32_MATMUL_RE = re.compile(
  r"stablehlo\.(?:dot_general|convolution)\b(?!.*HIGHEST).*-> tensor<[^>]*f32>"
)


def is_castable_matmul(eqn: core.JaxprEqn) -> bool:
  """Whether this is a float32 product that may run in half precision."""
  if not _primitives.is_matmul(eqn):
    return False
  avals: list[Any] = [v.aval for v in (*eqn.invars[:2], *eqn.outvars)]
  all_float32 = all(aval.dtype == jnp.float32 for aval in avals)
  return (
    all_float32
    and _primitives.has_castable_dtypes(eqn)
    and not has_keep_float32_scope(eqn)
  )


def has_exported_matmul(eqn: core.JaxprEqn) -> bool:
  """Whether this calls what ``jax.export`` made of a function with products.

  It is code for XLA, which runs as it is.
  """
  text = _eqns.get_exported_mlir(eqn)
  return bool(_FLOAT32_MATMUL_RE.search(text)) and not has_keep_float32_scope(
    eqn
  )


def has_keep_float32_scope(eqn: core.JaxprEqn) -> bool:
  """Whether the equation stands in a function marked to stay in float32."""
  return _provenance.has_scope(eqn, KEEP_FLOAT32_SCOPE)


def subjaxprs_to_search(eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
  """The jaxprs that an equation holds or hides, unless it is marked."""
  subjaxprs = list(_eqns.subjaxprs(eqn))
  lo_jaxpr = None if subjaxprs else _eqns.lower_hijax(eqn)
  subjaxprs += [] if lo_jaxpr is None else [lo_jaxpr]
  return [] if subjaxprs and has_keep_float32_scope(eqn) else subjaxprs


class MatmulSearch(_walk.EqnSearch):
  """Looks for products, once in each jaxpr.

  Args:
    include_rule_matmuls: whether a rule that may have products of its own
      counts, too.
  """

  def __init__(self, *, include_rule_matmuls: bool = False) -> None:
    super().__init__(
      lambda eqn: (
        is_castable_matmul(eqn)
        or has_exported_matmul(eqn)
        or (include_rule_matmuls and can_have_rule_matmuls(eqn))
      ),
      subjaxprs_to_search,
    )

  def any_inside(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are products in what an equation holds."""
    search = super().any_inside
    # A rule may need the axes of the mesh.
    return bool(_higher_order.call_in_eqn_context(eqn, lambda: search(eqn)))


def collect_cast_names(
  closed_jaxpr: _eqns.ClosedJaxpr,
) -> list[_provenance.EqnNames]:
  """The names of products that `autocast` runs in half, an inner one, too."""
  visits = _walk.walk(closed_jaxpr, _eqns.subjaxprs)
  locations = [x.location for x in visits if _primitives.is_matmul(x.eqn)]
  return [
    location.names
    for location in locations
    if location.autocast_dtype is not None
  ]


def can_have_rule_matmuls(eqn: core.JaxprEqn) -> bool:
  """Whether a rule may have products that its function has not.

  A ``custom_jvp`` that a library brings has none: it is ``relu`` or its like,
  or linear algebra.
  """
  rule = _custom_derivatives.get_custom_rule(eqn)
  if rule is None or rule.num_consts is None or has_keep_float32_scope(eqn):
    return False
  return (
    rule.primitive_name != "custom_jvp_call"
    or not _source_info.is_library_rule(eqn)
  )


def trace_rule_grad(
  eqn: core.JaxprEqn,
) -> tuple[list[int], _eqns.ClosedJaxpr | None]:
  """The jaxpr of an equation and its derivatives, if it has them.

  It is what a rule computes, each equation with the line of the rule.

  Returns:
    Which inputs of the equation are floats; and the jaxpr, of these and then of
    all inputs.
  """
  float_indices = [
    i for i, atom in enumerate(eqn.invars) if _is_differentiable(atom.aval)
  ]
  avals = [atom.aval for atom in eqn.invars]

  def loss(float_args: list[Any], args: tuple[Any, ...]) -> Any:
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
  except Exception:  # A rule may refuse, or need the axes of a mesh.
    return float_indices, None
  return float_indices, grad_jaxpr


def has_rule_matmuls(eqn: core.JaxprEqn) -> bool:
  """Whether there are products in what a rule computes, if it can be known."""
  if not can_have_rule_matmuls(eqn):
    return False
  _, grad_jaxpr = trace_rule_grad(eqn)
  return grad_jaxpr is None or MatmulSearch().any_in_jaxpr(grad_jaxpr.jaxpr)


class RuleMatmuls(NamedTuple):
  """The products that a function with a rule computes, and its derivative.

  Attributes:
    locations: the place of the function, and of each product.
    is_complete: whether its derivative could be looked at.
  """

  locations: list[_provenance.EqnLocation]
  is_complete: bool


def find_rule_matmuls(
  eqn: core.JaxprEqn,
  location: _provenance.EqnLocation,
  paths: _weights.WeightPaths,
  can_trace_rule: bool,
) -> RuleMatmuls:
  """Finds the products that a function with a rule computes.

  Args:
    eqn: the equation that calls the function.
    location: where it stands.
    paths: the names of those of its inputs that are weights.
    can_trace_rule: whether the rule may be asked for its derivative.

  Returns:
    An :class:`RuleMatmuls`.
  """
  float_indices, grad_jaxpr = (
    trace_rule_grad(eqn) if can_trace_rule else ([], None)
  )
  get_subjaxprs = subjaxprs_to_search
  jaxprs_and_paths = [(x, paths) for x in get_subjaxprs(eqn)]
  if grad_jaxpr is not None:
    float_paths = paths.select_inputs(float_indices)
    input_paths = (*float_paths, *paths.inputs)
    jaxprs_and_paths.append(
      (grad_jaxpr, _weights.WeightPaths(input_paths, float_paths))
    )
  locations = [location]
  for closed_jaxpr, inner_paths in jaxprs_and_paths:
    weights = _weights.ProgramWeights().get_jaxpr_weights(
      closed_jaxpr, inner_paths
    )
    visits = _walk.walk(
      closed_jaxpr, get_subjaxprs, weights=weights, root_location=location
    )
    locations += [x.location for x in visits if is_castable_matmul(x.eqn)]
  return RuleMatmuls(locations, grad_jaxpr is not None)


def _is_differentiable(array: Any) -> bool:
  """Whether an array, or its type, is one that has derivatives."""
  dtype = getattr(array, "dtype", jnp.int32)
  return jnp.issubdtype(dtype, jnp.inexact)
