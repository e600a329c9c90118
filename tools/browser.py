"""Fails if a page of the documentation does not fit a screen.

Usage: python tools/browser.py docs/_build/html

Chromium shows each page at several widths. No table may be cut off, so that one
would have to scroll in it for its last column. On a phone it may, but there,
too, the page itself must not scroll sideways. Without a browser the pages are
not looked at, and the output says so.
"""

import html
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# The names under which systems install it.
_NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
_WIDTHS = (1300, 1000, 800)
_PHONE = 390
_OPTIONS = (
  "--headless",
  "--no-sandbox",  # which containers do not have
  "--disable-gpu",
  "--disable-dev-shm-usage",
  "--disable-background-networking",
  "--no-first-run",
  "--allow-file-access-from-files",  # one page measures the others
)
# This runs in a page with all pages as frames. It opens folded sections. The
# width of a table is the part that is cut off, by its own scroll bar or by its
# parent. A border may take one pixel.
_MEASURE = """
const found = []
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, root = page.documentElement
  const note = (what, by) => {
    if (by > 1) found.push([frame.title, what, by])
  }
  page.querySelectorAll("details").forEach(d => d.open = true)
  note("the page", root.scrollWidth - root.clientWidth)
  page.querySelectorAll("table").forEach((table, i) => {
    let by = 0
    for (let e = table; e != root; e = e.parentElement)
      by = Math.max(by, e.scrollWidth - e.clientWidth)
    note("table " + (i + 1), by)
  })
}
document.body.textContent = "found" + JSON.stringify(found) + "found"
"""


def browser():
  """The path of a Chromium that is installed, or None."""
  return next(filter(None, map(shutil.which, _NAMES)), None)


def find_wide_elements(folder, width):
  """Return the elements that are wider than a screen, as lists of three values.

  The values are the page, the element ("the page", or "table 3" for the third
  table on it), and the number of pixels by which it is too wide.
  """
  folder = pathlib.Path(folder).resolve()
  frames = "".join(
    f'<iframe width="{width}" height="800" src="{path.as_uri()}"'
    f' title="{path.relative_to(folder)}"></iframe>'
    for path in sorted(folder.rglob("*.html"))
  )
  with tempfile.TemporaryDirectory() as scratch:
    outer = pathlib.Path(scratch) / "outer.html"
    outer.write_text(
      f"<body>{frames}<script>onload = () => {{{_MEASURE}}}</script>"
    )
    options = f"--user-data-dir={scratch}/profile", "--dump-dom"
    shown = subprocess.run(
      [browser(), *_OPTIONS, *options, outer.as_uri()],
      capture_output=True,
      text=True,
      timeout=300,
    )
  found = re.search("found(.*)found", shown.stdout)
  if found is None:
    sys.exit(f"{browser()} has shown nothing, and said: {shown.stderr}")
  return json.loads(html.unescape(found[1]))


def main():
  """Print the elements that are too wide."""
  folder = pathlib.Path(sys.argv[1])
  if not (folder / "index.html").exists():
    sys.exit(f"{folder} must hold built pages, and has no index.html.")
  if browser() is None:
    print(f"NOT LOOKED AT: {folder}, for want of one of {', '.join(_NAMES)}.")
    return
  found = [
    (width, *what)
    for width in (*_WIDTHS, _PHONE)
    for what in find_wide_elements(folder, width)
    if width != _PHONE or what[1] == "the page"
  ]
  for width, page, what, by in found:
    print(f"{page}: {what} is {by} pixels too wide for a screen of {width}")
  if found:
    sys.exit("Tables and pages must fit the screen.")


if __name__ == "__main__":
  main()
