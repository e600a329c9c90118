"""Helpers that tests share."""

from collections.abc import Collection
import importlib.util
import pathlib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]  # of the repository


def mark_slow_params(
  quick: Collection[Any],
  values: Collection[Any],
  slow: Collection[Any] | None = None,
) -> list[Any]:
  """Return the values of a parameter, of which only the quick ones always run.

  If many values prove one sentence, those that differ most are quick. If
  some are named as slow, the others run in the nightly tests.
  """
  assert set(quick) | set(slow or ()) <= set(values)
  return [
    pytest.param(value, marks=_get_marks(value, quick, slow))
    for value in values
  ]


def _get_marks(value, quick, slow):
  if value in quick:
    return ()
  is_slow = slow is None or value in slow
  return pytest.mark.slow if is_slow else pytest.mark.nightly


def parametrize_slow(
  name: str,
  quick: Collection[Any],
  values: Collection[Any],
  slow: Collection[Any] | None = None,
  **kwargs: Any,
) -> pytest.MarkDecorator:
  """Return the decorator of a test of which only a few values always run."""
  values = mark_slow_params(quick, values, slow)
  return pytest.mark.parametrize(name, values, **kwargs)


def relative_name(path: pathlib.Path) -> str:
  """The path of a file from the root of the repository."""
  return str(path.relative_to(ROOT))


def pages_below(folder: pathlib.Path) -> list[pathlib.Path]:
  """The Markdown files in a folder, without the copies that a build makes."""
  paths = sorted(folder.rglob("*.md"))
  return [path for path in paths if "_build" not in path.parts]


def find_line_number(comment: str, file: str) -> int:
  """Return the number of the only line of a file that ends with a comment."""
  lines = pathlib.Path(file).read_text().splitlines()
  (number,) = [i for i, x in enumerate(lines, 1) if x.endswith(f"# {comment}")]
  return number


def load_example(name: str) -> Any:
  """Return an example as a module."""
  path = ROOT / "examples" / f"{name}.py"
  spec: Any = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
