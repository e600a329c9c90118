"""Warnings that point to the user's line instead of a line of this package."""

import inspect
import traceback
import warnings

from optax_lossscale._jaxprs import _source_info


def warn(message: str) -> None:
  """Warn at the innermost line of user code on the call stack.

  The frames between that line and the caller belong to this package, to JAX,
  and to libraries such as Flax that call the function being traced.
  """
  frames = traceback.walk_stack(inspect.currentframe())
  levels = (
    level
    for level, (frame, _) in enumerate(frames)
    if _source_info.is_user_file(frame.f_code.co_filename)
  )
  # If no frame is the user's, point to this function.
  warnings.warn(message, stacklevel=next(levels, 0) + 1)
