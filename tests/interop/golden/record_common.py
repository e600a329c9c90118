"""The step sequences, the encoding and the file that all recorders share.

A recorder runs in the virtual environment of the package that it records, so
this module imports the standard library alone. The tests import it, too, to
decode.

Strings are written as "F*3 T FT": F is a step with finite gradients, T one that
overflowed. Scales and counters are run-length encoded. A scale that is a power
of two is written as its exponent, any other number as a string.
"""

from collections.abc import Callable, Iterable
import itertools
import json
import math
import pathlib
import random
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent


class Scaler:
  """One scaler of the package that is recorded, behind one interface.

  A recorder defines `start`, which makes it by its settings; `step`, which
  tells whether a finite step or another was applied, or None if the scaler gave
  up; `scale` and `counter`; `save`, what a checkpoint would hold, as JSON; and
  `restore`, which continues from there.
  """

  def __init__(self, settings: Any):
    self.settings = settings
    self.start()

  def load(self, saved: Any) -> "Scaler":
    """Return a scaler with these settings that continues from there."""
    other = type(self)(self.settings)
    other.restore(saved)
    return other


def make_strings(window: int, hysteresis: int = 1) -> dict[str, str]:
  """Return step sequences that distinguish rules, for one growth window."""
  n, long = window, 2 * window + 2
  named = {
    "finite": "F" * (3 * n + 3),
    "overflow": "T" * (hysteresis + 4),
    "bursts": "".join(
      "F" * (n + 1) + "T" * k + "F" * n for k in (2, 3, hysteresis + 3)
    ),
    "F T": "FT" * 10,
    "FF T": "FFT" * 7,
    "TT F": "TTF" * 7,
    "window-1, T": ("F" * (n - 1) + "T") * 5,
    "window, T": ("F" * n + "T") * 5,
    "window+1, T": ("F" * (n + 1) + "T") * 5,
  }
  for at in range(long):
    named[f"overflow at {at}"] = "F" * at + "T" + "F" * (n + 2)
  for seed, share in enumerate((0.05, 0.2, 0.5, 0.8)):
    rng = random.Random(f"{window} {hysteresis} {seed}")
    named[f"random {share}"] = "".join(
      "T" if rng.random() < share else "F" for _ in range(100)
    )
  return named


def record_cases(
  make: Callable[[Any], Scaler], cases: Iterable[tuple[str, Any, str]]
) -> list[dict[str, Any]]:
  """Runs each name, settings and string by a scaler that is made of these."""
  return [record_case(make, *case) for case in cases]


def record_case(
  make: Callable[[Any], Scaler], name: str, settings: Any, steps: str
) -> dict[str, Any]:
  """Runs one string, once straight on and once saved and restored midway."""
  straight = run_scaler(make(settings), steps)
  half = len(straight["taken"]) // 2
  first = make(settings)
  run_scaler(first, steps[:half])
  case = {
    "name": name,
    "settings": settings,
    "steps": pack(steps),
    **pack_result(straight),
    "half": half,
  }
  if not math.isfinite(first.scale()):
    return {**case, "saved": None}
  case["saved"] = first.save()
  again = run_scaler(first.load(case["saved"]), steps[half:])
  if any(again[key] != straight[key][half:] for key in again):
    # Not everything that decides the steps to come was saved.
    case["restored"] = pack_result(again)
  return case


def run_scaler(scaler: Scaler, steps: str) -> dict[str, list]:
  """Scale and counter after each step, and what was done in it.

  A step is A (applied) or S (skipped). A scaler that raises ends the string;
  that last step is R, and has no scale.
  """
  scales, counters, taken = [], [], []
  for step in steps:
    applied = scaler.step(step == "F")
    if applied is None:
      taken.append("R")
      break
    taken.append("A" if applied else "S")
    scales.append(scaler.scale())
    counters.append(scaler.counter())
  return {"scale": scales, "counter": counters, "taken": taken}


def pack_result(result: dict[str, list]) -> dict[str, Any]:
  """Return the result of `run_scaler` in the encoding of the files."""
  return {
    "scale": encode_runs(map(encode_scale, result["scale"])),
    "counter": encode_runs(encode_differences(result["counter"])),
    "taken": pack("".join(result["taken"])),
  }


# The results of `to_torch`, `to_keras` and `to_flax` for these policies and
# states. The tests check that they do; the recorders load it into the real
# packages, and record how these continue.
EXPORT_STEPS = "F*3 T FFTF*5 TTF*12 TFT"


def record_exports(
  package: str, load: Callable[[Any], Scaler]
) -> list[dict[str, Any]]:
  """Return the exported state, and how the package that loads it continues."""
  exported = json.loads((HERE / "exported.json").read_text())[package]
  return [
    {
      "name": name,
      "exported": value,
      "steps": EXPORT_STEPS,
      **pack_result(run_scaler(load(value), unpack(EXPORT_STEPS))),
    }
    for name, value in exported.items()
  ]


def write(name: str, package: str, version: str, **content: Any) -> None:
  """Writes the golden file, one case a line."""
  head = {
    "package": package,
    "version": version,
    "command": f"python tests/interop/golden/{pathlib.Path(sys.argv[0]).name}",
  }
  parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
  for key, value in content.items():
    lines = ",\n".join(json.dumps(item, allow_nan=False) for item in value)
    parts.append(f'"{key}": [\n{lines}\n]')
  path = HERE / name
  path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
  print(f"{path.name}: {path.stat().st_size} bytes")


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
  """The inverse of `pack`."""
  words = (word.partition("*") for word in packed.split())
  return "".join(head * int(count or 1) for head, _, count in words)


def encode_runs(values: Iterable[Any]) -> list:
  """[5, 5, 6] as [[5, 2], 6]."""
  groups = [(key, len(list(g))) for key, g in itertools.groupby(values)]
  return [key if count == 1 else [key, count] for key, count in groups]


def decode_runs(packed: list) -> list:
  """The inverse of `runs`."""
  pairs = (item if isinstance(item, list) else [item, 1] for item in packed)
  return [value for value, count in pairs for _ in range(count)]


def encode_differences(counters: list[int]) -> list[int]:
  """A counter as its first value and the moves from there."""
  return [b - a for a, b in zip([0, *counters], counters, strict=False)]


def encode_scale(scale: float) -> int | str:
  """2.0**15 as 15; what is not a power of two as a string."""
  if math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5:
    return math.frexp(scale)[1] - 1
  return repr(scale)


def decode_scale(exponent_or_text: int | str) -> float:
  """The inverse of `exponent`."""
  if isinstance(exponent_or_text, str):
    return float(exponent_or_text)
  return math.ldexp(1.0, exponent_or_text)


# The whole training runs: a linear model on a batch of 4, the overflowing steps
# with an inf among the inputs. Everything is written out as exact float32.

TRAINING_STEPS = "TFFTTFFFFFFTFFFFFTTTFFFFFFFFTF"
TRAINING_WINDOW = 4
TRAINING_SCALE = 2.0**10
FIRST_WEIGHTS = [[-0.25, 0.25], [0.0, -0.25], [0.25, 0.0]]
FIRST_BIAS = [0.0, 0.0]


def make_batch(step: int) -> tuple[list[list[float]], list[list[float]]]:
  """Inputs and targets of one step."""
  rows = [(3 * step + i) % 11 for i in range(4)]
  x = [[((7 * i + 3 * j) % 11 - 5) / 8 for j in range(3)] for i in rows]
  y = [[((5 * i + 2 * k) % 7 - 3) / 4 for k in range(2)] for i in rows]
  if TRAINING_STEPS[step] == "T":
    x[0][0] = math.inf
  return x, y


def record_training(
  name: str,
  step: Callable[..., tuple[Iterable[Any], Any]],
  counts: Callable[[], dict[str, int]],
) -> dict[str, Any]:
  """Runs a step, which takes a batch and returns params and scale, on all."""
  params, scales = [], []
  for at in range(len(TRAINING_STEPS)):
    arrays, scale = step(*make_batch(at))
    params.append(flatten(*arrays))
    scales.append(float(scale))
  return {
    "name": name,
    "scale": encode_runs(map(encode_scale, scales)),
    "params": params,
    "counts": counts(),
  }


def flatten(*arrays: Any) -> list[float]:
  """The params as one list, short enough to read, exact as float32."""
  values = itertools.chain.from_iterable(
    _ravel(array.tolist()) for array in arrays
  )
  return [float(f"{value:.9g}") for value in values]


def _ravel(x):
  return [v for item in x for v in _ravel(item)] if isinstance(x, list) else [x]
