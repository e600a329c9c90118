"""Writes the links of the pages into the documentation of JAX, Optax and Flax.

    python tools/inventories.py

The build of the pages has no network, so that it cannot ask those sites where a
name is explained. This looks up each name that our pages and docstrings mention
in the packages that are installed, and writes where it is explained into
`docs/inventories/`. A name that is gone there is left out, and a test fails.
"""

import inspect
import pathlib
import pkgutil
import re

ROOT = pathlib.Path(__file__).parents[1]
INVENTORIES = ROOT / "docs" / "inventories"
# As pages write them, and as they are.
SHORT = {"jnp": "jax.numpy", "lax": "jax.lax", "nnx": "flax.nnx"}
# In signatures, which no page spells.
IN_SIGNATURES = {
  "jax.Array",
  "optax.GradientTransformation",
  "optax.GradientTransformationExtraArgs",
}
# Pages of Optax and Flax with the names on them; JAX has one for each name.
PAGES = {
  "optax": {
    "api/apply_updates.html": ["apply_updates"],
    "api/combining_optimizers.html": ["chain", "partition"],
    "api/optimizer_schedules.html": ["inject_hyperparams"],
    "api/transformations.html": [
      "GradientTransformation",
      "GradientTransformationExtraArgs",
      "clip",
      "clip_by_global_norm",
    ],
  },
  "flax": {
    "api_reference/flax.nnx/transforms.html": [
      "nnx.jit",
      "nnx.remat",
      "nnx.value_and_grad",
    ],
    # A class is explained by the name of its module.
    "api_reference/flax.nnx/training/optimizer.html": ["nnx.Optimizer"],
  },
}
ANCHORS = {"flax.nnx.Optimizer": "flax.nnx.optimizer.Optimizer"}


def main():
  """Writes a file for each package."""
  for package, lines in build_inventories().items():
    text = "\n".join(["# Written by tools/inventories.py.", *lines])
    (INVENTORIES / f"{package}.txt").write_text(f"{text}\n")


def build_inventories():
  """The lines of each file: a name, what it is, and where it is explained."""
  found = {"flax": [], "jax": [], "optax": []}
  for name in sorted(mentioned() | IN_SIGNATURES):
    package = name.partition(".")[0]
    if package in found and (where := address(name)) and (what := kind(name)):
      found[package].append(f"{name} {what} {where}")
  return found


def mentioned():
  """Return the full names of other packages in code of pages and docstrings."""
  pages = (ROOT / "docs").glob("**/*.md")
  modules = (ROOT / "optax_lossscale").rglob("*.py")
  names = set()
  for path in [*pages, *modules]:
    for name in re.findall(r"`~?([a-z]\w*(?:\.\w+)+)[`(]", path.read_text()):
      first, dot, rest = name.partition(".")
      names.add(f"{SHORT.get(first, first)}{dot}{rest}")
  return names


def address(name):
  """Where it is explained, relative to the site of its package, or None."""
  package, _, rest = name.partition(".")
  if package == "jax":
    page = f"_autosummary/{name}.html"
  else:
    pages = PAGES.get(package, {}).items()
    page = next((page for page, names in pages if rest in names), None)
  return page and f"{page}#{ANCHORS.get(name, name)}"


def kind(name):
  """Return the Sphinx role of a public name of a package, or None."""
  try:
    thing = pkgutil.resolve_name(name)  # imports the modules on the way
  except (AttributeError, ImportError):
    return None
  if inspect.isclass(thing):
    return "class"
  return "function" if callable(thing) else None


if __name__ == "__main__":
  main()
