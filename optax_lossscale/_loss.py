"""What is required of a loss, and of the function that returns it."""

from collections.abc import Callable, Sequence
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _arrays, _warnings

_HINT_OF_GRADS = (
  " If fun is differentiated already, as by jax.value_and_grad or jax.grad,"
  " pass the loss function itself."
)


def check_not_differentiated(
  fun: Any, scaled_fun: Callable[..., Any], differentiated: Any
) -> None:
  """Raises if it is certain that ``fun`` is differentiated already.

  A function may return a loss together with what looks like gradients, such as
  an energy with its forces. So a function is refused only if it was made in the
  same way as `differentiated`.

  Args:
    fun: the function that the user gave.
    scaled_fun: the function that was differentiated in its place.
    differentiated: the result of differentiating it.
  """
  if getattr(differentiated, "__wrapped__", None) is not scaled_fun:
    return  # `using` did more than differentiate.
  jitted: Any = type(jax.jit(lambda: None))
  bare = fun
  while isinstance(bare, jitted):
    bare = bare.__wrapped__
  if _are_alike(bare, differentiated):
    raise TypeError(
      "fun must be the loss function itself, got"
      f" {getattr(fun, '__name__', fun)}, which is differentiated already."
      " Pass the function that was given to jax.value_and_grad, or to what took"
      " its place."
    )


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


def holds_nnx(tree: Any) -> bool:
  """Whether there is an object of Flax NNX in a tree."""
  nnx: Any = sys.modules.get("flax.nnx")  # If not, there are no such objects.
  is_object = lambda x: nnx is not None and isinstance(x, nnx.Module)
  return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


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


def _are_alike(fun: Any, differentiated: Any) -> bool:
  """Whether both functions were made in the same way, and `fun` not wrapped."""
  if type(fun) is not type(differentiated):
    return False
  is_function = isinstance(fun, types.FunctionType)
  if not is_function:
    return True  # Equinox has a class for differentiated functions.
  # All functions that JAX differentiates share their code. Their docstring says
  # what they return, and with respect to which arguments. If it is a copy of
  # the docstring of the loss, `fun` may be any wrapper.
  return (
    fun.__code__ is differentiated.__code__
    and fun.__doc__ == differentiated.__doc__ != fun.__wrapped__.__doc__
  )


def _split_aux(out: Any) -> Sequence[Any]:
  if not isinstance(out, (tuple, list)) or len(out) != 2:
    raise TypeError(
      "fun must return a pair (loss, aux) when has_aux=True, got"
      f" {type(out).__name__}."
    )
  return out
