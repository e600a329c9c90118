"""The code on each page runs from top to bottom, once."""

from helpers import markdown, ROOT
import jax
from jax.sharding import PartitionSpec as P
import matplotlib
import matplotlib.pyplot as plt
import pytest

import optax_lossscale as ols

PAGES = [
  path
  for folder in (ROOT, ROOT / "benchmarks", ROOT / "docs", ROOT / "docs/api")
  for path in sorted(folder.glob("*.md"))
  if markdown.blocks(path)
]


def marks(path):
  """Pages that are notebooks draw, which takes seconds."""
  is_notebook = "{code-cell}" in path.read_text()
  return pytest.mark.slow if is_notebook else ()


@pytest.mark.parametrize(
  "path",
  [
    pytest.param(path, marks=marks(path), id=str(path.relative_to(ROOT)))
    for path in PAGES
  ],
)
def test_the_code_on_a_page_runs_from_top_to_bottom(
  path, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  matplotlib.use("Agg")
  names = markdown.run(path)
  plt.close("all")
  if path.name in AFTERWARDS:
    AFTERWARDS[path.name](names, capsys.readouterr().out)


def the_scale_is_shown(names, out):
  assert "32768.0" in out


def the_loss_that_is_only_defined_can_be_differentiated(names, out):
  grad = jax.shard_map(
    ols.grad(names["loss_of_part"], names["opt_state"]),
    mesh=names["mesh"],
    in_specs=(P(), P("data")),
    out_specs=P(),
  )
  assert ols.all_finite(jax.jit(grad)(names["params"], names["x"]))


# What the code on a page leaves behind, or has printed.
AFTERWARDS = {
  "README.md": the_scale_is_shown,
  "many_devices.md": the_loss_that_is_only_defined_can_be_differentiated,
}


def test_each_page_with_code_is_among_those_that_run():
  names = {path.name for path in PAGES}
  expected = {"README.md", "frameworks.md", "migrating.md", "policies.md"}
  assert names >= {*expected, *AFTERWARDS}
