"""The examples, which are scripts beside the package."""

import importlib.util
import os
import subprocess
import sys

from helpers import ROOT


def load(name):
  """An example as a module."""
  path = ROOT / "examples" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def run(name, *options, folder):
  """What is printed and how far the progress bar comes, as its users run it."""
  command = [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py"]
  done = subprocess.run(
    [*command, *options],
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT)},  # this package, no other
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines(), done.stderr
