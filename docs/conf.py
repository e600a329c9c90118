"""Settings of the documentation's build; see `make docs`."""

import importlib
import inspect
import os
import pathlib
import re
import sys
import tomllib

import jax
from sphinx.util import logging
from sphinx.util import typing as sphinx_typing

import optax_lossscale as ols

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import fields  # noqa: E402
import links  # noqa: E402

PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Source"]
SITE = os.environ.get(  # Read the Docs has copies at addresses of its own
  "READTHEDOCS_CANONICAL_URL", PROJECT["urls"]["Documentation"]
).rstrip("/")

project = "optax_lossscale"
version = release = ols.__version__
author = "the optax_lossscale authors"

# Of these modules, each public name must be on a page: see warn_of_gaps.
PUBLIC_MODULES = (
  "optax_lossscale",
  "optax_lossscale.diagnostics",
  "optax_lossscale.interop",
  "optax_lossscale.plots",
)

extensions = [
  "myst_nb",  # pages in Markdown, and notebooks
  "notfound.extension",
  "sphinx.ext.autodoc",
  "sphinx.ext.intersphinx",
  "sphinx.ext.linkcode",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",  # tabs, cards and sections that fold
]
exclude_patterns = ["_build"]

# Docstrings.
default_role = "code"  # `this` is code in docstrings as it is in Markdown
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # as they are written: `jnp.float16`
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
python_maximum_signature_line_length = 78
toc_object_entries_show_parents = "hide"

# Links out.
linkcode_resolve = links.source_of(REPOSITORY)
intersphinx_mapping = links.intersphinx_mapping(HERE / "_build" / "inventories")
# A 404 page is shown at any depth, so that its links begin at the host.
notfound_urls_prefix = f"/{SITE.partition('//')[2].partition('/')[2]}/"
notfound_context = {
  "title": "No such page",
  "body": "<h1>No such page</h1><p>It was moved, or never was here. The menu"
  " lists all pages, and the search above it finds words and names.</p>",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# A reference that leads nowhere is a warning, and warnings are errors. Of other
# projects, those are looked up that are stored in docs/inventories.
nitpicky = True
nitpick_ignore_regex = [
  (r"py:.*", r"(?!optax_lossscale|LossScal|.*LossScale\b).*"),
  (r"py:class", r"optax_lossscale\..*\._\w+"),  # variables of types
  (r"py:class", r".*\._overflow\._report\.Context"),  # of a private field
]

# Pages and notebooks. Formulas are plain text: what sets them in a browser
# would have to be loaded from elsewhere.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_html_meta = {"description": PROJECT["description"]}
nb_execution_mode = "force"
# They are kept with their outputs; tests/pages/test_notebooks.py runs them.
nb_execution_excludepatterns = ["*.ipynb"]
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
suppress_warnings = [
  "mystnb.unknown_mime_type",  # of outputs that are no picture and no text
]

html_theme = "sphinx_book_theme"
html_title = "optax_lossscale"
html_baseurl = f"{SITE}/"
html_theme_options = {
  "path_to_docs": "docs",
  "repository_branch": "main",
  "repository_url": REPOSITORY,
  "use_edit_page_button": True,
  "use_repository_button": True,
  "home_page_in_toc": True,
  "show_navbar_depth": 1,
  "show_toc_level": 2,
  "use_download_button": False,
  "use_fullscreen_button": False,
}
html_show_copyright = False
html_show_sourcelink = False
html_use_index = False  # nothing links to it: there are docs/api and the search
html_domain_indices = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]


def setup(app):
  app.connect("source-read", link_to_the_notebooks_pages)
  app.connect("autodoc-process-docstring", fields.add_types, priority=400)
  app.connect("autodoc-process-signature", shorten_types)
  app.connect("autodoc-skip-member", skip_fields)
  app.connect("missing-reference", find_by_last_name)
  app.connect("doctree-resolved", links.link_literals(REPOSITORY))
  app.connect("env-check-consistency", warn_of_gaps)
  app.connect("html-page-context", edit_notebooks_where_they_are)


def link_to_the_notebooks_pages(app, docname, source):
  """Leads links into the repository's notebooks/ to the pages made of them.

  In the sources the links are those that work where the sources lie, in a clone
  or on a code host. Here docs/notebooks is a symbolic link, whose pages only
  Sphinx's own references find.
  """
  del app, docname
  source[0] = re.sub(
    r"\[([^]]+)\]\((?:\.\./)+(notebooks/\w+)\.ipynb\)",
    r"{doc}`\1 </\2>`",
    source[0],
  )


def edit_notebooks_where_they_are(app, pagename, template, context, doctree):
  """Leads the button past the symbolic link, which a code host does not."""
  del app, template, doctree
  if pagename.startswith("notebooks/"):
    context["doc_path"] = ""


def shorten_types(app, what, name, obj, options, signature, return_annotation):
  """Says ArrayLike for the many types it stands for, and jnp.float16."""
  del app, what, name, obj, options
  if signature is not None:
    for mode in ("smart", "fully-qualified-except-typing"):
      long = sphinx_typing.stringify_annotation(jax.typing.ArrayLike, mode)
      signature = signature.replace(long, "ArrayLike")
    # A signature that is not Python, Sphinx prints as it is.
    signature = re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", signature)
  return signature, return_annotation


def skip_fields(app, what, name, obj, skip, options):
  """Leaves out the fields of a class, which its docstring lists."""
  del app, name, options
  is_field = what == "class" and not inspect.isroutine(obj)
  return True if is_field else skip


def find_by_last_name(app, env, node, contnode):
  """Finds a class that a docstring names without its module."""
  if node["refdomain"] != "py" or node.get("refspecific"):
    return None
  node["refspecific"] = True  # Sphinx: in whatever module it is
  return env.domains["py"].resolve_xref(
    env,
    node["refdoc"],
    app.builder,
    node["reftype"],
    node["reftarget"],
    node,
    contnode,
  )


def warn_of_gaps(app, env):
  """Warns of a public name that is on no page, or has no docstring."""
  del app
  documented = env.domains["py"].objects
  for module_name in PUBLIC_MODULES:
    module = importlib.import_module(module_name)
    for name in module.__all__:
      if inspect.ismodule(getattr(module, name)):
        continue
      full_name = f"{module_name}.{name}"
      if full_name not in documented:
        _warn("%s is on no page in docs/api", full_name)
      elif not getattr(module, name).__doc__:
        _warn("%s has no docstring", full_name)


def _warn(message, *args):
  logging.getLogger(__name__).warning(message, *args)
