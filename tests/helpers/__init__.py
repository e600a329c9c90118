"""What tests share."""

from collections.abc import Collection
import importlib.util
import pathlib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]  # of the repository


def quick_alone(quick: Collection[Any], values: Collection[Any]) -> list[Any]:
  """Values of a parameter, of which all but the quick ones are for slow tests.

  Where many values prove one sentence, those that differ most are quick.
  """
  assert set(quick) <= set(values)
  marks = {
    value: () if value in quick else pytest.mark.slow for value in values
  }
  return [pytest.param(value, marks=mark) for value, mark in marks.items()]


def line_of(mark: str, file: str) -> int:
  """The number of the only line of a file that ends with a comment."""
  lines = pathlib.Path(file).read_text().splitlines()
  (number,) = [i for i, x in enumerate(lines, 1) if x.endswith(f"# {mark}")]
  return number


def load_example(name: str) -> Any:
  """An example as a module."""
  path = ROOT / "examples" / f"{name}.py"
  spec: Any = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
