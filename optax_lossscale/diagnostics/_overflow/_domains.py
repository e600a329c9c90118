"""Functions that have no value, or no derivative, at the edge of their domain.

The derivative of ``sqrt`` divides by zero at zero, but ``find_overflow`` finds
only the division. The fix is in front of the function, not of the division.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from optax_lossscale._jaxprs import _eqns, _walk

# For each primitive, the functions whose derivatives it makes infinite, and
# whether it divides by what follows from their operands or from their results.
_FUNCTIONS_BY_PRIMITIVE = {
  "div": {
    "sqrt": "outvars", "atanh": "invars", "log1p": "invars", "atan2": "invars",
    "log": "invars", "svd": "outvars",
  },
  "integer_pow": {"eigh": "outvars"},
  "rsqrt": {"acos": "invars", "asin": "invars", "acosh": "invars"},
}  # fmt: skip
# These are between the function and the primitive.
_ARITHMETIC = {
  "add", "broadcast_in_dim", "convert_element_type", "integer_pow", "mul",
  "neg", "one_minus_square", "reshape", "select_n", "square", "squeeze", "sub",
  "transpose",
}  # fmt: skip

_EPS = "jnp.finfo(x.dtype).eps"
# The fix for each function.
FIXES = {
  **dict.fromkeys(
    ("acos", "asin", "atanh", "erf_inv"),
    "{function} or its derivative is not finite at -1 and 1, and not defined"
    " beyond. Clip the operand: jnp.clip(x, -1 + eps, 1 - eps), with eps ="
    f" {_EPS}.",
  ),
  **dict.fromkeys(
    ("cholesky", "custom_linear_solve", "lu", "triangular_solve"),
    "the matrix is singular, or not positive definite. Add a small multiple of"
    " the identity: a + 1e-3 * jnp.eye(len(a)).",
  ),
  **dict.fromkeys(
    ("eigh", "svd"),
    "{function} has no derivative if eigenvalues or singular values are equal."
    " Make them distinct: a + jnp.diag(1e-3 * jnp.arange(len(a))).",
  ),
  **dict.fromkeys(
    ("log", "log2"),
    "keep zero and negative numbers out before the operation:"
    " jnp.log(jnp.where(x > 0, x, 1)). Or compute the loss from logits:"
    " jax.nn.log_softmax, optax.losses.sigmoid_binary_cross_entropy.",
  ),
  **dict.fromkeys(
    ("rsqrt", "sqrt"),
    "a root has no finite derivative at zero, and no value below. Keep such"
    f" numbers out inside of the root: jnp.sqrt(jnp.maximum(x, {_EPS})). For a"
    " norm or a distance, x is the sum of squares, and for a standard deviation"
    " jnp.var.",
  ),
  "acosh": (
    "acosh has no finite derivative at 1, and no value below. Limit the"
    f" operand: jnp.arccosh(jnp.maximum(x, 1 + {_EPS}))."
  ),
  "atan2": (
    "atan2 has no derivative at (0, 0). Keep this point out before the"
    " operation: jnp.arctan2(y, jnp.where((x == 0) & (y == 0), 1, x))."
  ),
  "log1p": (
    "log1p or its derivative is not finite at -1, and not defined below. Limit"
    f" the operand: jnp.log1p(jnp.maximum(x, -1 + {_EPS}))."
  ),
}

# In front of a fix for numbers that are zero in a dtype of a narrow range.
FLOAT32_FIRST = (
  "small numbers become zero in {dtype}, so compute it in float32, with the"
  " operations that lead to it: x.astype(jnp.float32). If this is not enough, "
)
# A hyperparameter in half precision may be rounded.
HYPERPARAMETER_FIX = (
  "hyperparameters have the dtype of the parameters: in {dtype}, b2 may be"
  " rounded to 1, and eps to 0. Keep them in float32:"
  " optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(...), or"
  " give the optimizer float32 parameters: tx = ols.with_master_weights(tx)."
)

# The fix for each operation that has no value at small operands.
SMALL_OPERAND_FIXES = {
  "div": (
    "a divisor is zero or too small. Keep such numbers out before the"
    " operation: x / jnp.where(jnp.abs(y) > 1e-6, y, 1), or use a larger"
    " epsilon, also for the optimizer: eps=1e-6."
  ),
  "pow": (
    "an operand of pow is negative or too small. Keep such numbers out before"
    " the operation: jnp.where(x > 1e-6, x, 1) ** p."
  ),
  "integer_pow": (
    "an operand is too small for 1 / x, x**-2, a root or their derivatives."
    " Keep such numbers out before the operation:"
    " jnp.where(jnp.abs(x) > 1e-6, x, 1)."
  ),
}

# The fixes for operands that may be zero only because of their dtype.
UNDERFLOW_FIXES = {FIXES["log"], FIXES["sqrt"], *SMALL_OPERAND_FIXES.values()}


def find_function(
  visit: _walk.EqnVisit, visits: Sequence[_walk.EqnVisit]
) -> str:
  """Return the primitive whose derivative an equation computes, or its own.

  JAX gives the equations of a derivative the line of the function that it
  differentiates. An operand or a result of this function is in the divisor.

  Args:
    visit: the visit of the equation.
    visits: those of all equations of the program.
  """
  eqn, jaxpr, parent = visit.eqn, visit.closed_jaxpr.jaxpr, visit.parent
  primitive = _eqns.get_primitive_name(eqn)
  functions = _FUNCTIONS_BY_PRIMITIVE.get(primitive, {})
  if not functions or not visit.location.is_differentiated:
    return primitive
  sources = _list_sources(eqn, jaxpr)
  # A jaxpr of the backward pass has operands of the forward pass as inputs.
  is_residual = (
    parent is not None
    and parent.location.is_backward
    and _has_common(sources, jaxpr.invars)
  )
  found = {
    name
    for x in visits
    if (name := _eqns.get_primitive_name(x.eqn)) in functions
    and x.location.lines == visit.location.lines
    and (
      (is_residual and functions[name] == "invars")
      or _has_common(sources, getattr(x.eqn, functions[name]))
    )
  }
  return next(filter(found.__contains__, functions), primitive)


def _list_sources(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> list[Any]:
  """Return the atoms from which the last operand follows by arithmetic."""
  sources: list[Any] = eqn.invars[-1:]
  for _ in range(8):  # Derivatives have fewer equations in a row.
    sources = eqn.invars[-1:] + [
      atom
      for x in jaxpr.eqns
      if x.primitive.name in _ARITHMETIC and _has_common(sources, x.outvars)
      for atom in x.invars
    ]
  return sources


def _has_common(atoms: list[Any], others: list[Any]) -> bool:
  return any(x is y for x in atoms for y in others)
