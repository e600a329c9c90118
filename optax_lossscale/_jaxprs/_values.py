"""Which arrays hold numbers now, and are not those of a program being made."""

from typing import Any

import jax


def is_known(x: Any) -> bool:
  """Whether an array has its numbers, if perhaps with a derivative.

  A JAX whose tracers do not tell is taken to know none.
  """
  if not isinstance(x, jax.core.Tracer):
    return True
  to_value = getattr(x, "to_concrete_value", lambda: None)
  return to_value() is not None
