"""``find_overflow`` names the operation, the line and the iteration.

The faulty lines are in ``helpers/faulty_models.py``, each with a comment that
names the fault.
"""

import dataclasses
import functools
import html
import itertools
import json
import sys
import time

from helpers import (
  faulty_models,
  find_line_number,
  harmless_models,
  hijax,
  mark_slow_params,
  sharding,
)
from helpers.effects import pass_through_host
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale._jaxprs import _eqns, _regions, _source_info
from optax_lossscale.diagnostics import (
  _progress,
  compare_precision,
  find_overflow,
)
from optax_lossscale.diagnostics._overflow import (
  _description,
  _origins,
)

FAULTS = faulty_models.FAULTS
QUICK_FAULTS = "in_scan", "in_cond", "custom_vjp_backward"


@pytest.mark.parametrize("name", mark_slow_params(QUICK_FAULTS, FAULTS))
def test_a_planted_fault_is_named_with_its_line_primitive_and_iteration(name):
  make, kind, path, backward, function = FAULTS[name]
  fun, *args = make()
  skip_if_jax_cannot(fun, *args)
  if name == "remat_backward" and hijax.is_enabled("jax_remat3"):
    path = "dot_general"  # JAX leaves nothing of the checkpoint there.

  hit = find_overflow(fun, *args)

  assert hit is not None
  assert (hit.kind, hit.eqn_path, hit.backward) == (kind, path, backward)
  assert hit.primitive == path.split("/")[-1]
  number = find_line_number(name, faulty_models.__file__)
  where = f"faulty_models.py:{number} ({function})"
  assert hit.source_line == where
  assert hit.primitive in str(hit) and where in str(hit)


IN_HIJAX = [name for name in FAULTS if "remat" in name or "custom" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_HIJAX)
def test_a_fault_has_the_same_name_and_path_with_hijax(name):
  with hijax.enable_all_flags():
    test_a_planted_fault_is_named_with_its_line_primitive_and_iteration(name)


QUICK_HARMLESS = (
  "masked_softmax",
  "nothing_but_integers",
  "only_an_integer_is_made_of_it",
  "scan_that_recovers",
)


@pytest.mark.parametrize(
  "name", mark_slow_params(QUICK_HARMLESS, harmless_models.PROGRAMS)
)
def test_a_harmless_program_names_nothing(name):
  fun, *args = harmless_models.PROGRAMS[name]()
  assert find_overflow(fun, *args) is None


X = jnp.linspace(-2, 2, 8, dtype=jnp.float16).reshape(2, 4)


def get_names(hit):
  return [hit.primitive, *(other.primitive for other in hit.other_origins)]


@functools.cache
def find_two_origins():
  def fun(x):
    return jnp.exp(x * 20), 1 / (x - x), x

  return find_overflow(jax.jit(fun), X)


def test_the_report_prints_the_operation_its_operands_and_a_fix():
  hit = find_two_origins()
  (line,) = {other.source_line for other in (hit, *hit.other_origins)}
  assert line.startswith("test_find_overflow.py:")
  assert line.endswith(" (fun)")
  first_line = "exp returned inf (float16) in the forward pass"
  assert str(hit).splitlines() == [
    f"{first_line}, at {line}.",
    "Operands: float16[2,4] (max abs 40)",
    "Equation: jit(fun)/exp",
    f"Fix: {hit.fix}",
    "(+1 more origin: see other_origins)",
  ]
  (other,) = hit.other_origins
  assert str(other).splitlines()[:2] == [
    f"div returned inf (float16) in the forward pass, at {line}.",
    "Operands: float16[] (max abs 1), float16[2,4] (max abs 0)",
  ]
  assert other.inputs[1] == ((2, 4), np.float16, 0.0, True, 0.0)
  assert other.dtype == np.float16
  with pytest.raises(dataclasses.FrozenInstanceError):
    hit.kind = "nan"
  named = dataclasses.replace(hit, name="up at model.py:3 (<lambda>)")
  assert str(named).startswith(f"{first_line}, in layer up at model.py:3 (<la")
  assert named._repr_html_() == f"<pre>{html.escape(str(named))}</pre>"
  warned = dataclasses.replace(hit, warnings=("A mistake.",))
  assert str(warned).startswith(f"A mistake.\n{first_line}")
  unknown = dataclasses.replace(hit, name="", source_line="")
  assert str(unknown).startswith(f"{first_line}.\n")


def test_the_overflow_report_converts_to_a_json_dict():
  hit = find_two_origins()
  data = json.loads(json.dumps(hit.as_dict()))
  fields = {field.name for field in dataclasses.fields(hit)}
  assert set(data) == fields | {"fix"}
  assert data["inputs"] == [
    {
      "shape": [2, 4],
      "dtype": "float16",
      "amax": 40.0,
      "all_finite": True,
      "amin": hit.inputs[0].amin,
    }
  ]
  assert data["dtype"] == "float16" and data["fix"] == hit.fix
  assert data["other_origins"][0]["primitive"] == "div"


def test_an_operand_is_printed_with_its_largest_magnitude():
  operand = diagnostics.Operand((8, 64), np.dtype(np.float16), 13400.2, True)
  assert str(operand) == "float16[8,64] (max abs 13400)"
  assert str(operand._replace(amax=65504.0)) == "float16[8,64] (max abs 65504)"
  operand = operand._replace(amax=3.2912, all_finite=False)
  assert str(operand) == "float16[8,64] (max abs 3.29, contains inf or NaN)"
  assert str(operand._replace(amax=None, all_finite=True)) == "float16[8,64]"


LARGE = jnp.full((2, 4), 300, jnp.float16)


@pytest.mark.slow
def test_the_fix_in_the_forward_pass_of_autocast_removes_the_overflow():
  def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["down"])
    with jax.named_scope("head"):
      return jnp.mean((x @ params["up"] @ jnp.eye(4))[:, :4] * hidden)

  params = {"up": 1e3 * jnp.eye(4), "down": jnp.eye(4)}
  x = jnp.full((2, 4), 100.0)
  kept = []
  for layer in ("up", "head at "):
    fun = ols.autocast(loss_fn, keep_float32=kept)
    hit = find_overflow(fun, params, x)
    name = hit.fix.split("'")[1]
    assert name.startswith(layer) and hit.in_autocast
    assert f"ols.autocast(loss_fn, keep_float32={name!r})" in hit.fix
    kept.append(name)
  assert (
    find_overflow(ols.autocast(loss_fn, keep_float32=kept), params, x) is None
  )
  assert not find_overflow(lambda x: x @ x.T, LARGE).in_autocast


# Programs, and the paths of the equations that make their infs and NaNs.
ORIGINS = {}


def register_origins(*paths, arg=X):
  def register(fun):
    ORIGINS[fun.__name__] = fun, arg, list(paths)
    return fun

  return register


@register_origins("mul", arg=jnp.abs(X) + 1)
def mask_of_infs_that_is_not_blamed(x):
  logits = x @ x.T + jnp.log(jnp.eye(2, dtype=x.dtype))
  return jax.nn.softmax(logits * jnp.array([[1], [3e4]], x.dtype))


@register_origins("mul")
def mask_that_an_overflow_depends_on(x):
  """Without the mask, the probabilities are too small to overflow."""
  mask = jnp.log(jnp.array([1, 0, 0, 0], x.dtype))
  return jax.nn.softmax(x * 0 + mask) * 60000 * 2


def set_first_entry(x, first):
  x = x.at[0, 0].set(first(x[1, 3] * 20))
  return x * jnp.array([1, 1, 1, 6e4], x.dtype) + 0.5


@register_origins("exp")
def fault_before_another(x):
  return set_first_entry(x, jnp.exp)


@register_origins("mul")
def second_fault_if_the_first_is_mended(x):
  return set_first_entry(x, jnp.tanh)


@register_origins("exp")
def more_masks_than_bits(x):
  """They leave no trace, and the one fault after them is named."""
  for _ in range(40):
    x = jax.nn.softmax(x + jnp.log(jnp.array([1, 0, 1, 1], x.dtype)))
  return jnp.exp(x * 70)


@register_origins(*["exp"] * 31)
def more_faults_than_bits(x):
  return [jnp.exp(x * 20 + i) for i in range(40)]


@register_origins("exp", arg=jnp.array([[0, 1], [0, 0]], X.dtype))
def infs_in_a_slice_of_a_scan(x):
  ys = jnp.exp(x * 20)
  return lax.scan(lambda c, y: (c, y + 1), 0.0, ys)[1][:1]


@register_origins("dot_general", "dot_general", arg=LARGE)
def two_matmuls_of_a_sum(x):
  ones = jnp.ones((2, 2), x.dtype)
  mask = jnp.log(jnp.array([1, 0], x.dtype)) @ ones
  masked = jax.nn.relu(mask) + (x @ x.T) * 600 @ ones
  return masked + (LARGE @ x.T) @ ones


@register_origins("x", "exp", arg=jnp.array([1, jnp.nan], X.dtype))
def nan_argument_and_another_fault(x):
  return x + jnp.exp(jnp.full(2, 20, X.dtype))


@register_origins("exp", arg=jnp.array([1, jnp.nan], X.dtype))
def nan_argument_that_is_replaced(x):
  return jnp.where(jnp.isnan(x), 0, x) + jnp.exp(jnp.full(2, 20, X.dtype))


@register_origins(
  # With this flag, JAX writes an array into the equation that reads it.
  "broadcast_in_dim"
  if getattr(jax.config, "jax_use_simplified_jaxpr_constants", False)
  else "constant",
  arg=LARGE,
)
def inf_of_the_program_that_matmuls_read(x):
  infs = jnp.array([jnp.inf] * 4, X.dtype)
  return ((jnp.abs(x) + infs) @ (jnp.ones((4, 4), X.dtype))) @ x.T


@register_origins("exp")
def inf_literal_next_to_a_fault(x):
  return jnp.where(x > 0, x, -jnp.inf), jnp.exp(x * 20)


@register_origins("constant")
def inf_literal_alone(x):
  return jnp.where(x > 0, x, -jnp.inf), jnp.exp(x)


def keep_masks(x, i):
  logits = x + jnp.log(jnp.array([1, 0, 1, 1], x.dtype))
  factor = jnp.where(i == 38, 30000, 1).astype(x.dtype)
  return jnp.square(jax.nn.softmax(logits) * factor), logits


@register_origins("square")
def masks_that_are_kept(x):
  """Their infs are all alive when the fault happens."""
  kept = []
  for i in range(39):
    x, logits = keep_masks(x, i)
    kept.append(logits)
  return x, jnp.stack(kept)[..., 2:].sum()


@register_origins("scan[38]/square")
def masks_that_a_scan_keeps(x):
  x, kept = lax.scan(keep_masks, x, jnp.arange(39))
  return x, kept[..., 2:].sum()


@register_origins("scan[200]/square", arg=jnp.abs(X))
def late_fault_in_a_loop_that_always_makes_infs(x):
  """The infs are distinguished by the outputs of the body."""

  def body(x, i):
    return jnp.where(i == 200, jnp.square(x * 200), x), x + jnp.log(x * 0)

  x, ys = lax.scan(body, x, jnp.arange(201))
  return x, jax.nn.relu(ys)


@register_origins("scan[0]/log")
def fault_of_all_iterations(x):
  body = lambda x, i: (x, jnp.log(-jnp.abs(x) - 1))
  return lax.scan(body, x, jnp.arange(200))[1]


@register_origins("scan[2]/mul")
def loop_that_carries_and_stacks_keys(x):
  def step(carry, i):
    x, key = carry
    key, own = jax.random.split(key)
    return (x * jnp.where(i == 2, 60000, 1).astype(x.dtype), key), (x, own)

  carry = x, jax.random.key(0)
  (x, _), (rows, keys) = lax.scan(step, carry, jnp.arange(4))
  return x, rows, jax.random.normal(keys[3])


@register_origins("while[15]/mul", arg=jnp.ones(3, X.dtype))
def iteration_of_a_while_loop(x):
  body = lambda state: (state[0] + 1, state[1] * 2)
  return lax.while_loop(lambda state: state[0] < 20, body, (0, x))[1]


@register_origins("div", arg=jnp.ones(3, X.dtype))
def inf_that_a_loop_makes_finite(x):
  undo = lambda i, x: jnp.where(i == 3, x * 60000, jnp.minimum(x, 4))
  return lax.fori_loop(0, 9, undo, x * 2) / (x - x)


@register_origins("mul", arg=jnp.array([60000, 2], X.dtype))
def inf_of_a_row_whose_loop_has_ended(x):
  """The body would make a zero of it, but it does not run any more."""

  def loop(count, x):
    body = lambda state: (state[0] + 1, 1 / state[1])
    return lax.while_loop(lambda state: state[0] < count, body, (0, x))[1]

  return jax.vmap(loop)(jnp.array([0, 3]), x * 2)


QUICK_ORIGINS = (
  "inf_literal_alone",
  "inf_literal_next_to_a_fault",
  "iteration_of_a_while_loop",
)


@pytest.mark.parametrize("name", mark_slow_params(QUICK_ORIGINS, ORIGINS))
def test_the_origins_that_matter_are_named(name):
  fun, arg, paths = ORIGINS[name]
  hit = find_overflow(fun, arg)
  assert [x.eqn_path for x in (hit, *hit.other_origins)] == paths


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["more_faults_than_bits", "two_matmuls_of_a_sum"]
)
def test_some_origins_of_a_large_program_are_left_out_and_masks_named(
  name, monkeypatch
):
  monkeypatch.setattr(_origins, "_MAX_MEASURED", 20)
  monkeypatch.setattr(_origins, "_MAX_WHOLE", 0)
  fun, arg, names = ORIGINS[name]
  found = get_names(find_overflow(fun, arg))
  is_mask = name == "two_matmuls_of_a_sum"
  assert found == (["log", *names] if is_mask else names[:6])


@pytest.mark.slow
@pytest.mark.parametrize(
  "fun, expected",
  [
    (lambda a, b: jnp.concatenate([a, b])[:2], ["exp"]),
    (lambda a, b: jnp.concatenate([a, b])[2:], ["log"]),
    (lambda a, b: jnp.where(jnp.arange(4) < 2, b, b[0, 3]), ["log"]),
    (lambda a, b: jnp.where(jnp.arange(4) > 1, a, a[0, 0]), ["exp"]),
    (lambda a, b: a + b, ["exp", "log"]),
    (lambda a, b: a.sum() + b.sum(), ["exp", "log"]),
    (lambda a, b: (a[:, 0], b[:, 0]), ["log"]),
    (lambda a, b: jnp.sort(a.ravel()), ["exp"]),
    (lambda a, b: jnp.max(a + jnp.maximum(b, 0)), ["exp"]),
    (lambda a, b: jnp.stack([a, b])[1].T, ["log"]),
    (lambda a, b: jnp.unstack(jnp.stack([a, b]))[0], ["exp"]),
  ],
)
def test_only_faults_that_reach_the_result_are_named(fun, expected):
  def both(x):
    a = jnp.exp(x * 20)  # inf in the last column
    b = jnp.log(jnp.abs(x[::-1] + 2))  # -inf in the first
    return fun(a, b)

  x = jnp.tile(X[:1] * 0 + jnp.array([-2, -1, 0, 1], X.dtype), (2, 1))
  assert get_names(find_overflow(both, x)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
def test_prints_appear_once_and_in_order_next_to_other_callbacks(wrap):
  calls = []

  def body(x, i):
    jax.debug.callback(lambda i: calls.append(int(i)), i)
    y = io_callback(
      lambda x: (calls.append("result"), np.asarray(x))[1],
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      x,
    )
    return y * jnp.where(i == 3, 6e4, 1).astype(x.dtype), y

  def fun(x):
    return lax.scan(body, x, jnp.arange(5), reverse=True)

  hit = find_overflow(wrap(fun), X)
  assert hit.eqn_path.endswith("scan[3]/mul")
  assert calls.count("result") > 5
  assert [i for i in calls if i != "result"] == [4, 3, 2, 1, 0]


@pytest.mark.slow
def test_loops_with_effects_return_the_usual_results():
  def step(i, x):
    return pass_through_host(x) * 200, i * 2

  def while_loop(x):
    body = lambda state: (state[0] + 1, step(*state)[0])
    return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]

  def long_scan(x):
    numbers = jnp.arange(101, dtype=x.dtype)
    return lax.scan(lambda x, i: (x, step(i, x)[1]), x, numbers)[1]

  assert find_overflow(while_loop, X) is not None
  assert find_overflow(while_loop, X / 1000) is None
  assert find_overflow(long_scan, X) is None
  hit = find_overflow(lambda x: 1 / (long_scan(x)[-1] - 200), X)
  assert hit.primitive == "div"


@pytest.mark.slow
@pytest.mark.parametrize("when", [3, 777])
def test_a_scan_of_ten_thousand_steps_takes_seconds(when):
  def body(x, i):
    x = jnp.where(i == when, x * 60000, x)
    return x, x.sum()

  def fun(x):
    return lax.scan(body, x, jnp.arange(10_000))

  started = time.perf_counter()
  hit = find_overflow(jax.jit(fun), X)
  assert hit.eqn_path == f"jit(fun)/scan[{when}]/mul"
  assert time.perf_counter() - started < 60


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", list(AxisType)[:2])
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
def test_a_scan_inside_shard_map_is_entered(wrap, axis_type, check_vma):
  mesh = sharding.make_mesh((2, 2), ("a", "b"), axis_type)

  def body(x, i):
    is_here = (i == 2) & (lax.axis_index("a") == 1)
    return x * jnp.where(is_here, 6e4, 1).astype(x.dtype), x

  def part(w, x):
    x, _ = lax.scan(body, x @ w, jnp.arange(4))
    return lax.pmean(jnp.sum(x.astype(jnp.float32) ** 2), ("a", "b"))

  spec = P(("a", "b"))
  loss_fn = jax.shard_map(
    part, mesh=mesh, in_specs=(P(), spec), out_specs=P(), check_vma=check_vma
  )
  w, x = jnp.eye(4, dtype=X.dtype) * 3, jnp.ones((8, 4), X.dtype)
  args = sharding.put_on_devices(
    (w, x), sharding.to_named_shardings(mesh, (P(), spec))
  )
  fun = jax.value_and_grad(loss_fn)
  skip_if_jax_cannot(jax.jit(fun), *args)

  hit = find_overflow(wrap(fun), *args)
  assert hit.eqn_path.endswith("shard_map/scan[2]/mul")
  assert hit.inputs[0] == ((2, 4), np.float16, 3.0, True, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["cond", "while"])
@pytest.mark.parametrize("with_callback", [False, True])
def test_a_branch_and_a_loop_that_differ_among_devices_are_entered(
  loop, with_callback
):
  """The devices take different branches, or do not stop together."""
  mesh = sharding.make_mesh((4,), ("data",))

  def times(x, factor):
    if with_callback:
      jax.debug.callback(lambda: None)
    return x * factor

  def part(x):
    i = lax.axis_index("data")
    if loop == "cond":
      return lax.cond(
        i == 2, lambda x: (times(x, 60000), x / 0), lambda x: (x, x), x
      )
    flags = i > jnp.arange(3)
    step = lambda state: (state[0] + 1, times(state[1], 200), flags)
    return lax.while_loop(lambda s: s[0] < 3, step, (i, x, flags))[1]

  fun = jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  hit = find_overflow(fun, jnp.full((8, 4), 2, X.dtype))
  path = "cond(branch 1)/mul" if loop == "cond" else "while[1]/mul"
  assert hit.eqn_path == f"shard_map/{path}"
  assert get_names(hit)[1:] == (["div"] if loop == "cond" else [])


@pytest.mark.slow
@pytest.mark.parametrize("factor, names", [(1, []), (60000, ["dot_general"])])
def test_a_branch_may_compute_what_is_the_same_on_all_devices(factor, names):
  mesh = sharding.make_mesh((4,), ("data",))

  def part(w, x):
    in_branch = lambda: x + jnp.sum(w @ w).astype(x.dtype)
    return lax.cond(lax.axis_index("data") == 2, in_branch, lambda: x)

  specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
  fun = jax.shard_map(part, mesh=mesh, **specs)
  w = factor * jnp.ones((2, 2), X.dtype)
  hit = find_overflow(fun, w, jnp.ones((8, 4), X.dtype))
  assert (get_names(hit) if hit else []) == names


@pytest.mark.slow
def test_a_large_array_is_checked_on_its_device():
  """One of a million entries is, and of a dtype that not all functions know."""
  fun = lambda x: (x * 2).astype(jnp.float8_e5m2)
  x = jnp.ones(2**20 + 1, X.dtype).at[7].set(40000)
  assert find_overflow(fun, x).eqn_path == "mul"
  assert find_overflow(fun, jnp.minimum(x, 1)) is None
  times_i = lambda x: x.astype(jnp.float32) * 1e38 * 1j
  assert find_overflow(times_i, x).primitive == "mul"


@pytest.mark.parametrize("with_callback", [False, True])
def test_a_loop_without_iterations_is_passed_through(with_callback):
  def body(c, x):
    return (pass_through_host(c) if with_callback else c) * 2, x

  fun = lambda c: lax.scan(body, c, jnp.zeros(0))[0]
  assert find_overflow(fun, X / 0).primitive == "argument"
  assert find_overflow(fun, X) is None


def scan_that_overflows(x):
  def body(x, i):
    return x * jnp.where(i == 3, 60_000, 1).astype(x.dtype), None

  return lax.scan(body, x, jnp.arange(6))[0]


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
@pytest.mark.parametrize("report", [find_overflow, compare_precision])
def test_a_flag_under_which_jax_drops_scans_is_refused(wrap, report):
  fun = wrap(scan_that_overflows)
  with hijax.enable_flags("jax_scan3"):
    if jnp.isinf(jax.jit(fun)(X)).any():
      pytest.skip("This JAX compiles such scans.")
    with pytest.raises(RuntimeError, match=f"jax_scan3.*{report.__name__} wou"):
      report(fun, X)
    assert find_overflow(lambda x: x * 60_000, X).primitive == "mul"


@pytest.mark.slow
def test_a_mesh_without_devices_is_not_entered():
  mesh = sharding.make_mesh((4,), ("data",))
  part = lambda x: jnp.exp(x * 20)
  with jax.set_mesh(mesh):
    fun = jax.shard_map(part, in_specs=P("data"), out_specs=P("data"))
    hit = find_overflow(jax.jit(fun), jnp.ones((8, 4), X.dtype))
  assert hit.primitive in ("shard_map", "exp")


@pytest.mark.slow
@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float8_e5m2]
)
def test_any_float_dtype_is_checked(dtype):
  with jax.enable_x64():
    hit = find_overflow(lambda x: x.astype(dtype), jnp.full(2, 1e39))
  assert (hit.kind, hit.dtype) == ("inf", np.dtype(dtype))
  assert hit.inputs == (((2,), np.float64, 1e39, True, 1e39),)


def test_other_arguments_reach_the_function_unchanged():
  def fun(x, n, mode, *, scale, act):
    assert isinstance(n, int) and isinstance(scale, np.ndarray)
    return act(x) / scale if mode == "divide" else x

  zeros = np.zeros(4, np.int32)
  hit = find_overflow(fun, X, 3, "divide", scale=zeros, act=jnp.tanh)
  assert hit.primitive == "div"
  assert find_overflow(fun, X, 3, "no", scale=zeros, act=jnp.tanh) is None


@pytest.mark.parametrize("loop", mark_slow_params([False], [False, True]))
def test_an_inf_that_is_not_reproduced_is_reported_with_its_operands(loop):
  """A callback returns smaller numbers when it is called again."""
  numbers = itertools.chain([X * 20], itertools.repeat(X * 5))

  def fun(x):
    y = io_callback(lambda: next(numbers), jax.typeof(x))
    return lax.map(jnp.exp, y) if loop else jnp.exp(y)

  hit = find_overflow(fun, X)
  assert hit.eqn_path == ("scan[1]/exp" if loop else "exp")
  assert (hit.kind, hit.is_reproduced) == ("inf", False)
  assert hit.inputs[0][:4] == (X.shape[loop:], np.float16, 10.0, True)


def test_a_function_without_a_signature_can_be_run():
  class Odd:
    __signature__ = "none"

    def __call__(self, x):
      return x / 0

  assert find_overflow(Odd(), X).primitive == "div"


def test_a_line_of_a_library_is_not_the_users():
  of_python = dataclasses.__file__, "<frozen importlib._bootstrap>"
  for file_name in jax.__file__, ols.__file__, *of_python:
    assert not _source_info.is_user_file(file_name)
  for file_name in __file__, pytest.__file__, "<stdin>":
    assert _source_info.is_user_file(file_name)


def test_a_line_of_a_notebook_names_the_cell():
  line = _source_info.SourceLine("/tmp/ipykernel_12/345.py", 3, "loss_fn")
  assert str(line) == "cell:3 (loss_fn)"


@pytest.mark.parametrize(
  "wrap", mark_slow_params([jax.jit], [lambda fun: fun, jax.jit])
)
def test_an_equation_that_reads_an_inf_from_a_ref_is_named(wrap):
  def fun(x, index):
    ref = jax.new_ref(x)
    ref[0] = x[1] * 60000
    jax.ref.addupdate(ref, 1, jnp.exp(x[1]))
    return ref[index] + 1

  hit = find_overflow(wrap(fun), jnp.abs(X) + 1, 0)
  assert get_names(hit) == ["get"]
  assert hit.source_line.endswith(" (fun)")
  assert find_overflow(wrap(fun), jnp.abs(X) + 1, 1) is None


def test_a_ref_may_be_an_argument():
  def fun(ref, x):
    ref[...] = x * 60000
    return ref[...] + 1

  ref = jax.new_ref(X)
  assert find_overflow(fun, ref, X).primitive == "get"
  assert find_overflow(fun, ref, X / 60000) is None


@pytest.mark.parametrize("factor", [1, 60000])
@pytest.mark.parametrize("has_result", [False, True])
def test_a_print_appears_once_and_each_run_calls_a_callback_with_a_result(
  has_result, factor
):
  seen = []

  def note(x):
    seen.append(x.shape)
    return np.asarray(x)

  @jax.jit
  def fun(x):
    if has_result:
      shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
      return factor * io_callback(note, shape, x)
    jax.debug.callback(note, x)
    return x * factor

  hit = find_overflow(fun, X)
  jax.effects_barrier()
  assert (hit is None) == (factor == 1)
  is_repeated = has_result and hit is not None
  assert (len(seen) > 1) == is_repeated
  if hit is not None:
    has_line = str(hit).startswith("find_overflow called the io_callback of")
    assert has_line == is_repeated


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_a_mapped_while_loop_with_different_lengths_is_entered(shape):
  """Rows that have ended keep what they have, and are not blamed."""

  def loop(count, x):
    body = lambda state: (state[0] + 1, state[1] * 32)
    return lax.while_loop(lambda s: s[0] < count, body, (0, x))[1]

  counts = jnp.broadcast_to(jnp.array([0, 2, 5, 1]), (*shape, 4))
  x = jnp.full((*shape, 4, 3), 2, jnp.float16)
  fun = loop
  for _ in counts.shape:
    fun = jax.vmap(fun)
  hit = find_overflow(fun, counts, x)
  assert (hit.eqn_path, hit.other_origins) == ("while[2]/mul", ())
  # Nor for what they would have become.
  hit = find_overflow(fun, counts, x.at[..., 0, :].set(60000))
  assert (hit.eqn_path, hit.other_origins) == ("while[2]/mul", ())
  assert find_overflow(fun, counts, x / 4000) is None
  x = (x / 4000).at[..., 0, :].set(jnp.inf)
  assert get_names(find_overflow(fun, counts, x)) == ["argument"]


def test_an_inf_that_a_function_without_equations_returns_is_named():
  @jax.custom_jvp
  def fun(x):
    return jnp.float32(jnp.inf)

  fun.defjvp(lambda x, t: (fun(*x), t[0]))
  assert find_overflow(jax.jit(fun), jnp.float32(1)).primitive == "constant"


@pytest.mark.slow
def test_an_uninitialized_value_is_named_only_if_it_reaches_the_result(
  monkeypatch,
):
  if "empty" not in str(jax.make_jaxpr(lambda: jnp.empty(4))()):
    pytest.skip("this JAX fills `jnp.empty` with zeros")
  eqn_as_fun = _eqns.eqn_as_fun

  def with_garbage(eqn):
    if eqn.primitive.name == "empty":
      return lambda *_: [jnp.full(4, jnp.nan)]
    return eqn_as_fun(eqn)

  monkeypatch.setattr(_eqns, "eqn_as_fun", with_garbage)
  fun = lambda x: jnp.empty(4).at[:2].set(x)
  x = jnp.ones(2)
  assert find_overflow(lambda x: fun(x)[:2], x) is None
  assert get_names(find_overflow(fun, x)) == ["empty"]
  assert get_names(find_overflow(lambda x: fun(x)[:2] / 0, x)) == ["div"]


def test_progress_is_shown_only_if_it_takes_long(capsys, monkeypatch):
  fun = jax.jit(lambda x: lax.scan(lambda x, _: (x * 60000, x), x, None, 2))
  find_overflow(fun, X, progress=False)  # The compiled programs are cached.
  monkeypatch.setattr(_progress, "_DELAY_SECONDS", 60)
  find_overflow(fun, X)
  monkeypatch.setattr(_progress, "_DELAY_SECONDS", -1)
  find_overflow(fun, X, progress=False)
  assert capsys.readouterr() == ("", "")
  find_overflow(fun, X)
  out, err = capsys.readouterr()
  assert out == ""
  assert [line.rpartition(", ")[0] for line in err.splitlines()] == [
    "find_overflow: compiling and running the function",
    "find_overflow: measuring 1 operation",
  ]


def test_on_a_terminal_each_line_replaces_the_line_before(capsys, monkeypatch):
  monkeypatch.setattr(_progress, "_DELAY_SECONDS", -1)
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
  find_overflow(lambda x: x * 60000, X)
  first, second, erased, _ = capsys.readouterr().err.split("\r")
  assert first.startswith("find_overflow: compiling and running the function, ")
  assert second.startswith("find_overflow: measuring 1 operation, ")
  assert len(second) == len(first)
  assert erased == " " * len(second.rstrip())


@pytest.mark.slow
def test_a_loop_over_arrays_whose_types_are_sharded_is_followed():
  mesh = sharding.make_mesh((4,), ("data",), AxisType.Explicit)
  ones = jnp.ones((4, 3), X.dtype)
  (x,) = sharding.put_on_devices(
    (ones,), sharding.to_named_shardings(mesh, (P("data"),))
  )

  def scan(x):
    step = lambda x, i: (x * jnp.where(i == 2, 60000, 2).astype(x.dtype), x)
    return lax.scan(step, x, jnp.arange(4))

  def while_loop(x):
    body = lambda state: (state[0] + 1, state[1] * 64)
    return lax.while_loop(lambda state: state[0] < 4, body, (0, x))[1]

  for fun in scan, while_loop:
    skip_if_jax_cannot(jax.jit(fun), x)
    hit = find_overflow(fun, x)
    assert hit.eqn_path in ("scan[2]/mul", "while[2]/mul")
    assert find_overflow(fun, x / 2**24) is None


def test_a_callback_in_the_condition_of_a_loop_is_called_once_each_time():
  calls = []

  def goes_on(state):
    jax.debug.callback(lambda i: calls.append(int(i)), state[0])
    return state[0] < 4

  def fun(x):
    body = lambda state: (state[0] + 1, state[1] * 64)
    return lax.while_loop(goes_on, body, (0, x))[1]

  hit = find_overflow(fun, jnp.ones(3, X.dtype))
  jax.effects_barrier()
  assert hit.eqn_path == "while[2]/mul"
  assert calls == [0, 1, 2, 3, 4]


def attend(boost):
  """Attention with a running maximum, which is -inf after the first block."""

  def body(carry, block):
    largest, total, out, i = carry
    key, value = block
    scores = jnp.where(i < 1, -jnp.inf, (QUERY @ key.T).astype(jnp.float32))
    new = jnp.maximum(largest, scores.max(-1))
    shift = jnp.where(jnp.isinf(new), 0, new)
    weights = jnp.exp(scores - shift[:, None])
    keep = jnp.exp(largest - shift)
    value = value * jnp.where(i == 2, boost, 1).astype(value.dtype)
    out = out * keep[:, None] + weights.astype(value.dtype) @ value
    return (new, total * keep + weights.sum(-1), out, i + 1), None

  def fun(keys):
    zeros = jnp.zeros(3)
    init = zeros - jnp.inf, zeros, jnp.zeros((3, 4)), 0
    (_, total, out, _), _ = lax.scan(body, init, (keys, keys + 1))
    return out / total[:, None]

  return fun


QUERY = jnp.linspace(-1, 1, 12, dtype=X.dtype).reshape(3, 4)


@pytest.mark.slow
def test_a_carry_that_begins_as_inf_hides_no_fault():
  keys = jnp.stack([QUERY] * 4)
  assert find_overflow(attend(1), keys) is None
  assert find_overflow(attend(60000), keys).eqn_path == "scan[2]/mul"


@pytest.mark.slow
def test_a_limited_number_of_later_operations_is_measured(monkeypatch):
  """It would take long to compile otherwise."""
  monkeypatch.setattr(_origins, "_MAX_MEASURED", 20)
  counts = []
  select_eqns = _origins._OriginSearch._select_eqns

  def record_count(*args):
    eqns = select_eqns(*args)
    counts.append(len(eqns))
    return eqns

  monkeypatch.setattr(_origins._OriginSearch, "_select_eqns", record_count)
  hit = find_overflow(attend(60000), jnp.stack([QUERY] * 4))
  assert hit.eqn_path == "scan[2]/mul"
  assert 1 < counts[0] <= 20


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_collective_is_blamed_only_for_an_inf_of_its_own(check_vma):
  mesh = sharding.make_mesh((4,), ("data",))

  def part(x):
    is_third = lax.axis_index("data") == 2
    y = jnp.square(x * jnp.where(is_third, 300, 1).astype(x.dtype))
    y = lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
    return lax.psum(lax.all_gather(y, "data", tiled=True), "data")

  def fun(x):
    specs = {"in_specs": P("data"), "out_specs": P()}
    return jax.shard_map(part, mesh=mesh, check_vma=check_vma, **specs)(x)

  x = jnp.ones((8, 4), X.dtype)
  assert get_names(find_overflow(fun, x)) == ["square"]
  (name,) = get_names(find_overflow(fun, x * 0.6 * 256 / 300))[:1]
  assert name.startswith("psum")


@pytest.mark.slow
@pytest.mark.skipif(
  jax.__version_info__ < (0, 12),
  reason="JAX takes each result of an optimization_barrier for varying",
)
def test_a_result_that_is_the_same_on_all_devices_remains_so():
  mesh = sharding.make_mesh((4,), ("data",))

  def part(w, x):
    w, x = lax.optimization_barrier((w, x))
    return w + lax.psum(jnp.square(x * 300), "data")

  specs = {"in_specs": (P(), P("data")), "out_specs": P()}
  fun = jax.shard_map(part, mesh=mesh, **specs)
  x = jnp.ones((8, 4), X.dtype)
  assert get_names(find_overflow(fun, x[:2], x)) == ["square"]


def test_the_output_of_a_jaxpr_is_located_at_its_equation():
  jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(1.0).jaxpr
  eqn = _description._get_eqn(jaxpr, (2, _regions.OUTPUT))
  assert eqn.primitive.name == "add"
