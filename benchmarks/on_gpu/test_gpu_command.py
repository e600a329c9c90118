"""The command that measures on a GPU, run on a CPU at its tiniest size."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

from helpers import ROOT
import pytest

pytestmark = pytest.mark.slow

REPORTS = "check_step of a GPT, JAX"


@pytest.fixture
def run(tmp_path):
  """Return a function that runs the command, and returns what it printed.

  It runs in a copy of the checkout, in which it must write nothing, with
  folders of its own for everything else.
  """
  checkout, out = tmp_path / "checkout", tmp_path / "results"
  for part in ("benchmarks", "optax_lossscale"):
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / part, checkout / part, ignore=ignore)
  home, tmp, cwd = empty = [tmp_path / name for name in ("home", "tmp", "cwd")]
  for path in empty:
    path.mkdir()
  env = {
    name: value
    for name, value in os.environ.items()  # Some would set the output path.
    if not name.startswith(("XDG_", "JAX_COMPILATION", "PYTHON", "MPL"))
  }
  env |= {"HOME": str(home), "TMPDIR": str(tmp), "JAX_PLATFORMS": "cpu"}

  def run(*options):
    files = lambda: {str(p): p.stat().st_mtime for p in checkout.rglob("*")}
    before = files()
    script = checkout / "benchmarks" / "gpu.py"
    command = [sys.executable, script, "--out", out, "--size", "tiny"]
    done = subprocess.run(
      [*command, *options], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert files() == before
    assert [list(path.iterdir()) for path in empty] == [[], [], []]
    written = {path.name for path in out.iterdir()}
    assert written == {"results.json", "tables.md", "log.txt"}
    page = (out / "tables.md").read_text()
    return json.loads((out / "results.json").read_text()), page, done.stdout

  return run


def assert_all_was_measured(found):
  for title, table in found["tables"].items():
    for row in table["rows"]:
      assert "error" not in row, (title, row)
      if table["kind"] == "report":
        assert row["seconds"] > 0
        continue
      assert row["milliseconds"][1] > 0 and row["rounds"] > 0, (title, row)
      if table["kind"] == "training":
        assert 0 < row["loss"] < 10 and row["compile_seconds"] > 0


@pytest.mark.nightly
def test_without_torch_only_jax_is_measured_and_the_report_says_so(run):
  found, page, printed = run("--without", "torch")
  assert "Left out, as asked for: torch" in found["lines"]
  assert_all_was_measured(found)
  titles = list(found["tables"])
  assert titles[0] == "Adam, JAX"  # The most important table is first.
  assert len([t for t in titles if "Adam" in t]) == 6
  assert {"transformer, unrolled, JAX", "residual network, JAX"} < set(titles)
  assert found["facts"]["device"] == "cpu" and found["facts"]["jax"]
  ours = found["tables"]["Adam, JAX"]["rows"][1]
  assert ours["variant"] == "ours"
  assert ours["expected_bytes"] == pytest.approx(32, abs=0.01)
  compiled, sound, overflowing = found["tables"][REPORTS]["rows"]
  assert 0 < compiled["trace_seconds"] < compiled["seconds"]
  assert sound["problems"] == 0 < overflowing["problems"]
  for title in titles:
    assert f"### {title}\n" in page and f"### {title}\n" in printed


@pytest.mark.skipif(
  importlib.util.find_spec("torch") is None,
  reason="needs torch, which is not installed with the tests",
)
def test_torch_and_jax_have_equal_losses(run):
  parts = "transformer", "torch-optimizers", "torch-transformer"
  found, _, _ = run("--parts", *parts)
  assert_all_was_measured(found)
  tables = found["tables"]
  assert len([t for t in tables if t.endswith("torch")]) == 5
  loss = lambda title, i: tables[title]["rows"][i]["loss"]
  for i in (0, 1):  # TF32, which a CPU has not, and float16 by autocast.
    expected = pytest.approx(loss("transformer, unrolled, JAX", i), rel=1e-3)
    assert loss("transformer, torch", i) == expected


def test_rows_that_exceed_their_seconds_are_reported_and_the_run_goes_on(run):
  options = "--without", "torch", "--parts", "reports", "--row-seconds=0.01"
  found, _, printed = run(*options)
  rows = found["tables"][REPORTS]["rows"]
  assert len(rows) == 3
  for row in rows:
    assert row["error"] == "not measured: more than 0.01 s"
    assert f"{REPORTS}: {row['variant']}: not measured" in printed


def test_without_any_time_each_part_is_reported_as_skipped(run):
  found, _, _ = run("--without", "torch", "--minutes", "0.01")
  assert found["tables"] == {}
  assert len([line for line in found["lines"] if "are over" in line]) == 5
