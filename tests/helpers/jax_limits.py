"""Limits of JAX itself, in this version or with the flags that are on."""

import jax
import pytest

from helpers import hijax


def can_run_in_jax(fun, *args):
  """Whether JAX can run a function, of which we have no part.

  It has no ``vmap`` of a ``ragged_dot`` along some axes, for example.
  """
  try:
    fun(*args)
  except NotImplementedError:
    return False
  except (TypeError, IndexError, ValueError):  # So fails what flags change.
    if not list_enabled_flags():
      raise
    return False
  return True


def skip_if_jax_cannot(fun, *args):
  """Skips a test of what JAX cannot do without us."""
  if not can_run_in_jax(fun, *args):
    with_flags = (
      f" with {', '.join(list_enabled_flags())}" if list_enabled_flags() else ""
    )
    pytest.skip(f"JAX {jax.__version__}{with_flags} cannot do it without us.")


def list_enabled_flags():
  return list(filter(hijax.is_enabled, hijax.FLAGS))
