"""Rules whose matmuls are in their derivative, or in a tangent."""

import collections
import itertools

from helpers import custom_rules, hijax, jaxprs, parametrize_slow, sharding
from helpers.bits import assert_functions_close
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols

TABLE = 2 * np.asarray(normal(8, 4))
IDS = np.array([0, 1, 1, 3, 5])
W = TABLE[:4] @ TABLE[:4].T + np.eye(4, dtype=np.float32)
TABLE = jnp.asarray(TABLE)


def make_lookup(dtype):
  def backward(kept, g):
    size, ids = kept
    return jax.nn.one_hot(ids, size, dtype=dtype).T @ g, None

  fun = jax.custom_vjp(lambda table, ids: table[ids])
  fun.defvjp(lambda t, i: (t[i], (t.shape[0], i)), backward)
  return fun


lookup, lookup_in_half = make_lookup(jnp.float32), make_lookup(jnp.float16)


def embedding(table):
  return jnp.sum(lookup(table, IDS) ** 2)


@jax.custom_jvp
def log_determinant(w):
  return jnp.linalg.slogdet(w)[1]


@log_determinant.defjvp
def log_determinant_jvp(primals, tangents):
  (w,), (t,) = primals, tangents
  with jax.named_scope("inverse"):
    return log_determinant(w), jnp.trace(jnp.linalg.inv(w) @ t)


@jax.custom_gradient
def closed_over(table):
  return jnp.sum(jnp.tanh(table)), lambda g: g * (table @ W)


# The function is JAX's own, and its rule is not.
sin = jax.custom_vjp(jnp.sin)
sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g @ (x.T @ x),))


# A loss, its argument, and the number of its matmuls in half precision.
LOSSES = {
  "an embedding": (embedding, TABLE, 1),
  "a determinant": (log_determinant, W, 1),
  "a gradient that closes over": (closed_over, TABLE, 1),
  "a function of JAX": (lambda table: jnp.sum(sin(table)), TABLE, 2),
}
WITHIN = {
  "unchanged": lambda f: f,
  "a jit": jax.jit,
  "a checkpoint": jax.checkpoint,
  "a scan": lambda f: lambda x: jnp.sum(lax.map(lambda _: f(x), jnp.ones(2))),
  "vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, x]))),
}


QUICK = [("an embedding", "unchanged"), ("a function of JAX", "unchanged")]


@parametrize_slow("case", QUICK, [*itertools.product(LOSSES, WITHIN)], ids=str)
def test_matmuls_of_a_rule_run_in_half_precision_in_any_function(case):
  name, within = case
  loss, argument, count = LOSSES[name]
  loss = WITHIN[within](loss)
  half, full = jax.grad(ols.autocast(loss)), jax.grad(loss)
  assert jaxprs.count_matmuls_by_dtype(half, argument)["float16"] == count
  assert_functions_close(half, full, argument)


def test_a_rule_stays_in_float32_if_it_is_marked():
  loss = ols.keep_float32(embedding)
  half = ols.autocast(lambda table: loss(table) + jnp.sum(table.T @ table))
  assert jaxprs.count_matmuls_by_dtype(jax.grad(half), TABLE)["float32"] == 1


def test_a_matmul_of_a_rule_with_an_operand_in_half_precision_is_cast():
  def loss(table):
    with jax.named_scope("embed"):
      return jnp.sum(lookup_in_half(table, IDS) ** 2)

  half = jax.grad(ols.autocast(loss))
  assert set(jaxprs.count_matmuls_by_dtype(half, TABLE)) == {"float16"}
  assert_functions_close(half, jax.grad(loss), TABLE)
  kept = jax.grad(ols.autocast(loss, keep_float32="embed"))
  assert set(jaxprs.count_matmuls_by_dtype(kept, TABLE)) == {"float32"}


def test_a_rule_that_might_raise_runs_in_half_precision_without_a_trace():
  inner = jax.jit(jax.nn.relu)

  def forward(x, frozen):
    if frozen.perturbed:
      raise NotImplementedError("This is frozen.")
    out, pull_back = jax.vjp(inner, x.value)
    return out * frozen.value, (pull_back, x.value)

  fun = jax.custom_vjp(lambda x, frozen: inner(x) * frozen)
  backward = lambda kept, g: (kept[0](g @ (kept[1].T @ kept[1]))[0], None)
  fun.defvjp(forward, backward, symbolic_zeros=True)
  shared = jax.jit(lambda x: fun(x, jnp.ones(4)))
  loss = lambda x: jnp.sum(shared(shared(x))) + jnp.sum(x.T @ x)
  half = jax.grad(ols.autocast(loss))
  assert_functions_close(half, jax.grad(loss), TABLE)
  assert set(jaxprs.count_matmuls_by_dtype(half, TABLE)) == {"float16"}
  # No trace shows whether a name selects the rule.
  named = jax.grad(ols.autocast(loss, keep_float32="*"))
  assert set(jaxprs.count_matmuls_by_dtype(named, TABLE)) == {"float32"}


# A `custom_vjp` within a `custom_jvp`: its backward pass waits in a tangent.
X = normal(4, 8, seed=1)
PARAMS = {"first": normal(8, 8, seed=2), "second": normal(8, 8, seed=3)}


dense = lambda w, x: jnp.tanh(x @ w)
inner = custom_rules.add_custom_vjp(dense)
again = custom_rules.add_recomputing_vjp(dense)


def loss(rule, wrap=lambda fun: fun):
  two_calls = lambda params, x: rule(params["first"], x) @ params["second"]
  around = wrap(custom_rules.add_custom_jvp(two_calls))
  return lambda params, x: jnp.mean(around(params, x) ** 2)


def list_matmuls(fun, *args):
  return [(x.weights, x.dtype) for x in jaxprs.list_named_matmuls(fun, *args)]


def map_over_devices(fun):
  mesh = sharding.make_mesh((2,), ("i",))
  specs = P(), P("i")
  return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("i"))


# The rule, the function around it, and the arguments that are differentiated.
NESTED = {
  "all": (inner, lambda fun: fun, (0, 1)),
  "weights": (inner, lambda fun: fun, 0),
  "data": (inner, lambda fun: fun, 1),
  "recomputed": (again, lambda fun: fun, (0, 1)),
  "in a jit": (inner, jax.jit, (0, 1)),
  "in a checkpoint": (inner, jax.checkpoint, (0, 1)),
  "on devices": (inner, map_over_devices, (0, 1)),
}


@parametrize_slow("name", ["in a jit"], NESTED)
def test_matmuls_of_a_nested_rule_run_in_half_precision_and_have_names(name):
  rule, wrap, argnums = NESTED[name]
  fun = loss(rule, wrap)
  half = jax.grad(ols.autocast(fun), argnums)
  found = list_matmuls(half, PARAMS, X)
  assert {dtype for _, dtype in found} == {"float16"}
  # JAX may multiply by the zeros that are the tangent of what does not move.
  assert {path for path, _ in found} - {""} == {"first", "second"}
  assert_functions_close(half, jax.grad(fun, argnums), PARAMS, X)


def test_gradients_of_several_weights_in_a_rule_have_the_name_of_each():
  of_two = lambda params, x: jnp.tanh(x @ params["first"]) @ params["second"]
  net = custom_rules.add_custom_jvp(custom_rules.add_custom_vjp(of_two))

  def count(net):
    fun = ols.autocast(lambda params, x: jnp.mean(net(params, x) ** 2))
    return collections.Counter(list_matmuls(jax.grad(fun), PARAMS, X))

  found, least = count(net), count(of_two)
  if hijax.is_enabled("jax_custom_vjp3"):
    # The tangent does not show which gradient belongs to which weight.
    assert set(found) - {("", "float16")} == set(least)
  else:
    assert set(found) == set(least) and found >= least


def test_a_nested_rule_is_kept_by_a_name_and_by_keep_float32():
  fun = loss(inner)
  by_name = jax.grad(ols.autocast(fun, keep_float32="first"))
  assert {dtype for _, dtype in list_matmuls(by_name, PARAMS, X)} == {"float32"}
  marked = ols.keep_float32(inner)
  by_mark = jax.grad(ols.autocast(loss(marked)))
  matmuls = list_matmuls(by_mark, PARAMS, X)
  found = {(path == "second", dtype) for path, dtype in matmuls}
  assert found == {(False, "float32"), (True, "float16")}


clip = jax.custom_vjp(lambda x: x)
clip.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))


def test_a_tangent_without_matmuls_is_unchanged():
  net = custom_rules.add_custom_jvp(lambda params, x: clip(x @ params["first"]))
  fun = lambda params, x: jnp.sum(net(params, x))
  half = jax.grad(ols.autocast(fun))
  found = list_matmuls(half, PARAMS, X)
  assert {dtype for _, dtype in found} == {"float16"}
  assert_functions_close(half, jax.grad(fun), PARAMS, 100 * X)


def test_the_name_of_a_rule_without_matmuls_selects_none():
  bounded = jax.named_scope("bounded")(clip)
  fun = lambda w, x: jnp.sum(bounded(x @ w))
  with pytest.raises(ValueError, match="'bounded' selects no matmul"):
    ols.autocast(fun, keep_float32="bounded")(W, TABLE)


@pytest.mark.parametrize("keep", [(), "*inverse*"])
def test_matmuls_only_in_a_rule_cause_no_warning(keep):
  # A warning would be an error.
  fun = jax.grad(ols.autocast(log_determinant, keep_float32=keep))
  dtype = "float32" if keep else "float16"
  assert dtype in jaxprs.count_matmuls_by_dtype(fun, W)
