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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
CI_RUN = (ROOT / ".ci" / "run").read_text()
WORKFLOWS = {
  path.stem: yaml.safe_load(path.read_text())
  for path in (ROOT / ".github" / "workflows").glob("*.yml")
}


def declared_versions():
  """The versions of Python in pyproject.toml, newest first."""
  versions = [
    found[1]
    for classifier in PROJECT["classifiers"]
    if (found := re.search(r"Python :: (3\.\d+)$", classifier))
  ]
  return sorted(versions, key=lambda v: int(v.split(".")[1]), reverse=True)


class Machine:
  """A machine with no Python, into which fake ones are put.

  A fake one answers as the real one does: with its version and its path.
  """

  def __init__(self, folder):
    self.home = folder / "home"
    self.shims = folder / "shims"
    self.bin = folder / "bin"
    for path in (self.home, self.shims, self.bin):
      path.mkdir()
    for tool in ("sh", "ls", "sort", "dirname"):
      (self.bin / tool).symlink_to(find_tool(tool))

  def add(self, version, folder=None):
    """A Python that works: on the PATH, or in a folder below pyenv's."""
    path = (folder or self.bin) / f"python{version}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return self._write(path, f"echo {version} {path}")

  def add_pyenv(self, patch, root=".pyenv"):
    """One that pyenv installed, with its full version."""
    version = ".".join(patch.split(".")[:2])
    return self.add(version, self.home / root / "versions" / patch / "bin")

  def add_shim(self, version):
    """What pyenv puts first on the PATH for a version that is not chosen."""
    path = self.shims / f"python{version}"
    return self._write(path, "echo 'pyenv: command not found' >&2; exit 127")

  def newest(self, *bounds, **environment):
    """What newest_python.sh says: (exit status, path, message)."""
    done = subprocess.run(
      [TOOLS / "newest_python.sh", *bounds],
      env={
        "PATH": f"{self.shims}:{self.bin}",
        "HOME": str(self.home),
        **environment,
      },
      capture_output=True,
      text=True,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()

  def _write(self, path, line):
    path.write_text(f"#!{find_tool('sh')}\n{line}\n")
    path.chmod(0o755)
    return str(path)


def find_tool(name):
  return shutil.which(name) or pytest.fail(f"{name} is not installed")


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


@pytest.mark.parametrize("root", [".pyenv", "elsewhere"])
def test_the_newest_python_that_works_is_taken(machine, root):
  """A shim that says "command not found" does not, and hides what does."""
  where = {} if root == ".pyenv" else {"PYENV_ROOT": str(machine.home / root)}
  machine.add("3.11")
  works = machine.add("3.12")
  assert machine.newest() == (0, works, "")
  machine.add_shim("3.14")
  machine.add_shim("3.13")
  assert machine.newest() == (0, works, "")
  machine.add_pyenv("3.13.9", root)
  latest = machine.add_pyenv("3.13.10", root)
  assert machine.newest(**where) == (0, latest, "")


def test_a_python_behind_a_shim_of_the_same_name_is_found(machine):
  machine.add_shim("3.13")
  works = machine.add("3.13")
  machine.add("3.12")
  assert machine.newest() == (0, works, "")


def test_an_older_python_than_3_11_is_never_taken(machine):
  machine.add("3.10")
  status, path, message = machine.newest()
  assert (status, path) == (1, "")
  assert "Python 3.11 or later is needed" in message
  assert "PYTHON=/path/to/python" in message


def test_python_3_11_is_told_where_jax_ends_for_it(machine):
  path = machine.add("3.11")
  told = "Python 3.11: JAX ends at 0.10.2"
  assert machine.newest() == (0, path, told)
  assert machine.newest(PYTHON=path) == (0, path, told)


def test_bounds_leave_out_what_is_older_and_what_is_newer(machine):
  oldest = machine.add("3.11")
  assert machine.newest("3.12")[0] == 1
  assert "Python 3.12 or later is needed" in machine.newest("3.12")[2]
  machine.add("3.13")
  assert machine.newest("3.11", "3.11")[:2] == (0, oldest)


def test_python_takes_the_place_of_the_search(machine):
  found = machine.add("3.13")
  wanted = machine.add("3.12")
  newer = machine.add("3.20")  # than what is looked for
  assert machine.newest() == (0, found, "")
  for python, path in ("python3.12", wanted), (wanted, wanted), (newer, newer):
    assert machine.newest(PYTHON=python) == (0, path, "")


def test_python_is_found_by_its_name_behind_a_shim_that_fails(machine):
  shim = machine.add_shim("3.12")
  machine.add("3.13")
  wanted = machine.add_pyenv("3.12.1")
  assert machine.newest(PYTHON="python3.12") == (0, wanted, "")
  status, path, message = machine.newest(PYTHON=shim)
  assert (status, path) == (1, "") and "does not run" in message


def test_python_is_refused_if_it_is_out_of_bounds(machine):
  machine.add("3.13")
  old = machine.add("3.11")
  status, path, message = machine.newest("3.12", PYTHON=old)
  assert (status, path) == (1, "")
  assert f"Python 3.12 or later is needed, and PYTHON={old} is" in message


def test_the_versions_that_are_looked_for_are_those_that_are_declared():
  script = (TOOLS / "newest_python.sh").read_text()
  versions = re.search(r'^VERSIONS="(.*?)"', script, re.MULTILINE)[1]
  assert versions.split() == declared_versions()
  lowest = PROJECT["requires-python"].removeprefix(">=")
  assert declared_versions()[-1] == lowest
  assert f"lowest=${{1:-{lowest}}}" in script
  assert f"PYTHON_BOUNDS ?= {lowest}\n" in MAKEFILE


lower_bounds = runpy.run_path(str(TOOLS / "lower_bounds.py"))["lower_bounds"]


def project(jax):
  """What lower_bounds reads, with this requirement of jax."""
  return PROJECT | {
    "dependencies": [
      jax if re.match(r"jax\b", requirement) else requirement
      for requirement in PROJECT["dependencies"]
    ]
  }


def test_the_lowest_jax_is_found_beside_single_releases_that_are_excluded():
  bounds = lower_bounds(project("jax>=0.8.0, !=0.11.0,!=0.12.0.1"))
  assert bounds["jax"] == bounds["jaxlib"] == "0.8.0"
  (ours,) = [r for r in PROJECT["dependencies"] if re.match(r"jax\b", r)]
  assert ours.startswith(f"jax>={lower_bounds(PROJECT)['jax']}")


@pytest.mark.parametrize("jax", ["jax", "jax>=0.8,<0.13", "jax!=0.11.0"])
def test_jax_has_a_lowest_version_and_no_highest(jax):
  with pytest.raises(ValueError, match="one bound for jax, such as"):
    lower_bounds(project(jax))


def make_venv(folder, *bounds, python):
  """Runs make_venv.sh with this Python; (exit status, message)."""
  done = subprocess.run(
    [TOOLS / "make_venv.sh", folder, *bounds],
    env=os.environ | {"PYTHON": str(python)},
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stderr


class Pythons:
  """Fake Pythons that make environments as fake as themselves."""

  def __init__(self, folder):
    self.folder = folder

  def path(self, version):
    path = self.folder / f"python{version}"
    path.write_text(f"""#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *ensurepip*) echo {version} "$0" ;;
  *) echo {version} ;;
esac
""")
    path.chmod(0o755)
    return path

  @staticmethod
  def version(venv):
    out = subprocess.run([venv / "bin" / "python"], capture_output=True)
    return out.stdout.decode().strip()


@pytest.fixture
def pythons(tmp_path):
  return Pythons(tmp_path)


def test_an_environment_is_made_once_and_made_anew_for_another_python(
  pythons, tmp_path
):
  venv = tmp_path / ".venv"
  assert make_venv(venv, python=pythons.path("3.12"))[0] == 0
  made = (venv / "made").stat().st_mtime_ns
  (venv / "installed-test").touch()

  assert make_venv(venv, python=pythons.path("3.12")) == (0, "")
  assert (venv / "made").stat().st_mtime_ns == made
  assert (venv / "installed-test").exists()

  assert make_venv(venv, python=pythons.path("3.13"))[0] == 0
  assert pythons.version(venv) == "3.13"
  assert not (venv / "installed-test").exists()


def test_an_environment_that_was_made_before_there_were_marks_is_made_anew(
  pythons, tmp_path
):
  venv = tmp_path / ".venv"
  make_venv(venv, python=pythons.path("3.12"))
  (venv / "made").unlink()
  (venv / "installed-test").touch()
  assert make_venv(venv, python=pythons.path("3.13"))[0] == 0
  assert pythons.version(venv) == "3.13"


def test_an_environment_of_somebody_is_used_or_refused_but_never_removed(
  pythons, tmp_path
):
  venv = tmp_path / ".venv"
  make_venv(venv, python=pythons.path("3.12"))
  (venv / "made").unlink()
  status, message = make_venv(venv, python=pythons.path("3.13"))
  assert status == 1 and "was not made by make. Remove it" in message
  assert pythons.version(venv) == "3.12"
  assert make_venv(venv, python=pythons.path("3.12")) == (0, "")


def test_an_environment_that_was_left_half_made_is_made_anew(pythons, tmp_path):
  venv = tmp_path / ".venv"
  venv.mkdir()
  (venv / "made").touch()
  assert make_venv(venv, python=pythons.path("3.12"))[0] == 0
  assert pythons.version(venv) == "3.12"


def what_make_would_do(*arguments):
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


def test_ci_run_fails_without_a_new_python_and_runs_all_versions():
  assert re.search(r"^set -euo pipefail$", CI_RUN, re.MULTILINE)
  # An assignment alone on its line fails with the command in it.
  assert re.search(
    r"^PYTHON=\$\(tools/newest_python\.sh 3\.12\)\nexport PYTHON$",
    CI_RUN,
    re.MULTILINE,
  )
  steps = re.findall(r"^make ([a-z0-9.-]+)", CI_RUN, re.MULTILINE)
  assert steps == ["check", "coverage", "test-3.11", "test-oldest", "docs"]


def test_ci_run_stops_at_once_without_a_new_python(tmp_path):
  machine = Machine(tmp_path)
  machine.add("3.11")
  for tool in ("bash", "env"):
    (machine.bin / tool).symlink_to(find_tool(tool))
  (machine.bin / "make").write_text("#!/bin/sh\necho it ran\n")
  (machine.bin / "make").chmod(0o755)
  done = subprocess.run(
    [ROOT / ".ci" / "run"],
    env={"PATH": str(machine.bin), "HOME": str(machine.home)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1 and done.stdout == ""
  assert "Python 3.12 or later is needed" in done.stderr


def test_the_tests_of_jax_itself_run_on_each_version():
  for target in ("test-3.11", "test-oldest"):
    commands = what_make_would_do(target)
    assert "--ignore=tests/pages" in commands
    assert "test_jax.py" not in commands


def test_what_is_left_out_on_older_versions_exists():
  commands = what_make_would_do("test-oldest")
  left_out = re.findall(r"--(?:ignore|deselect)=(tests/[\w/.]+)", commands)
  assert len(set(left_out)) > 10
  for path in left_out:
    assert (ROOT / path).exists(), path


def test_the_upgrade_flags_are_set_for_the_parts_that_read_jaxprs():
  commands = what_make_would_do("test-jax-flags").splitlines()
  flags = "JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1 "
  assert any(line.startswith(flags) for line in commands)
  assert "tests/autocast tests/diagnostics tests/core" in commands[-1]
  alone = what_make_would_do("test-jax-flags", "JAX_FLAGS=JAX_REMAT3=1")
  assert "\nJAX_REMAT3=1 " in alone and "JVP3" not in alone


def python_versions(job):
  """The versions of Python that a job of a workflow asks for."""
  (setup,) = [
    step["with"]["python-version"]
    for step in job["steps"]
    if step.get("uses", "").startswith("actions/setup-python")
  ]
  if "matrix" in setup:
    return job["strategy"]["matrix"]["python"]
  return [setup]


def commands(job):
  return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_of_tests_begins_with_the_newest_python_and_jax():
  jobs = WORKFLOWS["tests"]["jobs"]
  assert next(iter(jobs)) == "newest"
  new = [v for v in declared_versions() if v != "3.11"]
  assert python_versions(jobs["newest"]) == new
  assert python_versions(jobs["python-3-11"]) == ["3.11"]
  assert commands(jobs["python-3-11"])[0].startswith("make test-3.11 ")
  assert python_versions(jobs["oldest"]) == ["3.11"]


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_takes_the_python_that_it_set_up(name):
  workflow = WORKFLOWS[name]
  assert workflow["env"]["PYTHON"] == "python"
  for job in workflow["jobs"].values():
    if any(line.startswith("make ") for line in commands(job)):
      has_3_11 = "3.11" in python_versions(job)
      assert not has_3_11 or workflow["env"]["PYTHON_3_11"] == "python"


def test_a_night_that_fails_opens_an_issue():
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


def test_each_night_tries_the_next_jax_and_what_it_will_do_one_day():
  jobs = WORKFLOWS["nightly"]["jobs"]
  assert commands(jobs["jax-nightly"])[0].startswith("make test-jax-nightly ")
  assert commands(jobs["jax-flags"])[0].startswith("make test-jax-flags ")


@pytest.mark.parametrize("name", ["docs", "publish"])
def test_what_is_published_is_built_with_what_we_develop_on(name):
  assert python_versions(WORKFLOWS[name]["jobs"]["build"]) == ["3.13"]
  read_the_docs = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
  assert read_the_docs["build"]["tools"]["python"] == "3.13"
