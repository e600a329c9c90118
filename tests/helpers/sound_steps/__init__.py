"""Sound float16 training steps, as users write them.

Each module has the steps of one kind. A function without arguments makes a
step, and the arguments of a call. The step trains: it returns its parameters
and its optimizer state, in the order of its first arguments, or updates them
in place. ``check_step`` must find no problem in any of them.
"""

import ast
from collections.abc import Callable
import importlib
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

ROWS, FEATURES, HIDDEN, CLASSES = 8, 8, 16, 4


def normal(*shape, seed=0, scale=1.0):
  """Return random numbers, the same in each process."""
  numbers = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(scale * numbers, jnp.float32)


def dense(fan_in, fan_out, seed=0):
  """Return a weight matrix whose outputs are as large as its inputs."""
  return normal(fan_in, fan_out, seed=seed, scale=fan_in**-0.5)


def integers(high, *shape, seed=0):
  """Return random labels or tokens below a bound."""
  numbers = np.random.default_rng(seed).integers(0, high, size=shape)
  return jnp.asarray(numbers, jnp.int32)


def make_batch(rows=ROWS):
  """Return inputs and the targets of a regression."""
  return normal(rows, FEATURES, seed=100), normal(rows, CLASSES, seed=101)


def make_labeled_batch(rows=ROWS):
  """Return inputs and the labels of a classification."""
  return normal(rows, FEATURES, seed=100), integers(CLASSES, rows, seed=101)


def init_mlp(sizes=(FEATURES, HIDDEN, CLASSES), seed=0):
  """Return the parameters of dense layers."""
  return {
    f"layer_{i}": {
      "w": dense(*shape, seed=seed + i),
      "b": jnp.zeros(shape[1], jnp.float32),
    }
    for i, shape in enumerate(itertools.pairwise(sizes))
  }


def apply_mlp(params, x):
  """Apply dense layers with a tanh between them."""
  for i in range(len(params)):
    x = jnp.tanh(x) if i else x
    x = x @ params[f"layer_{i}"]["w"] + params[f"layer_{i}"]["b"]
  return x


def mse(predicted, targets):
  return jnp.mean((predicted - targets) ** 2)


def cross_entropy(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels
  return jnp.mean(losses(logits, labels))


def mse_loss_fn(params, batch):
  x, y = batch
  return mse(apply_mlp(params, x), y)


def cross_entropy_loss_fn(params, batch):
  x, labels = batch
  return cross_entropy(apply_mlp(params, x), labels)


def train(
  tx, loss_fn, params, opt_state, *args, cast=ols.autocast, **update_kwargs
):
  """Return the new parameters, the new state and the loss."""
  loss, grads = ols.value_and_grad(cast(loss_fn), opt_state)(params, *args)
  updates, opt_state = tx.update(grads, opt_state, params, **update_kwargs)
  return optax.apply_updates(params, updates), opt_state, loss


def train_with_aux(tx, loss_fn, params, opt_state, *args):
  """Return the new parameters, the new state and the auxiliary output."""
  (_, aux), grads = ols.value_and_grad(
    ols.autocast(loss_fn), opt_state, has_aux=True
  )(params, *args)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, aux


def jit_step(train_step, tx, *args, params=None, batch=None):
  """Return a step of params, their state, further arguments and a batch."""
  params = init_mlp() if params is None else params
  batch = make_batch() if batch is None else batch
  return jax.jit(train_step), (params, tx.init(params), *args, batch)


def make_train_step(
  tx, loss_fn=mse_loss_fn, params=None, batch=None, cast=ols.autocast
):
  """Return the step of the README with an optimizer, and its arguments."""

  def train_step(params, opt_state, batch):
    return train(tx, loss_fn, params, opt_state, batch, cast=cast)

  return jit_step(train_step, tx, params=params, batch=batch)


def no_cast(loss_fn):
  """Return a loss function unchanged, to replace ``ols.autocast``."""
  return loss_fn


_MODULES = (
  "with_nnx",
  "with_linen",
  "with_equinox",
  "with_haiku",
  "with_keras",
  "scaling",
  "accumulation",
  "optimizers",
  "several_losses",
  "inner_updates",
  "kept_back",
  "losses",
  "models",
  "transformations",
  "devices",
  "dtypes",
)


def _find_steps(module):
  """Return the names of a module's steps, without importing its library."""
  path = pathlib.Path(__file__).with_name(f"{module}.py")
  functions = [
    node
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
  ]
  return [f"{module}.{x.name}" for x in functions if not x.args.args]


NAMES = tuple(name for module in _MODULES for name in _find_steps(module))


def make_step(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Return a training step, and the arguments of a call."""
  module, function = name.split(".")
  return getattr(importlib.import_module(f"{__name__}.{module}"), function)()
