"""Events that a part sends to the command that started it, as lines of JSON.

A part keeps its standard output for them, since libraries print, even in the
middle of a line.
"""

import json
import math
import os
import sys
from typing import Any

_output = None  # None if a part is started by hand


def reserve_output() -> None:
  """Keep standard output for events; what libraries print is in the log."""
  global _output
  _output = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)


def tell(kind: str, **fields: Any) -> None:
  """Send an event to the command.

  Args:
    kind: "facts" about the device and the versions, the "begin" of a row, a
      "table" of the rows so far, a "line" for the reader, or the "end" of the
      part.
    **fields: the content of the event, as JSON.
  """
  text = dumps({"kind": kind} | fields)
  print(text, file=_output or sys.stdout, flush=True)


def line(text: str) -> None:
  """Send a line, which the command prints and keeps."""
  tell("line", text=text)


def dumps(value: Any, **options: Any) -> str:
  """JSON that every reader takes: NaN and infinities are strings."""
  return json.dumps(_spell_out(value), allow_nan=False, **options)


def _spell_out(value):
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, dict):
    return {key: _spell_out(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_spell_out(item) for item in value]
  return value
