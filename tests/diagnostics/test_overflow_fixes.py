"""The printed fix of an overflow removes it from the program."""

import functools

from helpers import parametrize_slow, train_steps
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.diagnostics import find_overflow
from optax_lossscale.diagnostics._overflow import _report

F16, F32 = np.dtype(jnp.float16), np.dtype(jnp.float32)
EPS = float(jnp.finfo(F32).eps)


def no_guard(x):
  return x


def above(bound):
  return lambda x: jnp.maximum(x, bound)


def clip(x):
  return jnp.clip(x, -1 + EPS, 1 - EPS)


def keep_large(x):
  return jnp.where(jnp.abs(x) > 1e-6, x, 1)


def add_identity(a):
  return a + 1e-3 * jnp.eye(len(a))


def make_distinct(a):
  return a + jnp.diag(1e-3 * jnp.arange(len(a)))


def guard_arg(fun):
  """Return a function of a guard and the argument to which it is applied."""
  return lambda guard, w: fun(guard(w))


def solve(a):
  return jnp.linalg.solve(a, jnp.ones(len(a)))


def first_eigenvector(a):
  return jnp.linalg.eigh(a)[1][:, 0] @ jnp.arange(3.0)


def first_singular_vector(a):
  return jnp.linalg.svd(a)[0][:, 0] @ jnp.arange(3.0)


def divide_in_half(guard, x):
  y = guard(jnp.float32(6e-6))
  return (x.astype(F16) / y.astype(F16)).astype(F32)


ZEROS = jnp.zeros(4)
EDGE = jnp.array([1, 0.5, 0, -0.5])
SOME_ZERO = jnp.array([1.0, 0, 2, -1])
POSITIVE = jnp.abs(SOME_ZERO)
SINGULAR = jnp.ones((3, 3))
ROOT, UNIT = "jnp.sqrt(jnp.maximum(x, ", "jnp.clip(x, -1 + eps, 1 - eps)"
IDENTITY, DISTINCT = "a + 1e-3 * jnp.eye(len(a))", "jnp.diag(1e-3 * jnp.arange"
LARGE_BASE = "jnp.where(jnp.abs(x) > 1e-6, x, 1)"
AT_UNIT = {
  "arccos": jnp.arccos, "arcsin": jnp.arcsin, "arctanh": jnp.arctanh,
  "jitted arctanh": jax.jit(jnp.arctanh), "erf_inv": lax.erf_inv,
}  # fmt: skip

# An operation or its derivative is not finite at the edge of its domain: a
# function of a guard and an argument, the argument, a part of the fix that is
# printed, and the guard that applies it literally.
EDGES = {
  name: (guard_arg(fun), EDGE, UNIT, clip) for name, fun in AT_UNIT.items()
} | {
  "norm": (
    lambda guard, w: jnp.sqrt(guard(jnp.sum(w**2))), ZEROS, ROOT, above(EPS)
  ),
  "sqrt": (guard_arg(jnp.sqrt), POSITIVE, ROOT, above(EPS)),
  "sqrt of negative": (guard_arg(jnp.sqrt), SOME_ZERO, ROOT, above(EPS)),
  "where after sqrt": (
    lambda guard, w: jnp.where(w > 0, jnp.sqrt(guard(w)), 0), POSITIVE, ROOT,
    above(EPS),
  ),
  "rsqrt": (
    lambda guard, w: w * lax.rsqrt(guard(jnp.mean(w**2))), ZEROS, ROOT,
    above(EPS),
  ),
  "arccosh": (
    guard_arg(jnp.arccosh), EDGE[::-1] ** 2 + 1,
    "jnp.arccosh(jnp.maximum(x, 1 + ", above(1 + EPS),
  ),
  "log1p": (
    guard_arg(jnp.log1p), -EDGE, "jnp.log1p(jnp.maximum(x, -1 + ",
    above(-1 + EPS),
  ),
  "log": (
    guard_arg(jnp.log), POSITIVE, "jnp.log(jnp.where(x > 0, x, 1))",
    lambda w: jnp.where(w > 0, w, 1),
  ),
  "arctan2": (
    lambda guard, w: jnp.arctan2(w, guard(w)), SOME_ZERO,
    "(x == 0) & (y == 0), 1, x)", lambda w: jnp.where(w == 0, 1, w),
  ),
  "pow": (
    guard_arg(lambda w: w**0.5001), SOME_ZERO,
    "jnp.where(x > 1e-6, x, 1) ** p",
    lambda w: jnp.where(w > 1e-6, w, 1),
  ),
  "cbrt": (guard_arg(jnp.cbrt), SOME_ZERO, LARGE_BASE, keep_large),
  "tiny power": (
    guard_arg(lambda w: w**-2), SOME_ZERO + 1e-20, LARGE_BASE, keep_large
  ),
  "tiny divisor": (
    guard_arg(lambda w: 1 / w), SOME_ZERO - 1e-25, LARGE_BASE, keep_large
  ),
  "temperature": (
    divide_in_half, SOME_ZERO + 1, "a divisor is zero or too small",
    lambda y: jnp.where(y > 1e-2, y, 1),
  ),
  "solve": (guard_arg(solve), SINGULAR, IDENTITY, add_identity),
  "cholesky": (
    guard_arg(jnp.linalg.cholesky), SINGULAR, IDENTITY, add_identity
  ),
  "log determinant": (
    guard_arg(lambda a: jnp.linalg.slogdet(a)[1]), SINGULAR, IDENTITY,
    add_identity,
  ),
  "eigh": (guard_arg(first_eigenvector), jnp.eye(3), DISTINCT, make_distinct),
  "svd": (
    guard_arg(first_singular_vector), jnp.eye(3), DISTINCT, make_distinct
  ),
}  # fmt: skip
QUICK_EDGES = {"arccos"}


def make_losses(name):
  """Return the loss of a row, and the same with its fix."""
  fun, *_, guard = EDGES[name]
  with_sum = lambda guard, w: jnp.sum(fun(guard, w))
  return tuple(functools.partial(with_sum, x) for x in (no_guard, guard))


def make_step(loss_fn, w, scale=2.0**10, inner=None):
  """Return a training step and its arguments."""
  step, args = train_steps.make_step(
    loss_fn=lambda w, batch: loss_fn(w),
    tx=train_steps.make_tx(inner, scale),
    params=w,
  )
  return step, *args


@parametrize_slow("name", QUICK_EDGES, EDGES)
def test_the_fix_of_a_derivative_at_the_edge_of_a_domain_removes_it(name):
  loss_fn, fixed_loss_fn = make_losses(name)
  _, w, fix, _ = EDGES[name]
  hit = find_overflow(jax.grad(loss_fn), w)
  assert fix in hit.fix
  assert "scale" not in hit.fix and "loss scale" not in str(hit)
  assert hit.source_line.startswith("test_overflow_fixes.py:") or (
    "jitted" in name
  )
  assert jnp.isfinite(jax.grad(fixed_loss_fn)(w)).all()


ONES_AND_ZEROS = jnp.array([1.0, 0])


@parametrize_slow("wrap", (), [no_guard, jax.jit], slow=[jax.jit])
@pytest.mark.parametrize(
  "fun, fix",
  [
    (lambda x, y: (x + 1) / jnp.log(y + 1), "a divisor is zero"),
    (lambda x, y: jnp.sqrt(x + 2) * (x / y), "a divisor is zero"),
    (lambda x, y: jnp.sqrt(x) + jnp.arccos(x / 2), "a root has no"),
    (lambda x, y: jnp.sqrt(x + 1) + jnp.arccos(x), "acos or its derivative"),
    (lambda x, y: jnp.sqrt(x + 1) + jnp.arctanh(x), "atanh or its derivative"),
  ],
)
def test_a_division_is_distinguished_from_a_derivative_on_its_line(
  wrap, fun, fix
):
  grad = jax.value_and_grad(wrap(lambda x, y: jnp.sum(fun(x, y))))
  hit = find_overflow(wrap(grad), ONES_AND_ZEROS, ONES_AND_ZEROS)
  assert hit.fix.startswith(fix)


@pytest.mark.slow
@pytest.mark.parametrize(
  "wrap, fun",
  [
    (jax.jit, first_singular_vector),
    *((x, first_eigenvector) for x in (jax.jit, jax.checkpoint, jax.vmap)),
  ],
)
def test_a_repeated_eigenvalue_is_reported_with_the_line_of_the_user(wrap, fun):
  fun(jnp.eye(3))  # JAX reuses the jaxpr of eigh from another line.
  batch = jnp.eye(3)[None] if wrap is jax.vmap else jnp.eye(3)
  hit = find_overflow(jax.grad(lambda x: jnp.sum(wrap(fun)(x))), batch)
  assert DISTINCT in hit.fix
  assert hit.source_line.endswith(f" ({fun.__name__})")


def scaled_too_high(w):
  return jnp.sum((w.astype(F16) * F16.type(8)).astype(F32) * 60000)


def test_the_fix_for_a_program_without_a_loss_scale_does_not_mention_it():
  hit = find_overflow(jax.grad(scaled_too_high), ZEROS)
  assert hit.backward and "scale" not in hit.fix


@pytest.mark.slow
def test_a_gradient_alone_and_a_step_with_a_fixed_scale_have_a_loss_scale():
  _, w, state, _ = make_step(scaled_too_high, ZEROS)
  hit = find_overflow(ols.grad(scaled_too_high, state), w)
  assert "ols.set_loss_scale(opt_state" in hit.fix
  grad = lambda w, state: ols.grad(scaled_too_high, state)(w)
  hit = find_overflow(grad, w, state)
  assert hit.scale_factor > 0 and "zero" not in hit.fix
  step, w, *args = make_step(scaled_too_high, ZEROS, 2.0**9)
  hit = find_overflow(lambda w: step(w, *args), w)
  assert "ols.set_loss_scale(opt_state" in hit.fix


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_dtype_without_inf_overflows_if_the_loss_scale_is_too_high(dtype):
  loss_fn = lambda w: jnp.mean((w.astype(F32) * jnp.arange(1.0, 5)) ** 2)
  step, w, state, batch = make_step(loss_fn, jnp.ones(4, dtype), 2.0**15)
  hit = find_overflow(step, w, state, batch)
  assert hit.primitive == "convert_element_type"
  assert hit.fix.startswith("the loss scale is too high")
  state = ols.set_loss_scale(state, 2.0**15 * hit.scale_factor)
  assert find_overflow(step, w, state, batch) is None


@pytest.mark.slow
def test_an_overflow_of_the_forward_pass_is_named_if_it_makes_gradients_zero():
  """The backward pass overflows, too, but a lower scale is no help."""

  def softmax_loss(w, dtype):
    exps = jnp.exp(w.astype(F16).astype(dtype) - w.max().astype(dtype))
    return jnp.sum((exps / exps.sum())[:3].astype(F32) - 1) ** 2 * 2e4

  def check(dtype, scale):
    loss_fn = functools.partial(softmax_loss, dtype=dtype)
    step = make_step(loss_fn, jnp.zeros(70_000), scale)
    return diagnostics.check_step(*step, progress=False)

  bad = check(F16, 2.0**20)
  assert "all gradients are zero" in bad.overflow.fix
  (problem,) = bad.problems
  assert "overflows in the forward pass" in problem.cause
  assert "x.astype(jnp.float32)" in problem.fix
  assert check(F32, 2.0**10).is_sound


def clip_before_update(grads, max_norm=1.0):
  return grads / jnp.linalg.norm(grads) * max_norm


# An optimizer with parameters, the factor of the loss, a fragment of the fix,
# and an optimizer with parameters to which the fix is applied.
OPTIMIZERS = {
  "a small epsilon": (
    optax.adam(0.1, eps=0), ZEROS, 0.0, "eps=1e-6", optax.adam(0.1, eps=1e-6),
    ZEROS,
  ),
  "large gradients": (
    optax.adam(0.1), ZEROS, 1e25, "optax.chain(optax.clip(1.0), optimizer)",
    optax.chain(optax.clip(1.0), optax.adam(0.1)), ZEROS,
  ),
  "half-precision updates": (
    optax.sgd(1e3), ZEROS.astype(F16), 300.0, "parameters in float32",
    optax.sgd(1e3), ZEROS,
  ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_fix_for_an_optimizer_removes_its_nan(name):
  inner, w, factor, fix, fixed_inner, fixed_w = OPTIMIZERS[name]
  loss_fn = lambda w: jnp.sum((w.astype(F32) + 1) * factor)
  hit = find_overflow(*make_step(loss_fn, w, 1.0, inner))
  assert " after the backward pass" in str(hit) and fix in hit.fix
  assert find_overflow(*make_step(loss_fn, fixed_w, 1.0, fixed_inner)) is None


@pytest.mark.slow
def test_an_operation_before_update_is_after_the_backward_pass():
  step, args = train_steps.make_step(
    lambda *args: clip_before_update(train_steps.compute_grads(*args)),
    loss_fn=lambda w, batch: jnp.sum(0 * w),
    params=ZEROS,
  )
  hit = find_overflow(step, *args)
  assert "after the backward pass" in str(hit) and not hit.backward
  check = diagnostics.check_step(step, *args, progress=False)
  assert "after the backward pass" in check.problems[0].cause
  # The same operation in a loss is part of the forward pass.
  hit = find_overflow(clip_before_update, ZEROS)
  assert "in the forward pass" in str(hit)


X = jnp.linspace(-2, 2, 8, dtype=F16).reshape(2, 4)
NOT_GIVEN, WRITTEN = "If batch['x'] is a parameter", "written in the program"
REF_FIX = "the Ref contains"
MASKED_ROW = "a row of a softmax is masked completely"
TOO_LARGE = "or normalize it; if it is a mask"


# A program, its argument, the primitive and the path, and a part of the fix.
OF_PROGRAMS = {
  "argument": (
    lambda batch: batch["x"] * 2, {"x": X * np.nan}, "batch['x']", NOT_GIVEN,
  ),
  "nan": (
    lambda x: jnp.where(x > 0, x, jnp.nan), X,
    "jit(_where)/convert_element_type", WRITTEN,
  ),
  "large number in a mask": (
    lambda x: jnp.where(x > 0, x, -1e9), X, "jit(_where)/convert_element_type",
    TOO_LARGE,
  ),
  "literal": (
    lambda x: lax.add(x[0, 0], np.float16(np.inf)), X, "add", WRITTEN,
  ),
  # The infs are written there, and the NaN is made of them.
  "masked row": (
    lambda x: jax.nn.softmax(jnp.where(x > 9, x, -jnp.inf)), X, "sub",
    MASKED_ROW,
  ),
  "zero times inf": (
    lambda x: 0 * x * jnp.array([np.inf] * 4, F16), X, "mul", "0 * inf",
  ),
  "sum": (
    lambda x: jnp.sum(30000 * jnp.abs(x)), X, "convert_element_type",
    "Keep this value in",
  ),
}  # fmt: skip


@parametrize_slow("name", {"argument", "nan"}, OF_PROGRAMS)
def test_the_fix_of_an_inf_of_the_program_or_its_arguments(name):
  fun, arg, path, fix = OF_PROGRAMS[name]
  hit = find_overflow(fun, arg)
  primitive = "argument" if "argument" in name else path.split("/")[-1]
  assert (hit.primitive, hit.eqn_path) == (primitive, path)
  assert fix in hit.fix and hit.other_origins == ()
  assert f"\nFix: {hit.fix}" in str(hit)


def operand(amax, dtype=F16, shape=(2, 4)):
  return diagnostics.Operand(shape, dtype, amax, np.isfinite(amax))


ONE, ZERO, LARGE, LARGER = map(operand, (1.0, 0.0, 300.0, 60_000.0))
INF = operand(np.inf)
E5M2, E4M3 = np.dtype(jnp.float8_e5m2), np.dtype(jnp.float8_e4m3fn)
NAN, WIDE = {"kind": "nan"}, {"dtype": F32}
DEFAULTS = {"dtype": F16, "kind": "inf", "backward": False}
IN_BACKWARD = {"backward": True, "has_loss_scale": True}
LOWERED = IN_BACKWARD | {"scale_factor": 0.5}


@pytest.mark.parametrize(
  "primitive, inputs, fields, fix",
  [
    ("add", [ONE, INF], {"is_written": True}, WRITTEN),
    ("add", [ONE, ONE], {"is_reproduced": False}, "is finite on its own"),
    ("gather", [ONE], NAN, "an index is out of bounds"),
    ("get", [], {}, REF_FIX),
    ("sub", [INF, INF], NAN, MASKED_ROW),
    ("mul", [ZERO, INF], NAN, "0 * inf"),
    ("mul", [LARGE], LOWERED | {"has_zero_grads": True}, "gradients are zero"),
    ("log", [ONE], NAN, "jnp.where(x > 0, x, 1)). Or compute"),
    ("log", [ONE], NAN | WIDE, "jnp.log(jnp.where(x > 0, x, 1)). Or"),
    ("rsqrt", [ZERO], {}, ROOT),
    ("acos", [LARGE], NAN, UNIT),
    ("div", [ZERO, ZERO], NAN, "a divisor is zero"),
    ("div", [ONE, LARGE], {}, "small numbers become zero in float16"),
    ("div", [operand(655.0), ONE], {}, "a divisor is zero"),
    ("div", [operand(656.0), ONE], {}, "div in float32"),
    ("div", [operand(1e30), ONE], WIDE, "jnp.abs(y) > 1e-6, y"),
    ("div", [operand(1e33), ONE], WIDE, "outside the range of float32"),
    ("div", [LARGER, ONE], {"scale_factor": 0.0}, "a divisor is zero"),
    ("div", [ONE, ZERO], {"function": "sqrt"}, ROOT),
    ("div", [LARGE, ZERO], IN_BACKWARD, "a divisor is zero"),
    ("div", [LARGER, ONE], IN_BACKWARD, "loss scale is too high"),
    ("div", [LARGE, ZERO], LOWERED, "ols.set_loss_scale(opt_state, scale / 2)"),
    ("mul", [LARGE], LOWERED | {"scale_factor": 0.0}, "at lower loss"),
    ("mul", [LARGE, LARGE], {"backward": True}, "compute mul in float32"),
    ("mul", [LARGE], {"in_autocast": True, "backward": True}, "runs this la"),
    ("integer_pow", [ZERO], {}, "so compute it in float32"),
    ("integer_pow", [LARGE], {}, "compute integer_pow in float32"),
    ("pow", [LARGE, ONE], NAN, "jnp.where(x > 1e-6, x, 1) ** p"),
    ("pow", [LARGE, ONE], {}, "compute pow in float32"),
    ("digamma", [ONE], NAN, "is not defined for some of its opera"),
    ("exp", [LARGE], {}, "above 11.1 in float16. Compute it in float32: jnp"),
    ("exp2", [LARGE], {}, "exp2 overflows above 16 in float16"),
    ("cosh", [LARGE], {}, "cosh overflows above 11.8 in float16"),
    ("exp", [LARGE], WIDE, "Limit the operand: jnp.minimum(x, 88.7)"),
    ("mul", [LARGE], WIDE, "outside the range of float32"),
    ("mul", [LARGE], {"dtype": np.dtype(np.complex64)}, "range of complex64"),
    ("mul", [LARGE], WIDE | {"after_backward": True}, "optax.clip(1.0)"),
    ("mul", [LARGE], {"after_backward": True}, "Compute mul in float32: x.a"),
    ("dot_general", [LARGE], NAN, "compute this layer in float32"),
    ("cumsum", [LARGE], {}, "jnp.sum(x, dtype=jnp.float32)"),
    ("reduce_sum", [LARGE], {}, "add up in float32: jnp.sum"),
    ("convert_element_type", [LARGE], {"dtype": E5M2}, "57300"),
    ("convert_element_type", [LARGE], NAN | {"dtype": E4M3}, "4m3fn is 448"),
  ],
)  # fmt: skip
def test_the_fix_depends_on_the_description(primitive, inputs, fields, fix):
  names = dict.fromkeys(("name_scope", "param_path", "name"), "layer")
  fields = DEFAULTS | {"eqn_path": primitive} | fields
  facts = {k: fields.pop(k) for k in _report.Context._fields if k in fields}
  hit = diagnostics.Overflow(
    primitive=primitive,
    source_line="",
    inputs=tuple(inputs),
    **names,
    **fields,
  )
  fixed = _report.add_context(hit, **facts).fix
  assert fix in fixed
  assert "has_loss_scale" in facts or "the loss scale" not in fixed
