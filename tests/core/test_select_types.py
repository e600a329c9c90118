"""Selecting inside the inner update keeps types, devices and names.

An equation that reads a selected value, or a call that holds one, was traced
with the value itself. It must not distinguish the two.
"""

import functools
import re

from helpers import on_host, parametrize_slow, sharding
import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _select

OLD = {"a": jnp.arange(8.0), "b": jnp.arange(8.0) + 10}
GRADS = jnp.linspace(-1.0, 1.0, 8)
PLAIN_AND_JIT = [pytest.param(lambda f: f, id="plain"), jax.jit]


def ordinary(grads, state, params=None):
  new = {"a": 0.9 * state["a"] + grads, "b": state["b"] + grads**2}
  return new["a"] / (jnp.sqrt(new["b"]) + 1), new


def make_select_jaxpr(update, grads=GRADS, state=OLD):
  def run(finite, grads, state):
    return _select.update_with_selects(update, finite, grads, state, None)

  return jax.make_jaxpr(run)(jnp.bool_(True), grads, state).jaxpr


JITS = [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.slow)]


@pytest.mark.parametrize("jit", JITS)
def test_each_device_may_train_separately_with_vma_types(jit):
  """There is no axis_name, so that the devices' flags differ."""

  def update(grads, state, params=None):
    # All devices have this count in common as long as nothing is selected.
    count = state["count"] + 1
    new = {"count": count, "moment": 0.9 * state["moment"] + grads}
    return new["moment"] / (1 - 0.9**count), new

  init = lambda params: {"count": jnp.float32(0), "moment": 0 * params}
  tx = ols.with_loss_scaling(optax.GradientTransformation(init, jit(update)))

  def train(params, batches):
    state = tx.init(params)
    for grads in batches:
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params, jax.tree.map(jnp.atleast_1d, state)

  batches = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
  batches[0, 6] = np.nan
  params = np.arange(16, dtype=np.float32)
  mesh = sharding.make_mesh((8,), ("data",))
  specs = P("data"), P(None, "data")
  mapped = jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=P("data"))
  together = jax.jit(mapped)(params, batches)
  skips = together[1].loss_scale_state.total_notfinite
  assert skips.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
  counts = together[1].inner_state["count"]
  assert counts.tolist() == [2, 2, 2, 1, 2, 2, 2, 2]
  alone = jax.jit(train)
  for i in range(8):
    part = slice(2 * i, 2 * i + 2)
    expected, _ = alone(params[part], batches[:, part])
    np.testing.assert_array_equal(together[0][part], expected)


def test_a_new_replicated_leaf_does_not_become_varying():
  """Its select would vary, since each device has its own old leaf."""

  def update(grads, state, params=None):
    total = lax.psum(grads, "data")
    return grads * total ** state["power"], {**state, "a": total}

  init = lambda params: {"a": jnp.zeros_like(params), "power": jnp.float32(2.0)}
  inner = optax.GradientTransformation(init, update)
  tx = ols.with_loss_scaling(inner, axis_name="data")
  update = jax.shard_map(
    lambda grads: tx.update(grads, tx.init(grads), grads)[0],
    mesh=sharding.make_mesh((8,), ("data",)),
    in_specs=P("data"),
    out_specs=P("data"),
  )
  updates = jax.jit(update)(jnp.arange(8.0))
  np.testing.assert_allclose(updates, jnp.arange(8.0) * 28**2)


def test_a_constraint_on_a_new_moment_reaches_the_updates():
  mesh = sharding.make_mesh((8,), ("x",))
  gather = lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P()))

  def update(grads, state, params=None):
    new = {"a": gather(0.9 * state["a"] + grads), "b": gather(state["b"])}
    return new["a"] / (new["b"] + 1), new

  init = lambda params: {"a": params, "b": params}
  tx = ols.with_loss_scaling(optax.GradientTransformation(init, update))
  params = jax.device_put(GRADS, NamedSharding(mesh, P("x")))
  updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
  assert updates.sharding.spec == P()


def list_jit_eqns(jaxpr):
  return [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]


def test_a_jit_stays_a_jit_with_all_its_params():
  update = jax.jit(
    lambda grads, state: ordinary(grads, state),
    donate_argnums=1,
    keep_unused=True,
    out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
  )
  jaxpr = make_select_jaxpr(lambda grads, state, _: update(grads, state))
  (found,) = list_jit_eqns(jaxpr)
  (bare,) = list_jit_eqns(jax.make_jaxpr(update)(GRADS, OLD).jaxpr)
  said = lambda eqn: {k: v for k, v in eqn.params.items() if k != "jaxpr"}
  assert said(found) == said(bare)


def test_without_jit_the_plain_and_the_nested_update_are_equal():
  with jax.disable_jit():
    jaxpr = make_select_jaxpr(jax.jit(ordinary))
  assert [e.primitive.name for e in jaxpr.eqns].count("select_n") == 2


@pytest.mark.parametrize("jit", PLAIN_AND_JIT)
def test_no_device_select_is_placed_between_host_operations(jit):
  on_device = on_host.run_on_host(jit(ordinary))
  jaxpr = make_select_jaxpr(lambda g, s, params=None: on_device(g, s))
  if on_host.IS_CONTEXT:
    assert len(list_jit_eqns(jaxpr)) == (jit is jax.jit)
    is_on_host = [e.ctx.compute_type == "device_host" for e in jaxpr.eqns]
  else:
    is_on_host = [e.primitive.name == "compute_on" for e in jaxpr.eqns]
    assert is_on_host.count(True) == 1
  host = [i for i, is_there in enumerate(is_on_host) if is_there]
  assert host == list(range(host[0], host[0] + len(host)))
  assert len(is_on_host) > len(host)  # The selects, on the device.


@pytest.mark.skipif(
  not on_host.IS_CONTEXT,
  reason="Since JAX 0.11 no context says that a whole trace is on the host.",
)
def test_selects_of_a_host_update_are_on_the_host():
  with on_host.compute_on("device_host"):
    jaxpr = make_select_jaxpr(ordinary)
  assert {eqn.ctx.compute_type for eqn in jaxpr.eqns} == {"device_host"}
  assert jaxpr.eqns[-1].primitive.name != "select_n"


def test_an_equation_in_another_context_is_selected_after():
  metadata = {"priority": "high"}

  def marked(grads, state, params=None):
    with set_xla_metadata(**metadata):
      return ordinary(grads, state)

  jaxpr = make_select_jaxpr(marked)
  assert [e.primitive.name for e in jaxpr.eqns[-2:]] == 2 * ["select_n"]


def list_op_names(update):
  """The names of the operations that profiles show, below the outermost."""
  text = jax.jit(update).lower(GRADS, OLD).compile().as_text()
  return set(re.findall(r'op_name="jit\(\w+\)/([^"]+)"', text))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap])
def test_profiles_show_the_name_and_the_scopes_of_an_inlined_jit(transform):
  @jax.jit
  def inner(grads, state):
    return jax.named_scope("deep")(ordinary)(grads, state)

  @jax.named_scope("outer")
  def named(grads, state, params=None):
    return transform(inner)(grads, state)

  @jax.named_scope("optimizer")
  def wrapped(grads, state):
    finite = jnp.isfinite(grads[0])
    return _select.update_with_selects(named, finite, grads, state, None)

  bare = jax.named_scope("optimizer")(named)
  expected = {name for name in list_op_names(bare) if "/deep/" in name}
  assert any("outer" in name and "inner" in name for name in expected)
  assert expected <= list_op_names(wrapped)


@parametrize_slow("in_axes", [(None, 0)], [(0, 0), (None, 0), (0, None)])
def test_each_member_of_a_vmap_is_selected_by_its_flag(in_axes):
  batch = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x + 1]), tree)
  grads = batch(GRADS) if in_axes[0] == 0 else GRADS
  state = batch(OLD) if in_axes[1] == 0 else OLD

  def run(finite, grads, state):
    return _select.update_with_selects(ordinary, finite, grads, state, None)

  finite = jnp.array([True, False])
  _, new = jax.jit(jax.vmap(run, (0, *in_axes)))(finite, grads, state)
  run_all = jax.vmap(functools.partial(run, True), in_axes)
  _, applied = jax.jit(run_all)(grads, state)
  stack = lambda x: jnp.stack([x, x])
  old = state if in_axes[1] == 0 else jax.tree.map(stack, OLD)
  for name in OLD:
    # Compiled in two programs, one may multiply and add at once.
    np.testing.assert_allclose(new[name][0], applied[name][0], rtol=1e-6)
    np.testing.assert_array_equal(new[name][1], old[name][1])
