"""Events that a part sends to the command that started it, as lines of JSON.

Events have their own pipe, since libraries write to standard output, even in
the middle of a line.
"""

import json
import math
import os
from typing import Any

PIPE = "ON_GPU_EVENTS"  # the variable with the number of the pipe


def tell(kind: str, **fields: Any) -> None:
  """Send an event to the command.

  Args:
    kind: "facts" about the device and the versions, the "begin" of a row, a
      "table" of the rows so far, a "line" for the reader, or the "end" of the
      part.
    **fields: the content of the event, as JSON.
  """
  text = dumps({"kind": kind} | fields)
  if PIPE not in os.environ:  # A part that was started by hand.
    print(text, flush=True)
    return
  with open(int(os.environ[PIPE]), "w", closefd=False) as pipe:
    pipe.write(text + "\n")


def line(text: str) -> None:
  """Send a line, which the command prints and keeps."""
  tell("line", text=text)


def dumps(value: Any, **options: Any) -> str:
  """JSON that every reader takes: NaN and infinities are strings."""
  return json.dumps(_spelled(value), allow_nan=False, **options)


def _spelled(value):
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, dict):
    return {key: _spelled(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_spelled(item) for item in value]
  return value
