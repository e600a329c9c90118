"""The benchmark for GPUs, part by part and as a command, on a CPU."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time

from helpers import ROOT
from helpers.benchmark import load_benchmark
import jax
import numpy as np
import pytest

clock = load_benchmark("shared.clock")
findings = load_benchmark("on_gpu.findings")
jax_optimizers = load_benchmark("on_gpu.jax_optimizers")
jax_training = load_benchmark("on_gpu.jax_training")
sizes = load_benchmark("on_gpu.sizes")
tables = load_benchmark("on_gpu.tables")
variants = load_benchmark("shared.variants")

pytestmark = pytest.mark.slow

TINY = dataclasses.replace(sizes.SIZES["tiny"], rounds=1, first_steps=2, rows=1)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: out of memory\nand where it was"
FAILED = "RuntimeError: RESOURCE_EXHAUSTED: out of memory"


class Sleeper(clock.Program):
  """A program whose steps take a known time, or fail."""

  def __init__(self, name, seconds=0.0, *, skips=False, fails=False):
    self.row = {"variant": name}
    self.skips = skips
    self._seconds, self._fails = seconds, fails

  def step(self, skip):
    if self._fails:
      raise RuntimeError(OUT_OF_MEMORY)
    time.sleep(self._seconds)


def measure(programs, rounds=3, until=math.inf):
  clock.measure(programs, rounds=rounds, steps=2, until=until)
  return {program.row["variant"]: program.row for program in programs}


@pytest.fixture
def found(tmp_path):
  return findings.Findings(tmp_path)


def read_rows(found, title):
  """Return the rows of a table in the file of results."""
  written = json.loads((found._out / "results.json").read_text())
  return written["tables"][title]["rows"]


def test_the_time_is_per_step_without_the_first_round():
  rows = measure([Sleeper("a", 0.01, skips=True), Sleeper("b")])
  assert 10 <= rows["a"]["milliseconds"][1] < 30
  assert "skipped_milliseconds" in rows["a"]
  assert "skipped_milliseconds" not in rows["b"]
  assert rows["b"]["rounds"] == 3


def test_a_program_that_fails_is_omitted_and_the_others_continue():
  rows = measure([Sleeper("bad", fails=True), Sleeper("good")])
  assert rows["bad"]["error"] == FAILED
  assert "milliseconds" not in rows["bad"]
  assert rows["good"]["rounds"] == 3
  with pytest.raises(KeyboardInterrupt), clock.catch({}):
    raise KeyboardInterrupt


def test_no_round_begins_that_would_end_too_late():
  start = time.time()
  rows = measure([Sleeper("a", 0.05)], rounds=1000, until=start + 0.5)
  assert time.time() - start < 2
  assert 1 <= rows["a"]["rounds"] < 10


def make_row(milliseconds, **fields):
  """A row; on its device, a copy of 28 bytes for each parameter takes 28 ms."""
  row = {"variant": "ours", "parameters": 10**6, "copy": 1e9}
  times = {} if milliseconds is None else {"milliseconds": [milliseconds] * 3}
  return {**row, "expected_bytes": 28.0, **times, **fields}


@pytest.mark.parametrize(
  "row, verdict",
  [
    (make_row(28 * 1.2), "1.20x"),
    (make_row(28 * 1.4), "1.40x: takes longer than its bytes"),
    (make_row(30, copy=math.nan), ""),
    # Without expected bytes, those of the compiled program.
    (make_row(33.6, expected_bytes=None, moved_bytes=28 * 10**6), "1.20x"),
    (
      make_row(None, error="XlaRuntimeError: a | b"),
      r"XlaRuntimeError: a \| b",
    ),
  ],
)
def test_a_step_is_compared_with_a_copy_of_its_bytes(row, verdict):
  head, rule, line = tables.render("optimizer", [row]).splitlines()
  assert len(head) == len(rule) == len(line)
  assert line.split(" | ")[9].strip() == verdict


def test_a_row_of_a_training_shows_its_loss_or_its_error():
  rows = [make_row(30, loss=math.nan, skipped=0), make_row(None, error=FAILED)]
  first, second = tables.render("training", rows).splitlines()[2:]
  assert "30.000 [30.000, 30.000]" in first and "nan" in first
  assert FAILED in second


def test_the_expected_bytes_equal_those_of_the_compiler():
  get = jax_optimizers.get_expected_bytes
  assert get("adam", "ours") == pytest.approx(32, abs=0.01)
  assert get("adam", "of nobody") is None
  for case in jax_optimizers.CASES.values():
    assert all(get(case.same_as, name) >= 24 for name in case.compared)


def test_a_row_is_printed_and_written_once_it_is_measured(
  found, tmp_path, capsys
):
  def make_program(row):
    if row["variant"] == "second":
      assert read_rows(found, "Adam") == [{"variant": "first", "loss": 0.5}]
      raise RuntimeError(OUT_OF_MEMORY)
    row["loss"] = 0.5
    program = Sleeper(row["variant"])
    program.row = row
    return program

  found.add_facts({"device": "a GPU", "unknown": None})
  found.add_line("Left out: something")
  rows = [{"variant": "first"}, {"variant": "second"}]
  found.measure_table(
    "training", "Adam", rows, make_program, rounds=3, steps=2, until=math.inf
  )
  printed = capsys.readouterr().out
  assert printed.startswith("Left out: something\nAdam: first: , loss 0.5000\n")
  assert f"Adam: second: {FAILED}\n\n### Adam\n\n| variant" in printed
  first, second = read_rows(found, "Adam")
  assert first["rounds"] == 3 and second["error"] == FAILED
  assert found.facts == {"device": "a GPU"}
  page = (tmp_path / "tables.md").read_text()
  assert "### Adam" in page and "* Left out: something" in page


def test_a_row_for_which_no_time_is_left_is_not_measured(found):
  name = "transformer, unrolled"
  jax_training.run(name, TINY, time.time() - 1, found)
  (row,) = read_rows(found, f"{name}, JAX")
  assert row["error"] == findings.NO_TIME


def test_a_case_has_a_share_of_the_time_that_is_left():
  start = time.time()
  shares = findings.share_time({"a": 1, "b": 2}, start + 60, [1, 2])
  found = [(name, case, end - start) for name, case, end in shares]
  near = lambda seconds: pytest.approx(seconds, abs=5)
  assert found == [("a", 1, near(20)), ("b", 2, near(60))]


def test_a_variant_that_fails_does_not_end_its_case(found, monkeypatch):
  def fail(workload):
    raise RuntimeError(OUT_OF_MEMORY)

  monkeypatch.setitem(variants.VARIANTS, "ours", (fail, "bare"))
  case = jax_optimizers.CASES["Adam"]
  case = dataclasses.replace(case, compared=("bare", "ours"))
  monkeypatch.setattr(jax_optimizers, "CASES", {"Adam": case})
  jax_optimizers.run(TINY, time.time() + 600, found)
  bare, ours = read_rows(found, "Adam, JAX")
  assert ours["error"] == FAILED
  assert bare["milliseconds"]
  assert bare["parameters"] == 4 * 64 * 64


def test_the_copy_is_measured(found):
  copy = jax_optimizers.make_copy(TINY)
  assert jax_optimizers.measure_copy(copy, found) > 1e6
  assert list(found.facts) == ["copy bandwidth, bytes/s"]
  failing = Sleeper("copy", fails=True)
  assert math.isnan(jax_optimizers.measure_copy(failing, found))


@pytest.mark.parametrize("name", ["transformer, unrolled", "residual network"])
def test_all_precisions_have_nearly_the_float32_loss(name):
  model = jax_training.Model(name, TINY)
  exact = jax_training.PRECISIONS["float32, highest"]
  loss = lambda precision, checkpoint: float(
    jax.jit(model.loss_fn(precision, checkpoint))(
      model.params, model.batches[0]
    )
  )
  with jax.default_matmul_precision("highest"):
    reference = loss(exact, False)
  for precision, checkpoint in jax_training.ROWS:
    found = loss(jax_training.PRECISIONS[precision], checkpoint)
    is_float32 = jax_training.PRECISIONS[precision] == exact
    rtol = 1e-5 if is_float32 else 2e-2
    assert np.isclose(found, reference, rtol=rtol), (precision, checkpoint)


@pytest.fixture
def run(tmp_path):
  """Return a function that runs the command, and returns what it printed.

  It runs in a copy of the checkout, in which it must write nothing, and with
  separate folders for everything else.
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

  def run(*options, status=0):
    files = lambda: {str(p): p.stat().st_mtime for p in checkout.rglob("*")}
    before = files()
    script = checkout / "benchmarks" / "gpu.py"
    command = [sys.executable, script, "--out", out, *options]
    done = subprocess.run(
      command, cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert files() == before
    assert [list(path.iterdir()) for path in empty] == [[], [], []]
    return out, done.stdout + done.stderr

  return run


@pytest.mark.nightly
def test_the_command_measures_each_part(run):
  out, printed = run("--size", "tiny")
  assert {path.name for path in out.iterdir()} == {"results.json", "tables.md"}
  found = json.loads((out / "results.json").read_text())
  for title, table in found["tables"].items():
    for row in table["rows"]:
      assert "error" not in row, (title, row)
      assert row["milliseconds"][1] > 0 and row["rounds"] > 0, (title, row)
      if table["kind"] == "training":
        assert 0 < row["loss"] < 10 and row["compile_seconds"] > 0
  titles = list(found["tables"])
  assert titles[0] == "Adam, JAX"  # The most important table is first.
  assert len([t for t in titles if "Adam" in t]) == 4
  assert {"transformer, unrolled, JAX", "residual network, JAX"} < set(titles)
  assert found["facts"]["device"] == "cpu" and found["facts"]["jax"]
  ours = found["tables"]["Adam, JAX"]["rows"][1]
  assert ours["variant"] == "ours"
  assert ours["expected_bytes"] == pytest.approx(32, abs=0.01)
  page = (out / "tables.md").read_text()
  for title in titles:
    assert f"### {title}\n" in page and f"### {title}\n" in printed


def test_without_any_time_each_part_is_reported_as_skipped(run):
  out, printed = run("--size", "tiny", "--minutes", "0.05")
  assert json.loads((out / "results.json").read_text())["tables"] == {}
  assert printed.count("Left out, since no time is left") == 3


def test_without_a_gpu_the_command_says_how_to_try_it_out(run):
  _, printed = run(status=1)
  assert "JAX finds no GPU." in printed and "add --size tiny" in printed
