# Copyright 2026 the optax_lossscale authors. All Rights Reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ==============================================================================
"""Dynamic loss scaling for training in float16.

Gradients of at most 2**-25 round to zero in float16. The loss is therefore
multiplied by a loss scale before the backward pass, and the gradients are
divided by it afterwards. If a gradient overflows, the step is skipped and the scale
decreases; after many finite steps it increases.

References:
  Micikevicius et al, `Mixed Precision Training
  <https://arxiv.org/abs/1710.03740>`_, 2018
"""
from collections.abc import Callable
import functools
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
from optax._src import base
from optax._src import numerics
import optax.tree


class LossScaleState(NamedTuple):
  """State of a dynamic loss scale.

  Attributes:
    loss_scale: the factor that multiplies the next loss.
    finite_count: finite steps since the scale changed or a step was skipped.
    notfinite_count: consecutive skipped steps.
    last_finite: whether the last step was applied.
    total_notfinite: skipped steps since the start.
  """

  loss_scale: jax.typing.ArrayLike  # shape=(), dtype=jnp.float32
  finite_count: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32
  notfinite_count: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32
  last_finite: jax.typing.ArrayLike  # shape=(), dtype=jnp.bool_
  total_notfinite: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32


class WithLossScalingState(NamedTuple):
  """State of `with_loss_scaling`.

  Attributes:
    loss_scale_state: the state of the loss scale.
    inner_state: the state of the wrapped transformation.
  """

  loss_scale_state: LossScaleState
  inner_state: base.OptState


def with_loss_scaling(
    inner: base.GradientTransformation,
    init_scale: float = 2.0**15,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    max_scale: float = 2.0**126,
) -> base.GradientTransformationExtraArgs:
  """Skips steps with nonfinite gradients and adjusts a loss scale.

  Differentiate with :func:`scaled_value_and_grad`. In a skipped step the
  updates are -0.0, which changes no bit of a parameter, and the inner state is
  unchanged. The inner transformation receives float16 gradients and parameters
  in float32, and the updates have the dtypes of the parameters.

  Args:
    inner: the transformation to wrap, usually the whole optimizer.
    init_scale: the first loss scale.
    growth_factor: the factor on the scale after ``growth_interval`` finite
      steps.
    backoff_factor: the factor on the scale after a skipped step.
    growth_interval: the number of consecutive finite steps before the scale
      grows.
    min_scale: the lowest scale.
    max_scale: the highest scale. The reciprocal of 2**127 would be subnormal.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` whose state is a
    :class:`WithLossScalingState`.

  Raises:
    ValueError: if a factor, the interval or a scale is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from optax.contrib import scaled_value_and_grad
    >>> from optax.contrib import with_loss_scaling
    >>> def loss_fn(params, x):
    ...   half_params = params.astype(jnp.float16)
    ...   return jnp.mean((half_params * x).astype(jnp.float32) ** 2)
    >>> optimizer = with_loss_scaling(optax.sgd(0.5))
    >>> params = jnp.array([0.5, 0.25])
    >>> opt_state = optimizer.init(params)
    >>> x = jnp.array([1.0, 0.5], jnp.float16)
    >>> value_and_grad = scaled_value_and_grad(loss_fn, opt_state)
    >>> loss, grads = value_and_grad(params, x)
    >>> updates, opt_state = optimizer.update(grads, opt_state, params)
    >>> print(optax.apply_updates(params, updates))
    [0.25    0.21875]

  .. seealso:: :func:`optax.apply_if_finite`
  """
  if _is_false(growth_factor >= 1.0):
    raise ValueError(
        "growth_factor must be at least 1, got growth_factor ="
        f" {growth_factor}."
    )
  if _is_false((backoff_factor > 0.0) & (backoff_factor <= 1.0)):
    raise ValueError(
        "backoff_factor must be in the range (0, 1], got backoff_factor ="
        f" {backoff_factor}."
    )
  if _is_false(growth_interval >= 1):
    raise ValueError(
        "growth_interval must be positive, got growth_interval ="
        f" {growth_interval}."
    )
  if _is_false(
      (min_scale > 0.0) & (min_scale <= init_scale) & (init_scale <= max_scale)
  ):
    raise ValueError(
        "The scales must satisfy 0 < min_scale <= init_scale <= max_scale, got"
        f" min_scale = {min_scale}, init_scale = {init_scale} and max_scale ="
        f" {max_scale}."
    )

  inner = base.with_extra_args_support(inner)

  def init_fn(params):
    inner_state = inner.init(jax.tree.map(_upcast, params))
    return WithLossScalingState(
        LossScaleState(
            loss_scale=jnp.array(init_scale, jnp.float32),
            finite_count=jnp.zeros([], jnp.int32),
            notfinite_count=jnp.zeros([], jnp.int32),
            last_finite=jnp.ones([], jnp.bool_),
            total_notfinite=jnp.zeros([], jnp.int32),
        ),
        inner_state,
    )

  def update_fn(updates, state, params=None, **extra_args):
    scale_state, inner_state = state
    finite = _all_finite(updates)
    # The inner update also runs in a skipped step. A line search or a matrix
    # decomposition could fail on a NaN, so it receives zeros.
    updates = jax.tree.map(
        lambda g: jnp.where(finite, _upcast(g), 0)
        if _is_inexact(g)
        else g,
        updates,
    )
    new_updates, new_inner_state = inner.update(
        updates, inner_state, jax.tree.map(_upcast, params), **extra_args
    )
    new_inner_state = jax.tree.map(
        functools.partial(_select, finite), new_inner_state, inner_state
    )
    if params is not None:
      new_updates = jax.tree.map(
          lambda u, p: u.astype(jnp.result_type(p)), new_updates, params
      )
    # Adding -0.0 keeps the sign of a parameter that is zero.
    new_updates = jax.tree.map(
        lambda u: jnp.where(finite, u, -jnp.zeros_like(u))
        if _is_inexact(u)
        else u,
        new_updates,
    )
    return new_updates, WithLossScalingState(
        adjust(scale_state, finite), new_inner_state
    )

  def adjust(state, finite):
    finite_count = jnp.where(
        finite, numerics.safe_increment(state.finite_count), 0
    )
    # Not `==`, since the count of a restored state may exceed the interval.
    grow = finite_count >= growth_interval
    factor = jnp.where(grow, jnp.float32(growth_factor), jnp.float32(1))
    factor = jnp.where(finite, factor, jnp.float32(backoff_factor))
    return LossScaleState(
        loss_scale=jnp.clip(
            state.loss_scale * factor,
            jnp.float32(min_scale),
            jnp.float32(max_scale),
        ),
        finite_count=jnp.where(grow, 0, finite_count),
        notfinite_count=jnp.where(
            finite, 0, numerics.safe_increment(state.notfinite_count)
        ),
        last_finite=finite,
        total_notfinite=jnp.where(
            finite,
            state.total_notfinite,
            numerics.safe_increment(state.total_notfinite),
        ),
    )

  return base.GradientTransformationExtraArgs(init_fn, update_fn)


def scaled_value_and_grad(
    fun: Callable[..., Any],
    state: base.OptState,
    has_aux: bool = False,
    value_and_grad: Optional[Callable[..., Any]] = None,
    **kwargs: Any,
) -> Callable[..., Any]:
  """Like :func:`jax.value_and_grad`, through a scaled loss.

  Args:
    fun: a function that returns a scalar loss, or a pair of a loss and
      auxiliary data if ``has_aux``.
    state: the state of :func:`with_loss_scaling`, or a state that contains it,
      such as the state of :func:`optax.chain`.
    has_aux: whether ``fun`` also returns auxiliary data.
    value_and_grad: the function to differentiate with. Defaults to
      :func:`jax.value_and_grad`.
    **kwargs: further arguments of ``value_and_grad``, such as ``argnums``.

  Returns:
    A function of the arguments of ``fun``. It returns the loss, which is not
    scaled, and the unscaled gradients; those of float16 parameters are float32.

  Raises:
    ValueError: if ``state`` contains no state of :func:`with_loss_scaling`.
    KeyError: if it contains several.
  """
  # Not "loss_scale", which may also be the name of a parameter.
  scale_state = optax.tree.get(state, "LossScaleState")
  if scale_state is None:
    raise ValueError(
        "scaled_value_and_grad requires the state of with_loss_scaling, got"
        f" state = {state}."
    )
  loss_scale = scale_state.loss_scale
  value_and_grad = value_and_grad or jax.value_and_grad

  def scaled_fun(*args, **fun_kwargs):
    out = fun(*args, **fun_kwargs)
    loss = out[0] if has_aux else out
    # The scale may exceed the range of float16.
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * (
        loss_scale
    ), out

  scaled_fn = value_and_grad(scaled_fun, has_aux=True, **kwargs)

  def unscaled_fn(*args, **fun_kwargs):
    (_, out), grads = scaled_fn(*args, **fun_kwargs)
    unscale = functools.partial(_unscale, loss_scale=loss_scale)
    return out, jax.tree.map(unscale, grads)

  return unscaled_fn


def _is_false(condition: Any) -> bool:
  """Whether a condition fails; settings of `inject_hyperparams` are traced."""
  return not isinstance(condition, jax.core.Tracer) and not condition


def _is_inexact(x: Any) -> bool:
  return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _upcast(x: Any) -> Any:
  """Casts float16 and float8 to float32; bfloat16 has the range of float32."""
  if not _is_inexact(x):
    return x
  dtype = jnp.result_type(x)
  is_narrow = jnp.finfo(dtype).bits <= 16 and dtype != jnp.bfloat16
  return jnp.asarray(x, jnp.float32) if is_narrow else x


def _unscale(x: jax.Array, loss_scale: jax.Array) -> jax.Array:
  """Divides by the scale, bfloat16 in float32 so that no scale is rounded."""
  if jnp.iscomplexobj(x):
    # A complex division would spread an inf to the other part as a NaN.
    return jax.lax.complex(
        _unscale(x.real, loss_scale), _unscale(x.imag, loss_scale)
    )
  x = _upcast(x)
  wide_dtype = jnp.promote_types(x.dtype, jnp.float32)
  unscaled = x.astype(wide_dtype) / loss_scale.astype(wide_dtype)
  return unscaled.astype(x.dtype)


def _all_finite(tree: Any) -> jax.Array:
  leaves = [x for x in jax.tree.leaves(tree) if _is_inexact(x)]
  flags = [jnp.all(jnp.isfinite(x)) for x in leaves]
  return jnp.all(jnp.array(flags)) if flags else jnp.array(True)


def _select(finite: jax.Array, new: Any, old: Any) -> Any:
  if jnp.issubdtype(jnp.result_type(old), jax.dtypes.prng_key):
    # A step may use the key again if the previous one was skipped. The clones
    # allow it if JAX checks the reuse of keys.
    selected = jax.lax.select(finite, new, jax.random.clone(old))
    return jax.random.clone(selected)
  return jnp.where(finite, jnp.asarray(new, jnp.result_type(old)), old)
