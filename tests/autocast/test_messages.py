"""The warnings of `autocast` about calls outside of `jit`."""

import functools
import gc
import weakref

import equinox as eqx
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _messages
from optax_lossscale._jaxprs import _avals

X = jnp.float32(np.arange(32).reshape(8, 4) % 5 - 2)
W = jnp.float32(np.arange(16).reshape(4, 4) % 3 - 1)

# Calls outside of `jit` in a loop are told, and no others are.
STATE = ols.DynamicLossScale().init()
WARNS = functools.partial(pytest.warns, UserWarning, match="outside of jit")


def loss_fn(w, x):
  return jnp.mean((x @ w) ** 2)


def make_loss():
  """Return a new function at each call, as a step without `jit` does."""
  return lambda w, x: jnp.mean((x @ w) ** 2)


class Method:
  def loss(self, w, x):
    return loss_fn(w, x)


class Layer(eqx.Module):
  w: jax.Array

  def __call__(self, x):
    return loss_fn(self.w, x)


def call_in_nnx(w, x):
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  return nnx.grad(ols.autocast(lambda model: loss_fn(w, model(x))))(model)


UNHASHABLE = {"w": W}  # bound by a partial, which cannot be hashed with it
CALLS = {
  "function": lambda: ols.autocast(loss_fn)(W, X),
  "gradient": lambda: ols.grad(ols.autocast(loss_fn), STATE)(W, X),
  "two gradients": lambda: jax.grad(
    lambda w: jnp.sum(jax.grad(ols.autocast(loss_fn))(w, X))
  )(W),
  "a new function": lambda: ols.autocast(make_loss())(W, X),
  "method": lambda: ols.autocast(Method().loss)(W, X),
  "layer": lambda: ols.autocast(Layer(W))(X),
  "partial": lambda: ols.autocast(
    functools.partial(lambda tree, x: loss_fn(tree["w"], x), UNHASHABLE)
  )(X),
  "jitted inside": lambda: ols.autocast(jax.jit(loss_fn))(W, X),
  "nnx": lambda: call_in_nnx(W, X),
  "keys without an order": lambda: ols.autocast(
    lambda tree: loss_fn(tree[1], tree["x"])
  )({1: W, "x": X}),
}


@pytest.mark.parametrize("name", CALLS)
def test_only_the_third_call_outside_of_jit_warns(name):
  CALLS[name]()
  CALLS[name]()
  with WARNS() as told:
    CALLS[name]()
  assert len(told) == 1 and told[0].filename == __file__
  CALLS[name]()


def make_loop(transform):
  """Five steps of a loop whose calls something transforms."""
  for _ in range(5):
    transform(ols.grad(ols.autocast(loss_fn), STATE))(W, X)


COMPILED = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "vmap": lambda fun: jax.jit(
    lambda w, x: jax.vmap(fun, (None, 0))(w, x[None])
  ),
  "eval_shape": lambda fun: functools.partial(jax.eval_shape, fun),
  "make_jaxpr": jax.make_jaxpr,
  "precision_report": lambda fun: functools.partial(
    ols.diagnostics.precision_report, fun
  ),
  "find_overflow": lambda fun: functools.partial(
    ols.diagnostics.find_overflow, fun
  ),
  "compare_precision": lambda fun: functools.partial(
    ols.diagnostics.compare_precision, fun, progress=False
  ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_and_traced_calls_do_not_warn(name):
  make_loop(COMPILED[name])


def test_calls_with_disabled_jit_do_not_warn():
  with jax.disable_jit():
    make_loop(jax.jit)


def test_calls_with_other_shapes_or_dtypes_do_not_warn():
  cast = ols.autocast(lambda w, x: loss_fn(w.astype(jnp.float32), x))
  for i in range(1, 5):
    cast(W, jnp.ones((i, 4)))
  cast(W.astype(jnp.bfloat16), X)


def test_a_result_without_arrays_does_not_warn():
  def without(w, x):
    w @ x.T

  for _ in range(4):
    ols.autocast(without)(W, X)


def test_objects_that_a_function_holds_are_released():
  model = Layer(W)
  for _ in range(2):
    ols.autocast(lambda x, model=model: model(x))(X)
    ols.autocast(model)(X)
  kept = weakref.ref(model)
  del model
  gc.collect()
  assert kept() is None


def test_the_counts_of_deleted_code_are_deleted():
  names = {"jnp": jnp}
  exec("fun = lambda w, x: jnp.mean((x @ w) ** 2)", names)
  ols.autocast(names["fun"])(W, X)
  assert len(_messages._call_counts) == 1
  names.clear()
  jax.clear_caches()
  gc.collect()
  assert not _messages._call_counts


def test_an_unknown_tracer_is_treated_as_not_concrete(monkeypatch):
  class Silent(jax.core.Tracer):  # as those of another JAX may be
    aval = jax.typeof(W)

  monkeypatch.delattr(jax.core.Tracer, "to_concrete_value")
  assert not _avals.is_concrete(object.__new__(Silent))
