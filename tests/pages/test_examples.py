"""The examples run as their users run them, and keep their promises."""

import os
import struct
import subprocess
import sys

from helpers import load_example, ROOT, sharding
import jax
import numpy as np
import optax
import pytest
import tqdm

import optax_lossscale as ols


def run(name, *options, folder):
  """Return what an example prints, and how far its progress bar comes."""
  script = ROOT / "examples" / f"{name}.py"
  done = subprocess.run(
    [sys.executable, "-W", "error", script, *options],
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT)},  # this package, no other
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines(), done.stderr


# What each says last; examples with tests of their own are not here.
LAST_LINES = {
  "equinox_mlp": "loss scale 32768, skipped 0",
  "flax_linen": "statistics finite: True",
  "first_hour": "float16: loss scale 32768, skipped 0 of 4",
  "gan": "critic: loss scale ",
  "wgan_gp": "critic: loss scale ",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_runs(name, tmp_path):
  lines, progress = run(name, "--steps", "4", folder=tmp_path)
  assert lines[-1].startswith(LAST_LINES[name])
  assert "4/4" in progress


def tensorboard_scalars(folder):
  """The (step, name, value) of each scalar in the files of a folder."""
  from tensorboardX.proto.event_pb2 import Event

  for path in folder.iterdir():
    data, start = path.read_bytes(), 0
    while start < len(data):  # a length, its checksum, an event, its checksum
      (length,) = struct.unpack_from("<Q", data, start)
      event = Event.FromString(data[start + 12 : start + 12 + length])
      start += length + 16
      for value in event.summary.value:
        yield event.step, value.tag, value.simple_value


@pytest.mark.slow
def test_the_log_has_a_row_for_each_step_and_is_drawn(tmp_path):
  options = "--steps=70", "--every=8", "--tensorboard=tb", "--out=run.png"
  lines, progress = run("log_to_files", *options, folder=tmp_path)
  assert "70/70" in progress
  columns = load_example("log_to_files").read(tmp_path / "run.csv")
  assert columns["step"].tolist() == list(range(70))
  skipped = columns["step_skipped"] == 1
  assert lines[-1].endswith(f"skipped {skipped.sum()} of 70") and skipped[0]
  assert np.isnan(columns["loss"][skipped]).all()
  assert np.isfinite(columns["loss"][~skipped]).all()
  assert (columns["loss_scale"] == 2.0 ** columns["log2_loss_scale"]).all()
  expected = {
    (step, name): pytest.approx(values[step], rel=1e-6)
    for name, values in columns.items()
    for step in range(70)
    if name != "step" and not np.isnan(values[step])
  }
  scalars = tensorboard_scalars(tmp_path / "tb")
  assert {(step, name): x for step, name, x in scalars} == expected
  assert (tmp_path / "run.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_the_penalty_is_of_the_true_gradient_whatever_the_scale():
  wgan, keys = load_example("wgan_gp"), jax.random.split(jax.random.key(0), 4)
  g = wgan.init_mlp(keys[0], [4, 64, 64, 2])
  d = wgan.init_mlp(keys[1], [2, 64, 64, 1])
  args = d, g, wgan.sample_real(keys[2]), keys[3]
  exact, distance = jax.jit(jax.grad(wgan.d_loss_fn, has_aux=True))(*args)
  loss_fn = ols.autocast(wgan.d_loss_fn)

  @jax.jit
  def grad(scale):
    state = ols.set_loss_scale(ols.DynamicLossScale().init(), scale)
    return ols.grad(loss_fn, state, has_aux=True)(*args)

  for scale in 1.0, 2.0**10:
    found, aux = grad(scale)
    error = optax.tree.norm(optax.tree.sub(found, exact))
    assert error < 5e-3 * optax.tree.norm(exact)
    assert float(aux) == pytest.approx(float(distance), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, arg, message",
  [
    ("digits", "--steps=1", "--steps must be at least 2, got 1"),
    ("master_weights", "--seed=-1", "--seed must be at least 0, got -1"),
    ("master_weights", "--out=x/x.png", "must be in a folder that exists"),
    ("rl_float16", "--devices=3", "must be 1, 2, 4 or 8, got 3"),
  ],
)
def test_wrong_arguments_are_refused_before_the_training(
  name, arg, message, monkeypatch, capsys
):
  monkeypatch.setattr(sys, "argv", ["example.py", arg])
  with pytest.raises(SystemExit, match="2"):
    load_example(name).parse_args()
  assert message in "".join(capsys.readouterr())


@pytest.mark.slow
def test_the_digits_script_shows_its_progress_a_table_and_a_picture(tmp_path):
  options = "--steps=3", "--seed=1", "--out=curves.png"
  lines, progress = run("digits", *options, folder=tmp_path)
  assert "21/21" in progress  # 3 steps for 7 runs
  rows = {line[:25].strip(): line[25:].split() for line in lines[2:9]}
  assert list(rows) == list(load_example("digits").RUNS)
  assert rows["float32"][1:] == ["1.000", "0", "2**0", "0.0%", "1.0000"]
  assert rows["float16, dynamic scale"][3] == "2**15"
  assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_the_master_weights_script_shows_a_table_and_a_picture(tmp_path):
  options = "--steps=2", "--out=curves.png"
  lines, progress = run("master_weights", *options, folder=tmp_path)
  assert "8/8" in progress  # 2 steps for 4 runs
  names = [line[:35].strip() for line in lines[1:5]]
  assert names == list(load_example("master_weights").RUNS)
  assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.nightly
def test_headroom_needs_no_skip_where_a_high_start_costs_ten():
  digits, bar = load_example("digits"), tqdm.tqdm(disable=True)
  data = digits.load_data(seed=0)
  train = lambda name: digits.train(data, *digits.RUNS[name], bar)
  high, headroom = map(train, ("float16, starts too high", "float16, headroom"))
  assert high.skipped[:10].all() and not high.skipped[10:100].any()
  assert high.scales[10] == high.scales[0] / 2**10
  limit = high.scales[100:].max()
  assert limit >= 4 * high.scales[10]
  assert high.skipped[200:].sum() < 12  # it meets its limit, now and then
  assert not headroom.skipped.any()
  assert headroom.scales[5] >= 2.0**10 * headroom.scales[0]  # there at once
  assert headroom.scales[100:].max() <= 8 * headroom.scales[100:].min()
  assert limit / 64 <= headroom.scales[-1] < limit


@pytest.mark.nightly
def test_the_rl_script_shows_its_progress_a_table_and_a_picture(tmp_path):
  options = "--steps=2", "--seeds=1", "--devices=2", "--out=curves.png"
  lines, progress = run("rl_float16", *options, folder=tmp_path)
  assert "6/6" in progress  # 2 steps in 3 precisions
  assert lines[0] == "256 answers a step, on 2 devices."
  names = [line.split()[0] for line in lines[3:6]]
  assert names == ["bfloat16", "float16", "float32"]
  assert lines[7].split() == ["reward", "at", "step", "0", "1"]
  curve = lines[9].split()
  assert curve[:3] == ["float16", "seed", "0"]
  assert all(0 <= float(reward) <= 1 for reward in curve[3:])
  assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.nightly
def test_float16_learns_like_float32_and_samples_closer_than_bfloat16():
  rl, mesh = load_example("rl_float16"), sharding.make_mesh((2,), ("data",))
  rl_runs = {
    name: rl.train(rl.make_program(mesh, *precision), 60, seed=0)
    for name, precision in rl.PRECISIONS.items()
  }
  rms, kl = (
    {name: getattr(run, field).mean() for name, run in rl_runs.items()}
    for field in ("rms", "kl")
  )
  assert rms["float16"] < rms["bfloat16"] / 5  # 3 bits more: 8, if all round
  assert kl["float16"] < kl["bfloat16"] / 25
  assert kl["float32"] < kl["float16"] / 25
  assert np.mean(rl_runs["float32"].rewards[:3]) < 0.2
  end = {name: run.rewards[-5:].mean() for name, run in rl_runs.items()}
  assert end["float32"] > 0.8
  assert end["float16"] == pytest.approx(end["float32"], abs=0.02)
  assert rl_runs["float16"].loss_scale_state.loss_scale > 2.0**10
