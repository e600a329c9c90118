"""Mutation testing: breaks the package in one place after another.

    python tools/mutants.py _policies._dynamic
    python tools/mutants.py _autocast --sample 200 --seed 0

cosmic-ray exchanges operators, numbers, conditions and decorators of a module,
or of all modules of a folder, in a copy of the project, and the tests run for
each such mutant. It prints how many mutants failed a test, and the survivors,
for which no test would fail. Exits with 1 if more than a tenth survive.
"""

import argparse
import ast
import collections
from collections.abc import Iterable
import difflib
import importlib
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import sys
import time
import warnings

from cosmic_ray import plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_db import use_db, WorkDB
from cosmic_ray.work_item import WorkItem

ROOT = pathlib.Path(__file__).parents[1]
# A mutant is done with its first failure: its own tests first, quick ones next.
# `core/state` is tests/core/test_state.py, and `_jaxprs._custom_derivatives` is
# optax_lossscale/_jaxprs/_custom_derivatives.py.
TESTS = {
  "_arrays": [
    "core/state",
    "core/select",
    "core/scaling",
    "core/select_types",
    "core/wrapper",
    "policies/headroom",
  ],
  "_checks": [
    "core/checks",
    "diagnostics/leaves",
    "interop/errors",
    "interop/writing",
  ],
  "_policies._powers_of_two": ["core/state", "policies/headroom"],
  "_jaxprs": [  # what is not named here
    "package/jax",
    "autocast/provenance",
    "autocast/weights",
    "autocast/reach",
    "autocast/float32_filter",
    "autocast/shared_custom_derivatives",
    "autocast/cotangents",
    "core/select",
    "core/select_types",
    "diagnostics/higher_order",
    "diagnostics/precision_report",
    "diagnostics/find_overflow",
    "diagnostics/compare_precision",
  ],
  "_jaxprs._provenance": ["autocast/provenance", "autocast/float32_filter"],
  "_jaxprs._weights": [
    "autocast/weights",
    "autocast/provenance",
    "autocast/float32_filter",
  ],
  "_jaxprs._harvest": ["diagnostics/tracing"],
  "_jaxprs._primitives": [
    "autocast/weights",
    "autocast/cotangents",
    "autocast/rewrite",
    "diagnostics/precision_report",
    "autocast/reach",
  ],
  "_tags": ["diagnostics/tracing"],
  "_grads": [
    "core/scaling",
    "core/checks",
    "core/cost",
    "diagnostics/leaves",
    "core/wrapper",
    "policies/headroom",
  ],
  "_state": ["core/state", "core/checkpoints", "frameworks/flax_nnx"],
  "_axes": ["devices/shard_map", "core/checks", "core/select"],
  "_grad_stats": [
    "core/checks",
    "core/wrapper",
    "core/cost",
    "devices/shard_map",
    "policies/headroom",
  ],
  "_scaling": [
    "core/scaling",
    "core/checks",
    "core/cost",
    "frameworks/equinox",
    "frameworks/flax_nnx",
    "core/wrapper",
  ],
  "_policies._base": [
    "core/checks",
    "core/wrapper",
    "policies/dynamic",
    "core/state",
  ],
  "_policies._dynamic": [
    "core/checks",
    "policies/dynamic",
    "policies/random_programs",
    "core/state",
    "policies/headroom",
  ],
  "_policies._policy_like": [
    "core/checks",
    "policies/dynamic",
    "policies/headroom",
  ],
  "_policies._search": ["policies/headroom", "policies/starving"],
  "_policies._headroom": [
    "policies/headroom",
    "policies/starving",
    "core/checks",
  ],
  "_select": [
    "core/select",
    "core/select_types",
    "core/cost",
    "policies/random_programs",
    "core/optax_compositions",
  ],
  "_wrapper": [
    "core/checks",
    "core/wrapper",
    "core/optax_battery",
    "core/cost",
    "core/select",
    "diagnostics/probes",
    "policies/random_programs",
  ],
  "_autocast": [  # what is not named here
    "autocast/weights",
    "autocast/float32_filter",
    "autocast/shared_custom_derivatives",
    "autocast/matmuls",
    "autocast/reach",
    "autocast/rewrite",
  ],
  "_autocast._float32_filter": ["autocast/float32_filter", "autocast/reach"],
  "_autocast._messages": [
    "autocast/reach",
    "autocast/rewrite",
    "autocast/messages",
  ],
  "_autocast._call_args": [
    "autocast/weights",
    "autocast/frameworks",
    "autocast/call_args",
  ],
  "_autocast._autocast": [
    "autocast/float32_filter",
    "autocast/rewrite",
    "autocast/keep_float32",
    "autocast/reach",
  ],
  "_autocast._matmuls": [
    "autocast/reach",
    "autocast/float32_filter",
    "autocast/rewrite",
    "autocast/keep_float32",
    "autocast/matmuls",
    "autocast/cotangents",
  ],
  "_autocast._rewrite": [
    "autocast/float32_filter",
    "autocast/reach",
    "autocast/rewrite",
    "autocast/transformations",
    "autocast/shared_custom_derivatives",
    "autocast/autocast",
  ],
  "_jaxprs._custom_derivatives": [
    "autocast/weights",
    "autocast/provenance",
    "autocast/float32_filter",
    "autocast/shared_custom_derivatives",
    "autocast/reach",
    "autocast/autocast",
    "autocast/transformations",
    "autocast/matmuls",
  ],
  "diagnostics._leaves": ["diagnostics/leaves"],
  "diagnostics._numbers": [
    "diagnostics/leaves",
    "diagnostics/higher_order",
    "diagnostics/precision_report",
    "diagnostics/find_overflow",
  ],
  "diagnostics._probes": ["diagnostics/probes"],
  "diagnostics._tracing": [
    "diagnostics/tracing",
    "diagnostics/precision_report",
    "diagnostics/leaves",
    "diagnostics/higher_order",
    "diagnostics/find_overflow",
    "diagnostics/compare_precision",
  ],
  "diagnostics._gradient_report": ["diagnostics/leaves", "diagnostics/plots"],
  "diagnostics._precision_report": [
    "diagnostics/precision_report",
    "diagnostics/higher_order",
    "diagnostics/plots",
  ],
  "diagnostics._overflow": [
    "diagnostics/find_overflow",
    "diagnostics/higher_order",
  ],
  "diagnostics._comparison": [
    "diagnostics/compare_precision",
    "diagnostics/compare_precision_models",
    "diagnostics/tracing",
  ],
}
# Its tests take longest.
LAST = "diagnostics._comparison"
# What most tests import. It is imported once, before a process is forked for
# each mutant. Not the package itself, which each process imports anew.
LIBRARIES = (
  "chex",
  "equinox",
  "flax.linen",
  "flax.nnx",
  "haiku",
  "hypothesis",
  "matplotlib.figure",
  "optax.contrib",
  "pytest",
)
# What these make of an array of floats, or of a bool, fails wherever it runs.
EASY = re.compile(
  r"core/ReplaceBinaryOperator_"
  r"((Add|Sub|Mul|Div|Pow)_(FloorDiv|Mod|RShift|LShift|Bit.*)"
  r"|Bit.*_(Add|Sub|Mul|Div|Pow|FloorDiv|Mod|RShift|LShift))"
)
SECONDS = 600  # for the tests of one mutant
PASSED = 0, 5  # with the status 5 there were none
FOREIGN = 100  # the status if the tests import another copy


def main():
  """Tries the mutants of a module or folder and prints what became of them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "name", help="such as _select, _jaxprs._custom_derivatives, _jaxprs"
  )
  parser.add_argument("--sample", type=int, help="try so many, drawn at random")
  parser.add_argument("--seed", type=int, default=0, help="of the sample")
  parser.add_argument("--minutes", type=float, help="begin none after so many")
  parser.add_argument("--quick", action="store_true", help="no slow tests")
  arguments = parser.parse_args()
  modules = find_modules(arguments.name)
  if not modules:
    parser.error(f"no tests are known for {arguments.name}: see TESTS")
  folder = copy_project(arguments.name)
  set_environment()
  for library in LIBRARIES:
    importlib.import_module(library)
  items = [item for item in list_items(folder, modules) if tells(folder, item)]
  counts = collections.Counter(
    get_mutated_module(folder, item) for item in items
  )
  # In random order, so that those of any minutes are a sample.
  random.Random(arguments.seed).shuffle(items)
  items = items[: arguments.sample]
  items.sort(key=lambda item: get_mutated_module(folder, item).startswith(LAST))
  tried = sorted({get_mutated_module(folder, item) for item in items})
  for slow in (False,) if arguments.quick else (False, True):
    if fails(folder, tried, slow=slow, is_mutant=False):
      sys.exit("The tests fail without a mutant.")
  end = time.monotonic() + 60 * (arguments.minutes or float("inf"))
  outcomes = collections.defaultdict(list)
  for item in items:
    if time.monotonic() > end:
      break
    module = get_mutated_module(folder, item)
    outcomes[module].append(is_caught(folder, item, arguments.quick))
  sys.exit(report(arguments.name, counts, outcomes))


def find_modules(name: str) -> list[str]:
  """The modules of a name, which is that of one, or of a folder."""
  path = ROOT / "optax_lossscale" / name.replace(".", "/")
  files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
  files = [f.with_suffix("") for f in files if f.name != "__init__.py"]
  parts = [f.relative_to(ROOT / "optax_lossscale").parts for f in files]
  return [m for m in map(".".join, parts) if get_test_key(m) is not None]


def get_test_key(module: str) -> str | None:
  """Under which name the tests of a module are: its own, or its folder's."""
  names = module, module.rpartition(".")[0]
  return next((name for name in names if name in TESTS), None)


def copy_project(name: str) -> pathlib.Path:
  """A copy to break; its folder."""
  folder = ROOT / "build" / "mutants" / name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  for part in ("benchmarks", "docs", "examples", "optax_lossscale", "tests"):
    ignore = shutil.ignore_patterns("__pycache__", "_build")
    shutil.copytree(ROOT / part, folder / part, ignore=ignore)
  shutil.copy(ROOT / "pyproject.toml", folder)
  return folder


def set_environment() -> None:
  """What JAX and the processes of tests are told. Before JAX is imported."""
  # Two mutants within a second would share their bytecode; most share the
  # programs that XLA compiled.
  os.environ |= {
    "PYTHONDONTWRITEBYTECODE": "1",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "mutants" / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_PLATFORMS": "cpu",
  }
  # It has not started a backend, nor threads, when the processes are forked.
  warnings.filterwarnings("ignore", r"os\.fork\(\) was called")


def list_items(folder: pathlib.Path, modules: list[str]) -> list[WorkItem]:
  """All mutants of the modules."""
  with use_db(folder / "session", WorkDB.Mode.create) as db:
    init([get_copy_path(folder, module) for module in modules], db, {})
    return sorted(db.work_items, key=place_of)


def place_of(item: WorkItem) -> tuple[str, str, int]:
  """What orders mutants alike in each run."""
  (mutation,) = item.mutations
  path, operator = str(mutation.module_path), mutation.operator_name
  return path, operator, mutation.occurrence


def get_copy_path(folder: pathlib.Path, module: str) -> pathlib.Path:
  """Where a module is in the copy."""
  return folder / "optax_lossscale" / f"{module.replace('.', '/')}.py"


def get_mutated_module(folder: pathlib.Path, item: WorkItem) -> str:
  """The module that is mutated."""
  path = item.mutations[0].module_path.relative_to(folder / "optax_lossscale")
  return ".".join(path.with_suffix("").parts)


def find_test_paths(modules: Iterable[str]) -> list[str]:
  """The files with the tests of modules: their doctests come last."""
  # As a dict, in their order and each once.
  names = dict.fromkeys(n for m in modules for n in TESTS[get_test_key(m)])
  pairs = [name.split("/") for name in names]
  paths = [f"tests/{folder}/test_{name}.py" for folder, name in pairs]
  return paths + [str(get_copy_path(pathlib.Path(), m)) for m in modules]


def fails(
  folder: pathlib.Path,
  modules: Iterable[str],
  *,
  slow: bool = False,
  is_mutant: bool = True,
) -> bool:
  """Whether one of the quick or slow tests fails, or they take too long."""
  options = [
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "--hypothesis-profile=mutants",
  ]
  options += ["-m", f"{'' if slow else 'not '}slow and not nightly"]
  # What is imported before pytest cannot be rewritten, nor need it be.
  options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
  arguments = folder, [*options, *find_test_paths(modules)], is_mutant
  context = multiprocessing.get_context("fork")
  process = context.Process(target=run, args=arguments)
  process.start()
  process.join(SECONDS)
  if process.is_alive():
    process.kill()
    process.join()
  if process.exitcode == FOREIGN:
    raise ImportError("The tests did not import the copy.")
  if process.exitcode not in (*PASSED, 1, 2):  # Failed, or not collected.
    print(f"The tests ended with the status {process.exitcode}.", flush=True)
  return process.exitcode not in PASSED


def run(folder: pathlib.Path, arguments: list[str], is_mutant: bool) -> None:
  """Runs tests in the copy, in a process of their own, which ends."""
  import pytest

  os.chdir(folder)
  sys.path.insert(0, str(folder))
  # The bytecode of all that is no mutant is made once.
  sys.dont_write_bytecode = is_mutant
  if is_mutant:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
  status = int(pytest.main(arguments))
  sys.stdout.flush()
  package = sys.modules.get("optax_lossscale")
  if package and not str(package.__file__).startswith(str(folder)):
    status = FOREIGN
  os._exit(status)


def is_caught(folder: pathlib.Path, item: WorkItem, quick: bool) -> bool:
  """Whether a mutant fails a test. One that does not is printed."""
  (mutation,) = item.mutations
  operator = plugins.get_operator(mutation.operator_name)
  operator = operator(**mutation.operator_args)
  path = mutation.module_path
  with use_mutation(path, operator, mutation.occurrence) as (old, new):
    modules = [get_mutated_module(folder, item)]
    caught = fails(folder, modules)
    caught = caught or (not quick and fails(folder, modules, slow=True))
  if not caught:
    lines = difflib.unified_diff(old.split("\n"), new.split("\n"), n=0)
    changed = [x for x in lines if re.match(r"@@|[-+](?![-+])", x)]
    name = mutation.operator_name
    print(*modules, name, *changed, "", sep="\n", flush=True)
  return caught


def tells(folder: pathlib.Path, item: WorkItem) -> bool:
  """Whether a mutant says something about the tests.

  Others are those that fail in any case; operators in signatures and other
  annotations, where they are part of types, or the star before keyword
  arguments; and `strict=True`, which asserts what is so.
  """
  (mutation,) = item.mutations
  operator = mutation.operator_name
  source = mutation.module_path.read_text()
  line = mutation.start_pos[0]
  return not (
    EASY.match(operator)
    or ("Binary" in operator and line in find_annotation_lines(source))
    or ("True" in operator and "strict=True" in source.split("\n")[line - 1])
  )


def find_annotation_lines(source: str) -> set[int]:
  """The numbers of the lines from `def` to the colon, and of annotations."""
  lines: set[int] = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef):
      lines.update(range(node.lineno, node.body[0].lineno))
    if isinstance(node, ast.AnnAssign) and not node.value:
      lines.add(node.lineno)
  return lines


def report(
  name: str, counts: dict[str, int], outcomes: dict[str, list[bool]]
) -> int:
  """Prints the figures of each module and of all; returns the exit status."""
  for module in sorted(outcomes):
    print_figures(module, counts[module], outcomes[module])
  every = [caught for caughts in outcomes.values() for caught in caughts]
  if len(counts) > 1:
    print_figures(name, sum(counts.values()), every)
  return int(sum(every) < 0.9 * len(every))


def print_figures(name: str, count: int, caught: list[bool]) -> None:
  """How many of the mutants that were tried failed a test."""
  tried = len(caught)
  print(f"{name}: {sum(caught)} of {tried} mutants failed a test, of {count}")


if __name__ == "__main__":
  main()
