"""The parts of the benchmark for GPUs, one by one, on a CPU."""

import dataclasses
import json
import math
import time

from helpers.benchmark import load_benchmark
import jax
import numpy as np
import pytest

bandwidth = load_benchmark("on_gpu.bandwidth")
clock = load_benchmark("on_gpu.clock")
events = load_benchmark("on_gpu.events")
expected = load_benchmark("on_gpu.expected_bytes")
findings = load_benchmark("on_gpu.findings")
jax_device = load_benchmark("on_gpu.jax_device")
jax_optimizers = load_benchmark("on_gpu.jax_optimizers")
jax_training = load_benchmark("on_gpu.jax_training")
processes = load_benchmark("on_gpu.processes")
sizes = load_benchmark("on_gpu.sizes")
tables = load_benchmark("on_gpu.tables")
variants = load_benchmark("shared.variants")

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
    {"kind": "table", "table": "optimizer", "title": "Adam", "rows": rows}
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


@pytest.mark.slow
def test_a_variant_that_fails_does_not_end_its_case(capsys, monkeypatch):
  def fail(workload):
    raise RuntimeError(OUT_OF_MEMORY)

  monkeypatch.setitem(variants.VARIANTS, "ours", (fail, "bare"))
  case = dataclasses.replace(
    jax_optimizers.LARGE["Adam"], compared=("bare", "ours")
  )
  jax_optimizers.run({"Adam": case}, TINY, time.time() + 60, [])
  bare, ours = read_events(capsys.readouterr().out)[-1]["rows"]
  assert ours["error"] == FAILED
  assert bare["milliseconds"] and bare["host_reads"] == 0
  assert bare["parameters"] == 4 * 64 * 64


def test_the_copy_is_measured(capsys):
  assert bandwidth.measure(jax_device.Copy(TINY.copied), "JAX") > 1e6
  assert any(e["kind"] == "facts" for e in read_events(capsys.readouterr().out))
  failed = bandwidth.measure(Sleeper("copy", fails=True), "JAX")
  assert math.isnan(failed)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["transformer, scan", "transformer, unrolled", "residual network"]
)
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
  jax_training.run("transformer, scan", TINY, time.time() - 1)
  (row,) = read_events(capsys.readouterr().out)[-1]["rows"]
  assert row["error"] == "left out, since no time is left"
