"""Warnings that name the line of the user."""

import inspect
import traceback
import warnings

from optax_lossscale._jaxprs import _source_info


def warn(message: str) -> None:
  """Warns at the nearest line that is the user's.

  Between that line and the caller are frames of ours, and of what maps or
  compiles what we returned.
  """
  frames = traceback.walk_stack(inspect.currentframe())
  levels = (
    level
    for level, (frame, _) in enumerate(frames)
    if _source_info.is_user_file(frame.f_code.co_filename)
  )
  warnings.warn(message, stacklevel=next(levels, 0) + 1)
