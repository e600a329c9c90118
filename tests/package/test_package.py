"""The package as a newcomer meets it: import, README, names, dependencies."""

import ast
import graphlib
import importlib
import inspect
import itertools
import pathlib
import pickle
import re
import subprocess
import sys

from helpers import ROOT
import pytest

import optax_lossscale as ols

PACKAGE = ROOT / "optax_lossscale"
SUBMODULES = ("diagnostics", "interop", "plots")


def run_code(code):
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  return out.stdout.strip()


def test_import_loads_neither_flax_nor_chex_nor_matplotlib():
  code = (
    "import sys, optax_lossscale; loaded = {m.split('.')[0] for m in"
    " sys.modules}; print(loaded & {'flax', 'chex', 'matplotlib', 'equinox'})"
  )
  assert run_code(code) == "set()"


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_submodule_is_loaded_when_it_is_first_used(name):
  code = (
    "import sys, optax_lossscale as ols;"
    f" before = 'optax_lossscale.{name}' in sys.modules;"
    f" print(before, {name!r} in dir(ols), ols.{name}.__name__)"
  )
  assert run_code(code) == f"False True optax_lossscale.{name}"
  assert not hasattr(ols, "no_such_name")


@pytest.mark.parametrize("module", ["", *SUBMODULES])
def test_a_public_class_names_the_public_path(module):
  path = f"optax_lossscale.{module}".rstrip(".")
  public = importlib.import_module(path)
  for name in public.__all__:
    thing = getattr(public, name)
    if inspect.isclass(thing):
      assert thing.__module__ == path, name
      assert pickle.loads(pickle.dumps(thing)) is thing


@pytest.mark.parametrize("name", ols.__all__)
def test_a_public_name_is_documented_with_an_example_and_typed(name):
  thing = getattr(ols, name)
  assert inspect.getdoc(thing)
  if inspect.isfunction(thing):
    doc = inspect.getdoc(thing)
    signature = inspect.signature(thing)
    sections = ["Args:", "Examples:", ">>> "]
    if signature.return_annotation is not None:
      sections.append("Returns:")
    for section in sections:
      assert section in doc, section
    for parameter in signature.parameters.values():
      assert parameter.annotation is not parameter.empty, parameter
      assert f"{parameter.name}:" in doc, parameter
    assert signature.return_annotation is not signature.empty


def test_there_are_few_names_and_they_are_sorted():
  assert len(ols.__all__) <= 25
  assert ols.__all__ == sorted(ols.__all__)


def imports(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {
  str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path
  for path in sorted(PACKAGE.rglob("*.py"))
}
# Beside jax, which brings numpy: what reads values on the host uses it, and
# what makes float0, which jax.numpy cannot. Plots are drawn with matplotlib,
# which is imported when one is asked for.
MAY_USE_NUMPY = (
  "_jaxprs._products",
  "_jaxprs._zeros",
  "diagnostics.",
  "interop.",
  "_causes",
  "_monitoring",
  "plots",
)
MAY_USE_MATPLOTLIB = {"plots._figures"}


@pytest.mark.parametrize("module", MODULES)
def test_the_package_imports_jax_and_optax_alone_and_nothing_private(module):
  allowed = {"jax", "optax", "optax_lossscale", *sys.stdlib_module_names}
  if module.startswith(MAY_USE_NUMPY):
    allowed.add("numpy")
  if module in MAY_USE_MATPLOTLIB:
    allowed.add("matplotlib")
  for name in imports(MODULES[module]):
    parts = name.split(".")
    assert parts[0] in allowed, name
    if parts[0] in ("jax", "optax"):
      assert not any(part.startswith("_") for part in parts), name


# In the order in which they may see each other: each only those before it.
ORDER = (
  "_arrays",
  "_checks",
  "_host",
  "_jaxprs",
  "_warnings",
  "_paths",
  "_state",
  "_policies",
  "_grads",
  "_judged",
  "_axes",
  "_measurement",
  "_loss",
  "_scaling",
  "_select",
  "_updates",
  "_wrapper",
  "_autocast",
  "diagnostics",
  "plots",
  "_causes",
  "_monitoring",
  "interop",
)
# Beyond the order: what keeps the core a core.
CORE = set(ORDER[: ORDER.index("_autocast")]) - {
  "_checks",
  "_host",
  "_jaxprs",
  "_paths",
  "_warnings",
}
NEVER = {
  "_autocast": CORE,
  "_select": {"_scaling", "_policies"},
  "diagnostics": {"_scaling", "_policies", "_wrapper"},
  "_monitoring": {"_scaling", "_wrapper", "_autocast"},
  "interop": {"_scaling", "_select", "_wrapper", "diagnostics"},
}


def test_imports_between_modules_point_one_way():
  tops = {module.split(".")[0] for module in MODULES} - {"__init__"}
  assert tops == set(ORDER)
  for module, path in MODULES.items():
    top = module.split(".")[0]
    for name in imports(path):
      parts = name.split(".")
      seen = parts[1] if parts[0] == "optax_lossscale" else None
      if seen not in ORDER or seen == top or top == "__init__":
        continue
      assert ORDER.index(seen) < ORDER.index(top), (module, seen)
      assert seen not in NEVER.get(top, ()), (module, seen)
      if top == "diagnostics" and seen == "_autocast":
        # Only what compares with autocast knows of it.
        assert module.startswith("diagnostics._comparison"), module


def modules_seen_by(module):
  """The modules that one imports names from, as they are called in MODULES."""
  for name in imports(MODULES[module]):
    parts = name.split(".")
    while parts and parts[0] == "optax_lossscale":
      path = ".".join(parts[1:])
      for seen in (path, f"{path}.__init__".lstrip(".")):
        if seen in MODULES:
          yield seen
          parts = []
      parts = parts[:-1]


def test_imports_go_round_in_no_circle():
  graph = {module: set(modules_seen_by(module)) for module in MODULES}
  assert "diagnostics._overflow._marks" in {*itertools.chain(*graph.values())}
  graphlib.TopologicalSorter(graph).prepare()


def test_nobody_outside_sees_the_parts_of_the_policies():
  for module in MODULES:
    if not module.startswith("_policies."):
      for seen in modules_seen_by(module):
        parts = seen.split(".")
        assert parts[0] != "_policies" or parts[1] == "__init__", (module, seen)


def test_the_engines_of_the_diagnostics_know_nothing_of_each_other():
  engine_of = {
    module: module.split(".")[1]
    for module in MODULES
    if re.match(r"diagnostics\.(.+\.|_gradients)", module)
  }
  assert set(engine_of.values()) == {
    "_comparison",
    "_gradients",
    "_overflow",
    "_precision",
  }
  for module in MODULES:
    if module == "diagnostics.__init__":
      continue
    for seen in modules_seen_by(module):
      engine = engine_of.get(seen)
      assert engine in (None, engine_of.get(module)), (module, seen)


# What JAX may rename: parameters of equations, and attributes of these and of
# types.
INSIDES = {"ctx", "debug_info", "donated_invars", "effects", "inner_aval",
           "params", "source_info"}  # fmt: skip


@pytest.mark.parametrize(
  "module", [x for x in MODULES if not x.startswith("_jaxprs")]
)
def test_only_one_room_reads_what_jax_may_rename(module):
  nodes = list(ast.walk(ast.parse(MODULES[module].read_text())))
  read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
  # As those of ``getattr``, or the keys of parameters.
  named = {node.value for node in nodes if isinstance(node, ast.Constant)}
  assert not INSIDES & read
  assert not INSIDES & named - {"effects", "params"}


def test_no_file_names_a_package_index():
  files = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.splitlines()
  for name in files:
    if pathlib.Path(name).suffix in {".toml", ".txt", ".cfg", ".lock", ".yml"}:
      text = (ROOT / name).read_text()
      assert not re.search(r"index-url|https?://\S*/simple", text), name
