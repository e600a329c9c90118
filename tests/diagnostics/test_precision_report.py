"""``precision_report`` counts as XLA does, and names the lines."""

import functools
import json

from flax import linen as nn
from flax import nnx
from helpers import find_line_number, hijax, sharding
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _source_info
from optax_lossscale.diagnostics import (
  _collectives,
  find_overflow,
  precision_report,
)

F16, F32 = jnp.float16, jnp.float32


def make_shape(*sizes, dtype=F16):
  return jax.ShapeDtypeStruct(sizes, dtype)


def find_location(mark):
  return f"test_precision_report.py:{find_line_number(mark, __file__)}"


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


def nnx_convolution_1d():
  make = lambda: nnx.Conv(256, 256, 9, dtype=F16, rngs=nnx.Rngs(0))
  structure, state = nnx.split(nnx.eval_shape(make))
  loss_fn = lambda state, x: total(nnx.merge(structure, state)(x))
  return jax.grad(loss_fn), state, make_shape(8, 512, 256)


MODELS = {
  "convolutions": make_linen_loss(ConvNet(), make_shape(8, 32, 32, 64)),
  "transformer": make_linen_loss(Block(), make_shape(4, 128, 512)),
  "recurrent": recurrent,
  "nnx_convolution_1d": nnx_convolution_1d,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_flops_equal_those_of_xla(name):
  fun, *args = MODELS[name]()
  if name == "recurrent":
    skip_if_jax_cannot(jax.eval_shape, fun, *args)
  report = precision_report(fun, *args)
  cost = jax.jit(fun).lower(*args).cost_analysis()
  assert report.total_flops == pytest.approx(cost["flops"], rel=0.01)
  assert report.fraction == 1.0
  assert report.unconverted == () and report.limitations == ()
  assert sum(row.flops for row in report.flops) == report.total_flops


def test_the_silent_upcast_of_a_dense_layer_is_reported_with_its_line():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(64, dtype=F16)(x)
      x = nn.Dense(32)(x)  # upcast
      return nn.Dense(64, dtype=F16)(x)

  fun, *args = make_linen_loss(Model(), make_shape(16, 64))()
  report = precision_report(fun, *args)

  where = f"{find_location('upcast')} (Model.__call__)"
  assert [(row.source_line, row.backward) for row in report.unconverted] == [
    (where, True),
    (where, False),
  ]
  back, forward = report.unconverted
  assert (forward.operand_dtype, forward.result_dtype) == ("float32", "float32")
  assert (forward.run_count, back.run_count) == (1, 2)
  assert forward.flops == 2 * 16 * 64 * 32
  assert back.fraction == 2 * forward.fraction
  assert forward.fraction == forward.flops / report.total_flops
  assert report.fraction == pytest.approx(1 - 3 * forward.fraction)
  assert {row.name_scope for row in report.unconverted} == {"Model/Dense_1"}
  lines = str(report).splitlines()
  assert lines[0] == (
    f"{report.fraction:.1%} of the matmul and convolution FLOPs run in float16."
  )
  assert lines[1].startswith("Fix: ols.autocast(loss_fn), or cast the operands")
  assert lines[2].startswith("FLOPs of matmuls and convolutions: ")
  assert lines[3].split("  ")[0] == "operand dtype"
  assert "Matmuls and convolutions not in float16:" in lines
  assert any(
    line.startswith(f"dot_general  Model/Dense_1 at {where}, backward")
    for line in lines
  )


def test_nothing_is_computed_and_nothing_called():
  calls = []

  def fun(x):
    jax.debug.callback(calls.append, x)
    return jnp.square(x)

  huge = make_shape(2**20, 2**20)
  (risk,) = precision_report(fun, huge).at_risk
  assert risk.primitive == "square"
  assert precision_report(fun, jnp.ones(3, F16)).at_risk[0].run_count == 1
  assert calls == []


def test_repeated_matmuls_are_counted_each_time():
  w = make_shape(8, 8)
  once = 2 * 8 * 8 * 8
  mesh = sharding.make_mesh((2, 2), ("a", "b"))

  def flops(fun, *args):
    report = precision_report(fun, *args)
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

  plain = precision_report(fun, make_shape(8, 8))
  with hijax.enable_all_flags():
    report = precision_report(fun, make_shape(8, 8))
  assert report == plain
  assert report.total_flops == 10 * 2 * 8**3


def make_scan(length):
  return lambda w: lax.scan(lambda c, _: (c @ w, None), w, length=length)[0]


def test_counts_that_shapes_do_not_determine_are_reported():
  def forever(w):
    return lax.while_loop(lambda w: w[0, 0] < 1, lambda w: w @ w, w)  # while

  report = precision_report(forever, make_shape(4, 4))
  assert report.total_flops == 128
  (note,) = report.limitations
  where = find_location("while")
  assert note == (f"while at {where} (forever): only one iteration is counted")
  assert str(report).splitlines()[1] == f"Not analyzed: {note}"

  report = precision_report(
    jnp.linalg.solve, *[make_shape(4, 4, dtype=F32)] * 2
  )
  note = report.limitations[0]
  assert note == "custom_linear_solve: its body is counted once"

  ragged = lambda x, w, sizes: lax.ragged_dot(x, w, sizes)
  sizes = make_shape(2, dtype=jnp.int32)
  report = precision_report(
    ragged, make_shape(4, 4), make_shape(2, 4, 4), sizes
  )
  assert (report.total_flops, report.limitations) == (128, ())
  assert report.flops[0].operand_dtype == "float16"
  # In the gradient, each group has its share of the rows.
  both = jax.grad(lambda w, x, sizes: total(ragged(x, w, sizes) ** 2))
  report = precision_report(both, make_shape(2, 4, 4), make_shape(4, 4), sizes)
  assert (report.total_flops, report.limitations) == (2 * 128, ())


def test_a_function_may_close_over_arrays():
  table = jnp.ones((4, 4), F16)
  report = precision_report(lambda x: x @ table + table, make_shape(4, 4))
  assert (report.total_flops, report.at_risk) == (128, ())


TINY = jnp.float32(1e-9)


@pytest.mark.parametrize(
  "fun, primitive, reason",
  [
    (jnp.exp, "exp", "exp overflows above 11.1"),
    (jnp.exp2, "exp2", "exp2 overflows above 16"),
    (jnp.cosh, "cosh", "cosh overflows above 11.8"),
    (jnp.log, "log", "log of an underflowed value is -inf"),
    (lambda x: x / x, "div", "the divisor may have underflowed to zero"),
    (lambda x: 1 / x, "div", "division"),
    (lambda x: x / 0.5, "div", "division"),
    (lambda x: x**3, "integer_pow", "power: may overflow or underflow"),
    (lax.rsqrt, "rsqrt", "power"),
    (lambda x: x**x, "pow", "power"),
    (jnp.sum, "convert_element_type", "sum of 1000 terms"),
    (lambda x: jnp.cumsum(x), "cumsum", "sum of 1000 terms"),
    (lambda x: nn.pooling.pool(x[:, None], 0.0, lax.add, (500,), (1,), "SAME"),
     "reduce_window_sum", "sum of 500 terms"),
    (jax.grad(lambda b: total(jnp.broadcast_to(b[0], (400,)))), "reduce_sum",
     "sum of 400 terms"),
    (lambda x: jax.ops.segment_sum(x, jnp.arange(1000) % 2, 2), "scatter-add",
     "sum by index of up to 1000 terms"),
    (lambda x: jax.ops.segment_prod(x, jnp.arange(1000) % 2, 2), "scatter-mul",
     "sum by index of up to 1000 terms"),
    (lambda x: x.at[jnp.zeros((2, 300), int)].add(1), "scatter-add",
     "sum by index of up to 600 terms"),
    (lambda x: jnp.zeros(3).at[x.astype(int)].add(x.astype(F32))
     .astype(x.dtype),
     "convert_element_type", "sum by index of up to 1000 terms"),
    (jax.grad(lambda table: total(table[jnp.zeros((4, 100), int)])),
     "scatter-add", "sum by index of up to 400 terms"),
    (lambda x: x + 1e-8, "add", "constant is 0; it may have underflowed"),
    (lambda x: jnp.where(x > 0, x, -1e9), "convert_element_type",
     "constant -1e+09 becomes -inf in float16"),
    (lambda x: x * TINY.astype(x.dtype), "convert_element_type", "1e-09"),
    (lambda x: x + jnp.full(1000, 1e-9).astype(x.dtype), "convert_element_type",
     "constant 1e-09 becomes 0 in float16"),
    (lambda x: jax.jit(lambda x, c: x + c.astype(x.dtype))(x, F32(-1e9)),
     "convert_element_type", "constant -1e+09 becomes -inf in float16"),
  ],
)  # fmt: skip
def test_risky_operations_are_reported_with_their_line(fun, primitive, reason):
  def wrapped(x):
    return fun(x)

  risks = precision_report(wrapped, make_shape(1000)).at_risk
  (risk,) = [risk for risk in risks if reason in risk.reason]
  assert risk.primitive == primitive
  assert risk.run_count == 1
  assert risk.source_line.startswith("test_precision_report.py:")
  # In float32 none of it is at risk.
  assert precision_report(wrapped, make_shape(1000, dtype=F32)).at_risk == ()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_constant_that_is_infinite_in_float16_is_reported():
  def fun(x):
    return x - 1e9  # too_large

  (risk,) = precision_report(fun, make_shape(3)).at_risk
  assert risk.reason == (
    "constant is inf; it may have overflowed when cast to float16"
  )
  assert risk.source_line == f"{find_location('too_large')} (fun)"


@pytest.mark.parametrize(
  "fun",
  [
    jnp.tanh,
    jax.nn.relu,
    jnp.max,
    lambda x: x / 8,
    lambda x: x / 1,
    lambda x: x / -1.5,
    lambda x: x * 1e-3,
    lambda x: x[:100].sum(),
    lambda x: jnp.mean(x),
    lambda x: jnp.where(x > 0, x, -jnp.inf),
    lambda x: jnp.exp(x.astype(F32)).astype(F16),
    lambda x: x.astype(F32) + 1e-8,
    lambda x: jnp.sort(x),
    lambda x: x + jnp.zeros(1000, x.dtype),
    lambda x: (x > 0).sum(),
    lambda x: x.at[jnp.zeros(100, int)].add(1),
    lambda x: x.at[jnp.arange(1000)].add(x, unique_indices=True),
    lambda x: jax.vmap(lambda row, i: row.at[i].add(1))(
      x.reshape(500, 2), jnp.zeros((500, 3), int)
    ),
  ],
)
def test_safe_operations_are_not_reported(fun):
  report = precision_report(fun, make_shape(1000))
  assert report.at_risk == ()
  assert str(report) == "The function has no matmuls and no convolutions."
  assert report.fraction == 1.0 and report.total_flops == 0


def scan_by_constant(x, divisor):
  return lax.scan(lambda c, _: (c / divisor, None), x, length=3)[0]


def scan_by_slices(x, divisor):
  divisors = jnp.broadcast_to(divisor, (3, *x.shape))
  return lax.scan(lambda c, d: (c / d, None), x, divisors)[0]


def scan_by_carry(x, divisor):
  body = lambda c, _: ((c[0] / c[1], c[1] - 1), None)
  return lax.scan(body, (x, divisor), length=3)[0]


def while_by_constant(x, divisor):
  offset = x[0]  # The condition and the body have other constants, too.
  body = lambda c: (c + offset) / divisor
  return lax.while_loop(lambda c: c[0] > offset, body, x)


def while_condition_by_constant(x, divisor):
  offset = x[0]
  condition = lambda c: (c / divisor)[0] > offset
  return lax.while_loop(condition, lambda c: c - offset, x)


def while_by_carry(x, divisor):
  body = lambda c: (c[0] / c[1], c[1] - 1)
  return lax.while_loop(lambda c: c[0][0] > 1, body, (x, divisor))


def branch_in_while_by_constant(x, divisor):
  divide = lambda c: lax.cond(c[0] > 0, lambda: c / divisor, lambda: c)
  return lax.while_loop(lambda c: c[0] > 1, divide, x)


@pytest.mark.parametrize("divisor", [8, 0.5])
@pytest.mark.parametrize(
  "loop",
  [
    scan_by_constant,
    scan_by_slices,
    scan_by_carry,
    while_by_constant,
    while_condition_by_constant,
    while_by_carry,
    branch_in_while_by_constant,
  ],
  ids=lambda fun: fun.__name__,
)
def test_a_division_in_a_loop_is_at_risk_unless_the_divisor_is_a_large_constant(
  loop, divisor
):
  fun = lambda x: loop(x, jnp.full((), divisor, x.dtype))
  reasons = [
    risk.reason
    for risk in precision_report(fun, make_shape(1000)).at_risk
    if risk.primitive == "div"
  ]
  is_safe = divisor == 8 and "carry" not in loop.__name__
  expected = "division: the divisor may have underflowed to zero"
  assert reasons == ([] if is_safe else [expected])


@pytest.mark.parametrize("ones", [2000, 5000])
def test_a_scatter_add_at_risk_may_be_inaccurate(ones):
  def fun(x):
    return jax.ops.segment_sum(x, jnp.zeros(ones, int), 1)

  (risk,) = precision_report(fun, make_shape(ones)).at_risk
  assert f"up to {ones} terms" in risk.reason
  # From 2048 on, the next one is less than half of the spacing.
  assert fun(jnp.ones(ones, F16))[0] == min(ones, 2048)


def test_a_float32_softmax_and_mean_leave_only_float16_operations_at_risk():
  def fun(x):
    x = jax.nn.softmax(x)  # softmax
    return jnp.mean(x.astype(F32))

  risks = precision_report(fun, make_shape(8, 1000)).at_risk
  assert {risk.source_line for risk in risks} == {
    f"{find_location('softmax')} (fun)"
  }
  assert {risk.primitive for risk in risks} >= {"exp", "div"}


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_devices_in_float16_is_reported(check_vma):
  mesh = sharding.make_mesh((4,), ("data",))

  def part(x):
    return lax.psum(x, "data")  # collective

  fun = jax.shard_map(
    part, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma
  )
  (risk,) = precision_report(fun, make_shape(8)).at_risk
  assert risk.reason == "sum over devices in float16"
  assert risk.source_line == f"{find_location('collective')} (part)"
  assert risk.run_count == 4


# XLA's CPU compiler sums bfloat16 in float32, which is no risk.
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
  "dtype,num_sums", [(jnp.float16, 1), (jnp.bfloat16, 0)]
)
def test_a_sum_over_devices_that_xla_inserts_is_reported(
  dtype, num_sums, axis_type
):
  mesh = sharding.make_mesh((4,), ("data",), axis_type)
  specs = sharding.to_named_shardings(mesh, [P(), P("data")])
  loss = lambda params, x: jnp.mean((x @ params["up"]) ** 2)
  params, x = sharding.put_on_devices(
    [{"up": jnp.ones((4, 4))}, jnp.ones((8, 4))], [{"up": specs[0]}, specs[1]]
  )
  with jax.set_mesh(mesh):
    grad = jax.grad(ols.autocast(loss, dtype))
    report = precision_report(grad, params, x, dtype=dtype)
    rows = [x for x in report.at_risk if x.primitive == "all-reduce"]
    assert [(x.name, x.backward) for x in rows] == [("up", True)] * num_sums
    assert all("sum over devices in float16" in x.reason for x in rows)
    # The sum of a float32 gradient is no risk, nor is one on a single device.
    assert (
      precision_report(jax.grad(loss), params, x, dtype=dtype).at_risk == ()
    )
  params, x = jax.device_get((params, x))
  report = precision_report(grad, params, x, dtype=dtype)
  assert "all-reduce" not in [x.primitive for x in report.at_risk]


def test_the_names_of_combined_sums_over_devices_are_separated():
  line = (
    "%all-reduce.2 = (f16[2,8]{1,0}, f16[8,4]{1,0}) all-reduce(%a, %b),"
    ' metadata={op_name="jit(step)/jit(main)/(transpose(jvp(Net))/head/'
    'autocast-float16/dot_general:jvp(up)/dot_general)"}'
  )
  sums = [*_collectives.find_device_sums(line, jnp.dtype(jnp.float16))]
  assert [(x.name_scope, x.backward) for x in sums] == [
    ("Net/head", True),
    ("up", False),
  ]
  assert not [*_collectives.find_device_sums(line, jnp.dtype(jnp.bfloat16))]
  (unnamed,) = _collectives.find_device_sums(
    "%x = f16[2]{0} reduce-scatter(%y)", jnp.dtype(jnp.float16)
  )
  assert unnamed == ("reduce-scatter", "", False)


def whiten(updates):
  """Returns updates times a matrix, as preconditioners do."""
  return jax.tree.map(lambda g: g @ (g.T @ g), updates)


@pytest.mark.parametrize(
  "inner",
  [
    optax.contrib.muon(1e-2),
    optax.stateless(lambda updates, params: whiten(updates)),
    optax.chain(
      optax.scale_by_adam(), optax.stateless(jax.jit(lambda u, p: whiten(u)))
    ),
  ],
)
@pytest.mark.parametrize("check_updates", [False, True])
def test_matmuls_of_the_optimizer_are_counted_apart(inner, check_updates):
  tx = ols.with_loss_scaling(inner, check_updates=check_updates)
  loss = ols.autocast(lambda params, x: jnp.mean((x @ params["w"]) ** 2))

  @jax.jit
  def step(params, state, x):
    grads = ols.grad(loss, state)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = {"w": jnp.eye(4)}
  report = precision_report(step, params, tx.init(params), jnp.ones((2, 4)))
  assert report.fraction == 1.0 and report.unconverted == ()
  assert report.total_flops == 2 * 2 * 2 * 4 * 4
  assert report.optimizer_flops >= 2 * 2 * 4**3
  assert report.as_dict()["optimizer_flops"] == report.optimizer_flops
  line = f"FLOPs of the matmuls of the optimizer: {report.optimizer_flops:.3g}"
  assert line in str(report) and "Fix" not in str(report)


def test_a_step_whose_only_matmuls_are_the_optimizers_has_none():
  tx = ols.with_loss_scaling(optax.stateless(lambda u, p: whiten(u)))
  params = {"w": jnp.eye(4)}
  report = precision_report(tx.update, params, tx.init(params), params)
  assert report.flops == () and report.optimizer_flops
  assert "no convolutions outside of the optimizer." in str(report)


def test_lines_that_run_often_are_one_row():
  def body(x, _):
    return jnp.exp(x), None  # often

  fun = lambda x: lax.scan(body, x, length=7)[0]
  (risk,) = precision_report(fun, make_shape(3)).at_risk
  assert (risk.run_count, risk.source_line) == (
    7,
    f"{find_location('often')} (body)",
  )


def test_the_dtype_can_be_another():
  fun = lambda x: jnp.exp(x @ x)
  report = precision_report(
    fun, make_shape(4, 4, dtype=jnp.bfloat16), dtype=jnp.bfloat16
  )
  assert (report.dtype, report.fraction) == ("bfloat16", 1.0)
  assert report.at_risk[0].reason.endswith("exp overflows above 88.7")
  report = precision_report(fun, make_shape(4, 4, dtype=jnp.bfloat16))
  assert (report.fraction, report.at_risk) == (1.0, ())
  integers = precision_report(fun, make_shape(4, 4, dtype=jnp.int8))
  assert (integers.flops[0].operand_dtype, integers.unconverted) == ("int8", ())


def test_the_wider_of_two_operands_and_the_accumulation_count():
  def fun(x, y):
    return lax.dot(x, y, preferred_element_type=F32)

  report = precision_report(fun, make_shape(4, 4), make_shape(4, 4))
  assert report.flops == (("float16", "float32", 128, 1.0),)
  report = precision_report(fun, make_shape(4, 4), make_shape(4, 4, dtype=F32))
  assert report.flops[0].operand_dtype == "float32"
  assert len(report.unconverted) == 1


def test_autocast_of_a_frozen_float16_matrix_leaves_no_float32_matmul():
  def loss(lora, base, x):
    return jnp.mean((x @ base + (x @ lora["a"]) @ lora["b"]) ** 2)

  lora = {"a": jnp.ones((64, 4)), "b": jnp.ones((4, 64))}
  args = lora, jnp.ones((64, 64), jnp.float16), jnp.ones((8, 64))
  report = precision_report(jax.grad(ols.autocast(loss)), *args)
  assert report.fraction == 1 and not report.unconverted
  assert [(x.operand_dtype, x.result_dtype) for x in report.flops] == [
    ("float16", "float16")
  ]


def test_the_report_converts_to_a_json_dict():
  report = precision_report(
    lambda x: jnp.exp(x @ x), make_shape(4, 4, dtype=F32)
  )
  as_dict = json.loads(json.dumps(report.as_dict()))
  assert as_dict["dtype"] == "float16"
  assert as_dict["total_flops"] == 128
  assert as_dict["flops"][0]["fraction"] == 1.0
  assert as_dict["unconverted"][0]["primitive"] == "dot_general"
  assert as_dict["at_risk"] == as_dict["limitations"] == []
  assert precision_report(jnp.exp, make_shape(3)).as_dict()["at_risk"][0][
    "run_count"
  ]


def test_the_fix_names_the_dtype_and_is_printed_only_if_there_is_one():
  fun = lambda x: x @ x
  text = str(precision_report(fun, make_shape(4, 4, dtype=F32)))
  assert text.startswith("0.0% of the matmul and convolution FLOPs run in flo")
  assert "\nFix: ols.autocast(loss_fn), or cast " in text
  x = make_shape(4, 4, dtype=F32)
  text = str(precision_report(fun, x, dtype=jnp.bfloat16))
  assert "\nFix: ols.autocast(loss_fn, jnp.bfloat16), or cast " in text
  report = precision_report(fun, make_shape(4, 4))
  assert "Fix:" not in str(report)
  assert str(report).splitlines()[:2] == [
    "100.0% of the matmul and convolution FLOPs run in float16.",
    "FLOPs of matmuls and convolutions: 128",
  ]
  assert report._repr_html_() == f"<pre>{report}</pre>"


@pytest.mark.parametrize("dtype", [int, jnp.float64])
def test_a_dtype_that_is_not_a_small_float_is_refused(dtype):
  with pytest.raises(TypeError, match="dtype must be a float dtype"):
    precision_report(jnp.exp, 1.0, dtype=dtype)


def test_an_equation_without_a_line_still_has_a_row(monkeypatch):
  monkeypatch.setattr(_source_info, "is_user_file", lambda name: False)
  report = precision_report(lambda x: jnp.exp(x) + 1e-8, make_shape(3))
  assert [risk.source_line for risk in report.at_risk] == ["", ""]
  assert "exp  unknown" in str(report)
  assert find_overflow(lambda x: x / 0, jnp.ones(2, F16)).source_line == ""
