"""The RL example keeps its promises, and runs as its users run it."""

from helpers import examples
import jax
from jax.sharding import AxisType
import numpy as np
import pytest

STEPS = 60


@pytest.fixture(scope="module")
def rl():
  return examples.load("rl_float16")


@pytest.fixture(scope="module")
def programs(rl):
  devices = jax.devices()[:2]
  mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=devices)
  return {
    name: rl.make_program(mesh, *precision)
    for name, precision in rl.PRECISIONS.items()
  }


@pytest.fixture(scope="module")
def runs(rl, programs):
  return {name: rl.train(programs[name], STEPS, seed=0) for name in programs}


@pytest.mark.slow
def test_the_script_shows_its_progress_a_table_and_a_picture(tmp_path):
  options = "--steps=2", "--seeds=1", "--devices=2", "--out=curves.png"
  lines, progress = examples.run("rl_float16", *options, folder=tmp_path)
  assert "6/6" in progress  # 2 steps in 3 precisions
  assert lines[0] == "256 answers a step, on 2 devices."
  names = [line.split()[0] for line in lines[3:6]]
  assert names == ["bfloat16", "float16", "float32"]
  assert lines[7].split() == ["reward", "at", "step", "0", "1"]
  curve = lines[9].split()
  assert curve[:3] == ["float16", "seed", "0"]
  assert all(0 <= float(reward) <= 1 for reward in curve[3:])
  assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_float16_keeps_sampler_and_trainer_closer_than_bfloat16_does(runs):
  rms, kl = (
    {name: getattr(run, field).mean() for name, run in runs.items()}
    for field in ("rms", "kl")
  )
  assert rms["float16"] < rms["bfloat16"] / 5  # 3 bits more: 8, if all round
  assert kl["float16"] < kl["bfloat16"] / 25
  assert kl["float32"] < kl["float16"] / 25


@pytest.mark.slow
def test_float16_learns_what_float32_learns(runs):
  start = np.mean(runs["float32"].rewards[:3])
  assert start < 0.2
  end = {name: run.rewards[-5:].mean() for name, run in runs.items()}
  assert end["float32"] > 0.8
  assert end["float16"] == pytest.approx(end["float32"], abs=0.02)
  assert runs["float16"].loss_scale_state.loss_scale > 2.0**10


@pytest.mark.parametrize("count", [1, 4])
def test_micro_batches_hold_each_answer_once(rl, count, monkeypatch):
  monkeypatch.setattr(rl, "MICRO_BATCHES", count)
  parts = rl.to_micro_batches(np.arange(16))
  assert parts.shape == (count, 16 // count)
  assert sorted(parts.ravel().tolist()) == list(range(16))


def test_an_answer_is_rewarded_for_each_digit_that_goes_on(rl):
  texts = np.array([[rl.UP, 8, 9, 0, 1], [rl.DOWN, 1, 0, 0, 9]])
  np.testing.assert_allclose(rl.reward(texts), [1, 2 / 3], rtol=1e-6)
