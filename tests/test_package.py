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


def test_the_readme_runs_as_pasted(capsys):
  blocks = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
  )
  assert blocks
  # The first runs alone; each later one may go on from those above it.
  namespace = {}
  for block in blocks:
    exec(compile(block, "README.md", "exec"), namespace)
  assert "32768.0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ols.__all__)
def test_a_public_name_is_documented_with_an_example_and_typed(name):
  thing = getattr(ols, name)
  assert inspect.getdoc(thing)
  if inspect.isfunction(thing):
    doc = inspect.getdoc(thing)
    for section in ("Args:", "Returns:", "Examples:", ">>> "):
      assert section in doc, section
    for parameter in inspect.signature(thing).parameters.values():
      assert parameter.annotation is not parameter.empty, parameter
      assert f"{parameter.name}:" in doc, parameter
    assert inspect.signature(thing).return_annotation is not inspect._empty


def test_there_are_few_names_and_they_are_sorted():
  assert len(ols.__all__) <= 25
  assert ols.__all__ == sorted(ols.__all__)


def imports(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
  "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name
)
def test_the_package_imports_jax_and_optax_alone_and_nothing_private(path):
  allowed = {"jax", "optax", "optax_lossscale", *sys.stdlib_module_names}
  if path.parent.name == "interop":
    allowed.add("numpy")  # to read other systems' scalars; comes with jax
  for name in imports(path):
    parts = name.split(".")
    assert parts[0] in allowed, name
    if parts[0] in ("jax", "optax"):
      assert not any(part.startswith("_") for part in parts), name


# What each module may see of the others.
ARROWS = {
  "_state": set(),
  "_scaling": {"_state"},
  "_policies": {"_state"},
  "_select": {"_state"},
  "_axes": {"_scaling"},
  "_wrapper": {"_state", "_scaling", "_policies", "_select", "_axes"},
  "_diagnostics": {"_state", "_scaling"},
}


@pytest.mark.parametrize("module", ARROWS)
def test_imports_between_modules_point_one_way(module):
  names = list(imports(PACKAGE / f"{module}.py"))
  ours = {n.split(".")[1] for n in names if n.startswith("optax_lossscale.")}
  assert ours - {"LossScaleState"} <= ARROWS[module]


def test_no_file_names_a_package_index():
  files = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.splitlines()
  for name in files:
    if pathlib.Path(name).suffix in {".toml", ".txt", ".cfg", ".lock", ".yml"}:
      text = (ROOT / name).read_text()
      assert not re.search(r"index-url|https?://\S*/simple", text), name
