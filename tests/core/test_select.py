"""Selecting inside the inner update: the values of the plain select."""

from typing import Any, NamedTuple

from helpers import optimizers, small_model
from helpers.bits import assert_same_bits
from helpers.small_model import loss_fn, make_batches
import jax
from jax import lax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _jaxprs, _select

OLD = {"a": jnp.arange(4.0), "b": jnp.arange(4.0) + 10}
GRADS = jnp.array([1.0, -2.0, 0.0, 0.5])


def plain(update, finite, grads, state, params, **extra_args):
  """What the splice has to be equal to."""
  updates, new_state = update(grads, state, params, **extra_args)
  return updates, _select.keep_unless(finite, new_state, state)


def jaxpr_of(select, update, grads, state, params=None):
  def run(finite, grads, state, params):
    return select(update, finite, grads, state, params)

  return jax.make_jaxpr(run, return_shape=True)(
    jnp.bool_(True), grads, state, params
  )


def evaluate(select, finite, update, grads, state, params=None):
  """Runs it equation by equation.

  Compiled as a whole, XLA would make one multiply-add of two operations here
  and not there, which rounds differently.
  """
  closed, shape = jaxpr_of(select, update, grads, state, params)
  args = jax.tree.leaves((jnp.bool_(finite), grads, state, params))
  with jax.disable_jit():
    outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
  return jax.tree.unflatten(jax.tree.structure(shape), outs)


def check_against_plain(update, grads, state, params=None):
  """Compares both ways, and returns updates and state of an applied step."""
  args = update, grads, state, params
  expected = evaluate(plain, True, *args)
  assert_same_bits(evaluate(_select.update_or_keep, True, *args), expected)
  _, kept = evaluate(_select.update_or_keep, False, *args)
  assert_same_bits(kept, jax.tree.map(jnp.asarray, state))
  return expected


def moments(grads, state):
  """Two new leaves from two old ones."""
  return {"a": 0.9 * state["a"] + grads, "b": state["b"] + grads**2}


def of_state(state):
  """Updates that read the new state, as those of an optimizer do."""
  return state["a"] / (jnp.sqrt(state["b"]) + 1)


def ordinary(grads, state, params):
  new = moments(grads, state)
  return of_state(new), new


def cond(grads, state, params):
  new = lax.cond(grads[0] > 0, moments, lambda g, s: s, grads, state)
  return of_state(new), new


def switch_between_states(grads, state, params):
  branches = [lambda s: s, lambda s: {"a": s["b"], "b": s["a"]}]
  new = lax.switch(jnp.int32(grads[0]), branches, state)
  return of_state(new), new


def while_loop(grads, state, params):
  body = lambda carry: (carry[0] + 1, moments(grads, carry[1]))
  _, new = lax.while_loop(lambda c: c[0] < 3, body, (0, state))
  return of_state(new), new


def scan(grads, state, params):
  body = lambda carry, _: (moments(grads, carry), of_state(carry))
  new, updates = lax.scan(body, state, length=3)
  return updates[-1], new


def jit_of_everything(grads, state, params):
  return jax.jit(ordinary)(grads, state, params)


def jit_of_one_result(grads, state, params):
  add = jax.jit(lambda x, y: 0.9 * x + y)
  new = {"a": add(state["a"], grads), "b": add(state["b"], grads)}
  return of_state(new), new


def custom_derivatives(grads, state, params):
  @jax.custom_jvp
  def f(x):
    return jnp.sin(x)

  f.defjvp(lambda primals, tangents: (f(*primals), 3 * tangents[0]))

  @jax.custom_vjp
  def g(x):
    return jnp.cos(x)

  g.defvjp(lambda x: (g(x), x), lambda x, cotangent: (x * cotangent,))
  slope = lambda h: jax.vmap(jax.grad(h))
  new = {
    "a": f(state["a"]) + slope(f)(grads),
    "b": g(state["b"]) + slope(g)(grads),
  }
  return of_state(new), {"a": f(new["a"]), "b": g(new["b"])}


def rematerialized(grads, state, params):
  return jax.checkpoint(ordinary)(grads, state, params)


def literals(grads, state, params):
  return grads, {"a": jnp.zeros(4), "b": state["b"].at[0].set(7.0)}


def gradients_as_state(grads, state, params):
  return state["a"], {"a": grads, "b": grads}


def passed_through(grads, state, params):
  return state["a"] + grads, state


def exchanged(grads, state, params):
  return grads, {"a": state["b"], "b": state["a"]}


def one_value_for_two_leaves(grads, state, params):
  a = state["a"] + grads
  return 2 * a, {"a": a, "b": a}


def state_as_updates(grads, state, params):
  new = moments(grads, state)
  return new["a"], new


def one_leaf_from_another(grads, state, params):
  a = state["a"] + grads
  return grads, {"a": a, "b": jnp.cumsum(a) * state["b"]}


def other_dtype(grads, state, params):
  a = (state["a"] + grads).astype(jnp.float16)
  return 2 * a, {"a": a, "b": state["b"] + a}


UPDATES = [
  ordinary,
  cond,
  switch_between_states,
  while_loop,
  scan,
  jit_of_everything,
  jit_of_one_result,
  custom_derivatives,
  rematerialized,
  literals,
  gradients_as_state,
  passed_through,
  exchanged,
  one_value_for_two_leaves,
  state_as_updates,
  one_leaf_from_another,
  other_dtype,
]


@pytest.mark.parametrize("update", UPDATES, ids=lambda f: f.__name__)
def test_an_update_gives_what_the_plain_select_gives(update):
  check_against_plain(update, GRADS, OLD)


def test_scalar_literals_are_selected():
  state = {"a": jnp.float32(3), "b": jnp.int32(4)}
  update = lambda g, s, p: (g, {"a": jnp.float32(1), "b": jnp.int32(2)})
  _, new = check_against_plain(update, GRADS, state)
  assert new == {"a": 1, "b": 2}


class KeyedState(NamedTuple):
  key: Any
  count: Any
  label: Any


def test_keys_integers_and_missing_leaves_are_selected_too():
  def update(grads, state, params):
    key, sub = jax.random.split(state.key)
    noise = jax.random.normal(sub, grads.shape)
    return grads + noise, KeyedState(key, state.count + 1, None)

  state = KeyedState(jax.random.key(0), jnp.int32(7), None)
  check_against_plain(update, GRADS, state)


def test_python_numbers_in_a_state_that_is_closed_over_are_selected():
  def count(grads, state, params):
    return grads, {"steps": state["steps"] + 1, "sum": state["sum"] + grads}

  state = {"steps": 3, "sum": 0.5}

  @jax.jit
  def run(finite, grads):
    return _select.update_or_keep(count, finite, grads, state, None)[1]

  assert run(True, 2.0) == {"steps": 4, "sum": 2.5}
  assert run(False, 2.0) == state


def test_functions_among_the_extra_arguments_are_closed_over():
  def update(grads, state, params, *, fun):
    return fun(state["a"]), moments(grads, state)

  @jax.jit
  def run(finite, factor):
    return _select.update_or_keep(
      update, finite, GRADS, OLD, None, fun=lambda x: factor * x
    )

  updates, new = run(True, 3.0)
  assert_same_bits(updates, 3 * OLD["a"])
  assert_same_bits(new["a"], 0.9 * OLD["a"] + GRADS)


# A line search, iterations and random numbers compile for seconds. That a step
# with these is bare Optax's, and a skip none, test_optax_battery.py proves too.
LONG = {"dpsgd", "galore", "lbfgs", "muon", "noisy_sgd", "sophia"}


def battery():
  return [
    pytest.param(
      name,
      *made,
      id=f"{module}.{name}",
      marks=pytest.mark.slow if name in LONG else (),
    )
    for module in optimizers.MODULES
    for name, made in optimizers.factories(module).items()
  ]


# Optax is about to rename arguments of some, and to drop others.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
@pytest.mark.parametrize(("name", "factory", "kwargs"), battery())
def test_each_optimizer_gives_what_the_plain_select_gives(
  name, factory, kwargs
):
  tx = optax.with_extra_args_support(factory(**kwargs))
  params = small_model.init_params()
  (batch,) = make_batches(1)
  value, grads = optimizers.loss_and_grads(
    name, jax.value_and_grad(loss_fn), params, batch
  )
  extra = optimizers.extra_args(
    name, value, grads, lambda params: loss_fn(params, batch)
  )

  def update(grads, state, params):
    return tx.update(grads, state, params, **extra)

  state = jax.tree.map(jnp.asarray, tx.init(params))
  _, state = check_against_plain(update, grads, state, params)
  check_against_plain(update, grads, state, params)


def test_what_an_update_leaves_as_it_was_is_not_selected():
  def update(grads, state, params):
    return grads, {**state, "b": state["b"] + grads}

  closed, _ = jaxpr_of(_select.update_or_keep, update, GRADS, OLD)
  names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
  assert names == ["add", "select_n"]


def readers_of_selected(update):
  """Names of the primitives that read a selected value, in order."""
  closed, _ = jaxpr_of(_select.update_or_keep, update, GRADS, OLD)
  found, selected = [], set()
  for eqn in closed.jaxpr.eqns:
    if any(str(var) in selected for var in eqn.invars):
      found.append(eqn.primitive.name)
    if eqn.primitive.name == "select_n":
      selected.update(map(str, eqn.outvars))
  return found


@pytest.mark.parametrize(
  "update",
  [ordinary, jit_of_one_result, cond],
  ids=lambda f: f.__name__,
)
def test_updates_read_the_selected_state(update):
  # a / (sqrt(b) + 1): the square root reads b, the division a.
  assert readers_of_selected(update) == ["sqrt", "div"]


@pytest.mark.parametrize("update", [scan, jit_of_everything])
def test_what_makes_the_updates_too_in_a_jaxpr_is_selected_behind(update):
  assert readers_of_selected(update) == []


def test_the_state_is_updated_in_place():
  tx = ols.with_loss_scaling(optax.adam(1e-3))
  params = {"w": jnp.zeros((512, 512))}

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
    params, tx.init(params), params
  )
  compiled = lowered.compile()
  assert compiled.cost_analysis()["bytes accessed"] < 44.1 * 512**2
  assert compiled.memory_analysis().temp_size_in_bytes < 512**2


def test_the_plain_way_would_copy():
  """So that the guard above is known to guard something."""

  def step(params, state, grads):
    updates, state = plain(adam.update, jnp.sum(grads) > 0, grads, state, None)
    return optax.apply_updates(params, updates), state

  adam = optax.adam(1e-3)
  params = jnp.zeros((512, 512))
  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
    params, adam.init(params), params
  )
  compiled = lowered.compile()
  assert compiled.cost_analysis()["bytes accessed"] > 60 * 512**2


def test_another_structure_of_the_state_is_refused():
  update = lambda g, s, p: (g, {"a": s["a"]})
  with pytest.raises(ValueError, match="must keep its structure"):
    jaxpr_of(_select.update_or_keep, update, GRADS, OLD)


def raises(error):
  def fail(*args, **kwargs):
    raise error("another JAX")

  return fail


SURPRISES = {
  "an equation cannot be evaluated alone": (
    _jaxprs, "context_here", raises(AttributeError),
  ),
  "equations have no context": (
    _jaxprs, "may_change_result", raises(KeyError),
  ),
  "the axes of a type have another name": (
    _jaxprs, "varying", raises(RuntimeError),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", SURPRISES)
def test_what_is_not_understood_is_selected_after_the_update(name, monkeypatch):
  monkeypatch.setattr(*SURPRISES[name])

  def update(grads, state, params=None):
    new, updates = 0.9 * state["a"] + grads, state["a"] - grads
    return updates, {"a": new, "b": state["b"] + grads**2}

  check_against_plain(update, GRADS, OLD)
