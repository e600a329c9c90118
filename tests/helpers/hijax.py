"""The flags that make primitives of hijax of JAX's own, in JAX 0.12."""

import contextlib

import jax
import pytest

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
# Whether the objects hold rules as functions that may be wrapped. In older ones
# they are the user's own functions.
HAS_RULES = jax.__version_info__ >= (0, 12)


def is_enabled(flag):
  """Whether a flag is there and on."""
  return bool(getattr(jax.config, flag, False))


@contextlib.contextmanager
def enable_flags(*flags):
  """Turns some of them on; skips the test if this JAX has not all of these."""
  missing = [flag for flag in flags if not hasattr(jax.config, flag)]
  if missing:
    pytest.skip(f"JAX {jax.__version__} has no {', '.join(missing)}.")
  old_values = {flag: is_enabled(flag) for flag in flags}
  try:
    for flag in flags:
      jax.config.update(flag, True)
    yield
  finally:
    for flag, value in old_values.items():
      jax.config.update(flag, value)


def enable_all_flags():
  """Turns all of them on; skips the test if this JAX has not all."""
  return enable_flags(*FLAGS)
