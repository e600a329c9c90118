"""Each example runs for a few steps, as its users run it."""

import sys

from helpers import examples
import pytest

# What each says last; examples with tests of their own are not here.
LAST_LINES = {
  "equinox_mlp": "loss scale 32768, skipped 0",
  "flax_linen": "statistics finite: True",
  "first_hour": "float16: loss scale 32768, skipped 0 of 4",
  "gan": "critic: loss scale ",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_runs(name, tmp_path):
  lines, progress = examples.run(name, "--steps", "4", folder=tmp_path)
  assert lines[-1].startswith(LAST_LINES[name])
  assert "4/4" in progress


def parse(name, args, monkeypatch, capsys):
  """The exit status, and what an example says of its arguments."""
  monkeypatch.setattr(sys, "argv", ["example.py", *args])
  with pytest.raises(SystemExit) as stopped:
    examples.load(name).parse_args()
  return stopped.value.code, "".join(capsys.readouterr())


@pytest.mark.parametrize(
  "name, args, message",
  [
    ("digits", ["--steps", "1"], "--steps must be at least 2, got 1"),
    ("digits", ["--seed", "-1"], "--seed must be at least 0, got -1"),
    ("digits", ["--out", "missing/x.png"], "must be in a folder that exists"),
    ("rl_float16", ["--steps", "0"], "--steps must be at least 1, got 0"),
    ("rl_float16", ["--seeds", "0"], "--seeds must be at least 1, got 0"),
    ("rl_float16", ["--devices", "3"], "must be 1, 2, 4 or 8, got 3"),
    ("rl_float16", ["--out", "x/x.png"], "must be in a folder that exists"),
  ],
)
def test_wrong_arguments_are_refused_before_the_training(
  name, args, message, monkeypatch, capsys
):
  status, told = parse(name, args, monkeypatch, capsys)
  assert status == 2 and message in told


def test_help_names_the_options_and_their_defaults(monkeypatch, capsys):
  status, told = parse("digits", ["--help"], monkeypatch, capsys)
  assert status == 0
  for part in ("--steps", "(1200)", "--seed", "(0)", "--out", "(digits.png)"):
    assert part in told
