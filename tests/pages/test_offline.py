"""What `make docs` refuses: pages that load something from another server."""

import runpy
import subprocess
import sys

from helpers import ROOT
import pytest

SCRIPT = ROOT / "tools" / "offline.py"
loaded_from_elsewhere = runpy.run_path(str(SCRIPT))["loaded_from_elsewhere"]


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("index.html", '<script src="https://a.example/x.js"></script>'),
    ("index.html", '<script async src="//a.example/x.js"></script>'),
    ("index.html", '<link rel="stylesheet" href="https://a.example/x.css">'),
    ("index.html", '<link rel="preload" href="https://a.example/x.woff2">'),
    ("index.html", '<link rel="icon" href="https://a.example/x.ico">'),
    ("index.html", '<img alt="x" src="http://a.example/x.png"/>'),
    ("index.html", '<iframe src="https://a.example/"></iframe>'),
    ("index.html", '<p style="background: url(https://a.example/x)">x</p>'),
    ("index.html", "<style>@import 'https://a.example/x';</style>"),
    ("index.html", '<script>import("https://a.example/x.mjs")</script>'),
    ("_static/x.css", '@font-face { src: url("https://a.example/x"); }'),
    ("_static/x.css", "@import url(//a.example/x);"),
    ("_static/x.js", 's.src = "https://a.example/x.js";'),
  ],
)
def test_what_a_browser_would_load_from_elsewhere_is_found(
  name, text, tmp_path
):
  page = tmp_path / name
  page.parent.mkdir(exist_ok=True)
  page.write_text(text)
  ((path, address),) = loaded_from_elsewhere(tmp_path)
  assert str(path) == name
  assert "//a.example/" in address


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("index.html", '<a href="https://a.example/x.js">a link</a>'),
    ("index.html", '<link rel="canonical" href="https://a.example/">'),
    ("index.html", '<link rel="stylesheet" href="_static/x.css">'),
    ("index.html", '<img src="data:image/png;base64,//8=">'),
    ("index.html", "<pre>@import 'https://a.example/x';</pre>"),
    ("_static/x.css", "/* https://a.example/x.css */ a { color: red; }"),
    ("_static/x.js", "// See https://a.example/x.js for the source."),
  ],
)
def test_a_link_a_comment_and_what_lies_beside_the_page_are_fine(
  name, text, tmp_path
):
  page = tmp_path / name
  page.parent.mkdir(exist_ok=True)
  page.write_text(text)
  assert loaded_from_elsewhere(tmp_path) == []


def test_the_build_fails_and_says_which_page_loads_what(tmp_path):
  page = tmp_path / "index.html"

  def run():
    return subprocess.run(
      [sys.executable, SCRIPT, tmp_path], capture_output=True, text=True
    )

  assert "no index.html" in run().stderr
  page.write_text('<img src="https://a.example/x.png">')
  assert run().returncode == 1
  assert run().stdout == "index.html loads https://a.example/x.png\n"
  page.write_text('<img src="x.png">')
  assert run().returncode == 0
