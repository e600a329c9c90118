"""What JAX itself cannot do, in this version or with the flags that are set."""

import jax
import pytest


def jax_can(fun, *args):
  """Whether JAX can trace a function, of which we have no part.

  It has no gradient of a scan with ``jax_scan3`` in JAX 0.12, for example, and
  no ``vmap`` of a ``ragged_dot`` along some axes.
  """
  try:
    jax.eval_shape(fun, *args)
  except NotImplementedError:
    return False
  return True


def skip_if_jax_cannot(fun, *args):
  """Skips a test of what JAX cannot do without us."""
  if not jax_can(fun, *args):
    pytest.skip(f"JAX {jax.__version__} cannot do this without us.")
