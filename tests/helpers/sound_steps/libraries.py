"""Steps with Flax, Equinox, Haiku and Keras, around the models of each."""

import os
from typing import Any

import equinox as eqx
from flax import linen as nn
from flax import nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
import optax

from helpers.train_steps import (
  apply_updates,
  BATCH,
  make_step,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)
TX = ols.with_loss_scaling(ADAM)
IMAGES = BATCH.reshape(2, 4, 4, 1)
WORDS = jnp.arange(48).reshape(8, 6) % 12


def mse(outputs):
  return jnp.mean((outputs - 1) ** 2)


def cross_entropy(logits):
  losses = optax.softmax_cross_entropy_with_integer_labels
  return jnp.mean(losses(logits, jnp.arange(len(logits)) % 4))


def _make_mlp(*layers, out=4):
  """Return a model of NNX, with some layers in the middle."""
  rngs = nnx.Rngs(0)
  linear = lambda out: nnx.Linear(4, out, rngs=rngs)
  return nnx.Sequential(linear(4), nnx.tanh, *layers, linear(out))


def _train_nnx(model, optimizer, loss_fn, **kwargs):
  """Update a model in place, and put the statistics of a skipped step back."""
  old = jax.tree.map(jnp.asarray, nnx.state(model, nnx.BatchStat))
  loss, grads = ols.value_and_grad(
    ols.autocast(loss_fn), optimizer, using=nnx.value_and_grad, **kwargs
  )(model)
  optimizer.update(model, grads)
  new = nnx.state(model, nnx.BatchStat)
  nnx.update(model, ols.select_if_applied(optimizer, new, old))
  return loss


def _nnx_step(make_model=_make_mlp, wrt=nnx.Param, batch=BATCH, **kwargs):
  """Return a function that makes a step in place."""

  @nnx.jit
  def step(model, optimizer, batch):
    return _train_nnx(
      model, optimizer, lambda model: mse(model(batch)), **kwargs
    )

  def make():
    model = make_model()
    return step, (model, nnx.Optimizer(model, TX, wrt=wrt), batch)

  return make


class _TiedModel(nnx.Module):
  """Its embedding is its output layer, too."""

  def __init__(self):
    self.embed = nnx.Embed(12, 4, rngs=nnx.Rngs(0))
    self.body = _make_mlp()
    self.head = self.embed

  def __call__(self, words):
    return self.head.attend(self.body(self.embed(words)))


def _split_and_merge():
  """A pure function of the state, under ``jax.jit``."""
  step, (*objects, batch) = _nnx_step()()
  graphdef, state = nnx.split(objects)

  @jax.jit
  def train_step(state, batch):
    objects = nnx.merge(graphdef, state)
    loss = step(*objects, batch)
    return nnx.state(objects), loss

  return train_step, (state, batch)


def _functional_optimizer():
  """A bare Optax optimizer, whose state is an argument."""
  graphdef, params = nnx.split(_make_mlp())
  loss_fn = lambda params, x: mse(nnx.merge(graphdef, params)(x))
  return make_step(loss_fn=ols.autocast(loss_fn), tx=TX, params=params)


class _Trainer(nnx.Module):
  """The step is a method of what is trained."""

  def __init__(self):
    self.model = _make_mlp()
    self.optimizer = nnx.Optimizer(self.model, TX, wrt=nnx.Param)

  def train_step(self, batch):
    return _train_nnx(self.model, self.optimizer, lambda f: mse(f(batch)))


def _two_optimizers():
  """A generator and a critic, each updated in place."""

  @nnx.jit
  def train_step(generator, critic, g_optimizer, c_optimizer, batch):
    judge = lambda f, sign: jnp.mean(nnx.softplus(sign * f))
    _train_nnx(
      critic,
      c_optimizer,
      lambda f: judge(f(generator(batch)), 1) + judge(f(batch), -1),
    )
    _train_nnx(generator, g_optimizer, lambda f: judge(critic(f(batch)), -1))

  networks = _make_mlp(), _make_mlp(out=1)
  optimizers = [nnx.Optimizer(f, TX, wrt=nnx.Param) for f in networks]
  return train_step, (*networks, *optimizers, BATCH)


class _TrainState(train_state.TrainState):
  batch_stats: Any = None
  average: Any = None


def _linen_step(module, cast=ols.autocast, inputs=BATCH, **kwargs):
  """Return a function that makes a step with ``TrainState``.

  Statistics and an average of the parameters outlive a skipped step. The random
  key is folded with the count of steps.
  """

  @jax.jit
  def train_step(state, batch, key):
    rngs = {"dropout": jax.random.fold_in(key, state.step)}

    def loss_fn(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      outputs, new = state.apply_fn(
        variables, batch, rngs=rngs, mutable="batch_stats"
      )
      return mse(outputs), new.get("batch_stats", {})

    (loss, batch_stats), grads = ols.value_and_grad(
      cast(loss_fn), state, has_aux=True
    )(state.params)
    new = state.apply_gradients(grads=grads)
    average = optax.incremental_update(new.params, state.average, 0.01)
    batch_stats, average = ols.select_if_applied(
      new, (batch_stats, average), (state.batch_stats, state.average)
    )
    return new.replace(batch_stats=batch_stats, average=average), loss

  def make():
    variables = {"batch_stats": {}, **module.init(jax.random.key(0), inputs)}
    state = _TrainState.create(
      apply_fn=module.apply, tx=TX, average=variables["params"], **variables
    )
    return train_step, (state, inputs, jax.random.key(1))

  return make


_BATCH_NORM_NET = nn.Sequential(
  [
    nn.Conv(4, (3, 3), use_bias=False),
    nn.BatchNorm(use_running_average=False),
    nn.relu,
    nn.Dense(4),
  ]
)
_DROPOUT_NET = nn.Sequential(
  [
    nn.Dense(4),
    nn.relu,
    nn.Dropout(0.3, deterministic=False),
    nn.Dense(4),
  ]
)
# Layers that compute in float16, with float32 parameters.
_HALF_NET = nn.Sequential(
  [
    nn.Dense(4, dtype=jnp.float16),
    nn.LayerNorm(dtype=jnp.float16),
    nn.MultiHeadDotProductAttention(2, dtype=jnp.float16),
    nn.Dense(4, dtype=jnp.float16),
    lambda x: x.astype(jnp.float32),
  ]
)


def _make_eqx_mlp():
  return eqx.nn.MLP(4, 4, 4, 1, jax.nn.tanh, key=jax.random.key(0))


def _init_optimizer(model, filter_spec=eqx.is_inexact_array):
  return TX.init(eqx.filter(model, filter_spec))


def _train_eqx(loss_fn, model, opt_state, *args, **kwargs):
  """Return the new model, the new state and the value of the loss function."""
  using = eqx.filter_value_and_grad
  value, grads = ols.value_and_grad(
    ols.autocast(loss_fn), opt_state, using=using, **kwargs
  )(model, *args)
  params = eqx.filter(model, eqx.is_inexact_array)
  model, opt_state = apply_updates(TX, grads, params, opt_state)
  return model, opt_state, value


def _eqx_loss_fn(model, batch):
  return mse(jax.vmap(model)(batch))


def _frozen_backbone():
  """Only the last layer is trained."""
  model = _make_eqx_mlp()
  last = lambda model: (model.layers[-1].weight, model.layers[-1].bias)
  frozen = jax.tree.map(lambda _: False, model)
  filter_spec = eqx.tree_at(last, frozen, (True, True))

  @eqx.filter_jit
  def train_step(model, opt_state, batch):
    trained, backbone = eqx.partition(model, filter_spec)
    loss_fn = lambda trained: _eqx_loss_fn(
      eqx.combine(trained, backbone), batch
    )
    trained, opt_state, loss = _train_eqx(loss_fn, trained, opt_state)
    return eqx.combine(trained, backbone), opt_state, loss

  return train_step, (model, _init_optimizer(model, filter_spec), BATCH)


def _batch_norm_state():
  """The state of the model is an argument and a result."""
  keys = jax.random.split(jax.random.key(0))
  model, model_state = eqx.nn.make_with_state(eqx.nn.Sequential)(
    [
      eqx.nn.Linear(4, 4, key=keys[0]),
      eqx.nn.BatchNorm(4, "batch", mode="batch"),
      eqx.nn.Linear(4, 4, key=keys[1]),
    ]
  )

  def loss_fn(model, model_state, batch):
    logits, new_state = jax.vmap(
      model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )(batch, model_state)
    return cross_entropy(logits), new_state

  @eqx.filter_jit
  def train_step(model, model_state, opt_state, batch):
    model, opt_state, (_, new_state) = _train_eqx(
      loss_fn, model, opt_state, model_state, batch, has_aux=True
    )
    new_state = ols.select_if_applied(opt_state, new_state, model_state)
    return model, new_state, opt_state

  return train_step, (model, model_state, _init_optimizer(model), BATCH)


def _haiku_step():
  """An LSTM that is unrolled by a scan, with gradients clipped by norm."""
  import haiku as hk

  def apply(x):
    core = hk.LSTM(4)
    state = core.initial_state(x.shape[0])
    x, _ = hk.dynamic_unroll(core, x, state, time_major=False)
    return mse(hk.BatchApply(hk.Linear(4))(x))

  batch = BATCH.reshape(2, 4, 4)
  loss = hk.without_apply_rng(hk.transform(apply))
  params = jax.jit(loss.init)(jax.random.key(0), batch)
  tx = ols.with_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), ADAM))
  loss_fn = ols.autocast(loss.apply)
  return make_step(loss_fn=loss_fn, tx=tx, params=params, batch=batch)


def _keras_step(make_layers, loss_fn, batch, cast=ols.autocast):
  """Return a function that makes a step with a model called without state."""

  def make():
    os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(make_layers(keras.layers))

    def train_step(params, opt_state, others, batch):
      def loss_of_params(params):
        outputs, others_after = model.stateless_call(
          params, others, batch, training=True
        )
        return loss_fn(outputs), others_after

      (loss, new_others), grads = ols.value_and_grad(
        cast(loss_of_params), opt_state, has_aux=True
      )(params)
      params, opt_state = apply_updates(TX, grads, params, opt_state)
      others = ols.select_if_applied(opt_state, new_others, others)
      return params, opt_state, others, loss

    params = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    args = params, TX.init(params), others, batch
    return jax.jit(train_step), args

  return make


STEPS = {
  "NNX, split and merged": _split_and_merge,
  "NNX, functional optimizer": _functional_optimizer,
  "NNX, statistics": _nnx_step(
    lambda: _make_mlp(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
  ),
  "NNX, tied weights": _nnx_step(_TiedModel, batch=WORDS),
  # The random keys are advanced in the model.
  "NNX, dropout": _nnx_step(
    lambda: _make_mlp(nnx.Dropout(0.2, rngs=nnx.Rngs(dropout=1)))
  ),
  # A filter selects the parameters by their path.
  "NNX, biases only": _nnx_step(
    wrt=nnx.PathContains("bias"),
    argnums=nnx.DiffState(0, nnx.PathContains("bias")),
  ),
  "NNX, trainer": lambda: (nnx.jit(_Trainer.train_step), (_Trainer(), BATCH)),
  "NNX, two optimizers": _two_optimizers,
  "linen, statistics": _linen_step(_BATCH_NORM_NET, inputs=IMAGES),
  "linen, dropout": _linen_step(_DROPOUT_NET),
  "linen, layers with dtype": _linen_step(_HALF_NET, lambda loss_fn: loss_fn),
  "Equinox, frozen backbone": _frozen_backbone,
  "Equinox, statistics": _batch_norm_state,
  "Haiku, LSTM": _haiku_step,
  "Keras, statistics and dropout": _keras_step(
    lambda layers: [
      layers.Input((4,)),
      layers.Dense(4),
      layers.BatchNormalization(),
      layers.Activation("gelu"),
      layers.Dropout(0.2),
      layers.Dense(4),
    ],
    mse,
    BATCH,
  ),
  # The policy that a user of Keras sets for all layers.
  "Keras, mixed precision": _keras_step(
    lambda layers: [
      layers.Input((4,)),
      layers.Dense(4, dtype="mixed_float16"),
      layers.BatchNormalization(dtype="mixed_float16"),
      layers.Dense(4, dtype="mixed_float16"),
    ],
    lambda outputs: mse(outputs.astype(jnp.float32)),
    BATCH,
    lambda loss_fn: loss_fn,
  ),
  # Padding is masked by the layers, and the loss takes probabilities.
  "Keras, text": _keras_step(
    lambda layers: [
      layers.Input((6,), dtype="int32"),
      layers.Embedding(12, 4, mask_zero=True),
      layers.GlobalAveragePooling1D(),
      layers.Dense(4, activation="softmax"),
    ],
    lambda probs: -jnp.mean(jnp.log(probs[jnp.arange(8), jnp.arange(8) % 4])),
    WORDS.at[:, 4:].set(0),
  ),
}
