"""The tables of docs/reference agree with the package."""

import re

from helpers import autocast_ops, markdown, ROOT
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

REFERENCE = ROOT / "docs" / "reference"


def section(page, heading):
  """Return the text below a heading of a page, up to the next heading."""
  text = (REFERENCE / f"{page}.md").read_text()
  (_, after) = text.split(f"\n{heading}\n", 1)
  return re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0]


def first_column(text):
  """Return the code in the first column of the tables of a text."""
  rows = re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)
  return re.findall(r"`([^`]+)`", " ".join(rows))


# --- autocast_ops.md


@pytest.mark.parametrize("heading", autocast_ops.TABLES)
def test_a_table_has_the_ops_that_the_tests_of_autocast_try(heading):
  listed = first_column(section("autocast_ops", heading))
  assert sorted(listed) == sorted(autocast_ops.TABLES[heading])


# --- metrics.md, and the API


def test_the_table_of_metrics_has_each_metric():
  metrics = jax.eval_shape(
    lambda: ols.loss_scale_metrics(
      ols.DynamicLossScale().init(), policy="dynamic", steps=1
    )
  )
  listed = first_column(section("metrics", "## loss_scale_metrics"))
  assert sorted(listed) == sorted(metrics)
  rows = section("metrics", "## loss_scale_metrics").splitlines()
  for name, array in metrics.items():
    (row,) = [row for row in rows if row.startswith(f"| `{name}` |")]
    assert f"| {array.dtype} |" in row


def test_the_docstring_of_probe_metrics_has_each_metric():
  metrics = jax.eval_shape(
    lambda: diagnostics.probe_metrics(diagnostics.probe_counters())
  )
  text = diagnostics.probe_metrics.__doc__
  listed = re.findall(r"^\s*\* ``(\w+)``:", text, re.MULTILINE)
  assert sorted(listed) == sorted(metrics)


# --- dtypes.md


def rows_of_dtypes():
  """Return the cells of the row of each dtype in the first table."""
  text = (REFERENCE / "dtypes.md").read_text()
  for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
    names, *expected = [
      cell.strip(" ").replace("`", "") for cell in row.split("|")
    ]
    names, masters, _ = names.partition(" with master weights")
    for name in names.split(", "):
      row = [x if x.isalnum() else name for x in expected]
      yield name, bool(masters), row


@pytest.mark.parametrize(
  ("dtype", "has_masters", "expected"), [*rows_of_dtypes()]
)
def test_a_step_has_the_dtypes_of_the_table(dtype, has_masters, expected):
  with jax.enable_x64(dtype == "float64"):
    assert dtypes_of_step(dtype, has_masters) == expected


def dtypes_of_step(dtype, has_masters):
  """Return the dtypes of gradients, optimizer state and updates."""
  tx = ols.with_loss_scaling(optax.adam(1e-3))
  if has_masters:
    tx = ols.with_master_weights(tx)

  def loss_fn(params):
    wide = params.astype("float32" if "float8" in dtype else dtype)
    return jnp.sum(jnp.abs(wide) ** 2).astype(jnp.float32)

  def step(params):
    opt_state = tx.init(params)
    grads = ols.grad(loss_fn, opt_state)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return grads, optax.tree.get(opt_state, "mu"), updates

  return [str(x.dtype) for x in jax.eval_shape(step, jnp.ones(4, dtype))]


# --- reports.md


def columns(line):
  """Return the names of the columns in the header of a printed table."""
  return set(re.split(r"\s{2,}", line.strip()))


@pytest.mark.slow
def test_each_report_prints_as_the_page_shows_it_with_columns_it_explains():
  names = markdown.run_page(REFERENCE / "reports.md")
  (nonfinite,) = names["nonfinite"]
  printed = {
    "## check_step": names["check"],
    "### Without a loss scale": names["bfloat16_check"],
    "## find_overflow": names["hit"],
    "## compare_precision": names["comparison"],
    "## count_flops": names["precision"],
    "## nonfinite_leaves": nonfinite,
  }
  for heading, report in printed.items():
    text = section("reports", heading)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.DOTALL)
    assert without_numbers(shown) == without_numbers(str(report)), heading
    for line in shown.splitlines():
      if line.startswith(" " * 5) or line.startswith("operand dtype"):
        explained = ", ".join(re.findall(r"^\| ([^|]*) \|", text, re.M))
        assert columns(line) <= set(explained.split(", ")), line


def without_numbers(text):
  """Return a printed report without numbers, names of files and spaces."""
  text = re.sub(r"\w+\.(?:py|md):\d+", "FILE", text)
  text = re.sub(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?%?", "N", text)
  return [line.split() for line in text.splitlines()]
