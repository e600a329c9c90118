"""Which operations run in half precision: one case for each of a table."""

from helpers import autocast_ops as ops
from helpers import jaxprs
import jax
from jax import lax
import jax.numpy as jnp
import jax.scipy.linalg
import pytest

import optax_lossscale as ols

X = ops.X
MATMULS = {"conv_general_dilated", "dot_general", "ragged_dot_general"}
# Matmuls that autocast doesn't cast, and that the page doesn't list.
LEFT_ALONE = {
  "an outer product of a batch": lambda a, b: a[:, :, None] @ b[:, None, :],
  "a large batch of products of vectors": lambda a, b: jnp.vecdot(
    jnp.tile(a, (100, 1)), jnp.tile(b, (100, 1))
  ),
  "a product of one row and one column": lambda a, b: a[:1] @ b[:, :1],
  "the highest precision of one side": lambda a, b: jnp.matmul(
    a, b, precision=("highest", "default")
  ),
  "an algorithm": lambda a, b: lax.dot(
    a, b, precision=lax.DotAlgorithmPreset.F32_F32_F32
  ),
  "a convolution with one weight": lambda a, b: lax.conv(
    a[None, None], b[:2, None, None, :1].reshape(2, 1, 1, 1), (1, 1), "SAME"
  ),
  "a convolution of many features with one weight each": lambda a, b: lax.conv(
    a[None, :1], jnp.tile(b[0], 100).reshape(400, 1, 1), (1,), "SAME"
  ),
  "a convolution with one result": lambda a, b: lax.conv(
    a[None, None], b[None, None], (1, 1), "VALID"
  ),
  "complex64": lambda a, b: (a + 1j * b) @ (b + 1j * a),
  "integers": lambda a, b: jnp.int32(9 * a) @ jnp.int32(9 * b),
  "determinant": lambda a, b: jnp.linalg.slogdet(a),
  "least squares": lambda a, b: jnp.linalg.lstsq(a, b)[0],
  "matrix exponential": lambda a, b: jax.scipy.linalg.expm(a),
} | ops.MATMULS_IN_FLOAT32


def list_matmul_dtypes(fun):
  eqns = jaxprs.list_eqns(fun, X, X)
  return [
    [str(v.aval.dtype) for v in (*eqn.invars[:2], *eqn.outvars)]
    for eqn in eqns
    if eqn.primitive.name in MATMULS
  ]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_excluded_matmuls_run_unchanged(name):
  fun = LEFT_ALONE[name]
  half = ols.autocast(lambda a, b: (fun(a, b), b @ b))  # The last one is cast.
  *others, last = list_matmul_dtypes(half)
  assert others == list_matmul_dtypes(fun)
  assert last == ["float16"] * 3


# The dtypes of the operands and of the result of a matmul, the dtype of
# autocast, and the dtypes of the matmul within autocast.
F32, F16, BF16 = "float32", "float16", "bfloat16"
CASTS = [
  ((F32, F32, F32), F16, (F16, F16, F16)),
  ((F32, F32, F32), BF16, (BF16, BF16, BF16)),
  ((F32, F32, F32), jnp.bfloat16, (BF16, BF16, BF16)),
  ((F32, F16, F32), F16, (F16, F16, F16)),
  ((F16, F32, F32), F16, (F16, F16, F16)),
  ((BF16, F32, F32), BF16, (BF16, BF16, BF16)),
  # These matmuls are unchanged.
  ((F16, F16, F16), F16, (F16, F16, F16)),
  ((F16, F16, F32), F16, (F16, F16, F32)),
  ((F16, F16, F32), BF16, (F16, F16, F32)),
  ((BF16, BF16, BF16), F16, (BF16, BF16, BF16)),
  ((F32, BF16, F32), F16, (F32, BF16, F32)),
  ((F16, F32, F32), BF16, (F16, F32, F32)),
  ((F32, F16, F16), F16, (F32, F16, F16)),
]


@pytest.mark.parametrize(("before", "dtype", "after"), CASTS)
def test_only_float32_next_to_float32_or_the_same_half_is_cast(
  before, dtype, after
):
  first, second, result = before

  def fun(a, b):
    a, b = a.astype(first), b.astype(second)
    matmul = jnp.matmul(a, b, preferred_element_type=result)
    return matmul, X @ X  # So that something is cast.

  found, _ = list_matmul_dtypes(ols.autocast(fun, dtype))
  assert found == list(after)


@pytest.mark.parametrize("name", ops.RUN_IN_FLOAT16)
def test_an_op_with_a_matmul_runs_in_float16(name):
  found = list_matmul_dtypes(ols.autocast(ops.RUN_IN_FLOAT16[name]))
  assert found and all(dtypes == ["float16"] * 3 for dtypes in found)


@pytest.mark.parametrize("name", [*ops.DATA_MOVEMENT, *ops.EXCHANGES])
def test_an_op_that_moves_entries_follows_its_input(name):
  move = (ops.DATA_MOVEMENT | ops.EXCHANGES)[name]
  wrap = ops.on_devices if name in ops.EXCHANGES else lambda fun: fun
  as_written = jaxprs.list_eqns(wrap(lambda x, w: move(x)), X, X)
  if name not in {eqn.primitive.name for eqn in as_written}:
    pytest.skip("With its upgrade flags JAX has another primitive for it.")
  after = wrap(lambda x, w: move(x @ w))
  assert name in jaxprs.list_half_primitives(ols.autocast(after), X, X)
  before = wrap(lambda x, w: (move(x), x @ w))
  assert name not in jaxprs.list_half_primitives(ols.autocast(before), X, X)


# Operations that do more than move data. The page doesn't list the last three.
# The transposes of some are sums, or become sums under an outer `vmap`.
STAYS = ops.RUN_IN_FLOAT32 | {
  "dynamic update": lambda h: lax.dynamic_update_slice(h, h + 1, (1, 0)),
  "negate": lambda h: -h,
  "with other numbers": lambda h: lax.optimization_barrier((h, 1e-9 * h)),
}


@pytest.mark.parametrize("name", STAYS)
def test_an_op_that_computes_stays_in_float32(name):
  half = ols.autocast(ops.on_devices(lambda x, w: STAYS[name](x @ w)))
  found = jaxprs.list_half_primitives(half, X, X)
  allowed = {"convert_element_type", "reshape", "slice", "squeeze", "transpose"}
  assert "dot_general" in found and found <= {"dot_general", *allowed}


# The primitives of the calls that autocast does not enter.
OPAQUE = {
  "pl.pallas_call": "pallas_call",
  "jax.export": "call_exported",
  "custom_vmap": "custom_vmap_call",
  "linear_call": "linear_call",
  "lax.custom_linear_solve": "custom_linear_solve",
}


@pytest.mark.parametrize("name", ops.LEFT_UNCHANGED)
def test_autocast_warns_of_a_call_that_it_leaves_unchanged(name):
  fun = ops.LEFT_UNCHANGED[name]
  half = ols.autocast(lambda a, b: fun(a, b) + a @ b)
  line = r"at (test|autocast)_ops\.py:\d+ \(\S+\) unchanged"
  message = f"^autocast left {OPAQUE[name]} {line}.*float32 instead of float16"
  with pytest.warns(UserWarning, match=message):
    dtypes = list_matmul_dtypes(half)
  assert dtypes[-1] == ["float16"] * 3
