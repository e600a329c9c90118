"""Times programs against each other, round by round, in random order."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import math
import random
import statistics
import time
from typing import Any

# By the index of the program and whether its steps were skipped, of each round:
# the seconds of a step by the clock, and its CPU seconds.
Samples = dict[tuple[int, bool], list[tuple[float, float]]]


class Program:
  """Something that can take a step.

  Attributes:
    row: the facts about the program, by name. Times or an error are added.
    skips: whether it also has steps that it must skip.
  """

  row: dict[str, Any]
  skips = False

  def prepare(self, skip: bool) -> None:
    """Make ready for steps; this is not timed."""

  def step(self, skip: bool) -> None:
    """Start a step, without waiting for its end."""
    raise NotImplementedError

  def wait(self) -> None:
    """Wait until all steps have ended."""


def measure(
  programs: Sequence[Program],
  *,
  rounds: int,
  steps: int,
  until: float = math.inf,
) -> Samples:
  """Add to each row the time of a step, and of a skipped one.

  In each round each program takes some steps in a row, as in training, and the
  clock is read when the last has ended. The first round is not counted. A
  program that fails is left out. No round begins that would end after `until`.
  """
  runs = [
    (i, skip)
    for i, program in enumerate(programs)
    for skip in (False, True)[: 1 + program.skips]
  ]
  samples: Samples = {}
  for done in range(rounds + 1):
    started = time.time()
    for i, skip in random.sample(runs, len(runs)):
      if "error" in programs[i].row:
        continue
      with catch(programs[i].row):
        elapsed = _time_steps(programs[i], skip, steps)
        if done:  # The first round touches all memory for the first time.
          samples.setdefault((i, skip), []).append(elapsed)
    for (i, skip), times in samples.items():
      key = "skipped_milliseconds" if skip else "milliseconds"
      seconds = quartiles([wall for wall, _ in times])
      programs[i].row[key] = [1e3 * s for s in seconds]
      programs[i].row["rounds"] = len(times)
    now = time.time()
    if now + (now - started) > until:
      break
  return samples


def take_first_steps(program: Program, steps: int) -> None:
  """Take steps, and note a time, in case that there will be no rounds.

  The first step is not timed with the others.
  """
  _time_steps(program, False, 1)
  mean = 1e3 * _time_steps(program, False, steps - 1)[0]
  program.row |= {"milliseconds": [mean] * 3, "rounds": 0}


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
  """Return the CPU seconds of a call, and its result."""
  start = time.process_time()
  result = call()
  return time.process_time() - start, result


@contextlib.contextmanager
def catch(row: dict[str, Any]) -> Iterator[None]:
  """Write an exception into a row, and suppress it."""
  try:
    yield
  except Exception as error:
    first = (str(error).strip() or "no message").splitlines()[0]
    row["error"] = f"{type(error).__name__}: {first}"[:200]


def quartiles(values: Sequence[float]) -> list[float]:
  """Return the first quartile, the median and the third quartile."""
  if len(values) < 2:
    return [values[0]] * 3
  return statistics.quantiles(values, n=4, method="inclusive")


def _time_steps(program, skip, steps):
  program.prepare(skip)
  program.wait()
  start = time.perf_counter(), time.process_time()
  for _ in range(steps):
    program.step(skip)
  program.wait()
  end = time.perf_counter(), time.process_time()
  return tuple((b - a) / steps for a, b in zip(start, end, strict=True))
