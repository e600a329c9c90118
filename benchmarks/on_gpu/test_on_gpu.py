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
events = load_benchmark("on_gpu.events")
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


def read_events(capsys):
  """The events in what was printed."""
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


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


def test_json_contains_no_number_that_only_python_reads():
  text = events.dumps({"loss": math.nan, "all": [math.inf, (1.5,)]})
  assert json.loads(text) == {"loss": "nan", "all": ["inf", [1.5]]}


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


def test_events_are_written_to_the_files_immediately(tmp_path):
  found = findings.Findings(tmp_path, {"size": "tiny"})
  found.add({"kind": "facts", "facts": {"device": "a GPU"}})
  found.add({"kind": "line", "text": "Left out: something"})
  rows = [make_row(30, loss=math.nan)]
  table = {"kind": "table", "table": "optimizer", "title": "Adam", "rows": rows}
  found.add(table)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written["facts"] == {"size": "tiny", "device": "a GPU"}
  assert written["tables"]["Adam"]["rows"] == [rows[0] | {"loss": "nan"}]
  page = (tmp_path / "tables.md").read_text()
  assert "### Adam" in page and "* Left out: something" in page


def test_each_row_is_printed_once_as_soon_as_it_is_measured(tmp_path, capsys):
  found = findings.Findings(tmp_path, {})
  table = {"kind": "table", "table": "training", "title": "Adam"}
  bare, ours = make_row(30, variant="bare", loss="nan"), make_row(None)
  found.add(table | {"rows": [bare, ours]})
  assert capsys.readouterr().out == "Adam: bare: 30.000 ms, loss nan\n"
  ours["error"] = "not measured: more than 120 s"
  found.add(table | {"rows": [bare, ours]})
  assert capsys.readouterr().out == f"Adam: ours: {ours['error']}\n"
  found.add(table | {"rows": [bare, ours], "complete": True})
  assert capsys.readouterr().out.startswith("\n### Adam\n\n| variant")


# Measures three rows, of which the second one is the name of the part.
PART = """
import json, os, signal, sys, time
from on_gpu import events
from on_gpu.rows import Rows
request = json.loads(sys.argv[1])
table = Rows("training", "model", request["finished"])
for name in "first", request["part"], "last":
  row = {"variant": name, "process": os.getpid()}
  if table.begin(row):
    if name == "slow":
      time.sleep(60)
    if name == "crash":
      os.kill(os.getpid(), signal.SIGSEGV)
    table.tell()
if request["part"] == "rounds":
  time.sleep(1.5)
events.tell("end")
"""


@pytest.fixture
def run_part(tmp_path, monkeypatch):
  """Return a function that runs `PART`, or other code, with limits."""

  def run(name, *, seconds=60, row_seconds=60, shell=None):
    script, python = tmp_path / "part.py", tmp_path / "python"
    script.write_text(PART)
    shell = shell or f'exec "{sys.executable}" "{script}" "$3"'
    python.write_text(f"#!/bin/sh\n{shell}\n")
    python.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(python))
    monkeypatch.setattr(processes, "GRACE", 0.0)
    request = {"part": name, "until": time.time() + seconds}
    log = tmp_path / "log.txt"
    return list(processes.run(request, tmp_path, log, row_seconds))

  return run


@pytest.mark.parametrize(
  "second, error",
  [
    ("slow", "not measured: more than 2 s"),
    ("crash", "not measured: its process broke off, and log.txt may say why"),
  ],
)
def test_a_row_that_does_not_end_is_reported_and_the_next_one_is_measured(
  second, error, run_part
):
  found = run_part(second, row_seconds=2)
  assert [event["kind"] for event in found] == ["table"] * 3
  assert [len(event["rows"]) for event in found] == [1, 2, 3]
  first, stopped, last = found[-1]["rows"]
  assert [row.get("error") for row in found[-1]["rows"]] == [None, error, None]
  assert stopped["variant"] == second
  # The first row was measured once, by the process that was ended.
  assert first["process"] == stopped["process"] != last["process"]


def test_rounds_of_rows_that_are_measured_may_take_longer_than_a_row(run_part):
  found = run_part("rounds", row_seconds=1)
  assert [event["kind"] for event in found] == ["table"] * 3
  assert not any("error" in row for row in found[-1]["rows"])


def test_a_part_that_exceeds_its_time_is_ended_and_reported(run_part):
  start = time.time()
  *_, table, line = run_part("slow", seconds=2)
  assert time.time() - start < 10
  error = "not measured: the time of its part was over"
  assert [row.get("error") for row in table["rows"]] == [None, error]
  assert line["text"] == "slow was ended, since its time was over."


def test_a_part_that_crashes_before_a_row_is_reported(run_part, tmp_path):
  (line,) = run_part("crash", shell="echo a bug >&2\nkill -SEGV $$")
  assert line["text"] == "crash broke off: log.txt may say why."
  assert "a bug" in (tmp_path / "log.txt").read_text()


def test_packages_of_the_users_path_are_found_after_this_checkout(
  tmp_path, monkeypatch
):
  benchmarks = processes.BENCHMARKS
  expected = [str(benchmarks.parent), str(benchmarks), str(tmp_path), "/b"]
  monkeypatch.chdir(tmp_path)
  # Parts run in another folder, so that relative paths become absolute.
  for path in os.pathsep.join([".", "", "/b"]), os.pathsep.join(expected):
    monkeypatch.setenv("PYTHONPATH", path)
    found = processes.environment(tmp_path)["PYTHONPATH"]
    assert found.split(os.pathsep) == expected


def test_a_variant_that_fails_does_not_end_its_case(capsys, monkeypatch):
  def fail(workload):
    raise RuntimeError(OUT_OF_MEMORY)

  monkeypatch.setitem(variants.VARIANTS, "ours", (fail, "bare"))
  case = jax_optimizers.CASES["small"]["Adam, many leaves"]
  case = dataclasses.replace(case, compared=("bare", "ours"))
  monkeypatch.setitem(jax_optimizers.CASES, "small", {"Adam": case})
  jax_optimizers.run("small", TINY, time.time() + 60)
  bare, ours = read_events(capsys)[-1]["rows"]
  assert ours["error"] == FAILED
  assert bare["milliseconds"]
  assert bare["parameters"] == 6 * 8 * 8
  assert tables.name(bare) == "bare, 6 leaves"


def test_the_copy_is_measured(capsys):
  copy = jax_optimizers.make_copy(TINY)
  assert devices.measure_copy(copy, "JAX") > 1e6
  assert any(event["kind"] == "facts" for event in read_events(capsys))
  failing = Sleeper("copy", fails=True)
  assert math.isnan(devices.measure_copy(failing, "JAX"))


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


EARLIER = {"variant": "TF32", "checkpoint": False, "milliseconds": [1.0] * 3}
NO_TIME = EARLIER | {"error": "left out, since no time is left"}
del NO_TIME["milliseconds"]


@pytest.mark.parametrize(
  "finished, row, kinds",
  [
    # The clock of the row is stopped before the rounds of the others.
    ([], NO_TIME, ["begin", "table", "table"]),
    ([EARLIER], EARLIER, ["table"]),
  ],
)
def test_a_row_without_time_or_of_an_earlier_process_is_not_measured(
  finished, row, kinds, capsys
):
  name = "transformer, unrolled"
  finished = {f"{name}, JAX": finished}
  jax_training.run(name, TINY, time.time() - 1, finished=finished)
  found = read_events(capsys)
  assert [event["kind"] for event in found] == kinds
  assert found[-1]["rows"] == [row] and found[-1]["complete"]


def test_reports_are_timed_relative_to_the_compilation(capsys, monkeypatch):
  def check_step(step, params, *args, progress):
    assert not progress
    ups = [layer["up"] for layer in params["layers"]]
    is_large.append([bool(abs(up).max() > 1e3) for up in ups])
    return Checked(["overflow"] if any(is_large[-1]) else [])

  is_large = []
  Checked = collections.namedtuple("Checked", "problems")
  monkeypatch.setattr(jax_reports.diagnostics, "check_step", check_step)
  size = dataclasses.replace(TINY, depth=3)
  jax_reports.run("all", size, time.time() + 600)
  found = read_events(capsys)
  # Each row is sent before the next one begins.
  assert [e["kind"] for e in found] == ["begin", "table"] * 3 + ["table"]
  compiled, sound, overflowing = found[-1]["rows"]
  assert is_large == [[False] * 3, [False, True, False]]
  assert (sound["problems"], overflowing["problems"]) == (0, 1)
  for row in sound, overflowing:
    assert row["to_compiling"] == row["seconds"] / compiled["seconds"]
  table = tables.render("report", found[-1]["rows"])
  assert f"| {sound['to_compiling']:.1f}x " in table
