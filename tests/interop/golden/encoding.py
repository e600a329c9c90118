"""The encoding of the golden files, for the tests and for the recorders.

A recorder runs in the virtual environment of the package that it records, so
this module imports the standard library alone.

Strings are written as "F*3 T FT": F is a step with finite gradients, T one that
overflowed. Scales and counters are run-length encoded. A scale that is a power
of two is written as its exponent, any other number as a string.
"""

from collections.abc import Iterable
import itertools
import math
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).parent

# The training runs: a linear model on a batch of 4, the overflowing steps with
# an inf among the inputs.
TRAINING_STEPS = "TFFTTFFFFFFTFFFFFTTTFFFFFFFFTF"
TRAINING_WINDOW = 4
TRAINING_SCALE = 2.0**10
FIRST_WEIGHTS = [[-0.25, 0.25], [0.0, -0.25], [0.25, 0.0]]
FIRST_BIAS = [0.0, 0.0]


def make_batch(step: int) -> tuple[list[list[float]], list[list[float]]]:
  rows = [(3 * step + i) % 11 for i in range(4)]
  x = [[((7 * i + 3 * j) % 11 - 5) / 8 for j in range(3)] for i in rows]
  y = [[((5 * i + 2 * k) % 7 - 3) / 4 for k in range(2)] for i in rows]
  if TRAINING_STEPS[step] == "T":
    x[0][0] = math.inf
  return x, y


def pack(steps: str) -> str:
  """'FFFFFFTFT' as 'F*6 TFT'."""
  words = []
  for letter, group in itertools.groupby(steps):
    count = len(list(group))
    if count > 4:
      words += [f"{letter}*{count}", ""]
    else:
      words[-1:] = [(words[-1] if words else "") + letter * count]
  return " ".join(filter(None, words))


def unpack(packed: str) -> str:
  words = (word.partition("*") for word in packed.split())
  return "".join(head * int(count or 1) for head, _, count in words)


def encode_runs(values: Iterable[Any]) -> list:
  """[5, 5, 6] as [[5, 2], 6]."""
  groups = [(key, len(list(g))) for key, g in itertools.groupby(values)]
  return [key if count == 1 else [key, count] for key, count in groups]


def decode_runs(packed: list) -> list:
  pairs = (item if isinstance(item, list) else [item, 1] for item in packed)
  return [value for value, count in pairs for _ in range(count)]


def encode_counters(counters: list[int]) -> list:
  """A counter as its first value and the moves from there."""
  pairs = itertools.pairwise([0, *counters])
  return encode_runs(b - a for a, b in pairs)


def decode_counters(encoded: list) -> list[int]:
  return list(itertools.accumulate(decode_runs(encoded)))


def encode_scale(scale: float) -> int | str:
  """2.0**15 as 15; what is not a power of two as a string."""
  if math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5:
    return math.frexp(scale)[1] - 1
  return repr(scale)


def decode_scale(exponent_or_text: int | str) -> float:
  if isinstance(exponent_or_text, str):
    return float(exponent_or_text)
  return math.ldexp(1.0, exponent_or_text)
