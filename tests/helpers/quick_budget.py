"""The budget of a quick test: the programs that JAX compiles for it.

A test is quick unless it is marked as `slow` or `nightly`. The sums of each
folder are printed after the tests, with CPU seconds, which have no budget: they
depend on the machine and on the cache of programs. With `--quick-budget`, a
quick test above its budget fails, and so does a run above the budget of all
quick tests.

JAX reports each program that it compiles or loads from the persistent cache, so
the numbers of programs don't depend on the cache. Single operations outside of
`jit` don't count, nor do the functions with which reports look at one array: a
process compiles one for the first test that needs it, whichever this is.
"""

import collections
import os
from typing import NamedTuple

import jax
from jax import lax
from jax.extend.core import primitives
import jax.monitoring
import jax.numpy as jnp
import pytest

MAX_PROGRAMS = 8
MAX_PROGRAMS_OF_ALL = 800

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# These compile what they call.
CONTROL_FLOW = {"cond", "scan", "while"}
OPERATIONS = {
  *dir(jnp),
  *dir(jax.random),
  *(x.removesuffix("_p") for x in dir(lax)),
  *(getattr(x, "name", "") for x in vars(primitives).values()),
} - CONTROL_FLOW

START = pytest.StashKey[tuple[int, float]]()
PROPERTY = "quick_usage"


class Usage(NamedTuple):
  """The number of some tests, their programs, and their CPU seconds."""

  tests: int = 0
  programs: int = 0
  seconds: float = 0.0

  def add(self, other):
    return Usage(*map(sum, zip(self, other, strict=True)))


compiled: list[str] = []  # The names of all programs of this process.
_usages: dict[str, Usage] = collections.defaultdict(Usage)  # By folder.


def _record_program(event, duration, fun_name="", **kwargs):
  del duration, kwargs
  if event == COMPILE_EVENT:
    compiled.append(fun_name.removeprefix("jit(").removesuffix(")"))


jax.monitoring.register_event_duration_secs_listener(_record_program)


def is_operation(name):
  """Return whether a program is a single operation, by its name.

  The functions of reports for one array are private, and shared by all tests.
  """
  is_of_array = name.startswith("_") and name != "_eval_program"
  return is_of_array or name.strip("_") in OPERATIONS


def pytest_addoption(parser):
  parser.addoption(
    "--quick-budget",
    action="store_true",
    help="fail a quick test that compiles many programs",
  )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  jax.devices()  # Not the first test pays for the start of JAX.
  item.stash[START] = len(compiled), _get_cpu_seconds()
  return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  report = yield
  is_quick = not any(map(item.get_closest_marker, ("slow", "nightly")))
  if call.when != "call" or not is_quick:
    return report
  num_compiled, seconds = item.stash[START]
  programs = [x for x in compiled[num_compiled:] if not is_operation(x)]
  usage = 1, len(programs), _get_cpu_seconds() - seconds
  report.user_properties.append((PROPERTY, usage))
  # An example in a docstring is written for its readers.
  is_judged = report.passed and not isinstance(item, pytest.DoctestItem)
  is_over = is_judged and len(programs) > MAX_PROGRAMS
  if item.config.getoption("quick_budget") and is_over:
    report.outcome = "failed"
    report.longrepr = (
      f"This quick test compiles {len(programs)} programs:"
      f" {dict(collections.Counter(programs))}. The budget is {MAX_PROGRAMS}."
      " Mark the test with @pytest.mark.slow, or test the function that decides"
      " on plain data: see tests/README.md."
    )
  return report


def pytest_runtest_logreport(report):
  """Add the usage of a test, which may have run in another process."""
  usage = dict(report.user_properties).get(PROPERTY)
  if report.when != "call" or usage is None:
    return
  *folders, _ = report.nodeid.split("::")[0].split("/")
  for name in "/".join(folders[:2]), "all":
    _usages[name] = _usages[name].add(usage)


def pytest_sessionfinish(session):
  is_over = _usages["all"].programs > MAX_PROGRAMS_OF_ALL
  is_passed = session.exitstatus == pytest.ExitCode.OK
  if session.config.getoption("quick_budget") and is_over and is_passed:
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
  if not _usages["all"].tests or terminalreporter.verbosity < 0:
    return
  terminalreporter.section("quick tests")
  terminalreporter.line(f"{'':24}{'tests':>7}{'programs':>10}{'CPU s':>8}")
  for name, usage in sorted(_usages.items(), key=lambda x: (x[0] == "all", x)):
    terminalreporter.line(
      f"{name:24}{usage.tests:7}{usage.programs:10}{usage.seconds:8.1f}"
    )
  if _usages["all"].programs > MAX_PROGRAMS_OF_ALL:
    terminalreporter.line(
      f"The budget of all quick tests is {MAX_PROGRAMS_OF_ALL} programs. Mark"
      " tests with @pytest.mark.slow: see tests/README.md."
    )


def _get_cpu_seconds():
  return sum(os.times()[:4])  # Without the last, which is no CPU time.
