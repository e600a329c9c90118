"""What a part tells the command that started it: one line of JSON each.

All other lines on standard output are passed on as they are.
"""

import json
import math
from typing import Any

MARK = "@event "


def tell(kind: str, **fields: Any) -> None:
  """Tells the command one thing.

  Args:
    kind: "facts" about the device and the versions, a "table", a "line" for the
      reader, or the "end" of the part.
    **fields: what there is to tell, as JSON.
  """
  print(MARK + dumps({"kind": kind} | fields), flush=True)


def line(text: str) -> None:
  """Tells a line, which the command prints and keeps."""
  tell("line", text=text)


def parse(text: str) -> dict[str, Any] | None:
  """The event in a line, or None if it is none."""
  return json.loads(text[len(MARK) :]) if text.startswith(MARK) else None


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
