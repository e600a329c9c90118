"""Fails if a page of the documentation loads anything from another server.

Usage: python tools/offline.py docs/_build/html

Such a page is broken without a network, and tells others who reads it. Links
that a reader may follow are fine.
"""

import pathlib
import re
import sys

# Attributes that a browser loads automatically, in any tag.
_LOADED = {"src", "srcset", "poster", "data", "background"}
# Values of `rel` of a <link> that a browser only follows on a click.
_FOLLOWED = {"author", "canonical", "help", "license", "next", "prev", "search"}
_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
# In style sheets: url(https://...) and @import "https://...".
_IN_STYLES = re.compile(
  r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE
)
# In scripts: the address of a script, a style sheet or a font, in quotes.
_IN_SCRIPTS = re.compile(
  r"""["'`]((?:https?:)?//[^"'`\s]+\.(?:m?js|css|woff2?|ttf))\b""",
  re.IGNORECASE,
)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"""<(\w+)((?:"[^"]*"|'[^']*'|[^>"'])*)>""")
_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_INLINE = re.compile(r"<(style|script)\b[^>]*>(.*?)</\1>", re.DOTALL)


def find_external_loads(folder):
  """The (file, address) of all that pages load from other servers."""
  readers = {
    ".html": _find_in_page,
    ".css": _IN_STYLES.findall,
    ".js": _IN_SCRIPTS.findall,
  }
  return [
    (path.relative_to(folder), address)
    for path in sorted(folder.rglob("*"))
    if path.suffix in readers
    for address in readers[path.suffix](path.read_text())
  ]


def _find_in_page(text):
  text = _COMMENT.sub("", text)
  addresses = []
  for tag, attributes in _TAG.findall(text):
    values = {k.lower(): a or b for k, a, b in _ATTRIBUTE.findall(attributes)}
    loaded = _LOADED.copy()
    if tag == "link" and not _FOLLOWED & set(values.get("rel", "").split()):
      loaded.add("href")
    found = [values[name] for name in sorted(loaded & values.keys())]
    addresses += filter(_ELSEWHERE.match, found)
    addresses += _IN_STYLES.findall(values.get("style", ""))
  for tag, content in _INLINE.findall(text):
    pattern = _IN_STYLES if tag == "style" else _IN_SCRIPTS
    addresses += pattern.findall(content)
  return addresses


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
