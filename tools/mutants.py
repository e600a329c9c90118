"""Mutation testing: breaks the core in one place after another.

    python tools/mutants.py _policies

cosmic-ray exchanges operators, numbers, conditions and decorators of one module
in a copy of the project, and runs the tests for each such mutant. It prints how
many mutants failed a test, and the survivors, for which no test would fail.
Exits with 1 if more than a tenth survive.
"""

import argparse
import ast
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

from cosmic_ray.work_db import use_db, WorkDB
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

ROOT = pathlib.Path(__file__).parents[1]
# A mutant is done with its first failure: its own tests first, quick ones next.
# `core/state` is tests/core/test_state.py, and `_jaxprs._loops` is
# optax_lossscale/_jaxprs/_loops.py.
TESTS = {
  "_arrays": [
    "core/state",
    "core/select_bfloat16",
    "core/scaling",
    "core/select_types",
    "core/wrapper",
    "policies/headroom",
  ],
  "_checks": [
    "core/input",
    "diagnostics/report",
    "interop/errors",
    "interop/writing",
  ],
  "_powers_of_two": ["core/state", "policies/headroom"],
  "_jaxprs._equations": [
    "core/select",
    "core/select_types",
    "autocast/reach",
    "diagnostics/precision",
    "diagnostics/overflow",
  ],
  "_jaxprs._loops": [
    "autocast/reach",
    "diagnostics/precision",
    "diagnostics/overflow",
  ],
  "_grads": [
    "core/finiteness",
    "core/scaling",
    "core/input",
    "core/cost",
    "diagnostics/leaves",
    "core/wrapper",
    "policies/headroom",
  ],
  "_state": ["core/state", "core/checkpoints", "frameworks/flax_nnx"],
  "_axes": ["devices/shard_map", "core/input", "core/select"],
  "_measurement": [
    "core/input",
    "core/wrapper",
    "core/cost",
    "devices/shard_map",
    "policies/headroom",
  ],
  "_loss": [
    "core/scaling",
    "core/input",
    "frameworks/equinox",
    "frameworks/flax_nnx",
  ],
  "_scaling": [
    "core/scaling",
    "core/input",
    "core/cost",
    "frameworks/equinox",
    "frameworks/flax_nnx",
    "core/wrapper",
  ],
  "_policies": [
    "core/input",
    "policies/dynamic",
    "policies/random_programs",
    "core/state",
    "policies/headroom",
  ],
  "_memory": ["policies/headroom", "policies/starving"],
  "_search": ["policies/headroom", "policies/starving"],
  "_headroom": ["policies/headroom", "policies/starving", "core/input"],
  "_select": [
    "core/select",
    "core/select_types",
    "core/cost",
    "policies/random_programs",
    "core/optax_compositions",
  ],
  "_updates": ["core/wrapper", "frameworks/flax_linen"],
  "_wrapper": [
    "core/input",
    "core/wrapper",
    "core/cost",
    "core/select",
    "diagnostics/probes",
    "policies/random_programs",
  ],
}
# What these make of an array of floats, or of a bool, fails wherever it runs.
EASY = re.compile(
  r"core/ReplaceBinaryOperator_"
  r"((Add|Sub|Mul|Div|Pow)_(FloorDiv|Mod|RShift|LShift|Bit.*)"
  r"|Bit.*_(Add|Sub|Mul|Div|Pow|FloorDiv|Mod|RShift|LShift))"
)
SECONDS = 600  # for the tests of one mutant


def main():
  """Tries the mutants of one module and prints what became of them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("module", choices=TESTS)
  module = parser.parse_args().module
  folder = copy_project(module)
  run(test_command(module), folder)
  cosmic_ray = pathlib.Path(sys.executable).with_name("cosmic-ray")
  run([cosmic_ray, "init", "config.toml", "session"], folder)
  skip_pointless(folder, module)
  run([cosmic_ray, "exec", "config.toml", "session"], folder)
  sys.exit(report(folder, module))


def copy_project(module):
  """A copy to break, with the settings of cosmic-ray in it; its folder."""
  folder = ROOT / "build" / "mutants" / module
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  for part in ("benchmarks", "docs", "examples", "optax_lossscale", "tests"):
    shutil.copytree(ROOT / part, folder / part)
  shutil.copy(ROOT / "pyproject.toml", folder)
  command = shlex.join(test_command(module))
  (folder / "config.toml").write_text(
    "[cosmic-ray]\n"
    f'module-path = "{path_of(module)}"\n'
    f"timeout = {SECONDS}.0\n"
    "excluded-modules = []\n"
    f'test-command = "{command}"\n'
    "[cosmic-ray.distributor]\n"
    'name = "local"\n'
  )
  return folder


def path_of(module):
  """Where a module is, from the root of the project."""
  return f"optax_lossscale/{module.replace('.', '/')}.py"


def test_command(module):
  """What fails, or does not, for a mutant; a list of words."""
  names = [name.split("/") for name in TESTS[module]]
  paths = [f"tests/{folder}/test_{name}.py" for folder, name in names]
  options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not nightly"]
  options += ["--hypothesis-profile=mutants"]
  return [sys.executable, "-m", "pytest", *options, *paths]


def run(command, folder):
  """Runs a command in the copy."""
  # Two mutants within a second would share their bytecode; most share the
  # programs that XLA compiled.
  environment = os.environ | {
    "PYTHONDONTWRITEBYTECODE": "1",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "mutants" / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  subprocess.run(command, cwd=folder, env=environment, check=True)


def skip_pointless(folder, module):
  """Leaves out the mutants that say nothing about the tests.

  They are those that fail in any case; operators in signatures, where they are
  part of types, or the star before keyword arguments; and `strict=True`, which
  asserts what is so.
  """
  source = (folder / path_of(module)).read_text()
  lines = source.splitlines()
  skipped = WorkResult(WorkerOutcome.SKIPPED)
  signatures = lines_of_signatures(source)
  with use_db(folder / "session", WorkDB.Mode.open) as db:
    for item in list(db.pending_work_items):
      (mutation,) = item.mutations
      operator = mutation.operator_name
      line = mutation.start_pos[0]
      if (
        EASY.match(operator)
        or ("Binary" in operator and line in signatures)
        or ("True" in operator and "strict=True" in lines[line - 1])
      ):
        db.set_result(item.job_id, skipped)


def lines_of_signatures(source):
  """The numbers of the lines from `def` to the colon, as a set."""
  lines = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef):
      lines.update(range(node.lineno, node.body[0].lineno))
  return lines


def report(folder, module):
  """Prints the figures and the survivors; returns the exit status."""
  with use_db(folder / "session", WorkDB.Mode.open) as db:
    results = [result for _, result in db.results]
  tried = [r for r in results if r.worker_outcome != WorkerOutcome.SKIPPED]
  survivors = [r for r in tried if r.test_outcome == TestOutcome.SURVIVED]
  for survivor in survivors:
    changed = re.findall(r"^(?:@@|[-+] ).*", survivor.diff, re.MULTILINE)
    print(*changed, "", sep="\n")
  killed = len(tried) - len(survivors)
  print(f"{module}: {killed} of {len(tried)} mutants failed a test")
  return int(killed < 0.9 * len(tried))


if __name__ == "__main__":
  main()
