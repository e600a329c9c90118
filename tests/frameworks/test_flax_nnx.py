"""Flax NNX: models and optimizers whose leaves are variables."""

from flax import nnx
from helpers.bits import assert_same_bits
from helpers.small_model import make_batches, make_overflowing_batch
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

(BATCH,) = make_batches(1)
BAD_BATCH = make_overflowing_batch(BATCH)


class Model(nnx.Module):
  def __init__(self, rngs):
    half = {"dtype": jnp.float16, "rngs": rngs}
    self.hidden = nnx.Linear(4, 8, **half)
    self.norm = nnx.BatchNorm(8, **half)
    self.out = nnx.Linear(8, 2, **half)

  def __call__(self, x):
    x = nnx.relu(self.norm(self.hidden(x)))
    return self.out(x).astype(jnp.float32)


def make():
  model = nnx.jit(lambda: Model(nnx.Rngs(0)))()
  policy = ols.DynamicLossScale(growth_interval=3)
  tx = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9), policy)
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def train_step(model, optimizer, x, y):
  # A copy, since the forward pass writes into the model.
  old = jax.tree.map(jnp.asarray, nnx.state(model, nnx.BatchStat))
  using = nnx.value_and_grad
  differentiate = ols.value_and_grad(loss_fn, optimizer, using=using)
  loss, grads = differentiate(model, x, y)
  optimizer.update(model, grads)
  new = nnx.state(model, nnx.BatchStat)
  nnx.update(model, ols.select_if_applied(optimizer, new, old))
  return loss


step = nnx.jit(train_step)


def arrays(node, *filters):
  return jax.tree.map(np.array, jax.tree.leaves(nnx.state(node, *filters)))


def test_a_skip_advances_only_the_step_of_the_optimizer():
  model, optimizer = make()
  step(model, optimizer, *BATCH)
  params, stats = arrays(model, nnx.Param), arrays(model, nnx.BatchStat)
  inner = arrays(optimizer.opt_state.inner_state)
  step(model, optimizer, *BAD_BATCH)
  assert_same_bits(arrays(model, nnx.Param), params)
  assert_same_bits(arrays(model, nnx.BatchStat), stats)
  assert_same_bits(arrays(optimizer.opt_state.inner_state), inner)
  assert optimizer.step[...] == 2
  assert ols.get_loss_scale_state(optimizer).loss_scale == 2.0**14
  losses = [step(model, optimizer, *BATCH) for _ in range(9)]
  assert losses[-1] < losses[0]


def test_the_scale_is_found_and_set_in_any_nnx_object():
  model, optimizer = make()
  step(model, optimizer, *BATCH)
  for tree in (optimizer, optimizer.opt_state, nnx.state(optimizer)):
    scale_state = ols.get_loss_scale_state(tree)
    assert all(isinstance(x, jax.Array) for x in scale_state[:-1])
    assert (scale_state.loss_scale, scale_state.finite_count) == (2.0**15, 1)
    assert ols.loss_scale_metrics(tree)["log2_loss_scale"] == 15
  nnx.update(optimizer, ols.set_loss_scale(nnx.state(optimizer), 2.0**8))
  assert ols.get_loss_scale_state(optimizer).loss_scale == 2.0**8
  step(model, optimizer, *BATCH)
  assert ols.get_loss_scale_state(optimizer).finite_count == 1


class Params(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(np.float32([1.0, 2.0]))


def test_the_gradient_uses_the_scale_at_the_time_of_the_call():
  model = Params()
  tx = ols.with_loss_scaling(optax.sgd(0.1), ols.DynamicLossScale(2.0**4))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  seen = []

  @jax.custom_vjp
  def watch(x):
    return x

  watch.defvjp(lambda x: (x, None), lambda _, g: (seen.append(g.item()) or g,))
  grad_fn = ols.grad(
    lambda model: watch(jnp.sum(model.w[...])),
    optimizer,
    using=nnx.value_and_grad,
  )
  grads = grad_fn(model)
  optimizer.update(model, jax.tree.map(lambda g: g * jnp.inf, grads))
  assert_same_bits(arrays(grad_fn(model)), arrays(grads))
  assert seen == [2.0**4, 2.0**3]


def test_an_nnx_model_that_jax_cannot_differentiate_raises_with_the_fix():
  """Dropout counts its random numbers, in integers."""
  model = nnx.Sequential(Params(), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
  state = ols.DynamicLossScale().init()
  loss_fn = lambda model: jnp.sum(model.layers[0].w[...])
  with pytest.raises(TypeError) as caught:
    ols.grad(loss_fn, state)(model)
  hint = "Pass using=nnx.value_and_grad"
  assert any(hint in note for note in caught.value.__notes__)
  ols.grad(loss_fn, state, using=nnx.value_and_grad)(model)
  with pytest.raises(TypeError) as caught:
    ols.grad(lambda x: jnp.sum(x), state)(np.arange(2))
  assert not any(hint in n for n in getattr(caught.value, "__notes__", ()))
