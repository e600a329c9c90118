"""Which Python is taken, and what is run on which version."""

import os
import re
import runpy
import shutil
import subprocess
import tomllib

from helpers import ROOT
import pytest
import yaml

TOOLS = ROOT / "tools"
SCRIPT = (TOOLS / "newest_python.sh").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
CI_RUN = (ROOT / ".ci" / "run").read_text()
WORKFLOWS = {
  path.stem: yaml.safe_load(path.read_text())
  for path in (ROOT / ".github" / "workflows").glob("*.yml")
}


def read_declared_versions():
  """The versions of Python in pyproject.toml, newest first."""
  classifiers = "\n".join(PROJECT["classifiers"])
  versions = re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)
  return sorted(versions, key=lambda v: int(v.split(".")[1]), reverse=True)


FAKE_PYTHON = """#!{sh}
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *ensurepip*) echo {version} {path} ;;
  *) echo {version} ;;
esac
"""


class Machine:
  """A machine with no Python, into which fake ones are put.

  A fake one answers as the real one does, with its version and its path, and
  makes environments as fake as itself.
  """

  def __init__(self, folder):
    self.home = folder / "home"
    self.shims = folder / "shims"
    self.bin = folder / "bin"
    for path in (self.home, self.shims, self.bin):
      path.mkdir()
    tools = "bash", "cp", "dirname", "env", "ls", "mkdir", "rm", "sh", "sort"
    for tool in (*tools, "touch"):
      (self.bin / tool).symlink_to(find_tool(tool))

  def add(self, version, folder=None):
    """A Python that works: on the PATH, or in a folder below pyenv's."""
    path = (folder or self.bin) / f"python{version}"
    path.parent.mkdir(parents=True, exist_ok=True)
    sh = find_tool("sh")
    text = FAKE_PYTHON.format(sh=sh, version=version, path=path)
    return write_executable(path, text)

  def add_pyenv(self, patch, root=".pyenv"):
    """One that pyenv installed, with its full version."""
    version = ".".join(patch.split(".")[:2])
    return self.add(version, self.home / root / "versions" / patch / "bin")

  def add_shim(self, version):
    """The shim that pyenv puts first on the PATH for an unselected version."""
    text = "echo 'pyenv: command not found' >&2; exit 127"
    path = self.shims / f"python{version}"
    return write_executable(path, f"#!{find_tool('sh')}\n{text}\n")

  def run(self, script, *arguments, **environment):
    """Exit status, output and errors of a script of this repository."""
    path = {"PATH": f"{self.shims}:{self.bin}", "HOME": str(self.home)}
    done = subprocess.run(
      [ROOT / script, *arguments],
      env=path | environment,
      capture_output=True,
      text=True,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()

  def newest(self, *bounds, **environment):
    return self.run("tools/newest_python.sh", *bounds, **environment)


def write_executable(path, text):
  path.write_text(text)
  path.chmod(0o755)
  return str(path)


def find_tool(name):
  return shutil.which(name) or pytest.fail(f"{name} is not installed")


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


@pytest.mark.parametrize("root", [".pyenv", "elsewhere"])
def test_the_newest_working_python_is_used(machine, root):
  """A shim that says "command not found" does not, and hides what does."""
  where = {} if root == ".pyenv" else {"PYENV_ROOT": str(machine.home / root)}
  machine.add("3.11")
  works = machine.add("3.12")
  assert machine.newest() == (0, works, "")
  for version in "3.14", "3.13", "3.12":
    machine.add_shim(version)
  assert machine.newest() == (0, works, "")
  machine.add_pyenv("3.13.9", root)
  latest = machine.add_pyenv("3.13.10", root)
  assert machine.newest(**where) == (0, latest, "")


def test_an_unsupported_python_is_never_used(machine):
  machine.add("3.10")
  status, path, message = machine.newest()
  assert (status, path) == (1, "")
  assert "Python 3.11 or later is needed" in message
  assert "PYTHON=/path/to/python" in message
  old = machine.add("3.11")
  assert "Python 3.12 or later is needed" in machine.newest("3.12")[2]
  machine.add("3.13")
  assert machine.newest("3.11", "3.11")[:2] == (0, old)
  status, path, message = machine.newest("3.12", PYTHON=old)
  assert (status, path) == (1, "")
  assert f"Python 3.12 or later is needed, and PYTHON={old} is" in message


def test_python_3_11_is_warned_of_the_last_jax_that_supports_it(machine):
  path = machine.add("3.11")
  warning = "Python 3.11: JAX ends at 0.10.2"
  assert machine.newest() == (0, path, warning)
  assert machine.newest(PYTHON=path) == (0, path, warning)


def test_the_python_option_replaces_the_search(machine):
  found = machine.add("3.13")
  wanted = machine.add("3.12")
  newer = machine.add("3.20")  # than what is looked for
  assert machine.newest() == (0, found, "")
  for python, path in ("python3.12", wanted), (wanted, wanted), (newer, newer):
    assert machine.newest(PYTHON=python) == (0, path, "")


def test_python_is_found_by_its_name_after_a_shim_that_fails(machine):
  shim = machine.add_shim("3.12")
  machine.add("3.13")
  wanted = machine.add_pyenv("3.12.1")
  assert machine.newest(PYTHON="python3.12") == (0, wanted, "")
  status, path, message = machine.newest(PYTHON=shim)
  assert (status, path) == (1, "") and "does not run" in message


def test_the_search_covers_exactly_the_declared_versions():
  versions = re.search(r'^VERSIONS="(.*?)"', SCRIPT, re.MULTILINE)[1]
  assert versions.split() == read_declared_versions()
  lowest = PROJECT["requires-python"].removeprefix(">=")
  assert read_declared_versions()[-1] == lowest
  assert f"lowest=${{1:-{lowest}}}" in SCRIPT
  assert f"PYTHON_BOUNDS ?= {lowest}\n" in MAKEFILE


lower_bounds = runpy.run_path(str(TOOLS / "lower_bounds.py"))["lower_bounds"]


def make_project(jax):
  """Return the input of lower_bounds with this requirement of jax."""
  others = [r for r in PROJECT["dependencies"] if not re.match(r"jax\b", r)]
  return PROJECT | {"dependencies": [jax, *others]}


def test_the_lowest_jax_is_found_despite_excluded_releases():
  bounds = lower_bounds(make_project("jax>=0.8.0, !=0.11.0,!=0.12.0.1"))
  assert bounds["jax"] == bounds["jaxlib"] == "0.8.0"
  (ours,) = [r for r in PROJECT["dependencies"] if re.match(r"jax\b", r)]
  assert ours.startswith(f"jax>={lower_bounds(PROJECT)['jax']}")


@pytest.mark.parametrize("jax", ["jax", "jax>=0.8,<0.13", "jax!=0.11.0"])
def test_jax_has_a_minimum_version_and_no_maximum(jax):
  with pytest.raises(ValueError, match="one bound for jax, such as"):
    lower_bounds(make_project(jax))


class Venv:
  """An environment that make_venv.sh makes."""

  def __init__(self, machine, folder):
    self.machine, self.folder = machine, folder
    self.mark, self.installed = folder / "made", folder / "installed-test"

  def make(self, version):
    """The exit status, and what is said of it."""
    python = self.machine.add(version)
    made = self.machine.run("tools/make_venv.sh", self.folder, PYTHON=python)
    return made[0], made[2]

  @property
  def version(self):
    python = self.folder / "bin" / "python"
    return subprocess.check_output([python], text=True).strip()


@pytest.fixture
def venv(machine, tmp_path):
  return Venv(machine, tmp_path / ".venv")


def test_an_environment_is_created_once_and_recreated_for_another_python(venv):
  assert venv.make("3.12")[0] == 0
  made = venv.mark.stat().st_mtime_ns
  venv.installed.touch()

  assert venv.make("3.12") == (0, "")
  assert venv.mark.stat().st_mtime_ns == made
  assert venv.installed.exists()

  assert venv.make("3.13")[0] == 0
  assert venv.version == "3.13"
  assert not venv.installed.exists()


def test_an_environment_of_a_user_is_used_or_refused_but_never_removed(venv):
  venv.make("3.12")
  venv.mark.unlink()
  status, message = venv.make("3.13")
  assert status == 1 and "was not made by make. Remove it" in message
  assert venv.version == "3.12"
  assert venv.make("3.12") == (0, "")


@pytest.mark.parametrize("mark", ["made", "installed-test"])
def test_an_incomplete_environment_is_recreated(venv, mark):
  """The second was the only mark, once."""
  venv.folder.mkdir()
  (venv.folder / mark).touch()
  assert venv.make("3.12")[0] == 0
  assert venv.version == "3.12"
  assert not venv.installed.exists()


def list_make_commands(*arguments):
  """The commands of a target, none of which is run."""
  done = subprocess.run(
    ["make", "--dry-run", *arguments],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout


def test_ci_run_stops_at_once_without_a_new_python(machine):
  machine.add("3.11")
  write_executable(machine.bin / "make", "#!/bin/sh\necho it ran\n")
  status, printed, errors = machine.run(".ci/run")
  assert status == 1 and printed == ""
  assert "Python 3.12 or later is needed" in errors


def test_ci_run_stops_with_the_first_step_that_fails_of_all_on_all_versions():
  assert re.search(r"^set -euo pipefail$", CI_RUN, re.MULTILINE)
  steps = re.findall(r"^make ([a-z0-9.-]+)", CI_RUN, re.MULTILINE)
  assert steps == [
    "check",
    "coverage",
    "test-3.11",
    "test-oldest",
    "test-jax-flags",
    "docs",
  ]


@pytest.mark.parametrize(
  "target", ["test-3.11", "test-oldest", "test-oldest-all"]
)
def test_packages_omitted_on_older_versions_exist_and_exclude_jax(target):
  commands = list_make_commands(target)
  left_out = re.findall(r"--(?:ignore|deselect)=(tests/[\w/.]+)", commands)
  assert "tests/pages" in left_out and len(set(left_out)) > 8
  assert not any("test_jax.py" in path for path in left_out)
  for path in left_out:
    assert (ROOT / path).exists(), path


def test_tests_on_the_oldest_versions_exist_and_cover_the_jaxpr_modules():
  commands = list_make_commands("test-oldest").splitlines()
  (line,) = [x for x in commands if x.endswith("test_shard_map.py")]
  paths = [word for word in line.split() if word.startswith("tests/")]
  assert "tests/package/test_jax.py" in paths and len(paths) > 5
  for path in paths:
    assert (ROOT / path).exists(), path


def test_the_upgrade_flags_are_set_for_the_parts_that_read_jaxprs():
  commands = list_make_commands("test-jax-flags").splitlines()
  flags = "JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1 "
  assert any(line.startswith(flags) for line in commands)
  assert "tests/autocast tests/diagnostics tests/core" in commands[-1]
  alone = list_make_commands("test-jax-flags", "JAX_FLAGS=JAX_REMAT3=1")
  assert "\nJAX_REMAT3=1 " in alone and "JVP3" not in alone


def list_python_versions(job):
  """The versions of Python that a job of a workflow asks for."""
  (setup,) = [
    step["with"]["python-version"]
    for step in job["steps"]
    if step.get("uses", "").startswith("actions/setup-python")
  ]
  if "matrix" in setup:
    return job["strategy"]["matrix"]["python"]
  return [setup]


def list_commands(job):
  return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_of_tests_begins_with_the_newest_python_and_jax():
  jobs = WORKFLOWS["tests"]["jobs"]
  assert next(iter(jobs)) == "newest"
  new = [v for v in read_declared_versions() if v != "3.11"]
  assert list_python_versions(jobs["newest"]) == new
  assert list_python_versions(jobs["python-3-11"]) == ["3.11"]
  assert list_commands(jobs["python-3-11"])[0].startswith("make test-3.11 ")
  assert list_python_versions(jobs["oldest"]) == ["3.11"]


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_uses_the_python_that_it_set_up(name):
  workflow = WORKFLOWS[name]
  assert workflow["env"]["PYTHON"] == "python"
  for job in workflow["jobs"].values():
    if any(line.startswith("make ") for line in list_commands(job)):
      has_3_11 = "3.11" in list_python_versions(job)
      assert not has_3_11 or workflow["env"]["PYTHON_3_11"] == "python"


def test_a_failed_nightly_run_opens_an_issue():
  jobs = WORKFLOWS["nightly"]["jobs"]
  report = jobs.pop("report")
  assert report["if"] == "failure()"
  assert report["needs"] == list(jobs)
  assert report["permissions"]["issues"] == "write"
  opens = report["steps"][-1]
  assert re.fullmatch(r"peter-evans/create-issue-from-file@v\d+", opens["uses"])
  fills_in = report["steps"][1]
  text = (ROOT / ".github" / "nightly_failed.md").read_text()
  for word in ("RUN", "RESULTS"):
    assert text.count(word) == 1 and word in fills_in["env"]
  for name in jobs:
    assert f"`{name}`" in text
    assert f"needs.{name}.result" in fills_in["env"]["RESULTS"]


def test_each_nightly_run_tests_the_next_jax_and_the_oldest_versions():
  jobs = WORKFLOWS["nightly"]["jobs"]
  assert list_commands(jobs["jax-nightly"])[0].startswith(
    "make test-jax-nightly "
  )
  assert list_python_versions(jobs["oldest"]) == ["3.11"]
  assert list_commands(jobs["oldest"])[0].startswith("make test-oldest-all ")


def test_each_push_tests_the_upgrade_flags_of_jax():
  jobs = WORKFLOWS["tests"]["jobs"]
  assert list_commands(jobs["jax-flags"])[0].startswith("make test-jax-flags ")


@pytest.mark.parametrize("name", ["docs", "publish"])
def test_releases_are_built_with_the_development_python(name):
  assert list_python_versions(WORKFLOWS[name]["jobs"]["build"]) == ["3.13"]
  read_the_docs = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
  assert read_the_docs["build"]["tools"]["python"] == "3.13"


def test_the_pages_that_are_built_are_those_that_are_published():
  jobs = WORKFLOWS["docs"]["jobs"]
  built, uploaded = jobs["build"]["steps"][-2:]
  assert built == {"run": "make docs"}
  assert f"-b html docs {uploaded['with']['path']}\n" in MAKEFILE
  assert jobs["deploy"]["needs"] == "build"
  permissions = {"pages": "write", "id-token": "write"}
  assert jobs["deploy"]["permissions"] == permissions


def test_the_page_on_versions_lists_the_declared_and_tested_versions():
  page = (ROOT / "docs" / "reference" / "versions.md").read_text()
  for requirement in PROJECT["dependencies"]:
    name, bound = re.match(r"([\w-]+)>=([\w.]+)", requirement).groups()
    row = rf"^\| {name} \| {re.escape(bound)} and later \| {re.escape(bound)}"
    assert re.search(row, page, re.MULTILINE | re.IGNORECASE), requirement
  row = re.search(r"^\| Python .*$", page, re.MULTILINE)[0].split("|")[3]
  assert set(re.findall(r"3\.\d+", row)) == set(read_declared_versions())
  table = page.split("### Which Python gets which JAX")[1].split("###")[0]
  gets = re.findall(r"^\| (3\.\d+) \| \d", table, re.MULTILINE)
  assert sorted(gets) == sorted(read_declared_versions())
  last = re.search(r"^LAST_JAX_FOR_3_11=(\S+)$", SCRIPT, re.MULTILINE)[1]
  assert re.search(rf"^\| 3\.11 \| {re.escape(last)} ", table, re.MULTILINE)
