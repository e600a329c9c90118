"""Float32 models from five libraries and none. They know of no half precision.

They are small, and made of what the libraries ship. Each library has a module,
which is imported when one of its models is made.
"""

from collections.abc import Callable
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


class Model(NamedTuple):
  """A loss function, and what it is called with."""

  # From what `unpack` returns and the batch, the loss and a tree of arrays:
  # what the model remembers, or its outputs.
  loss_fn: Callable[..., Any]
  params: Any  # a tree of arrays
  batch: tuple[Any, ...]  # the further arguments of the loss function
  state: Any = None  # the second argument of `unpack`
  # From params and state, the first argument of the loss function.
  unpack: Callable[..., Any] = lambda params, state: params
  value_and_grad_fn: Callable[..., Any] = (
    jax.value_and_grad
  )  # the library's own

  @property
  def arrays(self) -> tuple[Any, ...]:
    """The argument of the methods, which can be traced without values."""
    return self.params, self.batch, self.state

  def loss(self, arrays, cast):
    """The loss and the tree of arrays, of a loss function that is cast."""
    params, batch, state = arrays
    return cast(self.loss_fn)(self.unpack(params, state), *batch)

  def value_and_grad(self, arrays, cast, loss_scale=2.0**6):
    """The same with the gradients, as users of the library take them."""
    params, batch, state = arrays
    scale = ols.FixedLossScale(loss_scale).init()
    fun = ols.value_and_grad(
      cast(self.loss_fn), scale, using=self.value_and_grad_fn, has_aux=True
    )
    (loss, aux), grads = fun(self.unpack(params, state), *batch)
    return loss, jax.tree.leaves(aux), jax.tree.leaves(grads)


# Name, module and function. Those of Flax take the dtype of a model whose
# layers compute in half precision, as its authors would write it.
_FUNCTIONS = {
  "ResNet, Flax linen": ("with_flax", "resnet"),
  "transformer, Flax linen": ("with_flax", "transformer"),
  "scanned stack, Flax linen": ("with_flax", "scanned_stack"),
  "GRU, Flax linen": ("with_flax", "gru"),
  "U-Net, Flax NNX": ("with_flax", "unet"),
  "BatchNorm, Equinox": ("with_equinox", "conv_net"),
  "LSTM, Haiku": ("with_haiku", "lstm"),
  "MobileNet, Keras": ("with_keras", "mobile_net"),
  "text, Keras": ("with_keras", "text_classifier"),
  "rotary, plain JAX": ("plain_jax", "rotary_transformer"),
}
NAMES = tuple(_FUNCTIONS)
MODELS_WITH_DTYPE = tuple(name for name in NAMES if "Flax" in name)


def make_model(name: str, **options: Any) -> Model:
  """Make a model by its name; ``MODELS_WITH_DTYPE`` take a ``dtype``."""
  module, function = _FUNCTIONS[name]
  # Imported for values even within a trace: what a module makes while it is
  # loaded would be traced, and escape.
  with jax.ensure_compile_time_eval():
    module = importlib.import_module(f"{__name__}.{module}")
  return getattr(module, function)(**options)


def make_model_shapes(name: str, **options: Any) -> Model:
  """The same with shapes in place of arrays, as tracing needs no more."""
  models = []

  def arrays():
    models.append(make_model(name, **options))
    return models[0].arrays

  params, batch, state = jax.eval_shape(arrays)
  return models[0]._replace(params=params, batch=batch, state=state)


def noisy_images(count: int, size: int) -> jax.Array:
  """Noise of shape (count, size, size, 3), about a colour for each image.

  Without colours, batch normalization leaves gradients that are differences of
  numbers that are almost the same; and without noise it enlarges differences of
  neighbouring pixels that are nearly zero.
  """
  keys = jax.random.split(jax.random.key(0))
  colours = jax.random.normal(keys[0], (count, 1, 1, 3))
  return colours + jax.random.normal(keys[1], (count, size, size, 3))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return jnp.mean(losses)
