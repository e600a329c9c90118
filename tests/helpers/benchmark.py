"""The simulation of the policies, which is a script beside the package."""

import importlib
import sys

from helpers import ROOT


def load_benchmark():
  """The module benchmarks/policies.py."""
  folder = str(ROOT / "benchmarks")
  sys.path.insert(0, folder)
  try:
    return importlib.import_module("policies")
  finally:
    sys.path.remove(folder)
