"""Warnings that name the line of the user."""

import inspect
import traceback
import warnings

# Packages whose frames are between a user's line and the tracing of a function.
_NOT_THE_USERS = {
  "contextlib",
  "equinox",
  "flax",
  "functools",
  "jax",
  "optax_lossscale",
}


def warn(message: str) -> None:
  """Warns at the nearest line that is the user's.

  Between that line and the caller are frames of ours, and of what maps or
  compiles what we returned.
  """
  frames = traceback.walk_stack(inspect.currentframe())
  packages = (
    frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames
  )
  users = (
    level
    for level, package in enumerate(packages)
    if package not in _NOT_THE_USERS
  )
  warnings.warn(message, stacklevel=next(users, 0) + 1)
