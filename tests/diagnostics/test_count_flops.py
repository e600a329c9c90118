"""``count_flops`` counts as XLA does, and names the lines."""

import functools

from flax import linen as nn
from helpers import (
  find_line_number,
  hijax,
  parametrize_slow,
  sharding,
  train_steps,
)
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _source_info
from optax_lossscale.diagnostics import count_flops

F16, F32 = jnp.float16, jnp.float32


def make_shape(*sizes, dtype=F16):
  return jax.ShapeDtypeStruct(sizes, dtype)


def find_location(mark):
  return f"test_count_flops.py:{find_line_number(mark, __file__)}"


def total(x):
  return jnp.sum(x.astype(F32))


class ConvNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    conv = functools.partial(nn.Conv, dtype=F16)
    x = nn.relu(conv(128, (3, 3))(x))
    x = nn.relu(conv(256, (5, 3), strides=(2, 3), padding="VALID")(x))
    x = nn.relu(conv(256, (3, 3), kernel_dilation=2, feature_group_count=2)(x))
    x = nn.ConvTranspose(64, (4, 4), strides=(2, 2), dtype=F16)(x)
    return nn.Dense(512, dtype=F16)(x.reshape(x.shape[0], -1))


def make_linen_loss(model, x):
  def make():
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss_fn = lambda params, x: total(model.apply(params, x))
    return jax.value_and_grad(loss_fn), params, x

  return make


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    attention = nn.MultiHeadDotProductAttention(4, dtype=F16)
    x = x + attention(nn.LayerNorm(dtype=F16)(x))
    hidden = nn.relu(nn.Dense(4 * 512, dtype=F16)(x))
    return x + nn.Dense(512, dtype=F16)(hidden)


def recurrent():
  """Unrolled, since XLA counts the body of a loop only once."""

  def loss_fn(w, u, xs):
    body = lambda h, x: (jax.nn.relu(h @ w + x @ u), None)
    return total(lax.scan(body, xs[0], xs, unroll=8)[0])

  # XLA leaves out the derivative of the first carry if it is unused.
  fun = jax.grad(loss_fn, argnums=(0, 2))
  return fun, make_shape(768, 768), make_shape(768, 768), make_shape(8, 64, 768)


MODELS = {
  "convolutions": make_linen_loss(ConvNet(), make_shape(8, 32, 32, 64)),
  "transformer": make_linen_loss(Block(), make_shape(4, 128, 512)),
  "recurrent": recurrent,
}


@parametrize_slow("name", ["convolutions", "recurrent"], list(MODELS))
def test_the_flops_equal_those_of_xla(name):
  fun, *args = MODELS[name]()
  if name == "recurrent":
    skip_if_jax_cannot(jax.eval_shape, fun, *args)
  report = count_flops(fun, *args)
  cost = jax.jit(fun).lower(*args).cost_analysis()
  assert report.total_flops == pytest.approx(cost["flops"], rel=0.01)
  assert report.fraction == 1.0
  assert report.unconverted == () and report.limitations == ()
  assert sum(report.flops_by_dtype.values()) == report.total_flops


def test_the_silent_upcast_of_a_dense_layer_is_reported_with_its_line():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(64, dtype=F16)(x)
      x = nn.Dense(32)(x)  # upcast
      return nn.Dense(64, dtype=F16)(x)

  fun, *args = make_linen_loss(Model(), make_shape(16, 64))()
  report = count_flops(fun, *args)

  where = f"{find_location('upcast')} (Model.__call__)"
  back, forward = report.unconverted
  for row, backward, runs in (back, True, 2), (forward, False, 1):
    assert (row.source_line, row.backward) == (where, backward)
    assert (row.name_scope, row.dtype) == ("Model/Dense_1", "float32")
    assert not row.in_autocast and row.run_count == runs
    assert row.flops == runs * 2 * 16 * 64 * 32
    assert row.fraction == row.flops / report.total_flops
  assert report.fraction == pytest.approx(1 - 3 * forward.fraction)
  lines = str(report).splitlines()
  assert lines[0].startswith(f"{report.fraction:.1%} of the matmul and")
  assert lines[3].split("  ")[0] == "operand dtype"
  assert "Matmuls and convolutions not in float16:" in lines
  row_text = f"dot_general  Model/Dense_1 at {where}, backward"
  assert any(line.startswith(row_text) for line in lines)


def test_nothing_is_computed_and_nothing_called():
  calls = []

  table = jnp.ones((3, 3), F16)  # A function may close over arrays.

  def fun(x):
    jax.debug.callback(calls.append, table)
    return x @ x

  huge = make_shape(2**20, 2**20)
  assert count_flops(fun, huge).total_flops == 2 * 2**60
  assert count_flops(fun, table).fraction == 1.0
  assert calls == []


def test_repeated_matmuls_are_counted_each_time():
  w = make_shape(8, 8)
  once = 2 * 8 * 8 * 8
  mesh = sharding.make_mesh((2, 2), ("a", "b"))

  def flops(fun, *args):
    report = count_flops(fun, *args)
    return report.total_flops / once, report.limitations

  matmul = lambda w: w @ w
  scan = lambda w: lax.scan(lambda c, _: (c @ w, None), w, length=5)
  nested = lambda w: lax.map(lambda _: scan(w), jnp.arange(3))
  branches = lambda w: lax.switch(
    w[0, 0].astype(int), [lambda w: w, make_scan(2), matmul], w
  )
  assert flops(matmul, w) == (1, ())
  assert flops(jax.jit(jax.checkpoint(matmul)), w) == (1, ())
  # Unused results are omitted, as by XLA.
  assert flops(jax.grad(jax.jit(lambda w: total(w @ w))), w) == (2, ())
  two = jax.jit(lambda w: (w @ w, w + 1))
  assert flops(lambda w: two(w)[1], w) == (0, ())
  assert flops(scan, w) == (5, ())
  assert flops(nested, w) == (15, ())
  assert flops(branches, w) == (2, ())
  on_four = lambda axes: jax.shard_map(
    matmul, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=set(axes)
  )
  assert flops(on_four("ab"), w) == (4, ())
  assert flops(jax.jit(on_four("a")), w) == (2, ())


def test_matmuls_of_hijax_are_counted_each_time_they_run():
  matmul = jax.custom_vjp(jax.checkpoint(lambda w: w @ w))
  matmul.defvjp(lambda w: (w, ()), lambda _, g: (g,))

  def fun(w):
    body = lambda c, x: (matmul(c) @ w, c * x)
    return lax.scan(body, w, jnp.arange(5, dtype=w.dtype))

  plain = count_flops(fun, make_shape(8, 8))
  with hijax.enable_all_flags():
    report = count_flops(fun, make_shape(8, 8))
  assert report == plain
  assert report.total_flops == 10 * 2 * 8**3


def make_scan(length):
  return lambda w: lax.scan(lambda c, _: (c @ w, None), w, length=length)[0]


def test_counts_that_shapes_do_not_determine_are_reported():
  def forever(w):
    return lax.while_loop(lambda w: w[0, 0] < 1, lambda w: w @ w, w)  # while

  report = count_flops(forever, make_shape(4, 4))
  assert report.total_flops == 128
  (note,) = report.limitations
  where = find_location("while")
  assert note == (f"while at {where} (forever): only one iteration is counted")
  assert str(report).splitlines()[1] == f"Not analyzed: {note}"

  report = count_flops(jnp.linalg.solve, *[make_shape(4, 4, dtype=F32)] * 2)
  assert report.limitations[0].startswith("custom_linear_solve")
  assert report.limitations[0].endswith(": its body is counted once")

  sizes = make_shape(2, dtype=jnp.int32)
  args = make_shape(4, 4), make_shape(2, 4, 4), sizes
  report = count_flops(lax.ragged_dot, *args)
  assert (report.total_flops, report.limitations) == (128, ())
  assert report.flops_by_dtype == {"float16": 128}
  # In the gradient, each group has its share of the rows.
  loss = lambda x, w, sizes: total(lax.ragged_dot(x, w, sizes) ** 2)
  report = count_flops(jax.grad(loss, 1), *args)
  assert (report.total_flops, report.limitations) == (2 * 128, ())


def whiten(updates, params):
  """Return updates times a matrix, as preconditioners do."""
  return jax.tree.map(lambda g: g @ (g.T @ g), updates)


@pytest.mark.parametrize(
  "inner",
  [
    optax.contrib.muon(1e-2),
    optax.stateless(whiten),
    optax.chain(optax.scale_by_adam(), optax.stateless(jax.jit(whiten))),
  ],
)
@pytest.mark.parametrize("check_updates", [False, True])
def test_matmuls_of_the_optimizer_are_counted_apart(inner, check_updates):
  tx = ols.with_loss_scaling(inner, check_updates=check_updates)
  step, args = train_steps.make_step(tx=tx)
  report = count_flops(step, *args)
  assert report.fraction == 1.0 and report.unconverted == ()
  assert report.total_flops == 2 * 2 * 8 * 4 * 4
  assert report.optimizer_flops >= 2 * 2 * 4**3
  assert report.as_dict()["optimizer_flops"] == report.optimizer_flops
  line = f"FLOPs of the matmuls of the optimizer: {report.optimizer_flops:.3g}"
  assert line in str(report) and "Fix" not in str(report)


def test_a_step_whose_only_matmuls_are_the_optimizers_has_none():
  tx = ols.with_loss_scaling(optax.stateless(whiten))
  params = train_steps.PARAMS
  report = count_flops(tx.update, params, tx.init(params), params)
  assert report.flops_by_dtype == {} and report.optimizer_flops
  assert "no convolutions outside of the optimizer." in str(report)


@pytest.mark.parametrize(
  ("dtype", "fraction"), [(jnp.int32, 0), (jnp.int8, 1), (F16, 1)]
)
def test_integers_count_by_their_bits(dtype, fraction):
  report = count_flops(jnp.matmul, *[make_shape(4, 4, dtype=dtype)] * 2)
  assert report.flops_by_dtype == {jnp.dtype(dtype).name: 128}
  assert report.fraction == fraction


def test_bfloat16_is_not_float16():
  """They have as many bits, but a T4 is slow in bfloat16."""
  fun = lambda x, y: x @ x + (y @ y).astype(F16)
  args = make_shape(4, 4), make_shape(4, 4, dtype=jnp.bfloat16)
  report = count_flops(fun, *args)
  assert report.fraction == 0.5
  assert [row.dtype for row in report.unconverted] == ["bfloat16"]
  assert count_flops(fun, *args, dtype=jnp.bfloat16).fraction == 0.5


@pytest.mark.parametrize(
  ("sizes", "dtype"),
  [
    ((4, 4), "float16"),
    ((4, 5), "bfloat16"),
    ((5, 4), "float16"),
    ((0, 0), "float16"),
  ],
)
def test_the_half_precision_that_computes_the_most_is_reported(sizes, dtype):
  def fun(x, y, w):
    return x @ x, y @ y, w @ w

  args = [
    make_shape(size, size, dtype=dtype)
    for size, dtype in zip((*sizes, 9), (F16, jnp.bfloat16, F32), strict=True)
  ]
  report = count_flops(fun, *args)
  assert report.dtype == dtype
  half = report.flops_by_dtype.get(dtype, 0)
  assert report.fraction == pytest.approx(half / report.total_flops)


def test_at_most_twenty_layers_are_printed():
  def fun(x):
    for i in range(22):
      with jax.named_scope(f"layer{i}"):
        x = x @ x
    return x

  report = count_flops(fun, make_shape(4, 4, dtype=F32))
  assert len(report.unconverted) == 22
  lines = str(report).splitlines()
  assert sum("dot_general" in line for line in lines) == 20
  assert lines[-1] == "(+2 more rows: report.unconverted)"


@pytest.mark.parametrize(
  ("fun", "dtype", "is_offered"),
  [
    (lambda x: x @ x, F32, True),
    (lambda x: x @ x, jnp.bfloat16, False),
    (lambda x: jnp.dot(x, x, precision="highest"), F32, False),
    (ols.autocast(lambda x: x @ ols.keep_float32(jnp.dot)(x, x)), F32, False),
  ],
)
def test_autocast_is_offered_only_for_what_it_can_cast(fun, dtype, is_offered):
  report = count_flops(fun, make_shape(4, 4, dtype=dtype), dtype=F16)
  assert report.can_autocast is is_offered
  assert ("ols.autocast" in str(report)) is is_offered
  assert "cast the operands of the layers below" in str(report)


def test_the_wider_of_two_operands_counts_and_the_accumulation_does_not():
  def fun(x, y):
    return lax.dot(x, y, preferred_element_type=F32)

  report = count_flops(fun, make_shape(4, 4), make_shape(4, 4))
  assert (report.flops_by_dtype, report.fraction) == ({"float16": 128}, 1.0)
  report = count_flops(fun, make_shape(4, 4), make_shape(4, 4, dtype=F32))
  assert report.flops_by_dtype == {"float32": 128}
  assert len(report.unconverted) == 1


def test_autocast_of_a_frozen_float16_matrix_leaves_no_float32_matmul():
  def loss(lora, base, x):
    return jnp.mean((x @ base + (x @ lora["a"]) @ lora["b"]) ** 2)

  lora = {"a": make_shape(64, 4, dtype=F32), "b": make_shape(4, 64, dtype=F32)}
  args = lora, make_shape(64, 64), make_shape(8, 64, dtype=F32)
  report = count_flops(jax.grad(ols.autocast(loss)), *args)
  assert report.fraction == 1 and not report.unconverted
  assert [*report.flops_by_dtype] == ["float16"]


def test_the_fix_names_the_dtype_and_is_printed_only_if_there_is_one():
  fun, x = lambda x: x @ x, make_shape(4, 4, dtype=F32)
  text = str(count_flops(fun, x))
  assert "\nFix: ols.autocast(loss_fn), or cast " in text
  text = str(count_flops(fun, x, dtype=jnp.bfloat16))
  assert "\nFix: ols.autocast(loss_fn, jnp.bfloat16), or cast " in text
  report = count_flops(fun, make_shape(4, 4))
  assert "Fix:" not in str(report)
  assert str(report).splitlines()[:2] == [
    "100.0% of the matmul and convolution FLOPs run in float16.",
    "FLOPs of matmuls and convolutions: 128",
  ]
  assert report._repr_html_() == f"<pre>{report}</pre>"


@pytest.mark.parametrize("dtype", [int, jnp.float64])
def test_a_dtype_that_is_not_a_small_float_is_refused(dtype):
  with pytest.raises(TypeError, match="dtype must be a float dtype"):
    count_flops(jnp.exp, 1.0, dtype=dtype)


def test_an_equation_without_a_line_still_has_a_row(monkeypatch):
  monkeypatch.setattr(_source_info, "is_user_file", lambda name: False)
  report = count_flops(lambda x: x @ x, make_shape(4, 4, dtype=F32))
  assert [row.source_line for row in report.unconverted] == [""]
  assert "dot_general  unknown" in str(report)
