"""The documentation: complete, and its links lead somewhere.

`make docs` builds the pages, test_pages.py runs their code; what can be known
without either is here.
"""

import itertools
import json
import re
import runpy
import subprocess
import tomllib

from helpers import ROOT
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics, interop, plots

DOCS = ROOT / "docs"
API_PAGES = sorted((DOCS / "api").glob("*.md"))
GUIDES = sorted(DOCS.glob("*.md"))
PAGES = [
  *sorted(ROOT.glob("*.md")),
  *sorted(ROOT.glob("benchmarks/**/*.md")),
  *sorted(ROOT.glob("optax_lossscale/**/*.md")),
  *sorted(ROOT.glob("tests/*.md")),
  *GUIDES,
  *API_PAGES,
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CI_RUN = ROOT / ".ci" / "run"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def relative_name(path):
  return str(path.relative_to(ROOT))


def entries():
  """The (module, name) of each entry on an API page."""
  for page in API_PAGES:
    text = page.read_text()
    for module in (diagnostics, interop, plots):
      if re.search(rf"^\.\. automodule:: {module.__name__}$", text, re.M):
        yield from ((module.__name__, name) for name in module.__all__)
    owner = re.search(r"^\.\. currentmodule:: (\S+)$", text, re.M)
    for name in re.findall(r"^\.\. auto(?!module)\w+:: (\w+)", text, re.M):
      yield owner[1], name


def test_each_public_name_has_one_entry_on_an_api_page():
  modules = (ols, diagnostics, interop, plots)
  ours = [
    (module.__name__, name) for module in modules for name in module.__all__
  ]
  assert sorted(entries()) == sorted(ours)


def texts():
  """The (file, text) of everything in Markdown, without blocks of code."""
  for path in PAGES:
    yield path, prose(path.read_text())
  for path in NOTEBOOKS:
    for cell in json.loads(path.read_text())["cells"]:
      if cell["cell_type"] == "markdown":
        yield path, prose("".join(cell["source"]))


def test_the_stored_names_of_others_are_those_that_pages_mention_and_exist():
  """Else run tools/inventories.py, and look at what is new."""
  made = runpy.run_path(str(ROOT / "tools" / "inventories.py"))[
    "build_inventories"
  ]()
  for package, lines in made.items():
    stored = (DOCS / "inventories" / f"{package}.txt").read_text()
    assert stored.splitlines()[1:] == lines, package
  assert len(made["jax"]) > 20 and len(made["optax"]) > 5


def test_each_example_is_on_the_front_page():
  page = (DOCS / "index.md").read_text()
  for path in (ROOT / "examples").glob("*.py"):
    assert f"`examples/{path.name}`" in page, path.name


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

NO_TEXTS = {".json", ".msgpack", ".pickle", ".png"}


def read_tracked_texts():
  """The (file, text) of all that names an address: no pictures, no outputs."""
  out = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  for name in out.stdout.splitlines():
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


def slugs(path):
  """What a code host makes of the headings of a page, to link to them."""
  for heading in re.findall(r"^#+ (.*)$", prose(path.read_text()), re.M):
    heading = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
    yield re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-")


def test_each_link_leads_to_a_file_a_label_or_a_heading():
  labels = {
    label
    for path in PAGES
    for label in re.findall(r"^\(([\w-]+)\)=$", path.read_text(), re.MULTILINE)
  }
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


def test_the_picture_of_the_readme_is_there_and_small():
  text = (ROOT / "README.md").read_text()
  (url,) = re.findall(r"!\[.+\]\((\S+\.png)\)", text)
  picture = to_repository_path(url)
  assert picture.read_bytes()[1:4] == b"PNG"
  assert picture.stat().st_size < 50_000


def read_front_page():
  """The text of the front page: the beginning of the README, and its own."""
  own = (DOCS / "index.md").read_text()
  _, _, after_badges = (ROOT / "README.md").read_text().partition("-->\n")
  return after_badges.partition("\n## ")[0] + own


def test_the_front_page_has_the_install_command_a_picture_and_the_versions():
  page = read_front_page()
  command = f"pip install {PROJECT['name']}\n"
  assert page.index(command) < page.index("import jax")
  assert "## Install\n" in page and "](_static/digits.png)" in page
  for requirement in PROJECT["dependencies"]:
    name, lowest = requirement.split(">=")
    told = re.search(rf"{name} ([\d.]+)", page, re.IGNORECASE)[1]
    assert lowest.removesuffix(".0") == told, requirement
  minors = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))
  lowest, highest = min(map(int, minors)), max(map(int, minors))
  assert re.search(rf"Python 3\.{lowest} to\s3\.{highest}\b", page)


# The line for the cards that CUDA 13 and newer cuDNN do not know.
OLD_CARDS = 'pip install "jax[cuda12]" "nvidia-cudnn-cu12<9.11"'


@pytest.mark.parametrize("page", ["index", "versions", "which_precision"])
def test_what_to_install_for_a_v100_or_a_t4_is_the_same_on_each_page(page):
  text = (DOCS / f"{page}.md").read_text()
  assert re.findall(r"`(pip install [^`]*cuda12.*?)`", text) == [OLD_CARDS]


def test_no_power_of_two_turns_prose_bold_and_no_formula_needs_a_script():
  """Markdown may take the asterisks of one and of the next for bold."""
  assert "mathjax" not in (DOCS / "conf.py").read_text()
  for path, text in texts():
    text = re.sub(r"`[^`]*`", "", text)
    where = f"{relative_name(path)}: write it without TeX"
    assert not re.search(r"\$|\\[a-z]+", text), where
    # Paragraphs, items of lists, cells of tables.
    for part in re.split(r"\n\s*\n|\n(?=[*-] )|\|", text):
      has_power = re.search(r"\d\*\*-?\d", part)
      where = f"{relative_name(path)}: write code, as in `2**3`, in {part}"
      assert not has_power or part.count("**") == 1, where


def test_each_page_is_in_a_table_of_contents():
  listed = {"index"}
  for path in [*GUIDES, *API_PAGES]:
    for tree in re.findall(
      r"^```\{toctree\}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
    ):
      pages = [line for line in tree.splitlines() if re.match(r"\w", line)]
      folder = path.parent.relative_to(DOCS)
      listed |= {str(folder / page) for page in pages}
  pages = {str(p.relative_to(DOCS).with_suffix("")) for p in GUIDES + API_PAGES}
  notebooks = {f"notebooks/{path.stem}" for path in NOTEBOOKS}
  assert listed == pages | notebooks


def find_make_targets(path):
  """The make targets that a script, a workflow or a page calls or names."""
  calls = r"(?:^|run: |`)make (?:-j2 )?([a-z0-9.-]+)"
  return set(re.findall(calls, path.read_text(), re.MULTILINE))


def test_the_make_targets_that_are_called_or_named_exist():
  makefile = (ROOT / "Makefile").read_text()
  targets = set(re.findall(r"^([a-z0-9.-]+):", makefile, re.MULTILINE))
  pages = ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "reliability.md"
  for path in [CI_RUN, *WORKFLOWS, *pages]:
    assert find_make_targets(path), path.name
    assert find_make_targets(path) <= targets, path.name


def test_the_table_of_commands_holds_each_make_target():
  makefile = (ROOT / "Makefile").read_text()
  described = set(re.findall(r"^([a-z0-9.-]+):.*##", makefile, re.MULTILINE))
  page = (ROOT / "CONTRIBUTING.md").read_text()
  listed = re.findall(r"^\| `make ([a-z0-9.-]+)`", page, re.MULTILINE)
  assert sorted(listed) == sorted(described - {"help"})


def test_github_makes_all_that_ci_run_makes():
  on_a_push = [path for path in WORKFLOWS if "push:" in path.read_text()]
  assert find_make_targets(CI_RUN) <= set().union(
    *map(find_make_targets, on_a_push)
  )


def order():
  """The guides in the order of the index, with the page behind the last."""
  trees = re.findall(
    r"^```\{toctree\}\n:caption: Guide\n(.*?)^```",
    (DOCS / "index.md").read_text(),
    re.MULTILINE | re.DOTALL,
  )
  return [*re.findall(r"^\w+$", trees[0], re.MULTILINE), "api/index"]


@pytest.mark.parametrize(
  ("name", "following"), list(itertools.pairwise(order()))
)
def test_a_guide_ends_with_a_link_to_the_one_that_follows(name, following):
  *_, last = (DOCS / f"{name}.md").read_text().rstrip().split("\n\n")
  assert last.startswith("Next: ") and f"]({following}.md)" in last
