"""Loads the benchmarks, which are scripts outside of the package."""

import importlib
import sys

from helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"


def load_benchmark(script):
  """A module of benchmarks/, such as "cpu/report" or "shared.clock".

  Before the slash is the folder in which it finds its neighbours, as a script
  does that is run.
  """
  folder, _, name = script.rpartition("/")
  paths = [str(BENCHMARKS / folder), str(BENCHMARKS)]
  sys.path[:0] = paths
  try:
    return importlib.import_module(name)
  finally:
    for path in paths:
      sys.path.remove(path)
