"""The package as a newcomer meets it: import, README, names, dependencies."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "optax_lossscale"


def test_import_loads_neither_flax_nor_chex_nor_matplotlib():
  code = (
    "import sys, optax_lossscale; loaded = {m.split('.')[0] for m in"
    " sys.modules}; print(loaded & {'flax', 'chex', 'matplotlib', 'equinox'})"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == "set()"


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
# plots are drawn with matplotlib, which is imported when one is asked for.
MAY_USE_NUMPY = {"_diagnostics", "_leaves", "_report", "_stuck", "plots"}
MAY_USE_MATPLOTLIB = {"plots"}


@pytest.mark.parametrize("module", MODULES)
def test_the_package_imports_jax_and_optax_alone_and_nothing_private(module):
  allowed = {"jax", "optax", "optax_lossscale", *sys.stdlib_module_names}
  if module in MAY_USE_NUMPY or module.startswith("interop."):
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
  "_state",
  "_grads",
  "_loss",
  "_scaling",
  "_policies",
  "_exponents",
  "_axes",
  "_headroom",
  "_probes",
  "_select",
  "_updates",
  "_wrapper",
  "_leaves",
  "_diagnostics",
  "_stuck",
  "_report",
  "plots",
  "interop",
)
# Beyond the order: what keeps the core a core.
NEVER = {
  "_policies": {"_scaling"},
  "_select": {"_scaling", "_policies"},
  "_updates": {"_scaling", "_policies", "_axes"},
  "_diagnostics": {"_policies", "_wrapper"},
  "interop": {"_scaling", "_select", "_wrapper", "_diagnostics", "_stuck"},
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


def test_no_file_names_a_package_index():
  files = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.splitlines()
  for name in files:
    if pathlib.Path(name).suffix in {".toml", ".txt", ".cfg", ".lock", ".yml"}:
      text = (ROOT / name).read_text()
      assert not re.search(r"index-url|https?://\S*/simple", text), name
