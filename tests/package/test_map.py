"""The map of the tests and the drawing of the floors say what is so."""

import ast
import re

from helpers import ROOT
import pytest

PACKAGE, TESTS = ROOT / "optax_lossscale", ROOT / "tests"
README = (TESTS / "README.md").read_text()
ROOMS = sorted(
  {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
  - {"__init__.py"}
)
ROOMS = [room.removesuffix(".py") for room in ROOMS]


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_names_the_tests_of_each_module(room):
  rows = re.findall(r"^\| (.*?`.*?) \| (.*) \|$", README, re.MULTILINE)
  of_room = [tests for names, tests in rows if f"`{room}" in names]
  assert of_room and all("`" in tests for tests in of_room)


def test_each_path_on_the_map_leads_to_tests():
  named = re.findall(r"`([\w/]+\.py)`", README)
  assert len(named) > 30
  for path in named:
    assert list(TESTS.glob(path)) or list(TESTS.glob(f"*/{path}")), path
  folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
  for folder in folders:
    assert f"`{folder}" in README, folder


def floors():
  """The rooms on each floor of the drawing, from the top down."""
  page = (ROOT / "docs" / "design.md").read_text()
  (drawing,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
  # A floor may take two lines, of which the first has its number.
  rows = re.split(r"^ +\d \|", drawing, flags=re.MULTILINE)[1:]
  return [re.findall(r"[a-z_]+", row) for row in rows]


def test_the_drawing_has_each_room_once():
  assert sorted(room for floor in floors() for room in floor) == ROOMS


def test_each_room_imports_only_from_floors_below_its_own():
  height = {
    room: number
    for number, floor in enumerate(reversed(floors()))
    for room in floor
  }
  found = set()
  for path in PACKAGE.rglob("*.py"):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
      module = getattr(node, "module", None) or ""
      if not isinstance(node, ast.ImportFrom) or room == "__init__":
        continue
      if not module.startswith("optax_lossscale"):
        continue
      names = [f"{module}.{alias.name}".split(".")[1] for alias in node.names]
      for seen in set(names) - {room}:
        found.add((room, seen))
        assert height[seen] < height[room], f"{room} imports {seen}"
  assert ("_wrapper", "_measurement") in found
