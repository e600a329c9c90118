"""What types and values tell: where devices differ, and what has numbers."""

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax


def varying(x: Any) -> frozenset[Hashable]:
  """The mapped axes over which the type says that x varies."""
  return varying_of(jax.typeof(x))


def varying_of(kind: Any) -> frozenset[Hashable]:
  """The mapped axes over which what is of this type varies.

  Raises:
    RuntimeError: if JAX has another name for them, since a guess would make
      devices part ways, or a norm too large.
  """
  # No name of it is public. The second is that before JAX 0.10: remove it once
  # jax >= 0.10.
  axes = getattr(kind, "manual_axis_type", None)
  varying = getattr(axes, "varying", getattr(kind, "vma", None))
  if not isinstance(varying, (frozenset, set)):
    raise RuntimeError(
      "optax_lossscale cannot read the mesh axes over which a value varies in"
      f" JAX {jax.__version__}, got the type {kind!r}. Use an older JAX until"
      " optax_lossscale supports this version. Please report it."
    )
  return frozenset(varying)


def as_varying(x: jax.Array, axes: Any) -> jax.Array:
  """What is one value along these axes, as one that may differ."""
  if hasattr(lax, "pcast"):
    return lax.pcast(x, axes, to="varying")
  # What JAX 0.8.0 has instead: remove it once jax >= 0.9.
  return lax.pvary(x, axes)  # type: ignore[attr-defined]


def is_known(x: Any) -> bool:
  """Whether an array has its numbers, if perhaps with a derivative.

  A JAX whose tracers do not tell is taken to know none.
  """
  if not isinstance(x, jax.core.Tracer):
    return True
  to_value = getattr(x, "to_concrete_value", lambda: None)
  return to_value() is not None


def is_ref(kind: Any) -> bool:
  """Whether this is the type of a Ref, and not of an array."""
  return hasattr(kind, "inner_aval")
