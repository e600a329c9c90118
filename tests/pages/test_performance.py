"""The pages on performance show the figures of the last run, and these hold."""

import json
import re

from helpers import ROOT
from helpers.benchmark import load_benchmark
import pytest

BENCHMARKS = ROOT / "benchmarks"
GUIDE = ROOT / "docs" / "reference" / "performance.md"
RESULTS, BY_ARRAYS = (
  json.loads((BENCHMARKS / "cpu" / f"{name}.json").read_text())["results"]
  for name in ("results", "many_arrays")
)
COMPILED = json.loads(
  (BENCHMARKS / "compilers" / "compile_costs.json").read_text()
)
WITH_MASTERS = json.loads(
  (BENCHMARKS / "cpu" / "master_weights.json").read_text()
)["results"]
REPORT = vars(load_benchmark("cpu/report"))
MASTER_WEIGHTS = load_benchmark("cpu/master_weights")
BOUNDS = load_benchmark("compilers/bounds")


def bytes_of_steps():
  """The rows of the guide's table of bytes."""
  columns = "bare", "ours", "Flax DynamicScale", "apply_if_finite"
  for name, step in {
    "Adam": "adam",
    "AdamW with a clip": "adamw, clipped",
  }.items():
    for device in ("v5e", "H100"):
      found = COMPILED["steps"][device.lower()][step]
      moved = [str(round(found[column]["bytes"])) for column in columns]
      yield f"| {name}, {device} | {' | '.join(moved)} |"


def whole_steps():
  """The rows of the guide's table of steps on T4 and V100."""
  training = COMPILED["training"]
  for model in training["t4"]:
    for name, cast in {"float32": "float32", "`autocast`": "autocast"}.items():
      cells = []
      for device in ("t4", "v100"):
        found = training[device][model][cast]
        cells += [f"{found[x] / 1e9:.1f}" for x in ("bytes", "needed")]
        cells.append(f"{1e3 * max(found['seconds'].values()):.0f}")
        cells.append(str(found["largest_batch"]))
      yield f"| {model}, {name} | {' | '.join(cells)} |"


def bytes_with_master_weights():
  """The rows of the table of master weights, from the compilers' figures."""
  by_device = COMPILED["master weights"]
  devices = "v5e", "v6e", "t4", "v100", "h100"
  for name, figures in by_device["v5e"].items():
    cells = [by_device[device][name]["bytes"] for device in devices]
    cells.append(figures["resident"])
    yield f"| {name} | {' | '.join(f'{x:.2f}' for x in cells)} |"


def cost_of_master_weights():
  """The rows of the guide's table of master weights."""
  for name, on_v5e in COMPILED["master weights"]["v5e"].items():
    on_gpu = COMPILED["master weights"]["h100"][name]
    moved = f"{on_gpu['bytes']:.0f} | {on_v5e['bytes']:.0f}"
    times = [WITH_MASTERS[size][name]["time"][1] for size in WITH_MASTERS]
    large, small = (f"{x:.1f}x" for x in times)
    yield (
      f"| {name} | {on_v5e['resident']:.0f} | {moved} | {small} to {large} |"
    )


def headlines():
  """The cells of the index, from the times of CPU."""
  for workload in ("adam", "transformer"):
    times = {name: x["time"][1] for name, x in RESULTS[workload].items()}
    others = set(REPORT["COMPARED"]) - {"bare", "ours"}
    found = sorted(times[name] for name in others)
    yield f"| {times['ours']:.2f}x | {found[0]:.2f}x to {found[-1]:.2f}x |"


def sentences():
  """The sentences of the guide that have figures in them."""
  attention = COMPILED["attention"]["h100"]
  half, plain = (
    f"{attention[name]['bytes'] / 1e6:,.0f} MB"
    for name in ("cuDNN, in half", "XLA")
  )
  yield f"moves {half}, where JAX's own attention moves {plain}."
  ours = BY_ARRAYS["1000"]["ours"]
  trace, compiling = (ours[f"{x}_ratio"][1] for x in ("trace", "compile"))
  yield (
    f"with 1,000 arrays takes {trace:.1f} times as long to trace and"
    f" {compiling:.1f} times as long to compile"
  )


def share_of_t4():
  steps = COMPILED["training"]["t4"]["ViT-B/16"]
  share = steps["autocast"]["bytes"] / steps["float32"]["bytes"]
  yield f"ViT-B/16 moves {100 * share:.0f}% of the bytes"


# The figures of the last run, by the page that shows them.
FIGURES = [
  (
    BENCHMARKS / "cpu" / "README.md",
    [
      REPORT["summary"](RESULTS),
      *(REPORT["folded"](name, RESULTS[name]) for name in RESULTS),
      *map(MASTER_WEIGHTS.make_table, WITH_MASTERS.values()),
    ],
  ),
  (BENCHMARKS / "compilers" / "README.md", [*bytes_with_master_weights()]),
  (BENCHMARKS / "README.md", [*headlines()]),
  (
    GUIDE,
    [
      *bytes_of_steps(),
      *cost_of_master_weights(),
      *whole_steps(),
      *sentences(),
    ],
  ),
  (ROOT / "README.md", [*share_of_t4()]),
]


@pytest.mark.parametrize(
  ("page", "figures"), FIGURES, ids=lambda x: getattr(x, "name", "")
)
def test_a_page_has_the_figures_of_the_last_run(page, figures):
  found = " ".join(page.read_text().split())
  for figure in figures:
    assert " ".join(figure.split()) in found, figure


def test_the_times_on_a_gpu_are_the_same_on_all_pages():
  table = GUIDE.read_text().split("\n## Time on an H100\n")[1].split("\n## ")[0]
  rows = re.findall(r"^\| Adam.*? \| ([\d.]+ \| [\d.]+) \|", table, re.M)
  assert len(rows) == 4
  own_page = (BENCHMARKS / "on_gpu" / "README.md").read_text()
  assert all(f"| {times} |" in own_page for times in rows)
  bare, ours = map(float, rows[0].split(" | "))
  readme = (ROOT / "README.md").read_text()
  assert f"takes {bare:.2f} ms without and {ours:.2f} ms with" in readme
  index = (BENCHMARKS / "README.md").read_text()
  assert f"time on an H100 | {ours / bare:.2f}x |" in index


@pytest.mark.parametrize("largest", [0, 8, 56, 64, 72, 120, 128, 1000])
def test_the_largest_batch_fits_and_the_next_does_not(largest):
  asked = []

  def needed(batch):  # beyond 100 something is computed again
    asked.append(batch)
    return 10 * batch if batch <= 100 else 1000 + (batch - 100)

  available = needed(largest)
  assert BOUNDS.largest_batch(needed, available) == largest
  assert {b % BOUNDS.MULTIPLE for b in asked} == {0} and len(asked) < 24
