"""Which Python is taken, and which environments are made."""

import os
import re
import runpy
import shutil
import subprocess
import tomllib

from helpers import ROOT
import pytest

TOOLS = ROOT / "tools"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FAKE_PYTHON = """
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
    names = "home", "shims", "bin"
    self.home, self.shims, self.bin = paths = [folder / name for name in names]
    for path in paths:
      path.mkdir()
    commands = "bash", "cp", "dirname", "env", "ls", "mkdir", "rm", "sort"
    for command in (*commands, "sh", "touch"):
      (self.bin / command).symlink_to(shutil.which(command))

  def add(self, version, folder=None):
    """A Python that works: on the PATH, or in another folder."""
    path = (folder or self.bin) / f"python{version}"
    text = FAKE_PYTHON.format(version=version, path=path)
    return write_executable(path, text)

  def add_pyenv(self, patch, root=".pyenv"):
    """One that pyenv installed, with its full version."""
    version = patch.rpartition(".")[0]
    return self.add(version, self.home / root / "versions" / patch / "bin")

  def add_shim(self, version):
    """The shim that pyenv puts first on the PATH for an unselected version."""
    text = "\necho 'pyenv: command not found' >&2; exit 127\n"
    write_executable(self.shims / f"python{version}", text)

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
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!{shutil.which('sh')}{text}")
  path.chmod(0o755)
  return str(path)


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("root", [".pyenv", "elsewhere"])
def test_the_newest_working_python_is_used(machine, root):
  """A shim that says "command not found" does not, and hides what does."""
  where = {} if root == ".pyenv" else {"PYENV_ROOT": str(machine.home / root)}
  machine.add("3.11")
  works = machine.add("3.12")
  for version in "3.14", "3.13", "3.12":
    machine.add_shim(version)
  assert machine.newest() == (0, works, "")
  machine.add_pyenv("3.13.9", root)
  latest = machine.add_pyenv("3.13.10", root)
  assert machine.newest(**where) == (0, latest, "")


@pytest.mark.slow
def test_an_unsupported_python_is_never_used(machine):
  machine.add("3.10")
  status, path, message = machine.newest()
  assert (status, path) == (1, "")
  assert "Python 3.11 or later is needed" in message
  old = machine.add("3.11")
  warning = "Python 3.11: JAX ends at 0.10.2"
  machine.add("3.13")
  assert machine.newest("3.11", "3.11") == (0, old, warning)
  status, path, message = machine.newest("3.12", PYTHON=old)
  assert (status, path) == (1, "")
  assert f"Python 3.12 or later is needed, and PYTHON={old} is" in message


@pytest.mark.slow
def test_the_python_option_replaces_the_search(machine):
  machine.add("3.13")
  wanted = machine.add("3.12")
  newer = machine.add("3.20")  # than what is looked for
  for python, path in ("python3.12", wanted), (wanted, wanted), (newer, newer):
    assert machine.newest(PYTHON=python) == (0, path, "")


@pytest.mark.slow
def test_ci_run_stops_at_once_without_a_new_python(machine):
  machine.add("3.11")
  write_executable(machine.bin / "make", "\necho it ran\n")
  status, printed, errors = machine.run(".ci/run")
  assert status == 1 and printed == ""
  assert "Python 3.12 or later is needed" in errors


def test_the_search_covers_exactly_the_declared_versions():
  script = (TOOLS / "newest_python.sh").read_text()
  versions = re.search(r'^VERSIONS="(.*?)"', script, re.MULTILINE)[1].split()
  declared = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))
  assert sorted(versions) == sorted(declared)
  lowest = PROJECT["requires-python"].removeprefix(">=")
  assert versions[-1] == lowest
  assert f"lowest=${{1:-{lowest}}}" in script


lower_bounds = runpy.run_path(str(TOOLS / "lower_bounds.py"))["lower_bounds"]


def make_project(jax):
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


@pytest.mark.slow
def test_an_environment_is_created_once_and_recreated_for_another_python(venv):
  assert venv.make("3.12")[0] == 0
  made = venv.mark.stat().st_mtime_ns
  venv.installed.touch()
  assert venv.make("3.12") == (0, "")
  assert venv.mark.stat().st_mtime_ns == made and venv.installed.exists()
  assert venv.make("3.13")[0] == 0
  assert venv.version == "3.13" and not venv.installed.exists()


@pytest.mark.slow
def test_an_environment_of_a_user_is_used_or_refused_but_never_removed(venv):
  venv.make("3.12")
  venv.mark.unlink()
  status, message = venv.make("3.13")
  assert status == 1 and "was not made by make. Remove it" in message
  assert venv.version == "3.12" and venv.make("3.12") == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["made", "installed-test"])
def test_an_incomplete_environment_is_recreated(venv, mark):
  """The second was the only mark, once."""
  venv.folder.mkdir()
  (venv.folder / mark).touch()
  assert venv.make("3.12")[0] == 0
  assert venv.version == "3.12" and not venv.installed.exists()


def test_the_paths_that_make_targets_name_exist():
  """Pytest silently ignores an option whose path doesn't exist."""
  targets = "test-3.11", "test-oldest-all", "test-oldest", "test-jax-flags"
  done = subprocess.run(
    ["make", "--dry-run", *targets],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    capture_output=True,
    text=True,
    check=True,
  )
  paths = set(re.findall(r"\btests/[\w/.]+", done.stdout))
  assert len(paths) >= 12
  assert [path for path in paths if not (ROOT / path).exists()] == []
