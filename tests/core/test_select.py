"""Selecting inside the inner update: the values of the plain select."""

import functools

from helpers import parametrize_slow
from helpers.bits import assert_same_bits
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _arrays, _select
from optax_lossscale._jaxprs import _eqns, _primitives

OLD = {"a": jnp.arange(4.0), "b": jnp.arange(4.0) + 10}
GRADS = jnp.array([1.0, -2.0, 0.0, 0.5])


def select_after_update(update, finite, grads, state, params):
  updates, new_state = update(grads, state, params)
  return updates, _select.select_state(finite, new_state, state)


def make_select_jaxpr(select, update, grads, state):
  def run(finite, grads, state):
    return select(update, finite, grads, state, None)

  return jax.make_jaxpr(run, return_shape=True)(jnp.bool_(True), grads, state)


def evaluate(select, finite, update, grads, state):
  """Runs it equation by equation.

  Compiled as a whole, XLA would make one multiply-add of two operations here
  and not there, which rounds differently.
  """
  closed, shape = make_select_jaxpr(select, update, grads, state)
  args = jax.tree.leaves((jnp.bool_(finite), grads, state))
  with jax.disable_jit():
    outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
  return jax.tree.unflatten(jax.tree.structure(shape), outs)


def check_against_plain(update, grads, state):
  """Compares both ways, and returns updates and state of an applied step."""
  args = update, grads, state
  expected = evaluate(select_after_update, True, *args)
  assert_same_bits(evaluate(_select.update_with_selects, True, *args), expected)
  _, kept = evaluate(_select.update_with_selects, False, *args)
  assert_same_bits(kept, jax.tree.map(jnp.asarray, state))
  return expected


def moments(grads, state):
  return {"a": 0.9 * state["a"] + grads, "b": state["b"] + grads**2}


def of_state(state):
  return state["a"] / (jnp.sqrt(state["b"]) + 1)


def ordinary(grads, state, params):
  new = moments(grads, state)
  return of_state(new), new


def cond(grads, state, params):
  new = lax.cond(grads[0] > 0, moments, lambda g, s: s, grads, state)
  return of_state(new), new


def scan(grads, state, params):
  body = lambda carry, _: (moments(grads, carry), of_state(carry))
  new, updates = lax.scan(body, state, length=3)
  return updates[-1], new


def jit_of_one_result(grads, state, params):
  add = jax.jit(lambda x, y: 0.9 * x + y)
  new = {"a": add(state["a"], grads), "b": add(state["b"], grads)}
  return of_state(new), new


def one_value_for_two_leaves(grads, state, params):
  a = state["a"] + grads
  return 2 * a, {"a": a, "b": a}


def one_leaf_from_another(grads, state, params):
  a = state["a"] + grads
  return grads, {"a": a, "b": jnp.cumsum(a) * state["b"]}


def other_dtype(grads, state, params):
  a = (state["a"] + grads).astype(jnp.float16)
  return 2 * a, {"a": a, "b": state["b"] + a}


# The gradients, the state and params, to the updates and the new state.
UPDATES = {
  "ordinary": ordinary,
  "cond": cond,
  "scan": scan,
  "jit of everything": jax.jit(ordinary),
  "jit of one result": jit_of_one_result,
  "rematerialized": jax.checkpoint(ordinary),
  "literals": lambda g, s, _: (
    g, {"a": jnp.zeros(4), "b": s["b"].at[0].set(7.0)},
  ),
  "gradients as state": lambda g, s, _: (s["a"], {"a": g, "b": g}),
  "passed through": lambda g, s, _: (s["a"] + g, s),
  "exchanged": lambda g, s, _: (g, {"a": s["b"], "b": s["a"]}),
  "one value for two leaves": one_value_for_two_leaves,
  "state as updates": lambda g, s, _: (moments(g, s)["a"], moments(g, s)),
  "one leaf from another": one_leaf_from_another,
  "other dtype": other_dtype,
}  # fmt: skip
QUICK = "ordinary", "jit of one result", "exchanged"


@parametrize_slow("name", QUICK, UPDATES)
def test_an_update_equals_a_select_after_the_update(name):
  check_against_plain(UPDATES[name], GRADS, OLD)


def test_scalar_literals_are_selected():
  state = {"a": jnp.float32(3), "b": jnp.int32(4)}
  update = lambda g, s, p: (g, {"a": jnp.float32(1), "b": jnp.int32(2)})
  _, new = check_against_plain(update, GRADS, state)
  assert new == {"a": 1, "b": 2}


def test_python_numbers_in_a_state_that_is_closed_over_are_selected():
  def count(grads, state, params):
    return grads, {"steps": state["steps"] + 1, "sum": state["sum"] + grads}

  state = {"steps": 3, "sum": 0.5}

  @jax.jit
  def run(finite, grads):
    return _select.update_with_selects(count, finite, grads, state, None)[1]

  assert run(True, 2.0) == {"steps": 4, "sum": 2.5}
  assert run(False, 2.0) == state


def test_functions_among_the_extra_arguments_are_closed_over():
  def update(grads, state, params, *, fun):
    return fun(state["a"]), moments(grads, state)

  @jax.jit
  def run(finite, factor):
    args = finite, GRADS, OLD, None
    fun = lambda x: factor * x
    return _select.update_with_selects(update, *args, fun=fun)

  updates, new = run(True, 3.0)
  assert_same_bits(updates, 3 * OLD["a"])
  assert_same_bits(new["a"], 0.9 * OLD["a"] + GRADS)


def test_effects_of_an_update_happen_once_and_in_their_order():
  seen = []

  def update(grads, state, params):
    tell = functools.partial(jax.debug.callback, ordered=True)
    tell(lambda: seen.append("first"))
    new = moments(grads, state)
    tell(lambda x: seen.append(float(x)), new["a"][0])
    tell(lambda x: seen.append(float(x)), of_state(new)[0])
    return of_state(new), new

  @jax.jit
  def run(finite, grads, state):
    return _select.update_with_selects(update, finite, grads, state, None)

  updates, new = jax.block_until_ready(run(True, GRADS, OLD))
  jax.effects_barrier()
  assert seen == ["first", float(new["a"][0]), float(updates[0])]


def test_unchanged_leaves_of_a_state_are_not_selected():
  def update(grads, state, params):
    return grads, {**state, "b": state["b"] + grads}

  closed, _ = make_select_jaxpr(_select.update_with_selects, update, GRADS, OLD)
  names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
  assert names == ["add", "select_n"]


def list_selected_readers(update):
  closed, _ = make_select_jaxpr(_select.update_with_selects, update, GRADS, OLD)
  found, selected = [], set()
  for eqn in closed.jaxpr.eqns:
    if any(str(var) in selected for var in eqn.invars):
      found.append(eqn.primitive.name)
    if eqn.primitive.name == "select_n":
      selected.update(map(str, eqn.outvars))
  return found


@pytest.mark.parametrize("name", ["ordinary", "jit of one result", "cond"])
def test_updates_read_the_selected_state(name):
  # a / (sqrt(b) + 1): the square root reads b, the division a.
  assert list_selected_readers(UPDATES[name]) == ["sqrt", "div"]


@pytest.mark.parametrize("name", ["scan", "jit of everything"])
def test_state_and_updates_from_one_inner_jaxpr_are_selected_after_it(name):
  assert list_selected_readers(UPDATES[name]) == []


# Functions of which another JAX may raise an error: an equation cannot be
# evaluated alone, has no context, or its type has other axes.
SURPRISES = [
  (_eqns, "get_current_eqn_ctx", AttributeError),
  (_eqns, "can_substitute_result", KeyError),
  (_primitives, "get_varying_axes", RuntimeError),
]


@pytest.mark.parametrize("module, name, error", SURPRISES)
def test_unsupported_updates_are_selected_after_the_update(
  module, name, error, monkeypatch
):
  def fail(*args, **kwargs):
    raise error("another JAX")

  monkeypatch.setattr(module, name, fail)
  update = lambda g, s, params: (s["a"] - g, moments(g, s))
  check_against_plain(update, GRADS, OLD)


# In bfloat16, whichever way XLA selects it.

PATTERNS = np.arange(2**16, dtype=np.uint16)
MAGNITUDES = PATTERNS & 0x7FFF
IS_NAN = MAGNITUDES > 0x7F80
IS_SUBNORMAL = (MAGNITUDES > 0) & (MAGNITUDES < 0x80)
# XLA's compiler for CPU converts all bfloat16 to float32 and back. It replaces
# all NaNs by one, and keeps the sign.
PAYLOAD = np.where(IS_NAN, 0x7F, 0).astype(np.uint16)


def to_bits(x):
  return np.asarray(x).view(np.uint16)


def test_a_skipped_step_keeps_every_bfloat16_moment():
  tx = ols.with_loss_scaling(optax.trace(0.9, accumulator_dtype=jnp.bfloat16))
  grads = np.zeros(2**16, np.float32)
  moments = optax.TraceState(PATTERNS.view(jnp.bfloat16))
  state = tx.init(grads)._replace(inner_state=moments)
  grads[0] = np.nan
  _, after = jax.jit(tx.update)(grads, state)
  kept = to_bits(after.inner_state.trace)
  np.testing.assert_array_equal(kept | PAYLOAD, PATTERNS | PAYLOAD)
  assert not after.loss_scale_state.last_finite


@pytest.mark.parametrize("condition", [True, False])
def test_selecting_in_float32_preserves_numbers_and_nans(condition):
  """This way is for TPU; CPU treats subnormal numbers as zero in either."""
  other = np.ones(2**16, jnp.bfloat16)
  numbers = PATTERNS.view(jnp.bfloat16)
  args = (numbers, other) if condition else (other, numbers)
  out = to_bits(jax.jit(_arrays._select_in_float32)(condition, *args))
  certain = ~IS_NAN & ~IS_SUBNORMAL
  np.testing.assert_array_equal(out[certain], PATTERNS[certain])
  assert (out[IS_NAN] & 0x7FFF > 0x7F80).all()


def test_only_bfloat16_and_only_on_tpu_is_selected_in_float32(monkeypatch):
  ways = []

  def platform_dependent(*args, default, **others):
    ways.append((args[-1].dtype.name, others, default))
    return default(*args)

  monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)
  old = [jnp.ones(3, t) for t in ("bfloat16", "float16", "float32", "int32")]
  new = jax.tree.map(jnp.zeros_like, old)
  out = jax.jit(_arrays.select)(False, new, old)
  assert [x.dtype for x in out] == [x.dtype for x in old]
  on_tpu = {"tpu": _arrays._select_in_float32}
  assert ways == [("bfloat16", on_tpu, jax.lax.select)]
  # Outside jit nothing is fused: there it would be one more program.
  _arrays.select(jnp.bool_(False), new, old)
  assert len(ways) == 1
