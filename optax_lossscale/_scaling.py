"""Scale the loss, unscale the gradients, and ``value_and_grad`` for both."""

from collections.abc import Callable, Sequence
import functools
import inspect
import operator
import sys
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _grads, _state, _tags
from optax_lossscale._jaxprs import _source_info

_ALREADY_DIFFERENTIATED_HINT = (
  " If fun is already differentiated, for example by jax.value_and_grad or"
  " jax.grad, pass the loss function itself."
)

# The functions that differentiate models with leaves that are not floats.
_VALUE_AND_GRAD_BY_LIBRARY = {
  "equinox": "equinox.filter_value_and_grad",
  "flax.nnx": "nnx.value_and_grad",
}

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def scale_loss(loss: Any, state: Any) -> Any:
  """Multiplies a loss by the loss scale.

  Args:
    loss: a float or complex scalar, or any pytree of them. float16, bfloat16
      and float8 losses are returned in float32, since the largest float16
      number is 65504.
    state: a :class:`LossScaleState`, or any pytree that holds exactly one.

  Returns:
    A pytree of the same structure; other leaves (integers, ``None``) are
    unchanged.

  Raises:
    RuntimeError: in a function that :func:`value_and_grad` or :func:`grad`
      differentiates, which scale its loss themselves.
    ValueError: if ``state`` does not hold exactly one loss-scale state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> state = ols.FixedLossScale(1024.0).init()
    >>> print(ols.scale_loss(jnp.float32(0.5), state))
    512.0
  """
  _check_not_inside_value_and_grad()
  return _scale_tree(loss, _state.get_loss_scale_state(state).loss_scale)


def unscale_grads(grads: Any, state: Any) -> Any:
  """Divides gradients by the loss scale.

  Args:
    grads: a pytree of gradients of a scaled loss.
    state: the state that scaled the loss: a :class:`LossScaleState`, or any
      pytree that holds exactly one.

  Returns:
    A pytree of the same structure. float16 and float8 leaves are returned in
    float32, where the quotient does not underflow. bfloat16 leaves keep their
    dtype, since it has the range of float32, and so do float32, float64 and
    complex leaves. Leaves that are not gradients are returned unchanged:
    integers, bools, float0, PRNG keys, and everything under Flax's
    ``_overwrite_with_gradient`` collection.

  Raises:
    ValueError: if ``state`` does not hold exactly one loss-scale state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> state = ols.FixedLossScale(1024.0).init()
    >>> print(ols.unscale_grads({"w": jnp.float32(512.0)}, state)["w"])
    0.5
  """
  return _unscale_tree(grads, _state.get_loss_scale_state(state).loss_scale)


def value_and_grad(
  fun: Callable[_Args, _Result],
  state: Any,
  argnums: int | Sequence[int] | None = None,
  has_aux: bool = False,
  *,
  using: Callable[..., Any] = jax.value_and_grad,
  **kwargs: Any,
) -> Callable[_Args, tuple[_Result, Any]]:
  """Like :func:`jax.value_and_grad`, through a scaled loss.

  The loss is multiplied by the loss scale before the backward pass, and the
  gradients are divided by the loss scale after it. The returned loss and
  gradients are unscaled.

  Args:
    fun: the function to differentiate. It returns a scalar loss of a float
      dtype, or a pair of a loss and auxiliary data. Return the loss in float32:
      with a float16 loss, the backward pass overflows if the scale exceeds
      2**15.
    state: the state that scales the loss: a :class:`LossScaleState`, or any
      pytree that holds exactly one, such as the optimizer state.
    argnums: the positions of the arguments to differentiate with respect to.
      Defaults to the first one.
    has_aux: whether ``fun`` returns a pair of loss and auxiliary data.
    using: the function to differentiate with: :func:`jax.value_and_grad`, or a
      function like it, such as ``flax.nnx.value_and_grad`` or
      ``equinox.filter_value_and_grad``.
    **kwargs: further keyword arguments for ``using``.

  Returns:
    A function of the arguments of ``fun``, with its name and docstring, which
    returns ``(loss, grads)``, or ``((loss, aux), grads)`` if ``has_aux``. The
    loss is unscaled and in its own dtype. The gradients are unscaled as
    :func:`unscale_grads` does it, and are inf or NaN where they overflowed.

  Raises:
    TypeError: if the loss is not of a float dtype, ``fun`` is differentiated
      already, ``argnums`` are not integers, or ``using`` does not return the
      value in addition to the gradients.
    ValueError: if the loss is not a scalar, or ``state`` does not hold exactly
      one loss-scale state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> state = ols.DynamicLossScale().init()
    >>> def loss_fn(w):
    ...   return jnp.sum(w.astype(jnp.float16) ** 2).astype(jnp.float32)
    >>> loss, grad = ols.value_and_grad(loss_fn, state)(jnp.array([0.5]))
    >>> print(loss, grad)
    0.25 [1.]
  """
  hint = " Write value_and_grad(loss_fn, opt_state)(params, batch)."
  _checks.check_callable("fun", fun, hint=hint)
  _checks.check_callable("using", using, "a function like jax.value_and_grad")
  if argnums is not None:
    _check_argnums(argnums, hint)
  _state.get_loss_scale_state(state)  # Raise here if there is no loss scale.
  _warn_if_inside_multi_steps(state)
  # The scale is read at each call, because an optimizer of Flax NNX changes in
  # place.
  get_scale = lambda: _state.get_loss_scale_state(state).loss_scale

  def scaled_fun(*args: Any, **fun_kwargs: Any) -> tuple[Any, _FunOutput]:
    out = _call_loss_fn(fun, args, fun_kwargs)
    return _scale_tree(_extract_loss(out, has_aux), get_scale()), _FunOutput(
      out
    )

  # JAX's error messages show the name.
  scaled_fun.__name__ = getattr(fun, "__name__", "fun")
  # Flax NNX uses the signature to find the positions of keyword arguments.
  scaled_fun.__signature__ = _get_signature(fun)  # type: ignore[attr-defined]
  if argnums is not None:  # Equinox's function, for one, has no argnums.
    kwargs["argnums"] = argnums
  scaled_value_and_grad = using(scaled_fun, has_aux=True, **kwargs)

  @functools.wraps(fun, updated=())
  def value_and_grad_fun(
    *args: _Args.args, **fun_kwargs: _Args.kwargs
  ) -> tuple[_Result, Any]:
    try:
      result = scaled_value_and_grad(*args, **fun_kwargs)
    except TypeError as error:
      suggestion = _suggest_value_and_grad_fn((args, fun_kwargs))
      if using is jax.value_and_grad and suggestion:
        error.add_note(
          "An argument is a model with leaves that are not floats, which"
          f" jax.value_and_grad can't differentiate. Pass using={suggestion}."
        )
      raise
    out, grads = _split_result(result, using)
    loss, *aux = out if has_aux else (out,)
    _warn_if_narrow_range(loss)
    tagged_loss = _tags.tag_value("loss", loss)
    tagged_out: Any = (tagged_loss, *aux) if has_aux else tagged_loss
    return tagged_out, _unscale_tree(grads, get_scale())

  return value_and_grad_fun


def grad(
  fun: Callable[_Args, Any],
  state: Any,
  argnums: int | Sequence[int] | None = None,
  has_aux: bool = False,
  *,
  using: Callable[..., Any] = jax.value_and_grad,
  **kwargs: Any,
) -> Callable[_Args, Any]:
  """Like :func:`jax.grad`, through a scaled loss.

  Args:
    fun: the function to differentiate; see :func:`value_and_grad`.
    state: the state that scales the loss.
    argnums: the positions of the arguments to differentiate with respect to.
      Defaults to the first one.
    has_aux: whether ``fun`` returns a pair of loss and auxiliary data.
    using: the function to differentiate with. Like :func:`jax.value_and_grad`,
      it must also return the value.
    **kwargs: further keyword arguments for ``using``.

  Returns:
    A function of the arguments of ``fun``, which returns the unscaled
    gradients, or ``(grads, aux)`` if ``has_aux``.

  Raises:
    TypeError: if the loss is not of a float dtype, ``fun`` is differentiated
      already, ``argnums`` are not integers, or ``using`` does not return the
      value in addition to the gradients.
    ValueError: if the loss is not a scalar, or ``state`` does not hold exactly
      one loss-scale state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> state = ols.DynamicLossScale().init()
    >>> print(ols.grad(lambda w: w**2, state)(jnp.float32(3.0)))
    6.0
  """
  value_and_grad_fun = value_and_grad(
    fun, state, argnums, has_aux, using=using, **kwargs
  )

  @functools.wraps(fun, updated=())
  def grad_fun(*args: _Args.args, **fun_kwargs: _Args.kwargs) -> Any:
    out, grads = value_and_grad_fun(*args, **fun_kwargs)
    return (grads, out[1]) if has_aux else grads

  return grad_fun


def _check_argnums(argnums: Any, hint: str) -> None:
  """Raise if argnums are not integers, such as arguments of the loss."""
  argnum_list = argnums if isinstance(argnums, (tuple, list)) else [argnums]
  if not all(map(_is_argnum, argnum_list)):
    raise TypeError(
      "argnums must be an integer or a sequence of integers, got"
      f" {_checks.describe_arg('argnums', argnums)}.{hint}"
    )


def _is_argnum(x: Any) -> bool:
  """Return whether x is an integer, or the nnx.DiffState of Flax NNX."""
  try:
    operator.index(x)
  except TypeError:
    # Flax NNX need not be installed, so its class is recognized by exclusion.
    is_nnx_diff_state = jax.tree_util.all_leaves([x]) and not isinstance(x, str)
    return is_nnx_diff_state and not _arrays.is_array_like(x)
  return not isinstance(x, bool)


def _warn_if_inside_multi_steps(state: Any) -> None:
  """Warn if MultiSteps accumulates gradients before they are tested."""
  is_multi_steps = lambda x: isinstance(x, optax.MultiStepsState)
  leaves = jax.tree.leaves(state, is_leaf=is_multi_steps)
  if any(is_multi_steps(x) and _state.has_loss_scale(x) for x in leaves):
    _source_info.warn_user(
      "The loss scale is inside optax.MultiSteps, which accumulates a gradient"
      " that is inf or NaN before with_loss_scaling can skip it, so every later"
      " step may be skipped. Swap them:"
      " with_loss_scaling(optax.MultiSteps(optimizer, k))."
    )


class _FunOutput(NamedTuple):
  """The output of ``fun``, passed through ``using`` as auxiliary data.

  Its type shows whether ``using`` returned the auxiliary data where
  `jax.value_and_grad` does.
  """

  out: Any


def _split_result(result: Any, using: Callable[..., Any]) -> tuple[Any, Any]:
  """Return the output of ``fun`` and the gradients of the scaled loss."""
  value, grads = result
  is_pair = isinstance(value, (tuple, list)) and len(value) == 2
  if not is_pair or not isinstance(value[1], _FunOutput):
    raise TypeError(
      "using must return the value and the gradients, also for grad, got"
      f" using = {using!r}. Pass jax.value_and_grad, nnx.value_and_grad or"
      " eqx.filter_value_and_grad."
    )
  return value[1].out, grads


def _scale_tree(loss: Any, scale: jax.Array) -> Any:
  """Multiply the float and complex leaves of a loss by the scale."""
  scale = _tags.tag_scale("scale", scale, jax.tree.leaves(loss))

  def scale_leaf(leaf: Any) -> Any:
    if not _arrays.is_inexact(leaf):
      return leaf
    dtype = _arrays.promote_to_float32(jnp.result_type(leaf))
    return _arrays.scale_by(lax.convert_element_type(leaf, dtype), scale)

  return jax.tree.map(scale_leaf, loss)


def _unscale_tree(tree: Any, scale: jax.Array) -> Any:
  """Divide the gradients in a pytree by the scale, float16 in float32."""
  grads, combine = _grads.partition_grads(tree)
  upcast_grads = [
    jnp.asarray(_arrays.upcast_to_float32(grad)) for grad in grads
  ]
  scale = _tags.tag_scale("scale", scale, upcast_grads)
  unscaled_grads = [
    _arrays.unscale_by(grad, scale)
    for grad in _add_cpu_fusion_barrier(upcast_grads)
  ]
  return combine(_tags.tag_list("unscaled", unscaled_grads))


def _add_cpu_fusion_barrier(leaves: list[jax.Array]) -> list[jax.Array]:
  """Return the leaves behind a barrier, so XLA computes them once on CPU.

  XLA's CPU compiler would repeat the end of the backward pass (a transpose and
  the cast from float16) in each kernel of the optimizer. It does not repeat the
  division that follows the barrier. The compilers for other devices may fuse.
  """
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return leaves
  return lax.platform_dependent(
    leaves,
    cpu=lambda leaves: [lax.optimization_barrier(x) for x in leaves],
    default=lambda leaves: leaves,
  )


def _get_signature(fun: Callable[..., Any]) -> inspect.Signature | None:
  try:
    return inspect.signature(fun)
  except ValueError:  # Some functions written in C have no signature.
    return None


def _call_loss_fn(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
  """Call ``fun``; marks its stack frame for the check of `scale_loss`."""
  # `_check_not_inside_value_and_grad` reads the local variable `fun`.
  return fun(*args, **kwargs)


def _check_not_inside_value_and_grad() -> None:
  """Raise if `scale_loss` is called in the loss function of `value_and_grad`.

  `check_step` names it only if both scales are inputs of the step: the scale
  of a state that the loss closes over is a constant factor.

  The call stack shows this, so no state has to be kept while tracing. The
  search ends at code of JAX's autodiff: a function that the loss itself
  differentiates, such as an inner loss, may have its own loss scale.
  """
  frame = inspect.currentframe()
  while frame and not _source_info.is_autodiff_code(frame.f_code):
    if frame.f_code is _call_loss_fn.__code__:
      fun = frame.f_locals["fun"]
      name = getattr(fun, "__name__", type(fun).__name__)
      raise RuntimeError(
        f"{name} calls scale_loss, but value_and_grad and grad of"
        " optax_lossscale already scale its loss, so the loss would be scaled"
        f" twice. Remove scale_loss from {name}. To scale the loss yourself,"
        " keep scale_loss and use jax.value_and_grad and unscale_grads."
      )
    frame = frame.f_back


def _extract_loss(out: Any, has_aux: bool) -> Any:
  """Return the loss in the output of ``fun``; raise if it is invalid."""
  if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
    is_array = _arrays.is_array_like(out)
    raise TypeError(
      "fun must return a pair (loss, aux) when has_aux=True, got"
      f" {jax.typeof(out) if is_array else type(out).__name__}. Leave out"
      " has_aux, or return (loss, aux)."
    )
  loss = out[0] if has_aux else out
  if not _arrays.is_array_like(loss):
    hint = " If fun returns a pair (loss, aux), pass has_aux=True."
    raise TypeError(
      f"fun must return a scalar loss, got {type(loss).__name__}."
      f"{'' if has_aux else hint}{_ALREADY_DIFFERENTIATED_HINT}"
    )
  shape, dtype = jnp.shape(loss), jnp.result_type(loss)
  if shape != ():
    raise ValueError(
      "fun must return a scalar loss, got a loss of shape"
      f" {shape}. Take its mean or sum.{_ALREADY_DIFFERENTIATED_HINT}"
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f"fun must return a loss of a float dtype, got a loss of {dtype}."
    )
  return loss


def _suggest_value_and_grad_fn(tree: Any) -> str | None:
  """Return the function that can differentiate a model in the tree.

  Returns None if there is no Equinox or Flax NNX model with leaves that are not
  floats.
  """
  for library, using in _VALUE_AND_GRAD_BY_LIBRARY.items():
    # If the library is not loaded, the tree holds none of its models.
    module_cls: Any = getattr(sys.modules.get(library), "Module", ())
    is_model = lambda x, cls=module_cls: isinstance(x, cls)
    for x in filter(is_model, jax.tree.leaves(tree, is_leaf=is_model)):
      if not all(map(_arrays.is_inexact, jax.tree.leaves(x))):
        return using
  return None


def _warn_if_narrow_range(loss: Any) -> None:
  """Warn if the dtype of the loss cannot represent a large scale."""
  dtype = jnp.result_type(loss)
  if not _arrays.has_narrow_range(dtype):
    return
  _source_info.warn_user(
    f"fun returns a {dtype} loss. The backward pass starts with the loss scale"
    f" in {dtype}, so the loss scale can't exceed {jnp.finfo(dtype).max}."
    " Return the loss in float32: loss.astype(jnp.float32)."
  )
