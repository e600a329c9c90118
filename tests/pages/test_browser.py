"""What `make docs` refuses: tables that are cut off, pages that scroll."""

import runpy
import subprocess
import sys

from helpers import ROOT
import pytest

SCRIPT = ROOT / "tools" / "browser.py"
FUNCTIONS = runpy.run_path(str(SCRIPT))

with_a_browser = pytest.mark.skipif(
  FUNCTIONS["browser"]() is None, reason="no Chromium is installed"
)

WORD = "x" * 200  # is broken nowhere, and is wider than any screen here
SCROLLS = "display: block; overflow-x: auto"


def table(text, style=""):
  return f'<table style="{style}"><tr><td>{text}</td></tr></table>'


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  """What the browser finds on pages that are shown at once, by their names."""
  folder = tmp_path_factory.mktemp("pages")
  pages = {
    "short": table("x"),
    "broken": table("x " * 1000, SCROLLS),
    "scrolls": table("x") + table(WORD, SCROLLS),
    "in_a_box": f'<div style="overflow: auto">{table(WORD)}</div>',
    "clipped": f'<div style="overflow: hidden">{table(WORD)}</div>',
    "folded": f"<details>{table(WORD, SCROLLS)}</details>",
    "sticks_out": table(WORD),
    "no_table": f"<p>{WORD}</p>",
    "code": f'<pre style="overflow: auto">{WORD}</pre>',
    "sub/wide": f'<div style="width: 500px">{table("x")}</div>',
  }
  for name, text in pages.items():
    path = folder / f"{name}.html"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"<!doctype html><body>{text}")
  return {
    width: {
      (page.removesuffix(".html"), what): by
      for page, what, by in FUNCTIONS["too_wide"](folder, width)
    }
    for width in (390, 800)
  }


@pytest.mark.slow
@with_a_browser
@pytest.mark.parametrize("width", [390, 800])
def test_a_table_that_is_cut_off_is_found_however_it_is(found, width):
  tables = {page: what for page, what in found[width] if what != "the page"}
  assert tables == {
    "scrolls": "table 2",
    "in_a_box": "table 1",
    "clipped": "table 1",
    "folded": "table 1",
    "sticks_out": "table 1",
  } | ({"sub/wide": "table 1"} if width == 390 else {})


@pytest.mark.slow
@with_a_browser
def test_a_page_that_scrolls_sideways_is_found_with_its_width(found):
  scrolling = {
    width: {page for page, what in found[width] if what == "the page"}
    for width in found
  }
  assert scrolling[800] == {"sticks_out", "no_table"}
  assert scrolling[390] == {"sticks_out", "no_table", "sub/wide"}
  # 500 pixels and a margin of 8.
  assert found[390]["sub/wide", "the page"] == 508 - 390


def run(folder, **options):
  return subprocess.run(
    [sys.executable, SCRIPT, folder], capture_output=True, text=True, **options
  )


@pytest.mark.slow
@with_a_browser
def test_the_build_fails_and_says_what_is_too_wide_on_which_screen(tmp_path):
  page = tmp_path / "index.html"
  page.write_text(f"<!doctype html>{table(WORD, SCROLLS)}")
  assert run(tmp_path).returncode == 1
  lines = run(tmp_path).stdout.splitlines()
  widths = [line.rpartition(" ")[2] for line in lines]
  assert widths == ["1300", "1000", "800"]  # not on a phone: it scrolls there
  assert lines[0].startswith("index.html: table 1 is ")
  page.write_text(table("x"))
  assert run(tmp_path).returncode == 0


def test_without_a_browser_it_is_said_that_nobody_has_looked(tmp_path):
  assert "no index.html" in run(tmp_path).stderr
  (tmp_path / "index.html").touch()
  result = run(tmp_path, env={"PATH": str(tmp_path)})
  assert result.returncode == 0
  assert result.stdout.startswith("NOT LOOKED AT: ")
