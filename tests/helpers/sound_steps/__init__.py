"""Sound float16 training steps, as users write them.

Each module has the steps of one kind. A function without arguments, or in the
dict ``STEPS``, makes a step, and the arguments of a call. The step trains: it
returns its parameters and its optimizer state, in the order of its first
arguments, or updates them in place. ``check_step`` must find no problem in any
of them.
"""

import ast
from collections.abc import Callable
import importlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

ROWS, FEATURES, HIDDEN, CLASSES = 8, 8, 16, 4
TX = ols.with_loss_scaling(optax.adam(1e-2))


def normal(*shape, seed=0, scale=1.0):
  """Return random numbers, the same in each process."""
  numbers = np.random.default_rng(seed).normal(size=shape)
  return np.asarray(scale * numbers, np.float32)


def dense(fan_in, fan_out, seed=0):
  """Return a weight matrix whose outputs are as large as its inputs."""
  return normal(fan_in, fan_out, seed=seed, scale=fan_in**-0.5)


def integers(high, *shape, seed=0):
  """Return random labels or tokens below a bound."""
  numbers = np.random.default_rng(seed).integers(0, high, size=shape)
  return np.asarray(numbers, np.int32)


def make_batch():
  """Return inputs and the targets of a regression."""
  return normal(ROWS, FEATURES, seed=100), normal(ROWS, CLASSES, seed=101)


def make_image_batch():
  """Return images of one channel and their labels."""
  return normal(ROWS, 6, 6, 1, seed=1), integers(CLASSES, ROWS)


def mse(predicted, targets):
  return jnp.mean((predicted - targets) ** 2)


def cross_entropy(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels
  return jnp.mean(losses(logits, labels))


def train(tx, loss_fn, params, opt_state, *args, cast=ols.autocast):
  """Return the new parameters, the new state and the loss."""
  loss, grads = ols.value_and_grad(cast(loss_fn), opt_state)(params, *args)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def make_train_step(loss_fn, params, batch, *, tx=TX, cast=ols.autocast):
  """Return the step of the README with a loss function, and its arguments."""

  @jax.jit
  def train_step(params, opt_state, batch):
    return train(tx, loss_fn, params, opt_state, batch, cast=cast)

  return train_step, (params, tx.init(params), batch)


def no_cast(loss_fn):
  """Return a loss function unchanged, to replace ``ols.autocast``."""
  return loss_fn


_MODULES = (
  "with_nnx",
  "with_linen",
  "with_equinox",
  "with_haiku",
  "with_keras",
  "optimizers",
  "several_losses",
  "inner_updates",
  "kept_back",
  "models",
  "transformations",
  "devices",
  "dtypes",
)


def _find_steps(module):
  """Return the names of a module's steps, without importing its library."""
  path = pathlib.Path(__file__).with_name(f"{module}.py")
  names = []
  for node in ast.parse(path.read_text()).body:
    match node:
      case ast.FunctionDef(name=name, args=ast.arguments(args=[])):
        names += [] if name.startswith("_") else [name]
      case ast.Assign(targets=[ast.Name("STEPS")], value=ast.Dict(keys)):
        names += [key.value for key in keys]
  return [f"{module}.{name}" for name in names]


NAMES = tuple(name for module in _MODULES for name in _find_steps(module))


def make_step(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Return a training step, and the arguments of a call."""
  module, key = name.split(".")
  namespace = vars(importlib.import_module(f"{__name__}.{module}"))
  return (namespace | namespace.get("STEPS", {}))[key]()
