"""What all recorders share: they run the recorded cases again.

A golden file lists its cases: a name, settings and steps. A recorder reads
them, runs them on the installed version of its package, and writes the file
again, with the version and the command. To record a further case, add one to
the file first. When a system changes its rule, record the new version next to
the old one. jmp, tf_keras and `tf.compat.v1` do not change any more: version
`4459be9` has the recorders of the first two.

A recorder never runs in CI. It runs in the virtual environment of its package,
so this module imports the standard library alone.
"""

from collections.abc import Callable, Mapping
import itertools
import json
import math
import pathlib
import sys
from typing import Any

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "interop" / "golden"
sys.path.append(str(GOLDEN))

import encoding  # noqa: E402

# The steps after a state that `to_torch`, `to_keras` or `to_flax` wrote.
EXPORT_STEPS = "F*3 T FFTF*5 TTF*12 TFT"


class Scaler:
  """One scaler of the package that is recorded, behind one interface.

  A recorder defines `start`, which makes it by its settings; `step`, which
  returns whether a finite step or another was applied; `save`, what a
  checkpoint would hold, as JSON; and `restore`, which continues from there. If
  the checkpoint holds the scale and the counter, it defines their names in it,
  else `scale` and `counter`.
  """

  SCALE: str
  COUNTER: str

  def __init__(self, settings: Any):
    self.settings = settings
    self.start()

  def scale(self) -> float:
    return float(self.save()[self.SCALE])

  def counter(self) -> int:
    return int(self.save()[self.COUNTER])

  def load(self, saved: Any) -> "Scaler":
    """Return a scaler with these settings that continues from there."""
    other = type(self)(self.settings)
    other.restore(saved)
    return other


def record_case(
  make: Callable[[Any], Scaler], case: Mapping[str, Any]
) -> dict[str, Any]:
  """Runs one string, once straight on and once saved and restored midway."""
  settings, steps = case["settings"], encoding.unpack(case["steps"])
  straight = run_scaler(make(settings), steps)
  half = len(straight["taken"]) // 2
  first = make(settings)
  run_scaler(first, steps[:half])
  recorded = {
    "name": case["name"],
    "settings": settings,
    "steps": case["steps"],
    **pack_result(straight),
    "half": half,
  }
  if not math.isfinite(first.scale()):
    return {**recorded, "saved": None}
  recorded["saved"] = first.save()
  again = run_scaler(first.load(recorded["saved"]), steps[half:])
  # Everything that decides the steps to come was saved.
  assert again == {key: values[half:] for key, values in straight.items()}
  return recorded


def run_scaler(scaler: Scaler, steps: str) -> dict[str, list]:
  """Scale and counter after each step, and what was done in it.

  A step is A (applied) or S (skipped).
  """
  scales, counters, taken = [], [], []
  for step in steps:
    taken.append("A" if scaler.step(step == "F") else "S")
    scales.append(scaler.scale())
    counters.append(scaler.counter())
  return {"scale": scales, "counter": counters, "taken": taken}


def pack_result(result: dict[str, list]) -> dict[str, Any]:
  """Return the result of `run_scaler` in the encoding of the files."""
  return {
    "scale": encoding.encode_runs(map(encoding.encode_scale, result["scale"])),
    "counter": encoding.encode_counters(result["counter"]),
    "taken": encoding.pack("".join(result["taken"])),
  }


def record_exports(
  name: str, load: Callable[[Any], Scaler]
) -> list[dict[str, Any]]:
  """Return each exported state, and how the package that loads it continues."""
  exported = json.loads((GOLDEN / "exported.json").read_text())[name]
  steps = encoding.unpack(EXPORT_STEPS)
  return [
    {
      "name": case,
      "exported": value,
      "steps": EXPORT_STEPS,
      **pack_result(run_scaler(load(value), steps)),
    }
    for case, value in exported.items()
  ]


def record_training(
  name: str,
  step: Callable[..., tuple[list[Any], Any]],
  counts: Callable[[], dict[str, int]],
) -> dict[str, Any]:
  """Runs a step, which takes a batch and returns params and scale, on all."""
  params, scales = [], []
  for at in range(len(encoding.TRAINING_STEPS)):
    (weights, bias), scale = step(*encoding.make_batch(at))
    values = [*itertools.chain(*weights.tolist()), *bias.tolist()]
    # Exact as float32.
    params.append([float(f"{value:.9g}") for value in values])
    scales.append(encoding.encode_scale(float(scale)))
  return {
    "name": name,
    "scale": encoding.encode_runs(scales),
    "params": params,
    "counts": counts(),
  }


def record(
  name: str,
  make: Callable[[Any], Scaler],
  packages: Mapping[str, str],
  **content: list[dict[str, Any]],
) -> None:
  """Records the cases of a golden file again, and writes it, one case a line.

  Args:
    name: the name of the file, without its suffix.
    make: makes a scaler by the settings of a case.
    packages: the version of each package.
    **content: what else the file holds.
  """
  path = GOLDEN / f"{name}.json"
  cases = json.loads(path.read_text())["cases"]
  head = {
    "package": ", ".join(packages),
    "version": ", ".join(packages.values()),
    "command": f"python tools/recorders/{pathlib.Path(sys.argv[0]).name}",
  }
  content = {"cases": [record_case(make, case) for case in cases], **content}
  parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
  for key, value in content.items():
    lines = ",\n".join(json.dumps(item, allow_nan=False) for item in value)
    parts.append(f'"{key}": [\n{lines}\n]')
  path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
  print(f"{path.name}: {path.stat().st_size} bytes")
