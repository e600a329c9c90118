"""Which equations run in half precision, and where they may be hidden."""

import re
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _lines,
  _operations,
  _places,
  _rules,
  _walk,
  _weights,
)

# Functions marked with this scope keep their products in float32. The scope
# stays in the name stack of an equation, whatever transforms the function.
KEEP_FLOAT32 = "keep_float32"
# A line with a product in float32, whose precision was not chosen.
_PRODUCT = re.compile(
  r"stablehlo\.(?:dot_general|convolution)\b(?!.*HIGHEST).*-> tensor<[^>]*f32>"
)


def is_product(eqn: core.JaxprEqn) -> bool:
  """Whether this is a float32 product that may run in half precision."""
  if not _operations.is_matmul(eqn):
    return False
  floats: list[Any] = [v.aval for v in (*eqn.invars[:2], *eqn.outvars)]
  are_float32 = all(aval.dtype == jnp.float32 for aval in floats)
  return (
    are_float32 and _operations.has_castable_dtypes(eqn) and not is_kept(eqn)
  )


def is_exported(eqn: core.JaxprEqn) -> bool:
  """Whether this calls what ``jax.export`` made of a function with products.

  It is code for XLA, which runs as it is.
  """
  text = _equations.get_exported_mlir(eqn)
  return bool(_PRODUCT.search(text)) and not is_kept(eqn)


def is_kept(eqn: core.JaxprEqn) -> bool:
  """Whether the equation stands in a function marked to stay in float32."""
  return _places.has_scope(eqn, KEEP_FLOAT32)


def jaxprs_to_search(eqn: core.JaxprEqn) -> list[_equations.ClosedJaxpr]:
  """The jaxprs that an equation holds or hides, unless it is marked."""
  held = list(_equations.subjaxprs(eqn))
  plain = None if held else _equations.lower_hijax(eqn)
  held += [] if plain is None else [plain]
  return [] if held and is_kept(eqn) else held


class ProductSearch(_walk.EqnSearch):
  """Looks for products, once in each jaxpr.

  Args:
    rules: whether a rule that may have products of its own counts, too.
  """

  def __init__(self, *, rules: bool = False) -> None:
    super().__init__(
      lambda eqn: (
        is_product(eqn) or is_exported(eqn) or (rules and may_hide(eqn))
      ),
      jaxprs_to_search,
    )

  def inside_of(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are products in what an equation holds."""
    inside = super().any_inside
    # A rule may need the axes of the mesh.
    return bool(_higher_order.call_in_eqn_context(eqn, lambda: inside(eqn)))


def names_of_cast(closed: _equations.ClosedJaxpr) -> list[_places.EqnNames]:
  """The names of products that `autocast` runs in half, an inner one, too."""
  steps = _walk.walk(closed, _equations.subjaxprs)
  places = [x.location for x in steps if _operations.is_matmul(x.eqn)]
  return [place.names for place in places if place.autocast_dtype is not None]


def may_hide(eqn: core.JaxprEqn) -> bool:
  """Whether a rule may have products that its function has not.

  A ``custom_jvp`` that a library brings has none: it is ``relu`` or its like,
  or linear algebra.
  """
  rule = _rules.get_custom_rule(eqn)
  if rule is None or rule.num_consts is None or is_kept(eqn):
    return False
  return rule.primitive_name != "custom_jvp_call" or not _lines.is_library_rule(
    eqn
  )


def derivative_of(
  eqn: core.JaxprEqn,
) -> tuple[list[int], _equations.ClosedJaxpr | None]:
  """The jaxpr of an equation and its derivatives, if it has them.

  It is what a rule computes, each equation with the line of the rule.

  Returns:
    Which inputs of the equation are floats; and the jaxpr, of these and then of
    all inputs.
  """
  floats = [i for i, atom in enumerate(eqn.invars) if _is_float(atom.aval)]
  avals = [atom.aval for atom in eqn.invars]

  def loss(some: list[Any], args: tuple[Any, ...]) -> Any:
    old = _equations.eqn_as_fun(_lines.strip_source_info(eqn))
    full = list(args)
    for i, x in zip(floats, some, strict=True):
      full[i] = x
    return sum(jnp.sum(jnp.real(x)) for x in old(*full) if _is_float(x))

  try:
    seen = jax.make_jaxpr(jax.grad(loss))([avals[i] for i in floats], avals)
  except Exception:  # A rule may refuse, or need the axes of a mesh.
    return floats, None
  return floats, seen


def hides(eqn: core.JaxprEqn) -> bool:
  """Whether there are products in what a rule computes, if it can be known."""
  if not may_hide(eqn):
    return False
  _, seen = derivative_of(eqn)
  return seen is None or ProductSearch().any_in_jaxpr(seen.jaxpr)


class InRule(NamedTuple):
  """The products that a function with a rule computes, and its derivative.

  Attributes:
    places: the place of the function, and of each product.
    is_all: whether its derivative could be looked at.
  """

  places: list[_places.EqnLocation]
  is_all: bool


def products_in_rule(
  eqn: core.JaxprEqn,
  place: _places.EqnLocation,
  paths: _weights.WeightPaths,
  may_ask: bool,
) -> InRule:
  """Finds the products that a function with a rule computes.

  Args:
    eqn: the equation that calls the function.
    place: where it stands.
    paths: the names of those of its inputs that are weights.
    may_ask: whether the rule may be asked for its derivative.

  Returns:
    An :class:`InRule`.
  """
  floats, seen = derivative_of(eqn) if may_ask else ([], None)
  inside = jaxprs_to_search
  programs = [(x, paths) for x in inside(eqn)]
  if seen is not None:
    of_floats = paths.select_inputs(floats)
    inputs = (*of_floats, *paths.inputs)
    programs.append((seen, _weights.WeightPaths(inputs, of_floats)))
  places = [place]
  for closed, its_paths in programs:
    weights = _weights.ProgramWeights().get_jaxpr_weights(closed, its_paths)
    steps = _walk.walk(closed, inside, weights=weights, root_location=place)
    places += [x.location for x in steps if is_product(x.eqn)]
  return InRule(places, seen is not None)


def _is_float(array: Any) -> bool:
  """Whether an array, or its type, is one that has derivatives."""
  dtype = getattr(array, "dtype", jnp.int32)
  return jnp.issubdtype(dtype, jnp.inexact)
