"""The benchmarks, which are scripts beside the package."""

import importlib
import sys

from helpers import ROOT


def load_benchmark(name="policies"):
  """A module of benchmarks/, by name."""
  folder = str(ROOT / "benchmarks")
  sys.path.insert(0, folder)
  try:
    return importlib.import_module(name)
  finally:
    sys.path.remove(folder)
