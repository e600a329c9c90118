"""The notebooks run, and are kept as a reader wants to find them."""

import importlib
import re

from helpers import parametrize_slow, ROOT
from IPython.core.interactiveshell import InteractiveShell
import nbclient
import nbformat
import pytest
from traitlets.config import Config

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Where most people meet a T4, nothing may be upgraded: what is there, does.
NEEDED = {
  "quick_start": "{package}[plots] scikit-learn",
  "float16_on_a_t4": "{package}[plots]",
}

each_notebook = pytest.mark.parametrize(
  "path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS]
)


# The others take up to two minutes each, and run at night.
@parametrize_slow(
  "path",
  (),
  NOTEBOOKS,
  [ROOT / "notebooks" / "quick_start.ipynb"],
  ids=[path.stem for path in NOTEBOOKS],
)
def test_a_notebook_runs_without_an_error_or_a_warning(
  path, tmp_path, monkeypatch
):
  # This package, no other, and nothing of the user's own settings.
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
  notebook = nbformat.read(path, as_version=4)
  # Raises on an output that is an error, and so for a failed assertion.
  nbclient.NotebookClient(
    notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
  ).execute()

  for cell in notebook.cells:
    for output in cell.get("outputs", []):
      is_stderr = output.get("name") == "stderr"
      assert not (is_stderr and "Warning" in output["text"]), output["text"]


@each_notebook
def test_a_notebook_asserts_its_claim_and_is_kept_as_it_ran(path):
  cells = nbformat.read(path, as_version=4).cells
  cells = [cell for cell in cells if cell.cell_type == "code"]
  counts = [cell.execution_count for cell in cells]
  assert counts == [*range(1, len(cells) + 1)]
  outputs = list_outputs(cells)
  assert any("image/png" in output.get("data", {}) for output in outputs)
  assert "error" not in [output.output_type for output in outputs]
  claims = [re.search(r"^assert ", c.source, re.MULTILINE) for c in cells]
  assert any(claims)


# From its clone, or else from the index. The package is installed only if it is
# missing, so that a notebook never replaces the one that is developed.
@pytest.mark.parametrize(
  "is_clone, found", [(True, False), (False, False), (True, True)]
)
@each_notebook
def test_a_notebook_opens_in_colab_and_installs_what_it_needs_if_it_is_missing(
  path, is_clone, found, tmp_path, monkeypatch
):
  folder = tmp_path / "a clone" / "notebooks"
  folder.mkdir(parents=True)
  if is_clone:
    (folder.parent / "optax_lossscale").mkdir()
  link, install, *_ = nbformat.read(path, as_version=4).cells
  assert "https://colab.research.google.com/" in link.source
  assert f"/blob/main/notebooks/{path.name})" in link.source
  monkeypatch.chdir(folder)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: found or None)
  commands = []
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
  without_history = Config({"HistoryManager": {"enabled": False}})
  shell = InteractiveShell(config=without_history)
  shell.register_magic_function(commands.append, magic_name="pip")
  shell.run_cell(install.source).raise_error()
  package = str(folder.parent) if is_clone else "optax-lossscale"
  first, *others = NEEDED.get(path.stem, "{package}[examples]").split()
  needed = " ".join([f'"{first.format(package=package)}"', *others])
  command = f"install --quiet {needed}"
  assert commands == ([] if found else [command])


@each_notebook
def test_a_notebook_is_small_and_tells_nothing_of_the_machine(path):
  assert path.stat().st_size < 500_000
  notebook = nbformat.read(path, as_version=4)
  assert notebook.metadata == {
    "kernelspec": {
      "display_name": "Python 3",
      "language": "python",
      "name": "python3",
    },
    "language_info": {"name": "python"},
  }
  assert all(not cell.metadata for cell in notebook.cells)
  for output in list_outputs(notebook.cells):
    text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
    # A path that starts at the root, or an address in memory.
    assert not re.search(r"(?<![\w.])/\w+/\w+|\b0x[0-9a-f]{6}", text), text


def list_outputs(cells):
  return [output for cell in cells for output in cell.get("outputs", [])]
