"""What `make docs` refuses: pages that load something from another server."""

import runpy
import subprocess
import sys

from helpers import ROOT

SCRIPT = ROOT / "tools" / "offline.py"
loaded_from_elsewhere = runpy.run_path(str(SCRIPT))["loaded_from_elsewhere"]


LOADED = [
  ("x.html", '<script src="https://a.example/x.js"></script>'),
  ("x.html", '<script async src="//a.example/x.js"></script>'),
  ("x.html", '<link rel="stylesheet" href="https://a.example/x.css">'),
  ("x.html", '<link rel="preload" href="https://a.example/x.woff2">'),
  ("x.html", '<link rel="icon" href="https://a.example/x.ico">'),
  ("x.html", '<img alt="x" src="http://a.example/x.png"/>'),
  ("x.html", '<iframe src="https://a.example/"></iframe>'),
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
  found = sorted(loaded_from_elsewhere(tmp_path))
  expected = [f"{i:02}/{name}" for i, (name, _) in enumerate(LOADED)]
  assert [str(path) for path, _ in found] == expected
  assert all("//a.example/" in address for _, address in found)


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
