"""Fails if a page of the documentation loads anything from another server.

Usage: python tools/offline.py docs/_build/html

Such a page is broken without a network, and tells others who reads it. Links
that a reader may follow are fine.
"""

import html.parser
import pathlib
import re
import sys

# Attributes that a browser loads automatically, in any tag.
_LOADED = {"src", "srcset", "poster", "data", "background"}
# Values of `rel` of a <link> that a browser only follows on a click.
_FOLLOWED = {"author", "canonical", "help", "license", "next", "prev", "search"}
_ELSEWHERE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
# In style sheets: url(https://...) and @import "https://...".
_IN_STYLES = re.compile(
  r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE
)
# In scripts: the address of a script, a style sheet or a font, in quotes.
_IN_SCRIPTS = re.compile(
  r"""["'`]((?:https?:)?//[^"'`\s]+\.(?:m?js|css|woff2?|ttf))\b""",
  re.IGNORECASE,
)


def find_external_loads(folder):
  """The (file, address) of all that pages load from other servers."""
  readers = {
    ".html": _find_in_page,
    ".css": _find_in_styles,
    ".js": _find_in_script,
  }
  return [
    (path.relative_to(folder), address)
    for path in sorted(folder.rglob("*"))
    if path.suffix in readers
    for address in readers[path.suffix](path.read_text())
  ]


def _find_in_page(text):
  page = _Page()
  page.feed(text)
  return page.addresses


class _Page(html.parser.HTMLParser):
  def __init__(self):
    super().__init__()
    self.addresses = []
    self._inside = None  # "script" or "style"

  def handle_starttag(self, tag, attrs):
    self._inside = tag if tag in ("script", "style") else None
    attrs = {name: value or "" for name, value in attrs}
    kinds = set(attrs.get("rel", "").split())
    for name, value in attrs.items():
      is_loaded = name in _LOADED or (
        tag == "link" and name == "href" and not kinds & _FOLLOWED
      )
      if is_loaded and _ELSEWHERE.match(value.strip()):
        self.addresses.append(value)
    self.addresses += _find_in_styles(attrs.get("style", ""))

  def handle_endtag(self, tag):
    self._inside = None

  def handle_data(self, data):
    if self._inside == "style":
      self.addresses += _find_in_styles(data)
    if self._inside == "script":
      self.addresses += _find_in_script(data)


def _find_in_styles(text):
  return _IN_STYLES.findall(text)


def _find_in_script(text):
  return _IN_SCRIPTS.findall(text)


def main():
  """Print the files that a page loads from other sites."""
  folder = pathlib.Path(sys.argv[1])
  if not (folder / "index.html").exists():
    sys.exit(f"{folder} must hold built pages, and has no index.html.")
  found = find_external_loads(folder)
  for path, address in found:
    print(f"{path} loads {address}")
  if found:
    sys.exit("Pages must load nothing from other servers.")


if __name__ == "__main__":
  main()
