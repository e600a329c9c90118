"""New figures of matplotlib, which need not be installed."""

from typing import Any


def new_axes(caller: str, rows: int = 1) -> Any:
  """The axes of a new figure, as many below each other.

  Args:
    caller: the public function, for messages.
    rows: how many.

  Returns:
    One object of matplotlib's axes; an array of them if there are several.

  Raises:
    ImportError: if matplotlib is not installed.
  """
  try:
    from matplotlib import pyplot as plt
  except ImportError as error:
    raise ImportError(
      f"{caller} needs matplotlib, which is not installed. Run `pip install"
      " matplotlib`."
    ) from error
  size = 8, 2.5 + rows
  return plt.subplots(rows, figsize=size, layout="constrained", sharex=True)[1]
