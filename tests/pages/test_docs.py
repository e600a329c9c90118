"""The documentation: complete, and its links lead somewhere.

`make docs` builds the pages, test_pages.py runs their code; what can be known
without either is here.
"""

import json
import re
import subprocess
import tomllib

from helpers import pages_below, relative_name, ROOT
import pytest

from optax_lossscale import diagnostics, interop, plots

DOCS = ROOT / "docs"
API_PAGES = sorted((DOCS / "api").glob("*.md"))
GUIDES = [path for path in pages_below(DOCS) if path not in API_PAGES]
PAGES = [
  *sorted(ROOT.glob("*.md")),
  *sorted(ROOT.glob("benchmarks/**/*.md")),
  *sorted(ROOT.glob("optax_lossscale/**/*.md")),
  *sorted(ROOT.glob("tests/*.md")),
  *GUIDES,
  *API_PAGES,
]
CI_RUN = ROOT / ".ci" / "run"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def entries_of(page):
  """The (module, name) of each entry on one API page."""
  text = page.read_text()
  for module in (diagnostics, interop, plots):
    if re.search(rf"^\.\. automodule:: {module.__name__}$", text, re.M):
      yield from ((module.__name__, name) for name in module.__all__)
  owner = re.search(r"^\.\. currentmodule:: (\S+)$", text, re.M)
  for name in re.findall(r"^\.\. auto(?!module)\w+:: (\w+)", text, re.M):
    yield owner[1], name


def test_the_table_of_the_api_has_each_entry_of_its_pages():
  text = (DOCS / "api" / "index.md").read_text()
  rows = re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)
  named = re.findall(r"`(?:\w+)\.(\w+)`", " ".join(rows))
  entries = [name for page in API_PAGES for _, name in entries_of(page)]
  assert len(entries) > 40
  assert sorted(named) == sorted(entries)


def texts():
  """The (file, text) of everything in Markdown, without blocks of code."""
  for path in PAGES:
    yield path, prose(path.read_text())
  for path in NOTEBOOKS:
    for cell in json.loads(path.read_text())["cells"]:
      if cell["cell_type"] == "markdown":
        yield path, prose("".join(cell["source"]))


def prose(text):
  return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links():
  """The (file, link, message) of each link in Markdown."""
  pattern = r"\]\(([^)\s]+)\)|^\[[\w-]+\]: (\S+)$"
  for path, text in texts():
    for pair in re.findall(pattern, text, re.MULTILINE):
      link = "".join(pair)
      yield path, link, f"{relative_name(path)} links to {link}"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Source"]
# Of GitHub's own making, and so in no folder of the repository.
MADE_BY_GITHUB = {"", "issues", "releases", "security/advisories/new"}

NO_TEXTS = {".json", ".msgpack", ".npz", ".pickle", ".png"}


def read_tracked_texts():
  """The (file, text) of all that names an address: no pictures, no outputs."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
  names = subprocess.check_output(command, cwd=ROOT, text=True)
  for name in names.splitlines():
    path = ROOT / name
    if path.suffix not in NO_TEXTS and path.is_file():
      yield path, path.read_text()


def to_repository_path(url):
  """The path that an address of this repository stands for, or None."""
  rest = url.removeprefix(REPOSITORY).split("#")[0].strip("/")
  if rest in MADE_BY_GITHUB or rest.startswith(("releases/", "archive/")):
    return None
  workflow = re.match(r"actions/(workflows/\w+\.yml)", rest)
  if workflow:
    return ROOT / ".github" / workflow[1]
  return ROOT / re.sub(r"^(?:blob|raw|tree)/main/", "", rest)


def test_each_address_of_this_repository_leads_to_a_file():
  name = REPOSITORY.rsplit("/", 1)[1]
  # Colab opens notebooks by the same path.
  hosts = r"(?:github\.com|colab\.research\.google\.com/github)"
  pattern = rf"https://{hosts}/[\w-]+/{name}\b[^\s)>\"'`,;]*"
  found = 0
  for path, text in read_tracked_texts():
    for url in re.findall(pattern, text):
      where = f"{relative_name(path)} links to {url}"
      url = url.replace("colab.research.google.com/github", "github.com")
      assert url.startswith(REPOSITORY), where
      # Behind it is the end of a sentence, or in a notebook of a string.
      target = to_repository_path(url.rstrip(".\\"))
      assert target is None or target.exists(), where
      found += 1
  assert found > 20


def test_each_address_of_the_pages_leads_to_a_page_or_a_notebook():
  site = PROJECT["urls"]["Documentation"]
  found = 0
  for _, link, where in links():
    if not link.startswith(f"{site}/"):
      continue
    page, _, slug = link.removeprefix(f"{site}/").partition("#")
    source = (DOCS / page).with_suffix(".md")
    assert page.endswith(".html"), where
    assert source.exists() or source.with_suffix(".ipynb").exists(), where
    assert not slug or slug in set(slugs(source)), where
    found += 1
  assert found > 20


def test_the_readme_links_no_source_of_a_page():
  """GitHub shows its tabs, warnings and figures as text."""
  readme = (ROOT / "README.md").read_text()
  assert f"{REPOSITORY}/blob/main/docs/" not in readme


def slugs(path):
  """What a code host makes of the headings of a page, to link to them."""
  for heading in re.findall(r"^#+ (.*)$", prose(path.read_text()), re.M):
    heading = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
    yield re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-")


def test_each_link_leads_to_a_file_a_label_or_a_heading():
  whole_text = "\n".join(path.read_text() for path in PAGES)
  labels = re.findall(r"^\(([\w-]+)\)=$", whole_text, re.MULTILINE)
  files = headings = 0
  for path, link, where in links():
    target, _, slug = link.partition("#")
    page = to_repository_path(target) if target.startswith(REPOSITORY) else path
    if target and not re.match(r"\w+:", target) and target not in labels:
      files += 1
      page = (path.parent / target).resolve()
      assert page.exists(), where
    elif re.match(r"\w+:", target) and page is path:
      continue
    if slug:
      headings += 1
      assert page.suffix != ".md" or slug in set(slugs(page)), where
  assert files > 20 and headings > 20


def test_no_file_names_a_package_index():
  for path, text in read_tracked_texts():
    if path.suffix in {".toml", ".txt", ".cfg", ".lock", ".yml"}:
      assert not re.search(r"index-url|https?://\S*/simple", text), path


def test_the_readme_has_only_absolute_links_which_work_anywhere():
  text = prose((ROOT / "README.md").read_text())
  links = re.findall(r"\]\(([^)\s]+)\)", text)
  defined = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.MULTILINE))
  for link in [*links, *defined.values()]:
    assert link.startswith("https://"), link
  used = set(re.findall(r"\]\[([\w-]+)\]", text))
  assert used == set(defined)


FRONT_PAGES = ROOT / "README.md", DOCS / "index.md"


@pytest.mark.parametrize("path", FRONT_PAGES, ids=relative_name)
def test_a_front_page_has_the_lowest_version_of_each_requirement(path):
  page = path.read_text()
  for requirement in PROJECT["dependencies"]:
    name, lowest = requirement.split(">=")
    stated = re.search(rf"{name} ([\d.]+\d)", page, re.IGNORECASE)[1]
    assert lowest.removesuffix(".0") == stated, requirement
  lowest = PROJECT["requires-python"].removeprefix(">=")
  assert re.search(rf"Python\s{re.escape(lowest)}\b", page)


def test_the_page_on_versions_has_the_declared_versions():
  page = (DOCS / "reference" / "versions.md").read_text()
  for requirement in PROJECT["dependencies"]:
    name, bound = re.match(r"([\w-]+)>=([\w.]+)", requirement).groups()
    row = rf"^\| {name} \| {re.escape(bound)} and later \|"
    assert re.search(row, page, re.MULTILINE | re.IGNORECASE), requirement
  declared = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))
  table = page.split("### Which Python gets which JAX")[1].split("###")[0]
  listed = re.findall(r"^\| (3\.\d+) \| \d", table, re.MULTILINE)
  assert sorted(listed) == sorted(declared)


MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE)
ENVIRONMENTS = re.findall(r"^ON_(\S+) ", MAKEFILE, re.MULTILINE)


def test_each_make_target_is_described_and_no_other_is_named():
  phony = MAKEFILE.split("\n.PHONY: ")[1].split("\n\n")[0]
  assert [*TARGETS, "FORCE"] == phony.replace("\\\n", "").split()
  assert len(TARGETS) <= 12
  # package/test_package.py checks those of the page on reliability.
  for page in ROOT / "README.md", ROOT / "CONTRIBUTING.md":
    named = re.findall(r"`make ([a-z-]+)", page.read_text())
    assert named and set(named) <= set(TARGETS), page.name


def test_the_paths_that_the_makefile_names_exist():
  """Pytest silently ignores an option whose path doesn't exist."""
  paths = re.findall(r"\b(?:tests|benchmarks)/[\w/.]+", MAKEFILE)
  assert len(paths) >= 12
  assert [path for path in paths if not (ROOT / path).exists()] == []


def find_steps(workflow):
  """The steps of .ci/run that a workflow runs."""
  steps = r"(?:step: |run: \.ci/run )\"?([a-z0-9.-]+)"
  return set(re.findall(steps, workflow.read_text()))


def test_github_runs_the_steps_of_ci_run_which_make_has():
  found = set().union(*map(find_steps, WORKFLOWS))
  assert found <= {*TARGETS, *ENVIRONMENTS}
  on_a_push = [path for path in WORKFLOWS if "push:" in path.read_text()]
  (steps,) = re.findall(r"^ *set -- (.*)$", CI_RUN.read_text(), re.MULTILINE)
  assert set().union(*map(find_steps, on_a_push)) == set(steps.split())


def test_each_question_of_a_reader_is_answered_under_a_heading():
  text = (ROOT / "tests" / "pages" / "reader_questions.md").read_text()
  rows = re.findall(r"^\| (.*) \| (\S+\.md) \| (.*) \|$", text, re.MULTILINE)
  assert len(rows) >= 30
  for question, page, heading in rows:
    headings = re.findall(r"^#+ (.*)$", prose((DOCS / page).read_text()), re.M)
    assert heading in headings, question
