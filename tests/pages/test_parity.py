"""The comparison with float32: its statistic, its page, and how it trains."""

import json

from helpers import ROOT
from helpers.benchmark import load_benchmark
import numpy as np
import pytest
import tqdm

FOLDER = ROOT / "benchmarks" / "parity"
REFERENCE = [0.0, 1.0, 2.0, 3.0]  # The standard deviation is 1.291.


@pytest.fixture(scope="module")
def parity():
  return load_benchmark("parity/parity")


@pytest.mark.parametrize(
  ("values", "low", "high", "verdict"),
  [
    (REFERENCE, 0, 0, "equivalent"),
    ([1, 2, 3, 4], 0.7746, 0.7746, "equivalent"),
    ([2, 3, 4, 5], 1.5492, 1.5492, "different"),
    ([-2, -1, 0, 1], -1.5492, -1.5492, "different"),
    # Mean 0, but the t interval of four differences is too wide.
    ([1, 0, 3, 2], -1.0525, 1.0525, "unclear"),
    ([np.nan, 1, 2, 3], np.nan, np.nan, "different"),
  ],
)
def test_equivalent_is_what_differs_by_less_than_a_standard_deviation(
  parity, values, low, high, verdict
):
  found = parity.compare(values, REFERENCE)
  bounds = found["low"], found["high"]
  np.testing.assert_allclose(bounds, (low, high), atol=1e-4)
  assert found["verdict"] == verdict


def test_the_page_shows_the_figures_and_claims_what_they_show(parity):
  text = (FOLDER / "README.md").read_text()
  results = json.loads((FOLDER / "cpu.json").read_text())
  figures = results["figures"]
  assert list(figures) == list(parity.TASKS)
  assert parity.make_table(figures) in text
  assert len(parity.plot(figures).axes) == len(figures)
  summary = parity.make_summary(figures)
  assert summary in text
  tasks = ", ".join(task.split(":")[0] for task in figures)
  rows = [list(map(str.strip, row.split("|"))) for row in summary.split("\n")]
  equivalent = [row[1] for row in rows if row[2] == tasks]
  assert {"bfloat16 by a cast", "float16, loss scale"} <= set(equivalent)


@pytest.mark.slow
def test_variants_train_each_in_its_own_precision(parity):
  name = "diffusion: energy distance (x 100)"
  task = parity.TASKS[name]()._replace(steps=2 * parity.BLOCKS)
  names = "float32", "bfloat16 with masters", "float16 / 1,024, loss scale"
  with tqdm.tqdm(disable=True) as bar:
    found = {
      variant: parity.train(task, parity.VARIANTS[variant], bar, blocks=1)
      for variant in names
    }
  metrics = np.array([run["metric"] for run in found.values()])
  assert metrics.shape == (3, parity.SEEDS) and np.isfinite(metrics).all()
  assert len(set(metrics[0])) == parity.SEEDS  # Each seed has its own start.
  assert (metrics[1:] != metrics[0]).any(axis=1).all()
  np.testing.assert_allclose(metrics[1:], metrics[[0, 0]], rtol=0.2)
  assert found[names[2]]["skipped"] == [0] * parity.SEEDS
  assert all(variant in parity.make_table({name: found}) for variant in names)
