"""Evaluate equations of half precision in float32.

The reference of a comparison has float32 arrays in place of all half-precision
ones: float16, bfloat16 and float8. An equation is evaluated with float32
operands, and with float32 in place of each half-precision dtype among its
parameters. Which equations round is decided by their types alone.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import _eqns, _primitives

# These return entries of their operands, or exact functions of them, so they do
# not round.
_EXACT = (
  _primitives.DATA_MOVEMENT
  | _primitives.BROADCASTING
  | _primitives.PERMUTING_COLLECTIVES
  | {
    "abs", "all_gather", "clamp", "concatenate", "cummax", "cummin",
    "device_put", "dynamic_slice", "dynamic_update_slice", "gather", "get",
    "max", "min", "neg", "pad", "pmax", "pmin", "reduce_max", "reduce_min",
    "reduce_window_max", "reduce_window_min", "reshard", "scatter", "select_n",
    "sign", "sort", "split", "stop_gradient", "swap", "top_k", "unstack",
  }
)  # fmt: skip
# These add or multiply many numbers, and may round after each of them.
ACCUMULATING = _primitives.SCATTER_REDUCTIONS | {
  "cumlogsumexp", "cumprod", "cumsum", "psum", "psum_invariant", "reduce",
  "reduce_prod", "reduce_scatter", "reduce_sum", "reduce_window",
  "reduce_window_sum", "select_and_scatter_add",
}  # fmt: skip
# These depend on the bits or the spacing of their operands, or call code that
# JAX does not trace.
_OPAQUE = {
  "bitcast_convert_type", "ffi_call", "io_callback", "nextafter",
  "pure_callback", "reduce_precision",
}  # fmt: skip
# The jaxprs of these combine two numbers, so they can be traced for float32.
_REDUCERS = {
  "reduce", "reduce_window", "scatter", "scatter-add", "scatter-mul",
  "scatter-max", "scatter-min", "scatter-sub", "select_and_scatter",
}  # fmt: skip


def is_half(x: Any) -> bool:
  """Return whether an array, or a type, is in half precision."""
  dtype = getattr(x, "dtype", None)
  return dtype is not None and not _eqns.is_ref(x) and is_half_dtype(dtype)


def is_half_dtype(dtype: Any) -> bool:
  """Return whether a dtype is a float dtype of less than 32 bits."""
  return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def has_half(eqn: core.JaxprEqn) -> bool:
  """Return whether an operand or a result is in half precision."""
  return any(is_half(v.aval) for v in [*eqn.invars, *eqn.outvars])


def is_rounding(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation returns other numbers than in float32.

  An equation that only moves half-precision numbers does not.
  """
  name = eqn.primitive.name
  # JAX allocates an array by "empty", or "empty2".
  is_exact = name in _EXACT or name.startswith("empty")
  if is_exact or not any(is_half(v.aval) for v in eqn.outvars):
    return _primitives.is_matmul(eqn) and has_half(eqn)
  if name == "convert_element_type":
    return not _is_exact_cast(eqn.invars[0].aval, eqn.outvars[0].aval)
  return not _primitives.is_noop_reduce_precision(eqn)


def _is_exact_cast(old: Any, new: Any) -> bool:
  """Return whether a half-precision type holds all numbers of another type."""
  if not is_half(old):
    return old.dtype == bool
  old_info, new_info = jnp.finfo(old.dtype), jnp.finfo(new.dtype)
  return (
    old_info.nmant <= new_info.nmant
    and old_info.max <= new_info.max
    and old_info.smallest_subnormal >= new_info.smallest_subnormal
  )


def upcast(x: Any) -> Any:
  """Cast an array to float32 if it is in half precision."""
  return jnp.asarray(x, jnp.float32) if is_half(x) else x


def eval_in_float32(
  eqn: core.JaxprEqn, inputs: Sequence[Any]
) -> Sequence[Any] | None:
  """Evaluate an equation of half precision in float32.

  Args:
    eqn: the equation.
    inputs: its operands, in float32 in place of half precision.

  Returns:
    Its results, likewise; None if the equation can't be evaluated in float32:
    see :func:`eval_as_written`.
  """
  name = eqn.primitive.name
  # JAX inserts one before values that a checkpoint saves.
  if _primitives.is_noop_reduce_precision(eqn):
    return inputs
  if name in _OPAQUE:
    return None
  if _primitives.is_matmul(eqn) and all(is_float32(x) for x in inputs[:2]):
    # With the default precision, TPUs multiply in bfloat16 and some GPUs in
    # TensorFloat-32.
    highest = lax.Precision.HIGHEST, lax.Precision.HIGHEST
    eqn = _primitives.replace_result_dtype(eqn, jnp.float32, precision=highest)
  elif name in _REDUCERS:
    eqn = _eqns.map_subjaxprs(eqn, _retrace_in_float32)
  elif next(_eqns.subjaxprs(eqn), None) or _eqns.get_hi_primitive(eqn):
    return None
  as_float32 = lambda dtype: jnp.float32 if is_half_dtype(dtype) else dtype
  return _eqns.eqn_as_fun(_primitives.map_dtypes(eqn, as_float32))(*inputs)


def is_float32(x: Any) -> bool:
  """Return whether an array is in float32."""
  return getattr(x, "dtype", None) == jnp.float32


def _retrace_in_float32(jaxpr: _eqns.AnyJaxpr) -> _eqns.AnyJaxpr:
  closed_jaxpr = _eqns.close_jaxpr(jaxpr)
  invars: list[Any] = closed_jaxpr.jaxpr.invars
  avals = [
    jax.ShapeDtypeStruct(v.aval.shape, jnp.float32)
    if is_half(v.aval)
    else v.aval
    for v in invars
  ]
  new_jaxpr: Any = jax.make_jaxpr(core.jaxpr_as_fun(closed_jaxpr))(*avals)
  return new_jaxpr if isinstance(jaxpr, _eqns.ClosedJaxpr) else new_jaxpr.jaxpr


def eval_as_written(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
  """Evaluate an equation in the half precision that it is written in.

  Args:
    eqn: the equation.
    inputs: its operands, in float32 in place of half precision.

  Returns:
    Its results, likewise.
  """
  pairs: Any = zip(inputs, eqn.invars, strict=True)
  args = [x.astype(v.aval.dtype) if is_half(v.aval) else x for x, v in pairs]
  return list(map(upcast, _eqns.eqn_as_fun(eqn)(*args)))


def round_to_dtype(x: Any, dtype: np.dtype) -> Any:
  """Round a float32 array to a dtype.

  The program must be compiled without excess precision, since XLA drops a cast
  to the dtype and back otherwise.
  """
  return lax.convert_element_type(
    lax.convert_element_type(x, dtype), jnp.float32
  )
