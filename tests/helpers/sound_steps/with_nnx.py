"""Steps with Flax NNX, whose model and optimizer are updated in place."""

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  CLASSES,
  cross_entropy,
  FEATURES,
  HIDDEN,
  make_batch,
  make_image_batch,
  make_train_step,
  mse,
)
import optax_lossscale as ols


def _make_mlp(activation=nnx.tanh):
  rngs = nnx.Rngs(0)
  return nnx.Sequential(
    nnx.Linear(FEATURES, HIDDEN, rngs=rngs),
    activation,
    nnx.Linear(HIDDEN, CLASSES, rngs=rngs),
  )


def mse_loss_fn(model, batch):
  x, y = batch
  return mse(model(x), y)


def _make_optimizer(model, wrt=nnx.Param):
  tx = ols.with_loss_scaling(optax.adamw(1e-2))
  return nnx.Optimizer(model, tx, wrt=wrt)


def _train(loss_fn, model, optimizer, *args, **kwargs):
  """Update a model in place, and return the value of the loss function."""
  value, grads = ols.value_and_grad(
    ols.autocast(loss_fn), optimizer, using=nnx.value_and_grad, **kwargs
  )(model, *args)
  optimizer.update(model, grads)
  return value


def _make_in_place_step(model, wrt=nnx.Param, **kwargs):
  @nnx.jit
  def train_step(model, optimizer, batch):
    return _train(mse_loss_fn, model, optimizer, batch, **kwargs)

  return train_step, (model, _make_optimizer(model, wrt), make_batch())


def split_and_merge():
  """A pure function of the state, under ``jax.jit``."""
  model = _make_mlp()
  graphdef, state = nnx.split((model, _make_optimizer(model)))

  @jax.jit
  def train_step(state, batch):
    model, optimizer = nnx.merge(graphdef, state)
    loss = _train(mse_loss_fn, model, optimizer, batch)
    return nnx.state((model, optimizer)), loss

  return train_step, (state, make_batch())


def functional_optimizer():
  """A bare Optax optimizer, whose state is an argument."""
  graphdef, params = nnx.split(_make_mlp())
  loss_fn = lambda params, batch: mse_loss_fn(
    nnx.merge(graphdef, params), batch
  )
  return make_train_step(loss_fn, params, make_batch())


class ConvNet(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.out = nnx.Linear(4, CLASSES, rngs=rngs)

  def __call__(self, images):
    x = nnx.relu(self.norm(self.conv(images)))
    return self.out(jnp.mean(x, (1, 2)))


def batch_norm():
  """The statistics of a skipped step are put back."""
  model = ConvNet(nnx.Rngs(0))
  tx = ols.with_loss_scaling(optax.sgd(0.1, momentum=0.9))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def train_step(model, optimizer, images, labels):
    loss_fn = lambda model: cross_entropy(model(images), labels)
    old = jax.tree.map(jnp.asarray, nnx.state(model, nnx.BatchStat))
    loss = _train(loss_fn, model, optimizer)
    new = nnx.state(model, nnx.BatchStat)
    nnx.update(model, ols.select_if_applied(optimizer, new, old))
    return loss

  return train_step, (model, optimizer, *make_image_batch())


def dropout():
  """The random keys are advanced in the model."""
  layer = nnx.Dropout(0.2, rngs=nnx.Rngs(dropout=1))
  return _make_in_place_step(_make_mlp(layer))


def biases_only():
  """A filter selects the parameters by their path."""
  biases = nnx.PathContains("bias")
  return _make_in_place_step(
    _make_mlp(), wrt=biases, argnums=nnx.DiffState(0, biases)
  )


class Trainer(nnx.Module):
  """The step is a method of what is trained."""

  def __init__(self, rngs):
    self.model = _make_mlp()
    self.optimizer = _make_optimizer(self.model)

  def train_step(self, batch):
    return _train(mse_loss_fn, self.model, self.optimizer, batch)


def trainer_module():
  return nnx.jit(Trainer.train_step), (Trainer(nnx.Rngs(0)), make_batch())


def two_optimizers():
  """A generator and a critic, each updated in place."""
  linear = lambda seed: nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(seed))
  generator, critic = linear(0), linear(1)

  def critic_loss_fn(critic, generator, batch):
    fake = nnx.softplus(critic(generator(batch)))
    return jnp.mean(fake + nnx.softplus(-critic(batch)))

  def generator_loss_fn(generator, critic, batch):
    return jnp.mean(nnx.softplus(-critic(generator(batch))))

  @nnx.jit
  def train_step(generator, critic, g_optimizer, c_optimizer, batch):
    _train(critic_loss_fn, critic, c_optimizer, generator, batch)
    _train(generator_loss_fn, generator, g_optimizer, critic, batch)

  optimizers = map(_make_optimizer, (generator, critic))
  return train_step, (generator, critic, *optimizers, make_batch()[0])
