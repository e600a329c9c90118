"""An overflow in one micro-batch: drop it, or drop the step. Both are sound.

Gradients are accumulated with ``lax.scan`` inside the sharded step. What is
dropped depends on where the wrapper stands: around the accumulation, or inside.
"""

from helpers import sharding
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols

MICRO_BATCHES = 4
BAD = 2  # the micro-batch of the first step that overflows, on one device
OVERFLOWING = 60000
POLICY = ols.DynamicLossScale(init_scale=2.0**10)


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_one_update_of_the_sum_drops_the_step(mode):
  """Any overflow is in the sum: all micro-batches of the step are lost."""
  tx = make_optimizer(optax.sgd(1.0), mode)

  def step(params, opt_state, micro_batches):
    def accumulate(total, batch):
      grad = ols.grad(loss_fn, opt_state)(params, batch)
      return total + grad / MICRO_BATCHES, None

    total, _ = jax.lax.scan(accumulate, jnp.zeros_like(params), micro_batches)
    updates, opt_state = tx.update(total, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  data = make_data()
  (first, second), states = run(tx, step, mode, data)
  np.testing.assert_array_equal(first, np.ones(8))
  np.testing.assert_allclose(second, 1 - data[1].mean(0), rtol=1e-6)
  assert [s.loss_scale for s in states] == [2.0**9, 2.0**9]
  assert [s.total_notfinite for s in states] == [1, 1]


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_an_update_for_each_micro_batch_drops_the_micro_batch(mode):
  """MultiSteps inside the wrapper waits for as many finite ones as it wants.

  The scale moves within the step, so the micro-batches behind the bad one have
  the lower scale already.
  """
  tx = make_optimizer(optax.MultiSteps(optax.sgd(1.0), MICRO_BATCHES), mode)

  def step(params, opt_state, micro_batches):
    def one(carry, batch):
      params, opt_state = carry
      grad = ols.grad(loss_fn, opt_state)(params, batch)
      updates, opt_state = tx.update(grad, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), None

    return jax.lax.scan(one, (params, opt_state), micro_batches)[0]

  data = make_data()
  (first, second), states = run(tx, step, mode, data)
  # Three are in; the first of the next step completes the four.
  np.testing.assert_array_equal(first, np.ones(8))
  used = [*np.delete(data[0], BAD, axis=0), data[1][0]]
  np.testing.assert_allclose(second, 1 - np.mean(used, axis=0), rtol=1e-6)
  assert [s.loss_scale for s in states] == [2.0**9, 2.0**9]
  assert [s.total_notfinite for s in states] == [1, 1]
  assert states[-1].finite_count == MICRO_BATCHES + 1


def loss_fn(params, batch):
  return jnp.sum((params.astype(jnp.float16) * batch).astype(jnp.float32))


def make_optimizer(inner, mode):
  axis_name = "data" if mode == "shard_map" else None
  return ols.with_loss_scaling(inner, POLICY, axis_name=axis_name)


def make_data():
  """Two steps of gradients; one entry of the first step is bad."""
  rng = np.random.default_rng(0)
  data = rng.integers(-8, 9, (2, MICRO_BATCHES, 8)).astype(np.float16)
  data[0, BAD, 5] = OVERFLOWING
  return data


def run(tx, step, mode, data):
  """The params and loss-scale states after each step, params sharded."""
  mesh = sharding.make_mesh((8,), ("data",), AxisType.Auto)
  params = jnp.ones(8)
  specs = P("data"), sharding.state_specs(tx, params, P("data"))
  if mode == "shard_map":
    step = jax.shard_map(
      step, mesh=mesh, in_specs=(*specs, P(None, "data")), out_specs=specs
    )
  carry = jax.device_put((params, tx.init(params)), sharding.named(mesh, specs))
  step = jax.jit(step)
  history = []
  for micro_batches in data:
    batches = jax.device_put(
      micro_batches, sharding.named(mesh, P(None, "data"))
    )
    new = step(*carry, batches)
    sharding.assert_shardings_equal(new, carry)
    sharding.assert_replicas_equal(new)
    carry = new
    history.append(carry)
  params, states = zip(*history, strict=True)
  return params, [ols.get_loss_scale_state(s) for s in states]
