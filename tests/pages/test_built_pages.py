"""What `make docs` refuses of the built pages.

Tables that are cut off, pages that scroll, what is loaded from other servers.
"""

import runpy
import subprocess
import sys

from helpers import ROOT
import pytest

TOOLS = ROOT / "tools"
FUNCTIONS = runpy.run_path(str(TOOLS / "browser.py"))
OFFLINE = runpy.run_path(str(TOOLS / "offline.py"))

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
      for page, what, by in FUNCTIONS["find_wide_elements"](folder, width)
    }
    for width in (390, 800)
  }


@pytest.mark.slow
@with_a_browser
def test_what_is_cut_off_or_scrolls_sideways_is_found(found):
  tables = {
    "scrolls": "table 2",
    "in_a_box": "table 1",
    "clipped": "table 1",
    "folded": "table 1",
    "sticks_out": "table 1",
  }
  pages = ["sticks_out", "no_table"]
  expected = {*tables.items(), *((page, "the page") for page in pages)}
  assert set(found[800]) == expected
  wide = {("sub/wide", "table 1"), ("sub/wide", "the page")}
  assert set(found[390]) == expected | wide
  # 500 pixels and a margin of 8.
  assert found[390]["sub/wide", "the page"] == 508 - 390


def run(folder, script="browser.py", **options):
  command = sys.executable, TOOLS / script, folder
  return subprocess.run(command, capture_output=True, text=True, **options)


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


LOADED = [
  ("x.html", '<script src="https://a.example/x.js"></script>'),
  ("x.html", '<script async src="//a.example/x.js"></script>'),
  ("x.html", '<link rel="stylesheet" href="https://a.example/x.css">'),
  ("x.html", '<img alt="x" src="http://a.example/x.png"/>'),
  ("x.html", '<p style="background: url(https://a.example/x)">x</p>'),
  ("x.html", "<style>@import 'https://a.example/x';</style>"),
  ("x.html", '<script>import("https://a.example/x.mjs")</script>'),
  ("x.css", '@font-face { src: url("https://a.example/x"); }'),
  ("x.css", "@import url(//a.example/x);"),
  ("x.js", 's.src = "https://a.example/x.js";'),
]
# A link, a comment, and what lies beside the page.
FINE = [
  ("x.html", '<a href="https://a.example/x.js">a link</a>'),
  ("x.html", '<link rel="canonical" href="https://a.example/">'),
  ("x.html", '<link rel="stylesheet" href="x.css">'),
  ("x.html", '<img src="data:image/png;base64,//8=">'),
  ("x.html", "<pre>@import 'https://a.example/x';</pre>"),
  ("x.css", "/* https://a.example/x.css */ a { color: red; }"),
  ("x.js", "// See https://a.example/x.js for the source."),
]


def test_what_a_browser_would_load_from_elsewhere_is_found_and_nothing_else(
  tmp_path,
):
  for i, (name, text) in enumerate(LOADED + FINE):
    page = tmp_path / f"{i:02}" / name
    page.parent.mkdir()
    page.write_text(text)
  found = sorted(OFFLINE["find_external_loads"](tmp_path))
  expected = [f"{i:02}/{name}" for i, (name, _) in enumerate(LOADED)]
  assert [str(path) for path, _ in found] == expected
  assert all("//a.example/" in address for _, address in found)


def test_the_build_fails_and_says_which_page_loads_what(tmp_path):
  page = tmp_path / "index.html"
  assert "no index.html" in run(tmp_path, "offline.py").stderr
  page.write_text('<img src="https://a.example/x.png">')
  done = run(tmp_path, "offline.py")
  assert done.returncode == 1
  assert done.stdout == "index.html loads https://a.example/x.png\n"
  page.write_text('<img src="x.png">')
  assert run(tmp_path, "offline.py").returncode == 0
