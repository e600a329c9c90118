"""The matmuls that run in half precision, and the equations after them."""

from helpers import half_eqns, jaxprs, parametrize_slow
from helpers.bits import assert_same_bits
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _eqns, _primitives, _walk

A = 2 * normal(4, 4, seed=0) + 4 * np.eye(4, dtype=np.float32)
B = 2 * normal(4, 4, seed=1)
EXACT = jnp.float32(jnp.float16(A) @ jnp.float16(B))  # A @ B in half precision


@pytest.mark.parametrize("setting", ["highest", "float32"])
def test_a_global_highest_precision_applies_to_each_matmul(setting):
  fun = lambda a, b: a @ b
  warns = pytest.warns(UserWarning, match="jax.default_matmul_precision")
  with jax.default_matmul_precision(setting), warns:
    assert jaxprs.list_half_primitives(ols.autocast(fun), A, B) == set()
  with jax.default_matmul_precision("bfloat16"):
    assert jaxprs.list_half_primitives(ols.autocast(fun), A, B)


def test_float64_matmuls_are_unchanged():
  with jax.enable_x64(True):
    wide = lambda a, b: a.astype("float64") @ b.astype("float64") + a @ b
    counts = jaxprs.count_matmuls_by_dtype(ols.autocast(wide), A, B)
    assert counts == {"float64": 1, "float16": 1}
    assert jax.eval_shape(ols.autocast(wide), A, B).dtype == np.float64


HALVES = ["float16", "bfloat16"]


@parametrize_slow("dtype", ["float16"], HALVES)
def test_gradients_of_a_half_precision_operand_equal_a_hand_cast_model(dtype):
  def loss(x, w, v):
    return jnp.sum(jnp.tanh(x @ w) @ v + v @ (x @ w))

  def by_hand(x, w, v):
    dot = lambda a, b: jnp.float32(a.astype(dtype) @ b.astype(dtype))
    return jnp.sum(dot(jnp.tanh(dot(x, w)), v) + dot(v, dot(x, w)))

  args = A, B.astype(dtype), A.T.astype(dtype)
  functions = ols.autocast(loss, dtype), by_hand
  half, expected = (jax.value_and_grad(f, (0, 1, 2)) for f in functions)
  assert set(jaxprs.count_matmuls_by_dtype(half, *args)) == {dtype}
  _, grads = jax.eval_shape(half, *args)
  assert [str(g.dtype) for g in grads] == ["float32", dtype, dtype]
  assert_same_bits(jax.jit(half)(*args), jax.jit(expected)(*args))


def test_cotangents_of_matmuls_with_float16_weights_are_summed_in_float32():
  frozen = jnp.full((4, 4), 10_000.0, jnp.float16)
  loss = ols.autocast(lambda x: jnp.sum(x @ frozen) + jnp.sum(x @ frozen))
  grads = jax.jit(jax.grad(loss))(np.eye(4, dtype=np.float32))
  np.testing.assert_array_equal(grads, 80_000)


@pytest.mark.parametrize("keep", ["the function", "the name"])
def test_a_kept_matmul_with_an_operand_in_half_precision_is_unchanged(keep):
  def project(x, w):
    with jax.named_scope("project"):
      return x @ w

  fun = ols.keep_float32(project) if keep == "the function" else project
  names = ["project"] if keep == "the name" else []
  loss = lambda f: lambda x, w: jnp.sum(f(x, w)) + jnp.sum(x @ x)
  kept = ols.autocast(loss(fun), keep_float32=names)
  args = A, B.astype("float16")
  grads = jax.grad(kept, (0, 1))
  counts = jaxprs.count_matmuls_by_dtype(grads, *args)
  assert counts == {"float32": 3, "float16": 3}


def test_the_branch_of_a_platform_runs_in_half_precision():
  def fun(a, b):
    return lax.platform_dependent(
      a, cpu=lambda a: a @ b, tpu=only_on_tpu, default=lambda a: (a @ b) @ b
    )

  def only_on_tpu(a):
    raise_on_cpu = jax.ffi.ffi_call("no_such_function", jax.typeof(a))
    return raise_on_cpu(a) @ a

  half = ols.autocast(fun)
  assert set(jaxprs.count_matmuls_by_dtype(half, A, B)) == {"float16"}
  assert_same_bits(jax.jit(half)(A, B), EXACT)


def test_matmuls_accumulate_in_float32():
  # In float16, 2048 + 1 is 2048.
  ones = jnp.ones((2, 8192))
  assert jax.jit(ols.autocast(lambda x: x @ x.T))(ones)[0, 1] == 8192


def test_data_movement_of_two_matmuls_keeps_them_separate():
  fun = lambda a, b: lax.optimization_barrier((a @ b, b @ a))
  half = ols.autocast(fun)
  assert "optimization_barrier" in jaxprs.list_half_primitives(half, A, B)
  exact = jnp.float16(A) @ jnp.float16(B), jnp.float16(B) @ jnp.float16(A)
  for actual, expected in zip(jax.jit(half)(A, B), exact, strict=True):
    assert_same_bits(actual, jnp.float32(expected))


def test_cotangents_of_a_weight_in_a_scan_are_summed_in_float32():
  def loss(w, xs):
    return lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), 0.0, xs)[0]

  half = ols.autocast(loss)
  xs = jnp.ones((4096, 2, 4))
  # Each step adds 2, and 4,096 of them are beyond what float16 counts by one.
  np.testing.assert_array_equal(jax.jit(jax.grad(half))(jnp.eye(4), xs), 8192)
  eqns = jaxprs.list_eqns(half, A, xs)
  scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
  assert all(v.aval.dtype == jnp.float32 for v in scans[0].invars)


def test_a_half_precision_output_of_a_call_is_moved_in_half_precision():
  multiply = jax.jit(lambda a, b: a @ b)
  half = ols.autocast(lambda a, b: multiply(a, b).T)
  assert "transpose" in jaxprs.list_half_primitives(half, A, B)


def test_the_dtype_float32_returns_the_function_itself():
  fun = lambda a, b: a @ b
  assert ols.autocast(fun, jnp.float32) is fun
  assert ols.autocast(fun, jnp.float32, keep_float32="net") is fun


def test_an_autocast_inside_another_one_is_unchanged():
  inner = ols.autocast(lambda a, b: a @ b, jnp.bfloat16)
  half = ols.autocast(lambda a, b: inner(a, b) @ b)
  counts = jaxprs.count_matmuls_by_dtype(half, A, B)
  assert counts == {"bfloat16": 1, "float16": 1}


@pytest.mark.parametrize("dtype", ["float64", "int32", "float8_e4m3fn", None])
def test_another_dtype_is_an_error(dtype):
  with pytest.raises(TypeError, match="dtype must be"):
    ols.autocast(lambda: None, dtype)


CALLS = {
  "autocast": ols.autocast,
  "autocast()": ols.autocast(),
  "keep_float32": ols.keep_float32,
}


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_an_argument_other_than_a_function_raises_an_error(function):
  with pytest.raises(TypeError, match="fun must be a function, got fun = 3"):
    function(3)


def test_a_function_without_matmuls_warns_at_the_users_line():
  with pytest.warns(UserWarning, match="had no effect on sin") as caught:
    jax.jit(ols.autocast(jnp.sin))(A)
  assert caught[0].filename == __file__


def test_outside_of_jit_numpy_multiplies_its_arrays_and_a_warning_says_so():
  with pytest.warns(UserWarning, match="or convolution of JAX arrays"):
    ols.autocast(lambda x: x @ x)(np.ones((4, 4), np.float32))


IN_HALF = "A model that already computes in half precision needs no autocast."
MIXED = (
  "If one operand is float32 and the other one neither float32 nor float16, the"
  " matmul is unchanged. Cast the other operand to float32."
)
HIGHEST = "Matmuls of precision HIGHEST, also by jax.default_matmul_precision,"


def bfloat16(x):
  return x.astype(jnp.bfloat16)


def in_bfloat16(x):
  return bfloat16(x) @ bfloat16(x)


def by_integers(x):
  return x.astype(int) @ x


# Functions without a matmul to cast, and the end of the warning.
NO_EFFECT = {
  "no matmul": (
    jnp.sin,
    "had no effect on sin: it contains no matmul or convolution of",
  ),
  "bfloat16": (
    jax.jit(in_bfloat16),
    f"to float16, only some in bfloat16. {IN_HALF}",
  ),
  "highest precision": (
    jax.checkpoint(lambda x: jnp.matmul(x, x, precision="highest")),
    f"only some in float32. {HIGHEST}",
  ),
  "bfloat16 and kept": (
    lambda x: in_bfloat16(x) + ols.keep_float32(jnp.matmul)(x, x),
    f"only some in bfloat16 and float32. {HIGHEST}",
  ),
  "int32": (lambda x: x.astype(int) @ x.astype(int), "only some in int32."),
  "float32 @ bfloat16": (
    lambda x: x @ bfloat16(x),
    f"only some in float32 @ bfloat16. {MIXED}",
  ),
  "bfloat16 @ float32": (
    lambda x: bfloat16(x) @ x,
    f"only some in bfloat16 @ float32. {MIXED}",
  ),
  "bfloat16 and int32 @ float32": (
    lambda x: by_integers(x) + in_bfloat16(x),
    f"only some in bfloat16 and int32 @ float32. {IN_HALF} {MIXED}",
  ),
  "kept float32 @ float16": (
    ols.keep_float32(lambda x: x @ x.astype("float16")),
    f"only some in float32 @ float16. {HIGHEST} and matmuls marked with"
    " keep_float32 stay in float32.\n",
  ),
  "float16 @ bfloat16": (
    lambda x: x.astype("float16") @ bfloat16(x),
    f"only some in float16 @ bfloat16. {IN_HALF}\n",
  ),
  "complex": (lambda x: x @ (1j * x), "only some in float32 @ complex64.\n"),
}


@pytest.mark.parametrize("fun, text", NO_EFFECT.values(), ids=NO_EFFECT)
def test_the_warning_names_the_dtypes_of_unchanged_matmuls(fun, text):
  with pytest.warns(UserWarning, match="had no effect") as caught:
    jax.eval_shape(ols.autocast(fun), jnp.eye(3))
  assert text in f"{caught[0].message}\n"


def test_it_is_a_decorator_with_and_without_arguments():
  decorators = {
    ols.autocast: ["float16", "float16"],
    ols.autocast(): ["float16", "float16"],
    ols.autocast(dtype=jnp.bfloat16): ["bfloat16", "bfloat16"],
    ols.autocast(keep_float32="b"): ["float16", "float32"],
    ols.autocast(None, jnp.bfloat16, keep_float32=["a", "b"]): ["float32"] * 2,
  }
  for decorator, dtypes in decorators.items():

    @decorator
    def loss_fn(params, x):
      """How wrong the model is."""
      return jnp.sum(x @ params["a"] @ params["b"])

    assert loss_fn.__doc__ == "How wrong the model is."
    eqns = jax.make_jaxpr(loss_fn)({"a": A, "b": A}, A).eqns
    dot_eqns = [e for e in eqns if e.primitive.name == "dot_general"]
    assert [str(e.outvars[0].aval.dtype) for e in dot_eqns] == dtypes
  identity = ols.autocast(dtype=jnp.float32)
  assert identity(loss_fn) is loss_fn


def test_a_decorator_refuses_wrong_arguments_immediately():
  for wrong in {"dtype": jnp.int32}, {"keep_float32": 3}:
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} must be"):
      ols.autocast(**wrong)


@pytest.mark.parametrize(
  "args", [(), *((x,) for x in (jnp.float16, "float16", float, np.dtype("f2")))]
)
def test_a_with_block_or_a_dtype_as_first_argument_raises_a_helpful_error(args):
  """As PyTorch has it: with autocast(device_type="cuda")."""
  line = r"the loss function: ols\.value_and_grad\(ols\.autocast\(loss_fn\)"
  with pytest.raises(TypeError, match=line), ols.autocast(*args):
    pass


# Random programs have such values in other functions.
@pytest.mark.parametrize("fun", [lambda x: x @ x, lambda x: x @ A + x @ B])
def test_cotangents_of_a_value_that_matmuls_share_add_up_in_float32(fun):
  loss = ols.autocast(lambda x: jnp.sum(jnp.sin(fun(x))))
  jaxpr = jax.make_jaxpr(jax.grad(loss))(A)
  assert half_eqns.list_half_sums(jaxpr) == set()


def list_tagged(fun, *args):
  """The visits of the matmuls and transposes that `autocast` made."""
  steps = _walk.walk(jax.make_jaxpr(fun)(*args), _eqns.subjaxprs)
  return [
    step
    for step in steps
    if _primitives.is_matmul(step.eqn) or step.eqn.primitive.name == "transpose"
    if step.location.autocast_dtype is not None
  ]


def test_an_operand_in_the_dtype_of_the_operands_is_cast_with_its_matmul():
  cast = ols.autocast(lambda a, b: a @ b, jnp.bfloat16)
  (matmul,) = list_tagged(cast, A, bfloat16(B))
  assert matmul.eqn.invars[0].aval.dtype == jnp.bfloat16
  with pytest.warns(UserWarning, match="only some in float32 @ float16"):
    assert not list_tagged(cast, A, B.astype("float16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_matmul_and_what_moves_its_result_have_the_dtype_as_a_scope(dtype):
  cast = ols.autocast(lambda a, b: (a @ b).T, dtype)
  steps = list_tagged(cast, A, B)
  assert len(steps) == 2
  for step in steps:
    assert str(step.eqn.source_info.name_stack) == f"autocast-{dtype}"
    assert step.location.autocast_dtype == step.eqn.outvars[0].aval.dtype
