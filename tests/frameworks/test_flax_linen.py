"""Flax linen: TrainState, batch statistics, fp8 layers, serialization."""

import chex
from flax import linen as nn
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from helpers.bits import assert_same_bits
from helpers.small_model import make_batches, make_overflowing_batch
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

OVERWRITTEN = fp8_ops.OVERWRITE_WITH_GRADIENT


class StatsState(TrainState):
  batch_stats: dict


class Model(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Dense(8, dtype=jnp.float16)(x)
    x = nn.BatchNorm(use_running_average=not train, dtype=jnp.float16)(x)
    return nn.Dense(2, dtype=jnp.float16)(nn.relu(x)).astype(jnp.float32)


MODEL = Model()
(BATCH,) = make_batches(1)


def make_state(tx):
  variables = jax.jit(MODEL.init)(jax.random.key(1), BATCH[0])
  return StatsState.create(apply_fn=MODEL.apply, tx=tx, **variables)


def loss_fn(params, state, batch):
  x, y = batch
  variables = {"params": params, "batch_stats": state.batch_stats}
  out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
  return jnp.mean((out - y) ** 2), new["batch_stats"]


@jax.jit
def step(state, batch):
  grad_fn = ols.value_and_grad(loss_fn, state, has_aux=True)
  (loss, batch_stats), grads = grad_fn(state.params, state, batch)
  new = state.apply_gradients(grads=grads)
  batch_stats = ols.select_if_applied(new, batch_stats, state.batch_stats)
  return new.replace(batch_stats=batch_stats), loss


@pytest.fixture(scope="module")
def started():
  policy = ols.DynamicLossScale(growth_interval=3)
  tx = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), policy)
  state = make_state(tx)
  for _ in range(2):
    state, _ = step(state, BATCH)
  return state


def test_a_skip_advances_only_the_step_of_the_train_state(started):
  after, _ = step(started, make_overflowing_batch(BATCH))
  assert after.step == started.step + 1
  assert_same_bits(after.batch_stats, started.batch_stats)
  assert_same_bits(after.params, started.params)
  assert_same_bits(after.opt_state.inner_state, started.opt_state.inner_state)
  scale_state = ols.get_loss_scale_state(after)
  assert scale_state.loss_scale == 2.0**14
  assert scale_state.total_notfinite == 1
  # As TrainState.create makes it, `step` is a Python int; after one step all
  # leaves are arrays, and stay of one type.
  assert jax.eval_shape(lambda: after) == jax.eval_shape(lambda: started)
  _, first_loss = step(make_state(started.tx), BATCH)
  _, loss = step(after, BATCH)
  assert loss < first_loss


# An fp8 layer keeps statistics next to its params, and their "gradients" are
# the new statistics.


def fp8_step(differentiate):
  @jax.jit
  def step(state, x, weight):
    def loss_fn(params):
      return weight * jnp.mean((state.apply_fn(params, x) - 1) ** 2)

    grads = differentiate(loss_fn, state)(state.params)
    return state.apply_gradients(grads=grads)

  return step


@pytest.mark.slow
def test_an_fp8_model_trains_as_without_scaling_and_skips_by_the_recipe():
  model = nn.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
  x = jax.random.normal(jax.random.key(0), (16, 16))
  variables = model.init(jax.random.key(1), x)
  bare, scaled = (
    TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    for tx in (optax.sgd(0.1), ols.with_loss_scaling(optax.sgd(0.1), 2.0**15))
  )
  bare_step = fp8_step(lambda fun, state: jax.grad(fun))
  step = fp8_step(ols.grad)
  for _ in range(3):
    bare, scaled = bare_step(bare, x, 1.0), step(scaled, x, 1.0)
  params, bare_params = scaled.params["params"], bare.params["params"]
  chex.assert_trees_all_close(params, bare_params, rtol=1e-5)
  (stats,) = scaled.params[OVERWRITTEN].values()
  (bare_stats,) = bare.params[OVERWRITTEN].values()
  for name, value in stats.items():
    # Cotangents in the backward pass are larger by the scale.
    factor = 2.0**15 if name.startswith("output_grad") else 1
    if name.endswith("history") or factor == 1:
      np.testing.assert_allclose(value, bare_stats[name] * factor, rtol=1e-5)

  after = step(scaled, x, jnp.inf)
  assert ols.get_loss_scale_state(after).total_notfinite == 1
  assert_same_bits(after.params["params"], scaled.params["params"])
  leaves = jax.tree.leaves(after.params)
  assert not all(np.isfinite(leaf).all() for leaf in leaves)
  kept = ols.select_if_applied(after, after.params, scaled.params)
  assert_same_bits(kept, scaled.params)
