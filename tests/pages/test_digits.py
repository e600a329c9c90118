"""The digits example keeps its promises, and runs as its users run it."""

import sys

from helpers import examples
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits():
  return examples.load("digits")


@pytest.fixture(scope="module")
def data(digits):
  return digits.load_data(seed=0)


@pytest.fixture(scope="module")
def runs(digits, data):
  """Those runs of the demo that are compared, of full length."""
  names = set(digits.RUNS) - {"float16, fixed scale of 8"}
  return {name: digits.train(data, *digits.RUNS[name]) for name in names}


def test_the_script_shows_its_progress_a_table_and_a_picture(tmp_path):
  options = "--steps=3", "--seed=1", "--out=curves.png"
  lines, progress = examples.run("digits", *options, folder=tmp_path)
  assert "21/21" in progress  # 3 steps for 7 runs
  rows = {line[:25].strip(): line[25:].split() for line in lines[2:9]}
  assert list(rows) == [
    "float32",
    "float16, no scaling",
    "float16, fixed scale of 8",
    "float16, dynamic scale",
    "float16 by autocast",
    "float16, starts too high",
    "float16, headroom",
  ]
  assert rows["float32"][1:] == ["1.000", "0", "2**0", "0.0%", "1.0000"]
  assert rows["float16, dynamic scale"][3] == "2**15"
  assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


def test_the_small_picture_is_of_three_runs(
  digits, monkeypatch, tmp_path, capsys
):
  picture = tmp_path / "small.png"
  args = ["digits.py", "--small", "--steps", "2", "--out", str(picture)]
  monkeypatch.setattr(sys, "argv", args)
  digits.main()
  rows = capsys.readouterr().out.splitlines()[2:-1]
  assert [row[:25].strip() for row in rows] == [*digits.FEW]
  assert picture.read_bytes()[1:4] == b"PNG"


def test_a_dynamic_scale_trains_within_1_percent_of_float32(runs):
  dynamic = runs["float16, dynamic scale"].test_loss
  assert dynamic == pytest.approx(runs["float32"].test_loss, rel=0.01)
  assert dynamic < 0.02


def test_autocast_trains_as_a_model_that_is_cast_by_hand(runs):
  cast = runs["float16 by autocast"].test_loss
  for name in ("float32", "float16, dynamic scale"):
    assert cast == pytest.approx(runs[name].test_loss, rel=0.02)


def test_no_scaling_is_at_least_3_times_worse_than_float32(runs):
  unscaled = runs["float16, no scaling"].test_loss
  assert unscaled >= 3 * runs["float32"].test_loss


def test_a_scale_that_starts_too_high_falls_settles_and_climbs(digits, runs):
  run = runs["float16, starts too high"]
  start = digits.RUNS["float16, starts too high"][1].init_scale
  assert run.scales[0] == start
  assert run.skipped[:10].all() and not run.skipped[10:100].any()
  settled = run.scales[10]
  assert settled == start / 2**10
  assert run.scales[100:].max() >= 4 * settled
  assert run.skipped[200:].sum() < 12  # it meets its limit, now and then
  assert run.test_loss == pytest.approx(runs["float32"].test_loss, rel=0.02)


def test_the_headroom_policy_stays_below_the_limit_and_skips_nothing(runs):
  run = runs["float16, headroom"]
  assert not run.skipped.any()
  assert run.scales[5] >= 2.0**10 * run.scales[0]  # there at once
  assert run.scales[100:].max() <= 8 * run.scales[100:].min()
  limit = runs["float16, starts too high"].scales[100:].max()
  assert limit / 64 <= run.scales[-1] < limit
  assert run.test_loss == pytest.approx(runs["float32"].test_loss, rel=0.01)


def test_the_scale_brings_back_the_gradients_that_float16_flushed(
  digits, data, runs
):
  params = runs["float32"].params
  table = {
    name: digits.compare_gradients(name, run, params, data)
    for name, run in runs.items()
  }

  flushed, cosine = table["float16, no scaling"]
  assert flushed > 0.8 and cosine < 0.5
  flushed, cosine = table["float16, dynamic scale"]
  assert flushed < 0.001 and cosine > 0.999
  assert table["float32"] == pytest.approx((0, 1))
