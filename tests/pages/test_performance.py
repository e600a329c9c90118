"""The pages on performance show the figures of the last run."""

import json
import re

from helpers import ROOT
from helpers.benchmark import load_benchmark
import pytest

BENCHMARKS = ROOT / "benchmarks" / "cpu"
PAGE = (BENCHMARKS / "README.md").read_text()
RESULTS = json.loads((BENCHMARKS / "results.json").read_text())["results"]
GUIDE = (ROOT / "docs" / "performance.md").read_text()
COMPILED = json.loads(
  (ROOT / "benchmarks" / "compilers" / "compile_costs.json").read_text()
)
REPORT = vars(load_benchmark("cpu/report"))


def test_both_pages_begin_with_one_table_that_fits_them():
  table = REPORT["summary"](RESULTS)
  assert max(map(len, table.splitlines())) <= 110
  beginning = PAGE.split("\n## ")[0]
  assert beginning.index(table) < beginning.index("(results.png)")
  assert beginning.count("|\n|") == table.count("|\n|")
  _, first, *_ = GUIDE.split("\n## ")
  assert table in first and first.count("|\n|") == table.count("|\n|")


# The steps of the guide's second table, and their columns.
STEPS = {
  "Adam": "adam",
  "Adam with moments in bfloat16": "adam, bfloat16 moments",
  "AdamW with a clip": "adamw, clipped",
  "a step of the transformer": "transformer",
}
COLUMNS = ["bare", "ours", "Flax DynamicScale", "jmp", "apply_if_finite"]


def test_the_bytes_of_the_guide_are_those_of_the_compilers():
  rows = re.findall(r"^\| (.+), (v5e|H100) \| (.+) \|$", GUIDE, re.MULTILINE)
  assert {name for name, *_ in rows} == STEPS.keys()
  for name, device, cells in rows:
    step = COMPILED["steps"][device.lower()][STEPS[name]]
    bare, ours, flax, jmp, plain = (round(step[c]["bytes"]) for c in COLUMNS)
    assert flax == jmp
    assert cells == f"{bare} | {ours} | {flax} | {plain}"


def test_what_autocast_moves_is_that_of_its_own_page():
  table = GUIDE.split("\n## Autocast\n")[1].split("\n## ")[0]
  rows = re.findall(r"^\| .*?(?: \| [\d,]+){4} \|$", table, re.MULTILINE)
  page = (ROOT / "benchmarks" / "autocast" / "README.md").read_text()
  assert len(rows) == 5
  for row in rows:
    _, moved, peak, moved_on_gpu, peak_on_gpu = row.strip("| ").split(" | ")
    assert f"| {moved} | {peak} |" in page
    assert f"| {moved_on_gpu} | {peak_on_gpu} |" in page


@pytest.mark.parametrize("workload", RESULTS)
def test_the_full_table_of_a_workload_is_folded(workload):
  assert REPORT["folded"](workload, RESULTS[workload]) in PAGE


def test_the_table_compares_three_workloads_with_all_peers():
  variants = {name for result in RESULTS.values() for name in result}
  ours = {"ours, scaled grads", "ours, plain select"}
  assert set(REPORT["COMPARED"]) == variants - ours - {"Keras bare"}
  assert len(REPORT["SUMMARY"]) == 3


def test_a_figure_of_the_table_is_that_of_the_run():
  first = REPORT["summary"](RESULTS).splitlines()[2]
  time = RESULTS["adam"]["ours"]["time"][1]
  assert first.split("|")[4].strip() == f"{time:.2f}"


@pytest.mark.parametrize("workload", ["adam", "transformer"])
def test_the_index_has_the_headline_figures_of_the_run(workload):
  times = {v: f["time"][1] for v, f in RESULTS[workload].items()}
  others = set(REPORT["COMPARED"]) - {"bare", "ours"}
  found = sorted(times[name] for name in others)
  cells = f"| {times['ours']:.2f}x | {found[0]:.2f}x to {found[-1]:.2f}x |"
  assert cells in (ROOT / "benchmarks" / "README.md").read_text()
