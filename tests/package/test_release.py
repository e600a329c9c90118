"""Both published distributions are built, inspected and used."""

import email
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

from helpers import markdown, ROOT
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

NAME = f"optax_lossscale-{ols.__version__}"


def run(*command, cwd):
  done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
  """The folder with both, the wheel built from the source distribution."""
  out = tmp_path_factory.mktemp("dist")
  # The workflow that publishes does without --no-isolation: it makes a separate
  # environment, and installs the same flit_core into it.
  build = sys.executable, "-m", "build", "--no-isolation"
  run(*build, "--outdir", str(out), str(ROOT), cwd=out)
  return out


@pytest.fixture(scope="module")
def wheel(dist):
  """The names of its files, and its metadata."""
  with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
    metadata = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    return wheel.namelist(), email.message_from_string(metadata)


def test_the_wheel_contains_only_the_package_its_types_and_the_license(wheel):
  names, _ = wheel
  assert "optax_lossscale/py.typed" in names
  assert f"{NAME}.dist-info/licenses/LICENSE" in names
  folders = {name.split("/")[0] for name in names}
  assert folders == {"optax_lossscale", f"{NAME}.dist-info"}
  ours = {
    str(path.relative_to(ROOT))
    for path in (ROOT / "optax_lossscale").rglob("*")
    if path.suffix in {".py", ".typed"}
  }
  assert {n for n in names if n.startswith("optax_lossscale/")} == ours


def test_the_metadata_contain_the_requirements_and_the_links(wheel):
  _, fields = wheel
  required = fields.get_all("Requires-Dist")
  always = [re.match(r"\w+", r)[0] for r in required if "extra ==" not in r]
  assert sorted(always) == ["jax", "optax"]
  assert fields["Version"] == ols.__version__
  assert "the optax_lossscale authors" in fields["Author"]
  assert fields["License-Expression"] == "Apache-2.0"
  assert fields["Description-Content-Type"].startswith("text/markdown")
  assert fields.get_payload().startswith("# optax_lossscale\n")
  names = {url.split(",")[0] for url in fields.get_all("Project-URL")}
  assert names == {"Documentation", "Source", "Changelog", "Issues"}


def test_an_index_would_accept_the_one_wheel_and_source_distribution(dist):
  names = [path.name for path in sorted(dist.iterdir())]
  assert names == [f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"]
  twine = sys.executable, "-m", "twine", "--no-color", "check", "--strict"
  out = run(*twine, *map(str, sorted(dist.iterdir())), cwd=dist)
  assert out.count("PASSED") == 2


def test_the_source_distribution_can_be_built_and_is_small(dist):
  with tarfile.open(dist / f"{NAME}.tar.gz") as sdist:
    names = {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
  assert {"pyproject.toml", "README.md", "LICENSE"} <= names
  folders = {name.split("/")[0] for name in names if "/" in name}
  assert folders == {"optax_lossscale"}


def test_the_readmes_first_example_runs_with_the_wheel_alone(dist, tmp_path):
  python = make_environment(tmp_path / "venv", dist)
  example, *_ = markdown.find_code_blocks(ROOT / "README.md")
  example += "print(ols.__file__, ols.diagnostics, ols.interop, ols.plots)\n"
  out = run(python, "-c", example, cwd=tmp_path)
  assert "32768.0" in out
  # The installed package, and not this folder.
  assert out.count(f"{tmp_path}/venv/lib") == 4


# As in a notebook service, where a JAX for the GPU must not be replaced by one
# that does not find it.
INSTALLED = {"optax": "0.2.6", "matplotlib": "3.10.0", "scikit-learn": "1.6.1"}


def plan_install(folder, dist, jax, *others, extra=""):
  """Return what pip would install next to an existing JAX, without an index."""
  venv.create(folder, with_pip=False)
  (packages,) = folder.glob("lib/python*/site-packages")
  for name, version in {"jax": jax, "jaxlib": jax, **INSTALLED}.items():
    # Pip reads only this of a package.
    info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(head)
  wheel = f"{dist / NAME}-py3-none-any.whl{extra}"
  python = f"--python={folder / 'bin' / 'python'}"
  pip = sys.executable, "-m", "pip", python, "install"
  options = "--dry-run", "--no-index", "--quiet", "--report=report.json"
  run(*pip, *options, wheel, *others, cwd=folder)
  report = json.loads((folder / "report.json").read_text())
  return [item["metadata"]["name"] for item in report["install"]]


@pytest.mark.parametrize("jax", ["0.8.0", "0.10.2", "0.12.0"])
def test_nothing_is_upgraded_next_to_a_supported_jax(dist, tmp_path, jax):
  alone = plan_install(tmp_path / "alone", dist, jax)
  # The first cells of the notebooks on a T4 do the same.
  others = jax, "scikit-learn"
  folder = tmp_path / "notebook"
  quick_start = plan_install(folder, dist, *others, extra="[plots]")
  assert alone == quick_start == ["optax-lossscale"]
  # An older one would be upgraded, and there is no index.
  with pytest.raises(AssertionError, match=r"No matching distribution.* jax>="):
    plan_install(tmp_path / "older", dist, "0.7.2")


def make_environment(folder, dist):
  """An environment with the wheel in it; its Python.

  jax and optax, which take minutes to install, are those of this environment:
  it comes last on the path of the new one, as a folder of packages without the
  `.pth` files in it, one of which leads to this folder.
  """
  venv.create(folder, with_pip=False)
  python = str(folder / "bin" / "python")
  wheel = str(dist / f"{NAME}-py3-none-any.whl")
  pip = (sys.executable, "-m", "pip", f"--python={python}", "install")
  run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
  (packages,) = folder.glob("lib/python*/site-packages")
  ours = sysconfig.get_paths()["purelib"]
  (packages / "borrowed.pth").write_text(f"{ours}\n")
  return python
