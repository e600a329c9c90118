"""What is said of a release: the same in each file that says it."""

import re
import tomllib

from helpers import ROOT
import pytest
import yaml

import optax_lossscale as ols

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


SETTINGS = [
  *sorted((ROOT / ".github").rglob("*.yml")),
  ROOT / ".readthedocs.yaml",
  ROOT / "CITATION.cff",
  ROOT / "conda" / "recipe.yaml",
]


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.name)
def test_a_file_of_settings_can_be_read(path):
  assert len(yaml.safe_load(path.read_text())) > 2


def test_the_pages_that_are_built_are_those_that_are_published():
  workflow = ROOT / ".github" / "workflows" / "docs.yml"
  jobs = yaml.safe_load(workflow.read_text())["jobs"]
  built, uploaded = jobs["build"]["steps"][-2:]
  assert built == {"run": "make docs"}
  makefile = (ROOT / "Makefile").read_text()
  assert f"-b html docs {uploaded['with']['path']}\n" in makefile
  assert jobs["deploy"]["needs"] == "build"
  assert jobs["deploy"]["permissions"] == {
    "pages": "write",
    "id-token": "write",
  }


def test_the_version_is_the_same_wherever_it_stands():
  for name, line in {
    "CITATION.cff": rf"^version: {ols.__version__}$",
    "conda/recipe.yaml": rf'^  version: "{ols.__version__}"$',
    "CHANGELOG.md": rf"^## \[{ols.__version__}\] - (unreleased|[\d-]+)$",
  }.items():
    assert re.search(line, (ROOT / name).read_text(), re.MULTILINE), name


def test_the_conda_recipe_requires_what_the_package_requires():
  recipe = (ROOT / "conda" / "recipe.yaml").read_text()
  run = re.search(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)[1]
  required = [line.removeprefix("    - ") for line in run.splitlines()]
  assert required[0] == "python >=${{ python_min }}"
  ours = [re.sub(r"(?=>=)", " ", name) for name in PROJECT["dependencies"]]
  assert required[1:] == ours
  (build,) = PYPROJECT["build-system"]["requires"]
  assert f"- {build.replace('_', '-').replace('>=', ' >=', 1)}" in recipe


def test_the_page_on_versions_says_what_is_declared_and_tested():
  page = (ROOT / "docs" / "versions.md").read_text()
  for requirement in PROJECT["dependencies"]:
    name, bound = re.match(r"([\w-]+)>=([\w.]+)", requirement).groups()
    row = rf"^\| {name} \| {re.escape(bound)} and later \| {re.escape(bound)}"
    assert re.search(row, page, re.MULTILINE | re.IGNORECASE), requirement
  declared = {
    found[1]
    for classifier in PROJECT["classifiers"]
    if (found := re.search(r"Python :: (3\.\d+)$", classifier))
  }
  row = re.search(r"^\| Python .*$", page, re.MULTILINE)[0].split("|")[3]
  assert set(re.findall(r"3\.\d+", row)) == declared
  table = page.split("### Which Python gets which JAX")[1].split("###")[0]
  gets = re.findall(r"^\| (3\.\d+) \| \d", table, re.MULTILINE)
  assert sorted(gets) == sorted(declared)
  script = (ROOT / "tools" / "newest_python.sh").read_text()
  last = re.search(r"^LAST_JAX_FOR_3_11=(\S+)$", script, re.MULTILINE)[1]
  assert re.search(rf"^\| 3\.11 \| {re.escape(last)} ", table, re.MULTILINE)
