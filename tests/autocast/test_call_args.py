"""The arguments and the side effects of a function within `autocast`."""

from collections import defaultdict, OrderedDict
import functools
import sys

from flax import nnx
from helpers import jaxprs, parametrize_slow
from helpers.bits import assert_same_bits
import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

X = jnp.float32(np.arange(32).reshape(8, 4) % 5 - 2)
W = jnp.float32(np.arange(16).reshape(4, 4) % 3 - 1)


def test_arguments_and_results_may_be_any_objects():
  thing = object()

  def fun(mode, x, *rest, activation, table=None):
    """A docstring."""
    assert mode == "train" and rest == (3, None) and activation is jnp.tanh
    if rest[0] > 2:  # A number stays a number.
      y = activation(x @ W)
    return table | {"y": y, "x": x, "thing": [thing, mode], "n": rest[0]}

  table = {"host": np.arange(3)}
  half = ols.autocast(fun)
  out = half("train", X, 3, None, activation=jnp.tanh, table=table)
  assert out["thing"] == [thing, "train"] and out["n"] == 3
  assert out["x"] is X and out["host"] is table["host"]
  assert out["y"].dtype == jnp.float32
  assert (half.__name__, half.__doc__) == ("fun", "A docstring.")


@pytest.mark.parametrize(
  "kind",
  [dict, functools.partial(defaultdict, None)],
  ids=["dict", "defaultdict"],
)
def test_keys_of_an_argument_may_be_of_several_types(kind):
  # JAX cannot sort them. Nor need it, as long as they hold no NNX module.
  assert "flax.nnx" in sys.modules
  half = ols.autocast(lambda tables, x: tables["w"] @ tables[1] @ x)
  tables = kind({"w": W, 1: W})
  counts = jaxprs.count_matmuls_by_dtype(lambda x: half(tables, x), W)
  assert counts == {"float16": 2}


class Layer(nnx.Module):
  def __init__(self):
    self.count = nnx.Variable(jnp.asarray(np.int32(0)))

  def __call__(self, x):
    return x @ x


def test_a_module_is_found_next_to_keys_of_several_types():
  def fun(tables, x):
    tables["layer"].count[...] += 1
    return tables["layer"](x)

  layer = Layer()
  ols.autocast(fun)(OrderedDict(layer=layer), W)
  assert layer.count[...] == 1


def test_arguments_may_be_static_and_donated_and_a_trace_is_reused():
  traces = []

  def fun(x, n, scale=1):
    traces.append(x)
    return scale * (x @ W) + n

  half, static = ols.autocast(fun), ("n", "scale")
  step = jax.jit(half, static_argnames=static, donate_argnums=0)
  for _ in range(3):
    x = X + 0
    assert_same_bits(step(x, n=2, scale=3), 3 * (X @ W) + 2)
    assert x.is_deleted()
  assert len(traces) == 1


@parametrize_slow("ordered", [True], [False, True])
@parametrize_slow("jitted", [True], [False, True])
def test_effects_happen_once_and_in_order(ordered, jitted):
  def body(seen, x, w):
    note = lambda value: seen.append(int(value))
    io_callback(note, None, 1, ordered=ordered)
    y = x @ w
    jax.debug.callback(note, 2, ordered=ordered)

    def step(c, i):
      io_callback(note, None, 10 + i, ordered=ordered)
      return c @ w, None

    y, _ = lax.scan(step, y, jnp.arange(3))
    branch = lambda c: (io_callback(note, None, 20, ordered=ordered), c @ w)[1]
    y = lax.cond(jnp.sum(x) > -1e9, branch, lambda c: c, y)
    double = jax.pure_callback(lambda v: 2 * v, y, y)
    io_callback(note, None, 3, ordered=ordered)
    return double

  seen, expected = [], []
  for fun, to in ((ols.autocast(body), seen), (body, expected)):
    run = functools.partial(fun, to)
    out = (jax.jit(run) if jitted else run)(X, W)
    jax.effects_barrier()
    np.testing.assert_array_equal(out, 2 * (X @ W @ W @ W @ W @ W))
  assert sorted(seen) == sorted(expected) == [1, 2, 3, 10, 11, 12, 20]
  if ordered:  # Among callbacks of one kind.
    seen.remove(2)
    assert seen == [1, 10, 11, 12, 20, 3]


def test_a_reference_is_read_and_written():
  def fun(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ W
    return ref[...] + 1

  assert_same_bits(jax.jit(ols.autocast(fun))(X), X @ W + 1)


def test_a_leaked_tracer_is_reported_with_the_users_function():
  seen = []

  def loss_that_writes_outside(w):
    seen.append(2 * w)
    return jnp.sum(w @ w)

  jax.make_jaxpr(jax.grad(ols.autocast(loss_that_writes_outside)))(W)
  with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
    seen[0] + 1
  number = loss_that_writes_outside.__code__.co_firstlineno
  assert f"loss_that_writes_outside at {__file__}:{number}" in str(caught.value)
