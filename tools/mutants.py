"""Mutation testing: changes the package in one location at a time.

    python tools/mutants.py _policies._dynamic
    python tools/mutants.py _autocast --sample 200
    python tools/mutants.py --check

cosmic-ray replaces operators, numbers, conditions and decorators of a module,
or of all modules of a folder, in a copy of the project, and runs the tests of
the module for each such mutant. The tool prints how many mutants failed a test,
and the survivors, which failed none. It exits with 1 if more than a tenth
survive.

`tests/README.md` lists the tests of each module. With `--check`, the tool
checks this list: it draws one mutant of each module and runs only the quick
tests of the list, without doctests. It exits with 1 if a mutant survives:
another test file may belong on the list.
"""

import argparse
import ast
import collections
from collections.abc import Iterable
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

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "optax_lossscale"


def read_tests(page: str) -> dict[str, list[str]]:
  """Return the test files of each module or folder, from tests/README.md."""
  rows = re.findall(r"^\| `([\w/]+)` \| (`.*`) \|$", page, re.MULTILINE)
  return {
    module.replace("/", "."): re.findall(r"`([^`]+)`", tests)
    for module, tests in rows
  }


# The first failure ends a mutant, so the order of the files matters.
TESTS = read_tests((ROOT / "tests" / "README.md").read_text())
# The tests of this folder take longest, so its mutants are tried last.
SLOWEST = "diagnostics._comparison"
# These replacements fail on any array of floats and on any bool, so every test
# that runs the line catches them.
ALWAYS_CAUGHT = re.compile(
  r"core/ReplaceBinaryOperator_"
  r"((Add|Sub|Mul|Div|Pow)_(FloorDiv|Mod|RShift|LShift|Bit.*)"
  r"|Bit.*_(Add|Sub|Mul|Div|Pow|FloorDiv|Mod|RShift|LShift))"
)
OPTIONS = [
  "-x",
  "-q",
  "-pno:cacheprovider",
  "--hypothesis-profile=mutants",
]
TIMEOUT = 600  # seconds for the tests of one mutant
PASSED = 0, 5  # pytest exits with 5 if no test was selected


def main():
  """Try mutants, print the survivors, and exit with 1 if there are too many."""
  args = parse_args()
  folder = copy_project(args.name or "check")
  items = list_items(folder, find_modules(args.name))
  items = [item for item in items if is_informative(item)]
  counts = collections.Counter(get_module(folder, item) for item in items)
  random.Random(0).shuffle(items)
  if args.check:  # the first mutant of each module
    by_module = {get_module(folder, item): item for item in reversed(items)}
    items = list(by_module.values())
  items = items[: args.sample]
  items.sort(key=lambda item: get_module(folder, item).startswith(SLOWEST))
  check_tests_pass(folder, items, is_quick=args.check)
  outcomes = collections.defaultdict(list)
  for item in items:
    caught = is_caught(folder, item, is_quick=args.check)
    outcomes[get_module(folder, item)].append(caught)
  for module in sorted(outcomes):
    print_figures(module, counts[module], outcomes[module])
  every = [caught for caughts in outcomes.values() for caught in caughts]
  if len(counts) > 1:
    print_figures(args.name or "all modules", sum(counts.values()), every)
  sys.exit(int(sum(every) < (1.0 if args.check else 0.9) * len(every)))


def print_figures(name: str, count: int, caught: list[bool]) -> None:
  """Print how many of the mutants that were tried failed a test."""
  tried = len(caught)
  print(f"{name}: {sum(caught)} of {tried} mutants failed a test, of {count}")


def parse_args() -> argparse.Namespace:
  """Return the command line; `name` is None or has tests."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  name_help = (
    "a module or folder: _select, _jaxprs._custom_derivatives, _jaxprs"
  )
  check_help = "try one mutant of each module with the tests in tests/README.md"
  sample_help = "the number of mutants, drawn at random"
  add("name", nargs="?", help=name_help)
  add("--check", action="store_true", help=check_help)
  add("--sample", type=int, help=sample_help)
  args = parser.parse_args()
  if not (args.name or args.check):
    parser.error("name a module or folder, or use --check for all modules")
  if not find_modules(args.name):
    parser.error(f"tests/README.md lists no tests for {args.name}")
  return args


def find_modules(name: str | None) -> list[str]:
  """Return the modules of a module, of a folder, or (None) of the package."""
  package = ROOT / PACKAGE
  path = package / name.replace(".", "/") if name else package
  files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
  files = [f.with_suffix("") for f in files if f.name != "__init__.py"]
  modules = [".".join(f.relative_to(package).parts) for f in files]
  return [module for module in modules if get_test_key(module) is not None]


def get_test_key(module: str) -> str | None:
  """Return the key of a module in TESTS: the module itself, or its folder."""
  names = module, module.rpartition(".")[0]
  return next((name for name in names if name in TESTS), None)


def copy_project(name: str) -> pathlib.Path:
  """Copy the project, and return the folder of the copy."""
  folder = ROOT / "build" / "mutants" / name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  for part in ("benchmarks", "docs", "examples", PACKAGE, "tests"):
    ignore = shutil.ignore_patterns("__pycache__", "_build")
    shutil.copytree(ROOT / part, folder / part, ignore=ignore)
  shutil.copy(ROOT / "pyproject.toml", folder)
  return folder


def make_environment(folder: pathlib.Path, is_mutant: bool) -> dict[str, str]:
  """Return the environment of the tests, which must import the copy."""
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(folder),
    # Most mutants share the programs of XLA's cache.
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "mutants" / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  # The run without a mutant writes the bytecode that all mutants read. Else, a
  # mutant could run the bytecode of another one of the same second.
  if is_mutant:
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
  return environment


def list_items(folder: pathlib.Path, modules: list[str]) -> list[WorkItem]:
  """Return all mutants of the modules."""
  with use_db(folder / "session", WorkDB.Mode.create) as db:
    init([get_copy_path(folder, module) for module in modules], db, {})
    return sorted(db.work_items, key=get_sort_key)


def get_sort_key(item: WorkItem) -> tuple[str, str, int]:
  """Return a key that orders mutants the same way in each run."""
  (mutation,) = item.mutations
  path, operator = str(mutation.module_path), mutation.operator_name
  return path, operator, mutation.occurrence


def get_copy_path(folder: pathlib.Path, module: str) -> pathlib.Path:
  """Return the path of a module in the copy."""
  return folder / PACKAGE / f"{module.replace('.', '/')}.py"


def get_module(folder: pathlib.Path, item: WorkItem) -> str:
  """Return the module that a mutant changes."""
  path = item.mutations[0].module_path.relative_to(folder / PACKAGE)
  return ".".join(path.with_suffix("").parts)


def find_test_paths(modules: Iterable[str], *, doctests: bool) -> list[str]:
  """Return the test files of modules, with the modules' doctests at the end."""
  modules = list(modules)
  # A dict keeps the order and drops repetitions.
  files = dict.fromkeys(f for m in modules for f in TESTS[get_test_key(m)])
  paths = [f"tests/{file}" for file in files]
  if doctests:
    paths += [str(get_copy_path(pathlib.Path(), m)) for m in modules]
  return paths


def check_tests_pass(
  folder: pathlib.Path, items: list[WorkItem], *, is_quick: bool
) -> None:
  """Exit if a test fails without a mutant, as then it says nothing of one."""
  modules = sorted({get_module(folder, item) for item in items})
  paths = find_test_paths(modules, doctests=not is_quick)
  for slow in (False,) if is_quick else (False, True):
    if fails(folder, paths, slow=slow, is_mutant=False):
      sys.exit("The tests fail without a mutant.")


def fails(
  folder: pathlib.Path,
  paths: list[str],
  *,
  slow: bool = False,
  is_mutant: bool = True,
) -> bool:
  """Return whether a quick or a slow test fails, or the tests time out."""
  marks = f"{'' if slow else 'not '}slow and not nightly"
  command = [sys.executable, "-m", "pytest", *OPTIONS, "-m", marks]
  process = subprocess.Popen(
    [*command, *paths],
    cwd=folder,
    env=make_environment(folder, is_mutant),
    stdout=subprocess.DEVNULL if is_mutant else None,
    stderr=subprocess.DEVNULL if is_mutant else None,
    start_new_session=True,
  )
  try:
    # The timeout is for a mutant that never ends. Without a mutant, the tests
    # of many modules may run.
    status = process.wait(TIMEOUT if is_mutant else None)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
  if status not in (*PASSED, 1, 2):  # Failed, or not collected.
    print(f"The tests ended with the status {status}.", flush=True)
  return status not in PASSED


def is_caught(folder: pathlib.Path, item: WorkItem, *, is_quick: bool) -> bool:
  """Return whether a mutant fails a test, and print the mutant if not."""
  (mutation,) = item.mutations
  operator = plugins.get_operator(mutation.operator_name)
  operator = operator(**mutation.operator_args)
  module = get_module(folder, item)
  paths = find_test_paths([module], doctests=not is_quick)
  mutant = use_mutation(mutation.module_path, operator, mutation.occurrence)
  with mutant as (old, new):
    caught = fails(folder, paths)
    caught = caught or (not is_quick and fails(folder, paths, slow=True))
  if not caught:
    lines = difflib.unified_diff(old.split("\n"), new.split("\n"), n=0)
    changed = [x for x in lines if re.match(r"@@|[-+](?![-+])", x)]
    print(module, mutation.operator_name, *changed, "", sep="\n", flush=True)
  return caught


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


if __name__ == "__main__":
  main()
