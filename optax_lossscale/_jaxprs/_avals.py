"""What types and values tell: where devices differ, and what has numbers."""

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax


def get_varying_axes(x: Any) -> frozenset[Hashable]:
  """The mapped axes over which the type says that x varies."""
  return get_aval_varying_axes(jax.typeof(x))


def get_aval_varying_axes(aval: Any) -> frozenset[Hashable]:
  """The mapped axes over which what is of this type varies.

  Raises:
    RuntimeError: if JAX has another name for them, since a guess would make
      devices part ways, or a norm too large.
  """
  # No name of it is public. The second is that before JAX 0.10: remove it once
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


def as_varying(x: jax.Array, axes: Any) -> jax.Array:
  """What is one value along these axes, as one that may differ."""
  if hasattr(lax, "pcast"):
    return lax.pcast(x, axes, to="varying")
  # What JAX 0.8.0 has instead: remove it once jax >= 0.9.
  return lax.pvary(x, axes)  # type: ignore[attr-defined]


def is_concrete(x: Any) -> bool:
  """Whether an array has its numbers, if perhaps with a derivative.

  A JAX whose tracers do not tell is taken to know none.
  """
  if not isinstance(x, jax.core.Tracer):
    return True
  to_value = getattr(x, "to_concrete_value", lambda: None)
  return to_value() is not None


def is_ref(aval: Any) -> bool:
  """Whether this is the type of a Ref, and not of an array."""
  return hasattr(aval, "inner_aval")
