"""The axes of a picture; matplotlib need not be installed."""

from typing import Any


def axes_or_new(axes: Any, caller: str, rows: int = 1) -> Any:
  """The axes that were given, or those of a new figure, below each other.

  Args:
    axes: what the user gave, or None.
    caller: the public function, for messages.
    rows: how many are needed.

  Returns:
    One object of matplotlib's axes; an array of them if there are several.

  Raises:
    ImportError: if matplotlib is not installed.
  """
  if axes is not None:
    return axes
  try:
    from matplotlib import pyplot as plt
  except ImportError as error:
    raise ImportError(
      f"{caller} needs matplotlib, which is not installed. Run `pip install"
      " matplotlib`."
    ) from error
  size = 8, 2.5 + rows
  return plt.subplots(rows, figsize=size, layout="constrained", sharex=True)[1]
