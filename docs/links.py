"""Links out of the pages: to the source, to scripts, and to other projects.

Code in the text of a page becomes a link where it is the name of something:
`jax.vmap`, `ols.scale_loss`, `autocast`, `examples/gan.py`. The first time on a
page, since a page full of links is hard to read.
"""

import ast
import importlib
import inspect
import pathlib
import re
import zlib

from docutils import nodes
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.util import logging

ROOT = pathlib.Path(__file__).parents[1]
SITES = {
  "flax": "https://flax.readthedocs.io/en/latest/",
  "jax": "https://docs.jax.dev/en/latest/",
  "optax": "https://optax.readthedocs.io/en/latest/",
}
# What pages call the modules.
SHORT = {
  "diagnostics": "optax_lossscale.diagnostics",
  "interop": "optax_lossscale.interop",
  "jnp": "jax.numpy",
  "lax": "jax.lax",
  "nnx": "flax.nnx",
  "ols": "optax_lossscale",
  "plots": "optax_lossscale.plots",
}
FOLDERS = r"(?:benchmarks|examples|tests|tools)/[\w/.-]+"


def intersphinx_mapping(folder):
  """Where Sphinx finds the names of other projects, without a network.

  Sphinx reads only its compressed format. `docs/inventories` has text: the name
  of a function or class, which of both it is, and its page. To link another
  name, add a line.

  Args:
    folder: to write the compressed files to.
  """
  folder.mkdir(parents=True, exist_ok=True)
  mapping = {}
  for project, site in SITES.items():
    text = (ROOT / "docs" / "inventories" / f"{project}.txt").read_text()
    lines = [line.split() for line in text.splitlines()]
    body = "".join(f"{name} py:{kind} 1 {at} -\n" for name, kind, at in lines)
    head = [
      "# Sphinx inventory version 2",
      f"# Project: {project}",
      "# Version: ",
      "# The remainder of this file is compressed using zlib.\n",
    ]
    path = folder / f"{project}.inv"
    path.write_bytes("\n".join(head).encode() + zlib.compress(body.encode()))
    mapping[project] = site, str(path)
  return mapping


def source_of(repository):
  """What `linkcode` calls: a name's lines in the repository."""
  # Public classes say that they are of a public module, which Python's own
  # search for their source believes.
  classes = {
    node.name: (path, node.lineno, node.end_lineno)
    for path in (ROOT / "optax_lossscale").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
  }

  def resolve(domain, info):
    if domain != "py" or not info["module"]:
      return None
    thing = importlib.import_module(info["module"])
    for part in info["fullname"].split("."):
      thing = getattr(thing, part)
    if inspect.isclass(thing):
      where, first, last = classes[thing.__name__]
    elif inspect.isfunction(thing) and thing.__code__.co_filename != "<string>":
      thing = inspect.unwrap(thing)
      where = pathlib.Path(inspect.getsourcefile(thing)).resolve()
      lines, first = inspect.getsourcelines(thing)
      last = first + len(lines) - 1
    else:
      return None
    path = where.relative_to(ROOT)
    return f"{repository}/blob/main/{path}#L{first}-L{last}"

  return resolve


def link_literals(repository):
  """What makes links of code in the text of a page."""

  def link(app, doctree, docname):
    if docname == "changelog":
      return
    seen = set()
    for literal in list(doctree.findall(nodes.literal)):
      if not _is_text(literal):
        continue
      address = _address(app, literal.astext(), docname, repository)
      if address and address not in seen:
        seen.add(address)
        reference = nodes.reference("", "", refuri=address, internal=False)
        literal.replace_self(reference)
        reference += literal

  return link


def _is_text(literal):
  """Whether it is no link, heading or signature, but a part of a sentence."""
  around = (nodes.reference, nodes.title, nodes.term)
  parent = literal.parent
  while parent is not None and not isinstance(parent, nodes.document):
    if isinstance(parent, around) or "desc" in type(parent).__name__:
      return False
    parent = parent.parent
  return True


def _address(app, text, docname, repository):
  if re.fullmatch(FOLDERS, text):
    if not (ROOT / text).exists():
      logging.getLogger(__name__).warning("%s: no file %s", docname, text)
    kind = "tree" if (ROOT / text).is_dir() else "blob"
    return f"{repository}/{kind}/main/{text}"
  first, dot, rest = text.partition("(")[0].partition(".")
  # Other libraries have a `grad`, too.
  if not dot and (first == "autocast" or re.search("[A-Z_]", first)):
    first, rest = "ols", first
  name = f"{SHORT.get(first, first)}.{rest}"
  ours = app.env.domains["py"].objects.get(name)
  if ours:
    page = app.builder.get_relative_uri(docname, ours.docname)
    return f"{page}#{ours.node_id}"
  inventory = InventoryAdapter(app.env).main_inventory
  kinds = (inventory.get(f"py:{kind}", {}) for kind in ("function", "class"))
  return next((names[name].uri for names in kinds if name in names), None)
