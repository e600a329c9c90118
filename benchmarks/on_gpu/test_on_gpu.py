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

bandwidth = load_benchmark("on_gpu.bandwidth")
clock = load_benchmark("shared.clock")
events = load_benchmark("on_gpu.events")
expected = load_benchmark("on_gpu.expected_bytes")
findings = load_benchmark("on_gpu.findings")
jax_device = load_benchmark("on_gpu.jax_device")
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


class Sleeper:
  """A program whose steps take a known time, or fail."""

  def __init__(self, name, seconds=0.0, *, skips=False, fails=False):
    self.row = {"variant": name}
    self.skips = skips
    self._seconds, self._fails = seconds, fails

  def prepare(self, skip):
    pass

  def step(self, skip):
    if self._fails:
      raise RuntimeError(OUT_OF_MEMORY)
    time.sleep(self._seconds)

  def wait(self):
    pass


def measure(programs, rounds=3, until=math.inf):
  clock.measure(programs, rounds=rounds, steps=2, until=until)
  return {program.row["variant"]: program.row for program in programs}


def read_events(out):
  """The events in what was printed."""
  return [json.loads(line) for line in out.splitlines()]


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


def test_no_round_begins_that_would_end_too_late():
  start = time.time()
  rows = measure([Sleeper("a", 0.05)], rounds=1000, until=start + 0.5)
  assert time.time() - start < 2
  assert 1 <= rows["a"]["rounds"] < 10


def test_keyboard_interrupts_are_not_errors_of_a_row():
  with pytest.raises(KeyboardInterrupt), clock.catch({}):
    raise KeyboardInterrupt


def test_json_contains_no_number_that_only_python_reads():
  text = events.dumps({"loss": math.nan, "all": [math.inf, (1.5,)]})
  assert json.loads(text) == {"loss": "nan", "all": ["inf", [1.5]]}


# A copy of 28 bytes for each parameter takes 28 ms.
ROW = {"variant": "ours", "parameters": 10**6, "copy": 1e9}


def make_row(milliseconds, **fields):
  times = {} if milliseconds is None else {"milliseconds": [milliseconds] * 3}
  return {**ROW, "expected_bytes": 28.0, **times, **fields}


def test_a_step_that_takes_longer_than_its_bytes_is_reported():
  assert tables.verdict(make_row(28 * 1.2)) == "1.20x"
  slow = tables.verdict(make_row(28 * 1.4))
  assert slow == "1.40x: takes longer than its bytes"
  assert tables.verdict(make_row(30, copy=math.nan)) == ""
  assert tables.verdict(make_row(30, copy="nan")) == ""
  # Without expected bytes, those of the compiled program.
  row = make_row(28 * 1.2, expected_bytes=None, moved_bytes=28 * 10**6)
  assert tables.verdict(row) == "1.20x"


def test_a_row_that_failed_shows_its_error_in_a_whole_table():
  rows = [make_row(30), make_row(None, error="XlaRuntimeError: a | b")]
  for kind in ("optimizer", "training"):
    lines = tables.render(kind, rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "XlaRuntimeError: a \\| b" in lines[-1]


def test_the_expected_bytes_equal_those_of_the_compiler():
  found = expected.get_bytes_per_parameter("adam", "ours")
  assert found == pytest.approx(32, abs=0.01)
  assert expected.get_bytes_per_parameter("adam", "of nobody") is None
  for case in (jax_optimizers.LARGE | jax_optimizers.SMALL).values():
    for variant in jax_optimizers.COMPARED:
      assert expected.get_bytes_per_parameter(case.same_as, variant) >= 24


def test_events_are_written_to_the_files_immediately(tmp_path, capsys):
  found = findings.Findings(tmp_path, {"size": "tiny"})
  found.add({"kind": "facts", "facts": {"device": "a GPU"}})
  found.add({"kind": "line", "text": "Left out: something"})
  rows = [make_row(30, loss=math.nan)]
  found.add(
    {
      "kind": "table",
      "table": "optimizer",
      "title": "Adam",
      "rows": rows,
      "complete": True,
    }
  )
  written = json.loads((tmp_path / "results.json").read_text())
  assert written["facts"] == {"size": "tiny", "device": "a GPU"}
  page = (tmp_path / "tables.md").read_text()
  assert "### Adam" in page and "* Left out: something" in page
  assert "### Adam" in capsys.readouterr().out


def test_a_part_that_exceeds_its_time_is_ended_and_reported(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(processes, "GRACE", 0.0)
  asked = {"part": "optimizers", "size": "tiny", "without": []}
  start = time.time()
  asked["until"] = start + 0.2
  *_, last = processes.run(asked, tmp_path, tmp_path / "log.txt")
  assert last["text"] == "optimizers was ended, since its time was over."
  assert time.time() - start < 5


def test_a_part_that_crashes_is_reported(tmp_path, monkeypatch):
  crash = tmp_path / "crash"
  crash.write_text("#!/bin/sh\necho a bug in a library >&2\nkill -SEGV $$\n")
  crash.chmod(0o755)
  monkeypatch.setattr(processes.sys, "executable", str(crash))
  asked = {"part": "optimizers", "until": time.time() + 60}
  (last,) = processes.run(asked, tmp_path, tmp_path / "log.txt")
  assert last["text"] == "optimizers broke off: log.txt may say why."
  assert "a bug in a library" in (tmp_path / "log.txt").read_text()


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


@pytest.mark.parametrize(
  ("second", "error"),
  [
    ("slow", "not measured: more than 1 s"),
    ("crash", "not measured: its process broke off, and log.txt may say why"),
  ],
)
def test_a_row_that_does_not_end_is_reported_and_the_next_one_is_measured(
  second, error, tmp_path, monkeypatch
):
  replace_part(PART, tmp_path, monkeypatch)
  asked = {"part": second, "until": time.time() + 60}
  log = tmp_path / "log.txt"
  found = list(processes.run(asked, tmp_path, log, row_seconds=1))
  assert [event["kind"] for event in found] == ["table"] * 3
  assert [len(event["rows"]) for event in found] == [1, 2, 3]
  first, stopped, last = found[-1]["rows"]
  assert [row.get("error") for row in found[-1]["rows"]] == [None, error, None]
  assert stopped["variant"] == second
  # The first row was measured once, by the process that was ended.
  assert first["process"] == stopped["process"] != last["process"]


def test_rounds_of_rows_that_are_measured_may_take_longer_than_a_row(
  tmp_path, monkeypatch
):
  replace_part(PART, tmp_path, monkeypatch)
  asked = {"part": "rounds", "until": time.time() + 60}
  log = tmp_path / "log.txt"
  found = list(processes.run(asked, tmp_path, log, row_seconds=1))
  assert [event["kind"] for event in found] == ["table"] * 3
  assert not any("error" in row for row in found[-1]["rows"])


def test_a_row_that_the_end_of_its_part_stops_is_reported(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(processes, "GRACE", 0.0)
  replace_part(PART, tmp_path, monkeypatch)
  asked = {"part": "slow", "until": time.time() + 1}
  log = tmp_path / "log.txt"
  *_, table, line = processes.run(asked, tmp_path, log, row_seconds=60)
  error = "not measured: the time of its part was over"
  assert [row.get("error") for row in table["rows"]] == [None, error]
  assert line["text"] == "slow was ended, since its time was over."


def replace_part(code, folder, monkeypatch):
  """Run some code instead of `on_gpu/part.py`."""
  script, shell = folder / "part.py", folder / "python"
  script.write_text(code)
  shell.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$3"\n')
  shell.chmod(0o755)
  monkeypatch.setattr(processes.sys, "executable", str(shell))


def test_each_row_is_printed_once_as_soon_as_it_is_measured(tmp_path, capsys):
  found = findings.Findings(tmp_path, {})
  table = {"kind": "table", "table": "training", "title": "Adam"}
  bare, ours = make_row(30, variant="bare", loss="nan"), make_row(None)
  found.add(table | {"rows": [bare, ours]})
  assert capsys.readouterr().out == "Adam: bare: 30.000 ms, loss nan\n"
  ours["error"] = "not measured: more than 120 s"
  found.add(table | {"rows": [bare, ours]})
  assert capsys.readouterr().out == f"Adam: ours: {ours['error']}\n"
  written = json.loads((tmp_path / "results.json").read_text())
  assert written["tables"]["Adam"]["rows"] == [bare, ours]
  found.add(table | {"rows": [bare, ours], "complete": True})
  assert capsys.readouterr().out.startswith("\n### Adam\n\n| variant")


def test_paths_of_the_user_are_absolute_since_parts_run_elsewhere(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", "lib")
  found = processes.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
  assert found[2:] == [str(tmp_path / "lib")]


def test_packages_of_the_users_path_are_found_after_this_checkout(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a", "", "/b"]))
  found = processes.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
  benchmarks = str(processes.BENCHMARKS)
  checkout = str(processes.BENCHMARKS.parent)
  assert found == [checkout, benchmarks, "/a", "/b"]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))
  again = processes.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
  assert again == found


def test_a_variant_that_fails_does_not_end_its_case(capsys, monkeypatch):
  def fail(workload):
    raise RuntimeError(OUT_OF_MEMORY)

  monkeypatch.setitem(variants.VARIANTS, "ours", (fail, "bare"))
  case = dataclasses.replace(
    jax_optimizers.LARGE["Adam"], compared=("bare", "ours")
  )
  monkeypatch.setitem(jax_optimizers.CASES, "large", {"Adam": case})
  jax_optimizers.run("large", TINY, time.time() + 60)
  bare, ours = read_events(capsys.readouterr().out)[-1]["rows"]
  assert ours["error"] == FAILED
  assert bare["milliseconds"]
  assert bare["parameters"] == 4 * 64 * 64


def test_of_many_leaves_few_are_measured_before_the_others(capsys, monkeypatch):
  case = dataclasses.replace(
    jax_optimizers.SMALL["Adam, many leaves"], compared=("bare", "ours")
  )
  monkeypatch.setitem(jax_optimizers.CASES, "small", {"many": case})
  jax_optimizers.run("small", TINY, time.time() + 600)
  rows = read_events(capsys.readouterr().out)[-1]["rows"]
  assert [tables.name(row) for row in rows] == [
    "bare, 2 leaves",
    "bare, 6 leaves",
    "ours, 6 leaves",
  ]
  relative = [
    line.split("|")[3] for line in tables.render("optimizer", rows).splitlines()
  ]
  assert [cell.strip() for cell in relative[2:4]] == ["1.00x", "1.00x"]


@pytest.mark.parametrize(
  ("available", "leaves"), [(600, 300), (299, 149), (1, 30), (-5, 30)]
)
def test_as_many_leaves_are_compiled_as_there_is_time_for(available, leaves):
  assert jax_optimizers.fit_leaves(2.0, 30, 300, available) == leaves
  assert jax_optimizers.fit_leaves(math.inf, 30, 300, available) == 30


def test_the_copy_is_measured(capsys):
  assert bandwidth.measure(jax_device.Copy(TINY.copied), "JAX") > 1e6
  assert any(e["kind"] == "facts" for e in read_events(capsys.readouterr().out))
  failed = bandwidth.measure(Sleeper("copy", fails=True), "JAX")
  assert math.isnan(failed)


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
    assert np.isclose(found, reference, rtol=2e-2), (precision, checkpoint)
    is_float32 = jax_training.PRECISIONS[precision] == exact
    assert not is_float32 or np.isclose(found, reference, rtol=1e-5)


def test_rows_of_a_training_without_time_say_so(capsys):
  jax_training.run("transformer, unrolled", TINY, time.time() - 1)
  found = read_events(capsys.readouterr().out)
  (row,) = found[-1]["rows"]
  assert row["error"] == "left out, since no time is left"
  # The clock of the row is stopped before the rounds of the others.
  assert [event["kind"] for event in found] == ["begin", "table", "table"]
  assert [event.get("complete") for event in found] == [None, False, True]


def test_rows_of_an_earlier_process_are_not_measured_again(capsys):
  earlier = {"variant": "TF32", "checkpoint": False, "milliseconds": [1.0] * 3}
  finished = {"transformer, unrolled, JAX": [earlier]}
  jax_training.run(
    "transformer, unrolled", TINY, time.time() - 1, finished=finished
  )
  (event,) = read_events(capsys.readouterr().out)
  assert event["rows"] == [earlier]


def test_reports_are_timed_relative_to_the_compilation(capsys, monkeypatch):
  def check_step(step, *args, progress):
    assert not progress
    *_, loss = step(*args)
    is_finite.append(bool(np.isfinite(loss)))
    return Checked([] if is_finite[-1] else ["overflow"])

  is_finite = []
  Checked = collections.namedtuple("Checked", "problems")
  monkeypatch.setattr(jax_reports.diagnostics, "check_step", check_step)
  jax_reports.run("all", TINY, time.time() + 600)
  found = read_events(capsys.readouterr().out)
  # Each row is sent before the next one begins.
  assert [e["kind"] for e in found] == ["begin", "table"] * 3 + ["table"]
  compiled, sound, overflowing = found[-1]["rows"]
  assert is_finite == [True, False]
  assert (sound["problems"], overflowing["problems"]) == (0, 1)
  for row in sound, overflowing:
    assert row["to_compiling"] == row["seconds"] / compiled["seconds"]
  table = tables.render("report", found[-1]["rows"])
  assert f"| {sound['to_compiling']:.1f}x " in table


def test_the_gpt_of_the_reports_overflows_in_its_middle_block():
  size = dataclasses.replace(TINY, depth=3)
  _, sound, *_ = jax_reports.make_step(size, overflows=False)
  _, overflowing, *_ = jax_reports.make_step(size, overflows=True)
  changed = [
    not np.array_equal(a["up"], b["up"])
    for a, b in zip(sound["blocks"], overflowing["blocks"], strict=True)
  ]
  assert changed == [False, True, False]
