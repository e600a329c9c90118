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

TORCH_PARTS = ("torch-optimizers", "torch-transformer")
REPORTS = "check_step of a GPT, JAX"
needs_torch = pytest.mark.skipif(
  importlib.util.find_spec("torch") is None,
  reason="needs torch, which is not installed with the tests",
)


class Run:
  """Run the command in a copy of the checkout, and in separate folders."""

  def __init__(self, folder):
    self.out = folder / "results"
    self._checkout = folder / "checkout"
    no_caches = shutil.ignore_patterns("__pycache__")
    for part in ("benchmarks", "optax_lossscale"):
      shutil.copytree(ROOT / part, self._checkout / part, ignore=no_caches)
    self._empty = [folder / name for name in ("home", "tmp", "cwd")]
    for path in self._empty:
      path.mkdir()

  def __call__(self, *options):
    home, tmp, cwd = map(str, self._empty)
    before = self._files()
    script = self._checkout / "benchmarks" / "gpu.py"
    env = os.environ | {"HOME": home, "TMPDIR": tmp, "JAX_PLATFORMS": "cpu"}
    for name in list(env):  # These variables would set the output path.
      if name.startswith(("XDG_", "JAX_COMPILATION", "PYTHON", "MPL")):
        del env[name]
    done = subprocess.run(
      [
        sys.executable,
        script,
        "--out",
        self.out,
        "--size",
        "tiny",
        *options,
      ],
      cwd=cwd,
      env=env,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    self.printed = done.stdout
    assert self._files() == before
    assert [list(path.iterdir()) for path in self._empty] == [[], [], []]
    written = {path.name for path in self.out.iterdir()}
    assert written == {"results.json", "tables.md", "log.txt"}
    return json.loads((self.out / "results.json").read_text())

  def _files(self):
    return {
      str(path): path.stat().st_mtime for path in self._checkout.rglob("*")
    }


@pytest.fixture
def run(tmp_path):
  return Run(tmp_path)


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
  found = run("--without", "torch")
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
  for row in sound, overflowing:
    assert row["to_compiling"] == row["seconds"] / compiled["seconds"]
  page = (run.out / "tables.md").read_text()
  for title in titles:
    assert f"### {title}\n" in page and f"### {title}\n" in run.printed


@needs_torch
def test_torch_and_jax_have_equal_losses(run):
  found = run("--parts", "transformer", *TORCH_PARTS)
  assert_all_was_measured(found)
  tables = found["tables"]
  assert len([t for t in tables if t.endswith("torch")]) == 5
  loss = lambda title, i: tables[title]["rows"][i]["loss"]
  for i in (0, 1):  # TF32, which a CPU has not, and float16 by autocast.
    expected = pytest.approx(loss("transformer, unrolled, JAX", i), rel=1e-3)
    assert loss("transformer, torch", i) == expected


def test_rows_that_exceed_their_seconds_are_reported_and_the_run_goes_on(run):
  found = run("--without", "torch", "--parts", "reports", "--row-seconds=0.01")
  rows = found["tables"][REPORTS]["rows"]
  assert [row["error"] for row in rows] == [
    "not measured: more than 0.01 s"
  ] * 3
  variants = [row["variant"] for row in rows]
  assert variants[0] == "trace and compile the step"
  assert variants[1:] == [
    "check_step, sound step",
    "check_step, overflow in the middle block",
  ]
  for variant in variants:
    assert f"{REPORTS}: {variant}: not measured" in run.printed


def test_without_any_time_each_part_is_reported_as_skipped(run):
  found = run("--without", "torch", "--minutes", "0.01")
  assert found["tables"] == {}
  assert len([line for line in found["lines"] if "are over" in line]) == 5
