"""The imports, names and requirements of the package, and its layers."""

import ast
import functools
import graphlib
import importlib
import inspect
import itertools
import pickle
import re
import subprocess
import sys
import tomllib

from helpers import ROOT
import pytest
import yaml

import optax_lossscale as ols

PACKAGE, TESTS = ROOT / "optax_lossscale", ROOT / "tests"
SUBMODULES = ("diagnostics", "interop", "plots")
LOADS = """
import sys, optax_lossscale as ols
assert not {"flax", "chex", "matplotlib", "equinox"} & {*sys.modules}
for name in SUBMODULES:
  assert name in dir(ols)
  assert f"optax_lossscale.{name}" not in sys.modules, name
  assert getattr(ols, name).__name__ == f"optax_lossscale.{name}"
"""


def test_import_loads_no_framework_and_submodules_when_they_are_first_used():
  code = LOADS.replace("SUBMODULES", str(SUBMODULES))
  subprocess.run([sys.executable, "-c", code], check=True)
  assert not hasattr(ols, "no_such_name")


@pytest.mark.parametrize("module", ["", *SUBMODULES])
def test_dir_lists_only_public_names_and_classes_name_the_public_path(module):
  path = f"optax_lossscale.{module}".rstrip(".")
  public = importlib.import_module(path)
  own = set() if module else {*SUBMODULES, "__version__"}
  assert set(dir(public)) == {*public.__all__} | own
  for name in public.__all__:
    thing = getattr(public, name)
    if inspect.isclass(thing):
      assert thing.__module__ == path, name
      assert pickle.loads(pickle.dumps(thing)) is thing


def test_public_names_are_documented_with_an_example():
  names = ols.__all__
  offenders = [f"{x}: {lack}" for x in names for lack in list_missing(x)]
  assert not offenders


def list_missing(name):
  thing = getattr(ols, name)
  doc = inspect.getdoc(thing)
  if not doc:
    yield "no docstring"
  elif inspect.isfunction(thing):
    signature = inspect.signature(thing)
    sections = ["Args:", "Examples:", ">>> "]
    if signature.return_annotation is not None:
      sections.append("Returns:")
    yield from (f"no {section}" for section in sections if section not in doc)
    for parameter in signature.parameters.values():
      if f"{parameter.name}:" not in doc:
        yield f"no line on {parameter}"


@functools.cache
def list_nodes(path):
  return list(ast.walk(ast.parse(path.read_text())))


def list_imports(path):
  for node in list_nodes(path):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {
  str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path
  for path in sorted(PACKAGE.rglob("*.py"))
}
# Jax depends on numpy. Modules that read values on the host may use it (such as
# the evidence that update receives), and modules that count with integers.
# Plots need matplotlib, which is imported by the first plot.
MAY_USE_NUMPY = (
  "_jaxprs._primitives",
  "diagnostics.",
  "interop.",
  "_grad_stats",
  "_monitoring",
  "plots",
)
MAY_USE_MATPLOTLIB = {"plots"}


def test_the_package_imports_only_jax_and_optax_and_nothing_private():
  offenders = [
    f"{module} imports {name}"
    for module, path in MODULES.items()
    for name in list_imports(path)
    if not can_import(module, *name.split("."))
  ]
  assert not offenders


def can_import(module, package, *parts):
  allowed = {"jax", "optax", "optax_lossscale", *sys.stdlib_module_names}
  if module.startswith(MAY_USE_NUMPY):
    allowed.add("numpy")
  if module in MAY_USE_MATPLOTLIB:
    allowed.add("matplotlib")
  private = any(part.startswith("_") for part in parts)
  return package in allowed and not (package in ("jax", "optax") and private)


def read_layers():
  """Return the modules of each layer of the diagram, from the top down."""
  page = (ROOT / "ARCHITECTURE.md").read_text()
  layers = page.split("\n## Layers\n")[1].split("\n## ")[0]
  (diagram,) = re.findall(r"^```text\n(.*?)^```", layers, re.M | re.S)
  # A layer may take two lines, of which the first has its number.
  rows = re.split(r"^ +\d \|", diagram, flags=re.MULTILINE)[1:]
  return [re.findall(r"[a-z_]+", row) for row in rows]


TOP_MODULES = sorted({name.split(".")[0] for name in MODULES} - {"__init__"})
# Imports that the layers allow, but that a module must not have.
CORE = {"_arrays", "_grads", "_select", "_state"}
NEVER = {
  "_autocast": CORE,
  "_select": {"_scaling", "_policies"},
  "diagnostics": {"_scaling", "_policies", "_wrapper"},
  "_monitoring": {"_scaling", "_wrapper", "_autocast"},
  "interop": {"_scaling", "_select", "_wrapper", "diagnostics"},
}


def test_imports_go_down_in_the_diagram_which_holds_each_module_once():
  layers = read_layers()
  assert sorted(itertools.chain(*layers)) == TOP_MODULES
  depth = {top: i for i, layer in enumerate(layers) for top in layer}
  for module, path in MODULES.items():
    top = module.split(".")[0]
    for name in list_imports(path):
      parts = name.split(".")
      seen = parts[1] if parts[0] == "optax_lossscale" else None
      if seen not in depth or seen == top or top == "__init__":
        continue
      assert depth[seen] > depth[top], (module, seen)
      assert seen not in NEVER.get(top, ()), (module, seen)
      if top == "diagnostics" and seen == "_autocast":
        # Only the comparison with autocast imports it.
        assert module.startswith("diagnostics._precision"), module


def list_imported_modules(module):
  """Yield the modules that one imports names from, as named in MODULES."""
  for name in list_imports(MODULES[module]):
    parts = name.split(".")
    while parts and parts[0] == "optax_lossscale":
      path = ".".join(parts[1:])
      for seen in (path, f"{path}.__init__".lstrip(".")):
        if seen in MODULES:
          yield seen
          parts = []
      parts = parts[:-1]


def test_imports_have_no_cycle():
  graph = {module: set(list_imported_modules(module)) for module in MODULES}
  assert "diagnostics._overflow._origins" in {*itertools.chain(*graph.values())}
  graphlib.TopologicalSorter(graph).prepare()


# Submodules of packages that other packages import past the package itself.
SEEN_INSIDE = {
  ("diagnostics._precision._compare_precision", "_autocast._matmuls"),
  ("plots", "diagnostics._dtype_limits"),
  ("plots", "diagnostics._leaves"),
}


def test_private_submodules_are_imported_from_outside_in_three_cases_only():
  found = set()
  for module in MODULES:
    for seen in list_imported_modules(module):
      package, *inside = seen.split(".")
      is_package_itself = inside in ([], ["__init__"])
      is_outside = module.split(".")[0] not in (package, "__init__")
      if is_outside and not is_package_itself and package != "_jaxprs":
        found.add((module, seen))
  assert found == SEEN_INSIDE


ENGINES = {"_overflow", "_precision"}
# `check_step` combines them.
COMBINE_ENGINES = {
  "diagnostics.__init__",
  "diagnostics._check_step",
  "diagnostics._problems",
  "diagnostics._wiring",
}


def test_the_engines_of_the_diagnostics_do_not_import_each_other():
  parts_of = {module: set(module.split(".")[:2]) for module in MODULES}
  found = set()
  for module, parts in parts_of.items():
    for seen in list_imported_modules(module):
      is_other_engine = parts_of[seen] & ENGINES - parts
      if "diagnostics" in parts & parts_of[seen] and is_other_engine:
        found.add(module)
  assert found == COMBINE_ENGINES


# Names that JAX may change: params of equations, and attributes of these and of
# types.
INSIDES = {"ctx", "debug_info", "donated_invars", "effects", "inner_aval",
           "params", "source_info"}  # fmt: skip
# As arguments of ``getattr``, or as keys of params.
KEYS = INSIDES - {"effects", "params"}


def test_only_the_jaxprs_package_reads_attributes_that_jax_may_rename():
  offenders = [
    f"{module}:{line} reads {name}"
    for module, path in MODULES.items()
    if not module.startswith("_jaxprs")
    for line, name in list_internals(path)
  ]
  assert not offenders


def list_internals(path):
  for node in list_nodes(path):
    if isinstance(node, ast.Attribute) and node.attr in INSIDES:
      yield node.lineno, node.attr
    elif isinstance(node, ast.Constant) and node.value in KEYS:
      yield node.lineno, repr(node.value)


def test_the_readme_of_the_tests_names_each_folder():
  readme = (TESTS / "README.md").read_text()
  folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
  for folder in folders:
    assert f"`{folder}" in readme, folder


def test_each_path_and_target_in_the_page_on_reliability_exists():
  page = (TESTS / "RELIABILITY.md").read_text()
  paths = re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", page)
  assert len(paths) > 10
  assert not [path for path in paths if not (ROOT / path).exists()]
  targets = re.findall(r"`make ([a-z-]+)", page)
  makefile = (ROOT / "Makefile").read_text()
  assert {f"\n{target}:" in makefile for target in targets} == {True}


def test_the_version_is_equal_in_all_files():
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
  assert citation["version"] == recipe["context"]["version"] == ols.__version__
  line = rf"^## \[{ols.__version__}\] - (unreleased|[\d-]+)$"
  changelog = (ROOT / "CHANGELOG.md").read_text()
  (released,) = re.findall(line, changelog, re.MULTILINE)
  if released != "unreleased":
    assert str(citation["date-released"]) == released


def test_the_conda_recipe_requires_what_the_package_requires():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
  with_space = lambda requirement: re.sub(r"(?=>=)", " ", requirement)
  python, *required = recipe["requirements"]["run"]
  assert python == "python >=${{ python_min }}"
  assert required == [*map(with_space, project["project"]["dependencies"])]
  (build,) = project["build-system"]["requires"]
  needed = with_space(build.replace("_", "-"))
  assert needed in recipe["requirements"]["host"]
