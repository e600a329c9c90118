"""What is required of a loss, and of the function that returns it."""

from collections.abc import Callable, Sequence
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _arrays, _jaxprs, _warnings

_HINT_OF_GRADS = (
  " If fun is differentiated already, as by jax.value_and_grad or jax.grad,"
  " pass the loss function itself."
)

# By library, what differentiates models with leaves that are no floats.
_USING = {
  "equinox": "equinox.filter_value_and_grad",
  "flax.nnx": "nnx.value_and_grad",
}


def called(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
  """What a function returns whose loss is scaled: see `refuse_scaling`."""
  return fun(*args, **kwargs)


def refuse_scaling() -> None:
  """Raises if what computes the loss of `called` calls `scale_loss`.

  The stack of calls tells it, and nothing has to be kept. A function within
  that somebody else differentiates may have a loss scale of its own.
  """
  frame = inspect.currentframe()
  while frame and not _jaxprs.differentiates(frame.f_code):
    if frame.f_code is called.__code__:
      fun = frame.f_locals["fun"]
      name = getattr(fun, "__name__", type(fun).__name__)
      raise RuntimeError(
        "scale_loss must not be called in a function that value_and_grad or"
        " grad of optax_lossscale differentiates, since they scale its loss"
        f" themselves, got it in {name}. Drop scale_loss, and return the loss"
        " as it is. To scale by hand, drop the other: use jax.value_and_grad"
        " and unscale_grads."
      )
    frame = frame.f_back


def checked(out: Any, has_aux: bool) -> Any:
  """The loss in what a function returned, if it is one that can be scaled."""
  loss = _split_aux(out)[0] if has_aux else out
  if not _arrays.is_array_like(loss):
    hint = " If it is a pair of the loss and auxiliary data, pass has_aux=True."
    raise TypeError(
      f"fun must return a scalar loss, got {type(loss).__name__}."
      f"{'' if has_aux else hint}{_HINT_OF_GRADS}"
    )
  shape, dtype = jnp.shape(loss), jnp.result_type(loss)
  if shape != ():
    raise ValueError(
      "fun must return a scalar loss, got a loss of shape"
      f" {shape}. Take its mean or sum.{_HINT_OF_GRADS}"
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f"fun must return a loss of a float dtype, got a loss of {dtype}."
    )
  return loss


def using_for(tree: Any) -> str | None:
  """What differentiates a model in the tree that JAX alone cannot."""
  for library, using in _USING.items():
    # If it is not loaded, there are no such models.
    model: Any = getattr(sys.modules.get(library), "Module", ())
    is_model = lambda x, model=model: isinstance(x, model)
    for x in filter(is_model, jax.tree.leaves(tree, is_leaf=is_model)):
      if not all(map(_arrays.is_inexact, jax.tree.leaves(x))):
        return using
  return None


def warn_if_narrow(loss: Any) -> None:
  """Warns, at the user's line, of a loss that cannot hold a large scale."""
  dtype = jnp.result_type(loss)
  if not _arrays.is_narrow(dtype):
    return
  _warnings.warn(
    f"fun returns a {dtype} loss. Its backward pass starts with the loss"
    f" scale in {dtype}, which ends at {jnp.finfo(dtype).max}; the scale will"
    " settle below. Return the loss in float32."
  )


def _split_aux(out: Any) -> Sequence[Any]:
  if not isinstance(out, (tuple, list)) or len(out) != 2:
    raise TypeError(
      "fun must return a pair (loss, aux) when has_aux=True, got"
      f" {type(out).__name__}."
    )
  return out
