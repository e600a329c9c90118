"""Times programs against each other, round by round, in random order."""

from collections.abc import Callable, Sequence
import random
import statistics
import time
from typing import Any, Protocol


class Program(Protocol):
  """Something that can take a step.

  Attributes:
    row: the facts about the program, by name. Times or an error are added.
    skips: whether it also has steps that it must skip.
  """

  row: dict[str, Any]
  skips: bool

  def prepare(self, skip: bool) -> None:
    """Makes ready for steps; this is not timed."""

  def step(self, skip: bool) -> None:
    """Starts a step, and need not wait for its end."""

  def wait(self) -> None:
    """Waits until all steps have ended."""


def measure(
  programs: Sequence[Program],
  *,
  rounds: int,
  steps: int,
  until: float,
  after_round: Callable[[int], None] = lambda done: None,
) -> None:
  """Adds to each row the time of a step, and of a skipped one.

  In each round each program takes some steps in a row, as in training, and the
  clock is read when the last has ended. The first round is not counted.

  Args:
    programs: the programs to time; a program is left out after it fails.
    rounds: how many are counted, at most.
    steps: how many are taken in a row.
    until: the time at which the last round should have ended.
    after_round: is called with the number of rounds that were counted.
  """
  runs = [(p, skip) for p in programs for skip in (False, True)[: 1 + p.skips]]
  seconds: dict[tuple[int, bool], list[float]] = {}
  for done in range(rounds + 1):
    started = time.time()
    for program, skip in random.sample(runs, len(runs)):
      if "error" in program.row:
        continue
      with catch(program.row):
        elapsed = _time(program, skip, steps)
        if done:
          seconds.setdefault((id(program), skip), []).append(elapsed)
    _record_seconds(runs, seconds)
    after_round(done)
    now = time.time()
    if now + (now - started) > until:
      break


def first_steps(program: Program, steps: int) -> None:
  """Takes steps, and notes a time, in case that there will be no rounds.

  The first step is not timed.
  """
  program.prepare(False)
  program.step(False)
  program.wait()
  mean = 1e3 * _time(program, False, steps - 1)
  program.row |= {"milliseconds": [mean] * 3, "rounds": 0}


class catch:  # noqa: N801
  """Context manager that writes an exception into a row, and suppresses it."""

  def __init__(self, row: dict[str, Any]):
    self._row = row

  def __enter__(self) -> None:
    pass

  def __exit__(self, kind, error, traceback) -> bool:
    if error is None or not isinstance(error, Exception):
      return False
    first = (str(error).strip() or "no message").splitlines()[0]
    self._row["error"] = f"{kind.__name__}: {first}"[:200]
    return True


def quartiles(values: Sequence[float]) -> list[float]:
  """First quartile, median and third quartile."""
  if len(values) < 2:
    return [values[0]] * 3
  return statistics.quantiles(values, n=4, method="inclusive")


def _time(program, skip, steps):
  program.prepare(skip)
  program.wait()
  start = time.perf_counter()
  for _ in range(steps):
    program.step(skip)
  program.wait()
  return (time.perf_counter() - start) / steps


def _record_seconds(runs, seconds):
  for program, skip in runs:
    if found := seconds.get((id(program), skip)):
      key = "skipped_milliseconds" if skip else "milliseconds"
      program.row[key] = [1e3 * s for s in quartiles(found)]
      program.row["rounds"] = len(found)
