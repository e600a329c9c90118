"""The page for migrants: its versions are the recorded."""

import json
import re

from helpers import ROOT
from interop.golden import record_common as common
import pytest

PAGE = ROOT / "docs" / "migrating.md"


def test_the_versions_on_the_page_are_those_that_were_recorded():
  page = PAGE.read_text()
  table = page[page.index("| package | version") :]
  for path in common.HERE.glob("*.json"):
    golden = json.loads(path.read_text())
    if "version" in golden:
      version = golden["version"].split(",")[0].split("+")[0]
      package = golden["package"].split(",")[0]
      assert re.search(rf"\| {package}\b.*{re.escape(version)}", table)


@pytest.mark.parametrize("path", sorted(common.HERE.glob("*.json")))
def test_a_golden_file_is_small_and_says_how_it_was_made(path):
  assert path.stat().st_size < 100_000
  golden = json.loads(path.read_text())
  if path.stem != "exported":
    assert golden["package"] and golden["version"]
    recorder = golden["command"].split("/")[-1]
    assert (common.HERE / recorder).exists()
