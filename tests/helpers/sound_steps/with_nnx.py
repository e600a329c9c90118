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
  integers,
  make_batch,
  make_labeled_batch,
  mse,
  normal,
)
import optax_lossscale as ols


class Mlp(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
    self.down = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.tanh(self.up(x)))


def mse_loss_fn(model, batch):
  x, y = batch
  return mse(model(x), y)


def _make_in_place_step(model, loss_fn, batch, wrt=nnx.Param, **kwargs):
  tx = ols.with_loss_scaling(optax.adamw(1e-2))
  optimizer = nnx.Optimizer(model, tx, wrt=wrt)

  @nnx.jit
  def train_step(model, optimizer, batch):
    loss, grads = ols.value_and_grad(
      ols.autocast(loss_fn), optimizer, using=nnx.value_and_grad, **kwargs
    )(model, batch)
    optimizer.update(model, grads)
    return loss

  return train_step, (model, optimizer, batch)


def in_place():
  return _make_in_place_step(Mlp(nnx.Rngs(0)), mse_loss_fn, make_batch())


def split_and_merge():
  """A pure function of the state, under ``jax.jit``."""
  model = Mlp(nnx.Rngs(0))
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  graphdef, state = nnx.split((model, optimizer))

  @jax.jit
  def train_step(state, batch):
    model, optimizer = nnx.merge(graphdef, state)
    loss, grads = ols.value_and_grad(
      ols.autocast(mse_loss_fn), optimizer, using=nnx.value_and_grad
    )(model, batch)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss

  return train_step, (state, make_batch())


def functional_optimizer():
  """A bare Optax optimizer, whose state is an argument."""
  graphdef, params = nnx.split(Mlp(nnx.Rngs(0)))
  tx = ols.with_loss_scaling(optax.adam(1e-2))

  @jax.jit
  def train_step(params, opt_state, batch):
    loss_fn = lambda params: mse_loss_fn(nnx.merge(graphdef, params), batch)
    loss, grads = ols.value_and_grad(ols.autocast(loss_fn), opt_state)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, (params, tx.init(params), make_batch())


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
    loss, grads = ols.value_and_grad(
      ols.autocast(loss_fn), optimizer, using=nnx.value_and_grad
    )(model)
    optimizer.update(model, grads)
    new = nnx.state(model, nnx.BatchStat)
    nnx.update(model, ols.select_if_finite(optimizer, new, old))
    return loss

  images = normal(8, 6, 6, 1, seed=1)
  return train_step, (model, optimizer, images, integers(CLASSES, 8))


def dropout():
  """The random keys are advanced in the model."""
  rngs = nnx.Rngs(0, dropout=1)
  model = nnx.Sequential(
    nnx.Linear(FEATURES, HIDDEN, rngs=rngs),
    nnx.relu,
    nnx.Dropout(0.5, rngs=rngs),
    nnx.Linear(HIDDEN, CLASSES, rngs=rngs),
  )
  return _make_in_place_step(model, mse_loss_fn, make_batch())


class TiedLanguageModel(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(12, FEATURES, rngs=rngs)
    self.mix = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

  def __call__(self, tokens):
    return self.embed.attend(nnx.gelu(self.mix(self.embed(tokens))))


def tied_weights():
  """One matrix is the embedding and the output layer."""
  tokens = integers(12, 4, 7)
  loss_fn = lambda model, tokens: cross_entropy(
    model(tokens[:, :-1]), tokens[:, 1:]
  )
  return _make_in_place_step(TiedLanguageModel(nnx.Rngs(0)), loss_fn, tokens)


def lora():
  """Adapters are trained, and the model below them is frozen."""
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(
    nnx.LoRALinear(FEATURES, HIDDEN, lora_rank=2, rngs=rngs),
    nnx.tanh,
    nnx.LoRALinear(HIDDEN, CLASSES, lora_rank=2, rngs=rngs),
  )
  return _make_in_place_step(
    model,
    mse_loss_fn,
    make_batch(),
    wrt=nnx.LoRAParam,
    argnums=nnx.DiffState(0, nnx.LoRAParam),
  )


def biases_only():
  """A filter selects the parameters by their path."""
  biases = nnx.PathContains("bias")
  return _make_in_place_step(
    Mlp(nnx.Rngs(0)),
    mse_loss_fn,
    make_batch(),
    wrt=biases,
    argnums=nnx.DiffState(0, biases),
  )


def causal_attention():
  """Flax's attention, with a mask of bools."""
  attention = nnx.MultiHeadAttention(
    1, FEATURES, decode=False, use_bias=False, rngs=nnx.Rngs(0)
  )

  def loss_fn(attention, batch):
    x, y = batch
    mask = nnx.make_causal_mask(x[..., 0])
    return mse(attention(x, mask=mask), y)

  x, y = normal(2, 4, FEATURES, seed=1), normal(2, 4, FEATURES, seed=2)
  return _make_in_place_step(attention, loss_fn, (x, y))


def metrics_in_place():
  """A running mean of the loss and the accuracy, updated in the step."""
  model = Mlp(nnx.Rngs(0))
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
  )

  @nnx.jit
  def train_step(model, optimizer, metrics, batch):
    def loss_fn(model):
      logits = model(batch[0])
      return cross_entropy(logits, batch[1]), logits

    (loss, logits), grads = ols.value_and_grad(
      ols.autocast(loss_fn),
      optimizer,
      using=nnx.value_and_grad,
      has_aux=True,
    )(model)
    metrics.update(loss=loss, logits=logits, labels=batch[1])
    optimizer.update(model, grads)

  return train_step, (model, optimizer, metrics, make_labeled_batch())


class ScannedMlp(nnx.Module):
  def __init__(self, rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make_layer(rngs):
      return nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    self.layers = make_layer(rngs)
    self.out = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def apply_layer(x, layer):
      return x + nnx.tanh(layer(x))

    return self.out(apply_layer(x, self.layers))


def scan_over_layers():
  model = ScannedMlp(nnx.Rngs(0))
  return _make_in_place_step(model, mse_loss_fn, make_batch())


class Trainer(nnx.Module):
  """The step is a method of what is trained."""

  def __init__(self, rngs):
    self.model = Mlp(rngs)
    tx = ols.with_loss_scaling(optax.adam(1e-2))
    self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

  def train_step(self, batch):
    loss, grads = ols.value_and_grad(
      ols.autocast(mse_loss_fn), self.optimizer, using=nnx.value_and_grad
    )(self.model, batch)
    self.optimizer.update(self.model, grads)
    return loss


def trainer_module():
  return nnx.jit(Trainer.train_step), (Trainer(nnx.Rngs(0)), make_batch())


def two_optimizers():
  """A generator and a critic, each updated in place."""
  generator = nnx.Linear(4, FEATURES, rngs=nnx.Rngs(0))
  critic = Mlp(nnx.Rngs(1))
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  g_optimizer = nnx.Optimizer(generator, tx, wrt=nnx.Param)
  c_optimizer = nnx.Optimizer(critic, tx, wrt=nnx.Param)

  def critic_loss_fn(critic, generator, real, noise):
    fake = nnx.softplus(critic(generator(noise)))
    return jnp.mean(fake + nnx.softplus(-critic(real)))

  def generator_loss_fn(generator, critic, noise):
    return jnp.mean(nnx.softplus(-critic(generator(noise))))

  @nnx.jit
  def train_step(generator, critic, g_optimizer, c_optimizer, real, noise):
    c_loss, c_grads = ols.value_and_grad(
      ols.autocast(critic_loss_fn), c_optimizer, using=nnx.value_and_grad
    )(critic, generator, real, noise)
    c_optimizer.update(critic, c_grads)
    g_loss, g_grads = ols.value_and_grad(
      ols.autocast(generator_loss_fn), g_optimizer, using=nnx.value_and_grad
    )(generator, critic, noise)
    g_optimizer.update(generator, g_grads)
    return c_loss, g_loss

  real, noise = normal(8, FEATURES, seed=1), normal(8, 4, seed=2)
  models = generator, critic
  return train_step, (*models, g_optimizer, c_optimizer, real, noise)
