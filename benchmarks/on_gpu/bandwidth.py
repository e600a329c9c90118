"""The bandwidth of the device's memory, by a copy in place."""

import time

from shared import clock

from on_gpu import events

SECONDS = 5.0  # at most


def measure(copy: clock.Program, by: str) -> float:
  """Return the bytes per second, read and written, and report them in a line.

  Args:
    copy: adds one to each of many numbers. Its row has the "bytes" that a step
      reads and writes.
    by: the name of the library.

  Returns:
    The bandwidth, or NaN if the copy failed.
  """
  until = time.time() + SECONDS
  clock.measure([copy], rounds=20, steps=10, until=until)
  row = copy.row
  if "milliseconds" not in row:
    events.line(f"{by} could not measure a copy: {row.get('error')}")
    return float("nan")
  found = row["bytes"] / row["milliseconds"][1] * 1e3
  events.line(
    f"Copy bandwidth by {by}: {found / 1e9:,.1f} GB/s, read and written"
  )
  events.tell("facts", facts={f"copy bandwidth by {by}, bytes/s": found})
  return found
