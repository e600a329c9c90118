"""The parts of the benchmark for GPUs, one by one, on a CPU."""

import collections
import dataclasses
import json
import math
import os
import sys
import time

from helpers.benchmark import load_benchmark
import jax
import numpy as np
import pytest

clock = load_benchmark("shared.clock")
devices = load_benchmark("on_gpu.devices")
findings = load_benchmark("on_gpu.findings")
jax_optimizers = load_benchmark("on_gpu.jax_optimizers")
jax_reports = load_benchmark("on_gpu.jax_reports")
jax_training = load_benchmark("on_gpu.jax_training")
processes = load_benchmark("on_gpu.processes")
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
  """The rows of a table, as another process reads them."""
  written = findings.Findings(found._out)
  assert json.dumps(findings.spell_out(found.tables)) == json.dumps(
    written.tables
  )
  return written.tables[title]["rows"]


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
    (make_row(30, copy="nan"), ""),
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
  rows = [make_row(30, loss="nan", skipped=0), make_row(None, error=FAILED)]
  first, second = tables.render("training", rows).splitlines()[2:]
  assert "30.000 [30.000, 30.000]" in first and "nan" in first
  assert FAILED in second


def test_the_expected_bytes_equal_those_of_the_compiler():
  get = jax_optimizers.get_expected_bytes
  assert get("adam", "ours") == pytest.approx(32, abs=0.01)
  assert get("adam", "of nobody") is None
  for cases in jax_optimizers.CASES.values():
    for case in cases.values():
      assert all(get(case.same_as, name) >= 24 for name in case.compared)


def test_a_row_is_printed_and_written_once_it_is_measured(
  found, tmp_path, capsys
):
  def measure(row):
    (begun,) = read_rows(found, "Adam")
    assert begun["error"] == findings.BROKE_OFF
    row |= {"milliseconds": [30.0] * 3, "loss": math.nan}

  found.add_facts({"device": "a GPU", "unknown": None})
  found.add_line("Left out: something")
  table = findings.Table(found, "training", "Adam")
  table.measure_each([{"variant": "ours"}], measure, lambda row: math.inf)
  assert capsys.readouterr().out == (
    "Left out: something\nAdam: ours: 30.000 ms, loss nan\n"
  )
  table.finish()
  assert capsys.readouterr().out.startswith("\n### Adam\n\n| variant")
  (row,) = read_rows(found, "Adam")
  # JSON that every reader takes, without NaN.
  assert row == {"variant": "ours", "milliseconds": [30.0] * 3, "loss": "nan"}
  assert findings.Findings(tmp_path).facts == {"device": "a GPU"}
  page = (tmp_path / "tables.md").read_text()
  assert "### Adam" in page and "* Left out: something" in page


# Measures three rows, of which the second one is the name of the part.
PART = """
import json, os, pathlib, signal, sys, time
from on_gpu.findings import Findings, Table
request = json.loads(sys.argv[1])
found = Findings(pathlib.Path(request["out"]), request["row_seconds"])
if request["part"] == "early":
  print("a bug", file=sys.stderr)
  os._exit(1)
table = Table(found, "training", "model")
def measure(row):
  row["process"] = os.getpid()
  if row["variant"] == "slow":
    time.sleep(60)
  if row["variant"] == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
names = "first", request["part"], "last"
table.measure_each([{"variant": n} for n in names], measure, lambda row: 1e12)
if request["part"] == "rounds":
  time.sleep(1.5)
"""


@pytest.fixture
def run_part(found, tmp_path, monkeypatch):
  """Return a function that runs `PART` with limits, and returns its rows."""

  def run(name, *, seconds=60, row_seconds=60):
    script, python = tmp_path / "part.py", tmp_path / "python"
    script.write_text(PART)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$3"\n')
    python.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(python))
    monkeypatch.setattr(processes, "GRACE", 0.0)
    request = {"part": name, "until": time.time() + seconds}
    request |= {"out": str(tmp_path), "row_seconds": row_seconds}
    processes.run(request, tmp_path)
    written = findings.Findings(tmp_path)
    return written.tables.get("model", {"rows": []})["rows"], written.lines

  return run


@pytest.mark.parametrize(
  "second, error",
  [("slow", "not measured: more than 1 s"), ("crash", findings.BROKE_OFF)],
)
def test_a_row_that_does_not_end_is_reported_and_the_next_one_is_measured(
  second, error, run_part
):
  rows, lines = run_part(second, row_seconds=1)
  assert [row.get("error") for row in rows] == [None, error, None]
  assert [row["variant"] for row in rows] == ["first", second, "last"]
  # The first row was measured once, by the process that was ended.
  assert rows[0]["process"] != rows[2]["process"]
  assert lines == []


def test_rounds_of_rows_that_are_measured_may_take_longer_than_a_row(run_part):
  rows, lines = run_part("rounds", row_seconds=1)
  assert len({row["process"] for row in rows}) == 1 and lines == []


@pytest.mark.parametrize(
  "name, errors, line",
  [
    ("slow", [None, findings.BROKE_OFF], "was ended, since its time was over."),
    ("early", [], "broke off: log.txt may say why."),
  ],
)
def test_a_part_that_exceeds_its_time_or_crashes_is_reported(
  name, errors, line, run_part, tmp_path
):
  start = time.time()
  rows, lines = run_part(name, seconds=3)
  assert time.time() - start < 10
  assert [row.get("error") for row in rows] == errors
  assert lines == [f"{name} {line}"]
  assert ("a bug" in (tmp_path / "log.txt").read_text()) == (name == "early")


def test_packages_of_the_users_path_are_found_after_this_checkout(
  tmp_path, monkeypatch
):
  benchmarks = processes.BENCHMARKS
  expected = [str(benchmarks.parent), str(benchmarks), str(tmp_path), "/b"]
  monkeypatch.chdir(tmp_path)
  # Parts run in another folder, so that relative paths become absolute.
  for path in os.pathsep.join([".", "", "/b"]), os.pathsep.join(expected):
    monkeypatch.setenv("PYTHONPATH", path)
    found = processes.make_environment(tmp_path)["PYTHONPATH"]
    assert found.split(os.pathsep) == expected


def test_a_variant_that_fails_does_not_end_its_case(found, monkeypatch):
  def fail(workload):
    raise RuntimeError(OUT_OF_MEMORY)

  monkeypatch.setitem(variants.VARIANTS, "ours", (fail, "bare"))
  case = jax_optimizers.CASES["small"]["Adam, many leaves"]
  case = dataclasses.replace(case, compared=("bare", "ours"))
  monkeypatch.setitem(jax_optimizers.CASES, "small", {"Adam": case})
  jax_optimizers.run("small", TINY, time.time() + 600, found)
  bare, ours = read_rows(found, "Adam, JAX")
  assert ours["error"] == FAILED
  assert bare["milliseconds"]
  assert bare["parameters"] == 6 * 8 * 8
  assert tables.name(bare) == "bare, 6 leaves"


def test_the_copy_is_measured(found):
  copy = jax_optimizers.make_copy(TINY)
  assert devices.measure_copy(copy, "JAX", found) > 1e6
  assert list(found.facts) == ["copy bandwidth by JAX, bytes/s"]
  failing = Sleeper("copy", fails=True)
  assert math.isnan(devices.measure_copy(failing, "JAX", found))


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


def test_a_row_without_time_or_of_an_earlier_process_is_not_measured(found):
  name = "transformer, unrolled"
  earlier = {"variant": "TF32", "checkpoint": False, "milliseconds": [1.0] * 3}
  found.tables[f"{name}, JAX"] = {"kind": "training", "rows": [earlier]}
  size = dataclasses.replace(TINY, rows=2)
  jax_training.run(name, size, time.time() - 1, found)
  first, second = read_rows(found, f"{name}, JAX")
  assert first == earlier
  assert second["error"] == "left out, since no time is left"


def test_reports_are_timed_relative_to_the_compilation(found, monkeypatch):
  def check_step(step, params, *args, progress):
    assert not progress
    ups = [layer["up"] for layer in params["layers"]]
    is_large.append([bool(abs(up).max() > 1e3) for up in ups])
    return Checked(["overflow"] if any(is_large[-1]) else [])

  is_large = []
  Checked = collections.namedtuple("Checked", "problems")
  monkeypatch.setattr(jax_reports.diagnostics, "check_step", check_step)
  size = dataclasses.replace(TINY, depth=3)
  jax_reports.run("all", size, time.time() + 600, found)
  rows = read_rows(found, "check_step of a GPT, JAX")
  compiled, sound, overflowing = rows
  assert is_large == [[False] * 3, [False, True, False]]
  assert (sound["problems"], overflowing["problems"]) == (0, 1)
  for row in sound, overflowing:
    assert row["to_compiling"] == row["seconds"] / compiled["seconds"]
  table = tables.render("report", rows)
  assert f"| {sound['to_compiling']:.1f}x " in table
