"""The page on performance shows the figures of the last run."""

import json

from helpers import ROOT
from helpers.benchmark import load_benchmark
import pytest

BENCHMARKS = ROOT / "benchmarks" / "cpu"
PAGE = (BENCHMARKS / "README.md").read_text()
RESULTS = json.loads((BENCHMARKS / "results.json").read_text())["results"]
REPORT = vars(load_benchmark("cpu/report"))


def test_the_page_begins_with_one_table_that_fits_it_and_the_picture():
  table = REPORT["summary"](RESULTS)
  assert max(map(len, table.splitlines())) <= 110
  beginning = PAGE.split("\n## ")[0]
  assert beginning.index(table) < beginning.index("(results.png)")
  assert beginning.count("|\n|") == table.count("|\n|")
  page = (ROOT / "docs" / "performance.md").read_text()
  before_it = page.split("<!-- include ../benchmarks/cpu/README.md")[0]
  assert "|" not in before_it and before_it.count("\n## ") == 0


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
