"""Properties of avals and arrays: varying mesh axes, concrete values, Refs."""

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax


def get_varying_axes(x: Any) -> frozenset[Hashable]:
  """Return the mapped axes over which an array varies, by its type."""
  return get_aval_varying_axes(jax.typeof(x))


def get_aval_varying_axes(aval: Any) -> frozenset[Hashable]:
  """Return the mapped axes over which an array of this type varies.

  Args:
    aval: the type.

  Returns:
    The names of the axes; empty outside of ``shard_map`` and ``pmap``.

  Raises:
    RuntimeError: if JAX stores the axes under another name. A wrong guess would
      let devices diverge, or count replicated gradients in a norm several
      times.
  """
  # Neither attribute is public. JAX < 0.10 has `aval.vma`: remove it once
  # jax >= 0.10.
  manual_axis_type = getattr(aval, "manual_axis_type", None)
  vma = getattr(manual_axis_type, "varying", getattr(aval, "vma", None))
  if not isinstance(vma, (frozenset, set)):
    raise RuntimeError(
      "optax_lossscale cannot read the mesh axes over which a value varies in"
      f" JAX {jax.__version__}, got the type {aval!r}. Use an older JAX until"
      " optax_lossscale supports this version. Please report it."
    )
  return frozenset(vma)


def cast_to_varying(x: jax.Array, axes: Any) -> jax.Array:
  """Cast a replicated array to the type of one that varies over these axes."""
  if hasattr(lax, "pcast"):
    return lax.pcast(x, axes, to="varying")
  # JAX 0.8.0 has no `pcast`: remove this line once jax >= 0.9.
  return lax.pvary(x, axes)  # type: ignore[attr-defined]


def is_ref(aval: Any) -> bool:
  """Return whether a type is that of a Ref instead of an array."""
  return hasattr(aval, "inner_aval")


def is_ref_object(x: Any) -> bool:
  """Return whether an object is a Ref of JAX."""
  return hasattr(x, "dtype") and is_ref(getattr(x, "aval", None))


def read_ref(x: Any) -> Any:
  """Return the contents of a Ref; any other object itself."""
  return x[...] if is_ref_object(x) else x
