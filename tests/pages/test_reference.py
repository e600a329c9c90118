"""The tables of docs/reference agree with the package."""

import re
import warnings

from helpers import markdown, ROOT
import jax
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
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

X = 1.0 + jnp.eye(4)
MESH = jax.make_mesh(
  (1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1]
)


def on_devices(fun):
  """Return a function of two arrays that calls another inside shard_map."""
  return jax.shard_map(
    fun, mesh=MESH, in_specs=(P(), P()), out_specs=P(), check_vma=False
  )


def attention(x, w):
  q, k = x[None, :, None], w[None, :, None]
  return jax.nn.dot_product_attention(q, k, k)


RUN_IN_FLOAT16 = {
  "jnp.matmul": jnp.matmul,
  "jnp.dot": jnp.dot,
  "jnp.tensordot": lambda x, w: jnp.tensordot(x, w, 1),
  "jnp.einsum": lambda x, w: jnp.einsum("ij,j->i", x, w[0]),
  "lax.dot_general": lambda x, w: lax.dot_general(
    x, w, (((1,), (0,)), ((), ()))
  ),
  "jnp.linalg.multi_dot": lambda x, w: jnp.linalg.multi_dot([x, w, x]),
  "jnp.linalg.matrix_power": lambda x, w: jnp.linalg.matrix_power(x, 3),
  "jnp.cov": lambda x, w: jnp.cov(x),
  "lax.conv_general_dilated": lambda x, w: lax.conv_general_dilated(
    x[None, None], w[None, None, :2, :2], (1, 1), "SAME"
  ),
  "jnp.convolve": lambda x, w: jnp.convolve(x[0], w[0]),
  "lax.ragged_dot": lambda x, w: lax.ragged_dot(
    x, w[None], jnp.array([4], jnp.int32)
  ),
  "jax.nn.dot_product_attention": attention,
}
FOLLOW = {
  "jnp.reshape": lambda y: jnp.reshape(y, (2, 8)),
  "jnp.transpose": jnp.transpose,
  "jnp.squeeze": lambda y: jnp.squeeze(lax.slice(y, (0, 0), (1, 4))),
  "jnp.copy": jnp.copy,
  "lax.slice": lambda y: lax.slice(y, (0, 0), (2, 2)),
  "lax.rev": lambda y: lax.rev(y, (0, 1)),
  "checkpoint_name": lambda y: checkpoint_name(y, "hidden"),
  "lax.optimization_barrier": lax.optimization_barrier,
  "lax.with_sharding_constraint": lambda y: lax.with_sharding_constraint(
    y, NamedSharding(MESH, P())
  ),
  "lax.ppermute": lambda y: lax.ppermute(y, "data", [(0, 0)]),
  "lax.all_to_all": lambda y: lax.all_to_all(y, "data", 0, 0, tiled=True),
}
IN_SHARD_MAP = {"lax.ppermute", "lax.all_to_all"}
RUN_IN_FLOAT32 = {
  "jax.nn.softmax": jax.nn.softmax,
  "jax.nn.log_softmax": jax.nn.log_softmax,
  "jax.nn.logsumexp": jax.nn.logsumexp,
  "jnp.exp": jnp.exp,
  "jnp.log": jnp.log,
  "jnp.sum": jnp.sum,
  "jnp.mean": jnp.mean,
  "jnp.var": jnp.var,
  "jnp.cumsum": jnp.cumsum,
  "jnp.linalg.norm": jnp.linalg.norm,
  "jax.nn.standardize": jax.nn.standardize,
  "jnp.add": lambda y: y + y,
  "jnp.multiply": lambda y: y * y,
  "jnp.divide": lambda y: y / y,
  "jnp.sqrt": jnp.sqrt,
  "jax.nn.relu": jax.nn.relu,
  "jax.nn.gelu": jax.nn.gelu,
  "jnp.where": lambda y: jnp.where(y > 0, y, y),
  "jnp.concatenate": lambda y: jnp.concatenate([y, y]),
  "jnp.split": lambda y: jnp.split(y, 2),
  "jnp.pad": lambda y: jnp.pad(y, 1),
  "jnp.broadcast_to": lambda y: jnp.broadcast_to(y, (2, 4, 4)),
  "jnp.take": lambda y: jnp.take(y, jnp.array([0, 1]), axis=0),
  "lax.dynamic_slice": lambda y: lax.dynamic_slice(
    y, (jnp.int32(1), 0), (2, 2)
  ),
  "lax.psum": lambda y: lax.psum(y, "data"),
  "lax.all_gather": lambda y: lax.all_gather(y, "data"),
  "optax.softmax_cross_entropy": lambda y: optax.softmax_cross_entropy(y, X),
  "optax.l2_loss": optax.l2_loss,
}
MATMULS_IN_FLOAT32 = {
  "jnp.vdot": jnp.vdot,
  "jnp.inner": lambda x, w: jnp.inner(x[0], w[0]),
  "jnp.vecdot": jnp.vecdot,
  "jnp.outer": lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]),
  "jnp.kron": jnp.kron,
  'precision="highest"': lambda x, w: jnp.matmul(x, w, precision="highest"),
  "jnp.linalg.solve": jnp.linalg.solve,
  "jnp.linalg.inv": lambda x, w: jnp.linalg.inv(x),
  "jnp.linalg.svd": lambda x, w: jnp.linalg.svd(x)[1],
  "jnp.linalg.eigh": lambda x, w: jnp.linalg.eigh(x)[0],
  "jnp.linalg.cholesky": lambda x, w: jnp.linalg.cholesky(x),
  "jnp.linalg.pinv": lambda x, w: jnp.linalg.pinv(x),
  "ols.keep_float32": ols.keep_float32(jnp.matmul),
}


def kernel(x, w, out):
  out[...] = x[...] @ w[...]


@custom_vmap
def with_rule_for_vmap(x, w):
  return x @ w


@with_rule_for_vmap.def_vmap
def batched(axis_size, in_batched, x, w):
  return jnp.matmul(x, w), True


def solve_by_matmuls(x, w):
  by_matmul = lambda matvec, b: x @ b
  return lax.custom_linear_solve(
    lambda v: x @ v, w, by_matmul, transpose_solve=by_matmul
  )


LEFT_UNCHANGED = {
  "pl.pallas_call": pl.pallas_call(kernel, out_shape=X),
  "jax.export": export.export(jax.jit(jnp.matmul))(X, X).call,
  "custom_vmap": with_rule_for_vmap,
  "linear_call": lambda x, w: linear_call(
    lambda w, x: x @ w, lambda w, x: x @ w.T, w, x
  ),
  "lax.custom_linear_solve": solve_by_matmuls,
}
MATMULS = {"conv_general_dilated", "dot_general", "ragged_dot_general"}


def eqns_of(jaxpr):
  for eqn in jaxpr.eqns:
    inner = [x for x in map(as_jaxpr, jax.tree.leaves(eqn.params)) if x]
    yield from [] if inner else [eqn]
    for jaxpr_of_eqn in inner:
      yield from eqns_of(jaxpr_of_eqn)


def as_jaxpr(x):
  x = getattr(x, "jaxpr", x)
  return x if hasattr(x, "eqns") else None


def dtypes_in(fun, *args):
  """Return the float dtypes of the results of matmuls, and of other ops."""
  closed = jax.make_jaxpr(ols.autocast(fun))(*args)
  of_matmuls, of_others = set(), set()
  for eqn in eqns_of(closed.jaxpr):
    dtypes = {getattr(v.aval, "dtype", jnp.int32) for v in eqn.outvars}
    if eqn.primitive.name in MATMULS:
      of_matmuls |= {str(x) for x in dtypes}
    elif eqn.primitive.name != "convert_element_type":
      of_others |= {str(x) for x in dtypes if jnp.issubdtype(x, jnp.floating)}
  return of_matmuls, of_others


@pytest.mark.parametrize(
  ("heading", "cases"),
  [
    ("## Ops that run in float16", RUN_IN_FLOAT16),
    ("## Ops that follow their input", FOLLOW),
    ("## Ops that run in float32", RUN_IN_FLOAT32),
    ("## Matmuls that stay in float32", MATMULS_IN_FLOAT32),
    ("## Ops that autocast leaves unchanged", LEFT_UNCHANGED),
  ],
)
def test_the_ops_of_a_table_are_those_that_are_tried_here(heading, cases):
  listed = first_column(section("autocast_ops", heading))
  assert sorted(listed) == sorted(cases)


@pytest.mark.parametrize("name", RUN_IN_FLOAT16)
def test_an_op_of_the_first_table_runs_in_float16(name):
  matmuls, _ = dtypes_in(RUN_IN_FLOAT16[name], X, X)
  assert matmuls == {"float16"}


@pytest.mark.parametrize("name", FOLLOW)
def test_an_op_that_moves_entries_follows_its_input(name):
  move = FOLLOW[name]
  wrap = on_devices if name in IN_SHARD_MAP else lambda fun: fun
  fun = wrap(lambda x, w: move(x @ w))
  assert dtypes_in(fun, X, X) == ({"float16"}, {"float16"})
  fun = wrap(lambda x, w: (move(x), x @ w))
  assert dtypes_in(fun, X, X) == ({"float16"}, {"float32"})


@pytest.mark.parametrize("name", RUN_IN_FLOAT32)
def test_an_op_of_the_third_table_runs_in_float32(name):
  op = RUN_IN_FLOAT32[name]
  # The multiplication keeps a reshape inside of the op from running in float16.
  fun = on_devices(lambda x, w: op(1.0 * (x @ w)))
  assert dtypes_in(fun, X, X) == ({"float16"}, {"float32"})


@pytest.mark.parametrize("name", MATMULS_IN_FLOAT32)
def test_a_matmul_of_the_fourth_table_stays_in_float32(name):
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="autocast had no effect")
    matmuls, others = dtypes_in(MATMULS_IN_FLOAT32[name], X, X)
  assert matmuls <= {"float32"} and others <= {"float32"}


@pytest.mark.parametrize("name", LEFT_UNCHANGED)
def test_autocast_warns_of_a_call_that_it_leaves_unchanged(name):
  with pytest.warns(UserWarning, match="^autocast left .* unchanged"):
    jax.make_jaxpr(ols.autocast(LEFT_UNCHANGED[name]))(X, X)


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
    for name in names.split(", "):
      yield name, [x if x.isalnum() else name for x in expected]


@pytest.mark.parametrize(("dtype", "expected"), [*rows_of_dtypes()])
def test_a_step_has_the_dtypes_of_the_table(dtype, expected):
  with jax.enable_x64(dtype == "float64"):
    assert dtypes_of_step(dtype) == expected


def dtypes_of_step(dtype):
  """Return the dtypes of gradients, optimizer state and updates."""
  tx = ols.with_loss_scaling(optax.adam(1e-3))

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
    "check_step": names["check"],
    "find_overflow": names["hit"],
    "compare_precision": names["comparison"],
    "precision_report": names["precision"],
    "gradient_report": names["gradients"],
    "nonfinite_leaves": nonfinite,
  }
  for name, report in printed.items():
    text = section("reports", f"## {name}")
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.DOTALL)
    assert without_numbers(shown) == without_numbers(str(report)), name
    for line in shown.splitlines():
      if line.startswith(" " * 5) or line.startswith("operand dtype"):
        explained = ", ".join(re.findall(r"^\| ([^|]*) \|", text, re.M))
        assert columns(line) <= set(explained.split(", ")), line


def without_numbers(text):
  """Return a printed report without numbers, names of files and spaces."""
  text = re.sub(r"\w+\.(?:py|md):\d+", "FILE", text)
  text = re.sub(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?%?", "N", text)
  return [line.split() for line in text.splitlines()]
