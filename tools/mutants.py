"""Mutation testing: changes the package in one location at a time.

    python tools/mutants.py _policies._dynamic
    python tools/mutants.py _autocast _jaxprs --sample 2

cosmic-ray replaces operators, numbers, conditions and decorators in a copy of
the project. For each such mutant, a quick test must fail, of a file that runs
the changed function. The tool draws a sample of the mutants of each module,
prints how many failed a test, and the survivors, which failed none. It exits
with 1 if more than a tenth survive.

Before the first mutant, and again after a change of the package or of the
tests, the tool runs all quick tests to measure which files run which lines.
This takes some minutes.
"""

import argparse
import ast
import collections
import difflib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

from cosmic_ray import plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_db import use_db, WorkDB
from cosmic_ray.work_item import WorkItem
from coverage import CoverageData

ROOT = pathlib.Path(__file__).parents[1]
COPY = ROOT / "build" / "mutants" / "copy"
PACKAGE = COPY / "optax_lossscale"
COVERAGE = ROOT / "build" / "mutants" / "coverage"
# These replacements fail on any array of floats and on any bool, so every test
# that runs the line catches them.
ALWAYS_CAUGHT = re.compile(
  r"core/ReplaceBinaryOperator_"
  r"((Add|Sub|Mul|Div|Pow)_(FloorDiv|Mod|RShift|LShift|Bit.*)"
  r"|Bit.*_(Add|Sub|Mul|Div|Pow|FloorDiv|Mod|RShift|LShift))"
)
PYTEST = [
  *(sys.executable, "-m", "pytest", "-x", "-q", "-pno:cacheprovider"),
  "--hypothesis-profile=mutants",
  # The tests of files that are not copied.
  *("--ignore=tests/pages", "--ignore=tests/package/test_package.py"),
]
TIMEOUT = 600  # seconds for the tests of one mutant

# The test files that run each line of each module.
FilesByLine = dict[pathlib.Path, dict[int, set[str]]]


def main():
  """Try mutants, print the survivors, and exit with 1 if there are too many."""
  args = parse_args()
  copy_and_measure()
  coverage = read_coverage()
  sizes = collections.Counter(
    file
    for lines in coverage.values()
    for files in lines.values()
    for file in files
  )
  num_caught = num_tried = 0
  for path in find_modules(args.names):
    items = list(filter(is_informative, list_items(path)))
    tried = random.Random(0).sample(items, min(args.sample, len(items)))
    # The first failure ends a mutant, so the most specific files come first.
    caught = sum(
      is_caught(item, sorted(find_files(item, coverage[path]), key=sizes.get))
      for item in tried
    )
    name = path.relative_to(PACKAGE)
    print(f"{name}: {caught} of {len(tried)} mutants failed a test", flush=True)
    num_caught, num_tried = num_caught + caught, num_tried + len(tried)
  print(f"in total: {num_caught} of {num_tried} mutants failed a test")
  sys.exit(int(num_caught < 0.9 * num_tried))


def parse_args() -> argparse.Namespace:
  """Return the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names_help = (
    "modules or folders: _select, _jaxprs._custom_derivatives, _jaxprs; all if"
    " none is named"
  )
  sample_help = "the number of mutants of each module, drawn at random"
  parser.add_argument("names", nargs="*", default=[""], help=names_help)
  parser.add_argument("--sample", type=int, default=8, help=sample_help)
  return parser.parse_args()


def copy_and_measure() -> None:
  """Copy the project, and measure which tests run which lines if it changed."""
  sources = [*ROOT.glob("optax_lossscale/**/*.py"), *ROOT.glob("tests/**/*.py")]
  newest = max(path.stat().st_mtime for path in sources)
  is_measured = COVERAGE.exists() and COVERAGE.stat().st_mtime > newest
  if not is_measured:
    shutil.rmtree(COPY, ignore_errors=True)
  ignore = shutil.ignore_patterns("__pycache__", "_build")
  for part in ("benchmarks", "docs", "examples", PACKAGE.name, "tests"):
    shutil.copytree(ROOT / part, COPY / part, ignore=ignore, dirs_exist_ok=True)
  shutil.copy(ROOT / "pyproject.toml", COPY)
  if not is_measured:
    COVERAGE.unlink(missing_ok=True)
    options = ["-n2", "--cov", "--cov-context=test", "--cov-report="]
    command = [*PYTEST, *options, "--cov-fail-under=0"]
    environment = make_environment() | {
      "COVERAGE_CORE": "ctrace",  # sys.monitoring has no contexts
      "COVERAGE_FILE": f"{COVERAGE}.part",
    }
    if subprocess.run(command, cwd=COPY, env=environment).returncode:
      sys.exit("The tests fail without a mutant.")
    pathlib.Path(f"{COVERAGE}.part").rename(COVERAGE)


def make_environment() -> dict[str, str]:
  """Return the environment of the tests, which must import the copy."""
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
    "PYTHONPATH": str(COPY),
  }


def read_coverage() -> FilesByLine:
  """Return the test files that run each line of each module."""
  data = CoverageData(str(COVERAGE))
  data.read()
  return {
    pathlib.Path(file): {
      # A context is a test and its phase: "tests/test_x.py::test_y|run".
      line: {context.partition("::")[0] for context in contexts} - {""}
      for line, contexts in data.contexts_by_lineno(file).items()
    }
    for file in data.measured_files()
  }


def find_modules(names: list[str]) -> list[pathlib.Path]:
  """Return the paths of modules, and of all modules of folders."""
  paths = []
  for name in names:
    path = PACKAGE / name.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    paths += sorted(file for file in files if file.name != "__init__.py")
  return paths


def list_items(path: pathlib.Path) -> list[WorkItem]:
  """Return all mutants of a module, the same way in each run."""
  with use_db(COPY / "session", WorkDB.Mode.create) as db:
    init([path], db, {})
    get_key = lambda item: (
      item.mutations[0].operator_name,
      item.mutations[0].occurrence,
    )
    return sorted(db.work_items, key=get_key)


def is_informative(item: WorkItem) -> bool:
  """Return whether the outcome of a mutant shows something about the tests.

  It does not for mutants that any test catches; for operators in annotations
  and signatures, where they belong to types or are the star before keyword-only
  parameters; and for `strict=True`, which asserts what always holds.
  """
  (mutation,) = item.mutations
  operator = mutation.operator_name
  source = mutation.module_path.read_text()
  line = mutation.start_pos[0]
  return not (
    ALWAYS_CAUGHT.match(operator)
    or ("Binary" in operator and line in find_annotation_lines(source))
    or ("True" in operator and "strict=True" in source.split("\n")[line - 1])
  )


def find_annotation_lines(source: str) -> set[int]:
  """Return the line numbers of signatures and of annotated fields."""
  lines: set[int] = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef):
      lines.update(range(node.lineno, node.body[0].lineno))
    if isinstance(node, ast.AnnAssign) and not node.value:
      lines.add(node.lineno)
  return lines


def find_files(item: WorkItem, files: dict[int, set[str]]) -> set[str]:
  """Return the files that run the function of a mutant, or else its module."""
  (mutation,) = item.mutations
  line = mutation.start_pos[0]
  functions = [
    range(node.body[0].lineno, node.end_lineno + 1)
    for node in ast.walk(ast.parse(mutation.module_path.read_text()))
    if isinstance(node, ast.FunctionDef)
    and node.lineno <= line <= node.end_lineno
  ]
  # The innermost function, if functions are nested.
  lines = min(functions, key=len, default=files)
  return set().union(*(files.get(line, ()) for line in lines))


def is_caught(item: WorkItem, files: list[str]) -> bool:
  """Return whether a mutant fails a test, and print the mutant if not."""
  (mutation,) = item.mutations
  operator = plugins.get_operator(mutation.operator_name)
  operator = operator(**mutation.operator_args)
  mutant = use_mutation(mutation.module_path, operator, mutation.occurrence)
  with mutant as (old, new):
    caught = bool(files) and fails(files)
  if not caught:
    lines = difflib.unified_diff(old.split("\n"), new.split("\n"), n=0)
    changed = [x for x in lines if re.match(r"@@|[-+](?![-+])", x)]
    print(mutation.module_path.name, mutation.operator_name, *changed, sep="\n")
    print(f"Of the tests, {len(files)} files run it.\n", flush=True)
  return caught


def fails(files: list[str]) -> bool:
  """Return whether a test of the files fails, or the tests time out."""
  process = subprocess.Popen(
    [*PYTEST, *files],
    cwd=COPY,
    # A mutant could run the bytecode of another one of the same second.
    env=make_environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  )
  try:
    return process.wait(TIMEOUT) != 0
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


if __name__ == "__main__":
  main()
