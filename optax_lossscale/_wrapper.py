"""``with_loss_scaling``: the loss scaler as an Optax transformation."""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale import (
  _axes,
  _grads,
  _policies,
  _probes,
  _select,
  _state,
  _updates,
)


class LossScalingState(NamedTuple):
  """The state of :func:`with_loss_scaling`.

  Attributes:
    loss_scale_state: the :class:`LossScaleState`.
    inner_state: the state of the wrapped optimizer.
  """

  loss_scale_state: _state.LossScaleState
  inner_state: Any


def with_loss_scaling(
  inner: optax.GradientTransformation,
  loss_scale: _policies.LossScale | jax.typing.ArrayLike | str = "dynamic",
  *,
  axis_name: _axes.AxisName | None = None,
  max_norm: jax.typing.ArrayLike | None = None,
  grads_are_scaled: bool = False,
  skip_nonfinite: bool = True,
  check_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer in loss scaling: skips bad steps, moves the scale.

  Differentiate with :func:`~optax_lossscale.value_and_grad`, and give
  ``update`` what it returns. A step whose gradients hold an inf or a NaN
  changes nothing but the loss-scale state: its updates are -0.0, which added
  to a parameter changes no bit of it, and the inner state is kept. Nothing is
  read back to the host. On CPU a sum may make a subnormal parameter zero,
  whatever is added; :func:`~optax_lossscale.select_if_finite` keeps those, too.

  Wrap the whole chain: clipping or weight decay outside would hide an overflow
  or act on a skipped step.

  Two extra arguments of ``update`` are its own, all others go to ``inner``:
  ``grads_finite``, further evidence of whether the backward pass overflowed,
  and ``cotangents``, a pytree of what :func:`~optax_lossscale.probe` counted.
  ``grads_finite`` is a bool, or a number that counts by its truth (a NaN as
  false). If it is false, the step is skipped and the scale is lowered, as by an
  overflow. For a condition that has nothing to do with the scale, wrap
  :func:`optax.transforms.conditionally_mask`, which leaves the scale alone.
  An inf or a NaN among these counts as one among the gradients, even where none
  arrives at them: what cut it off on its way may have cut off more. Their
  largest magnitude counts as one of a gradient.

  float16 and float8 gradients and parameters are float32 inside ``inner``, in
  ``init`` and ``update`` alike; updates come back in the dtypes of the
  parameters.

  Args:
    inner: the optimizer to wrap.
    loss_scale: a policy such as :class:`~optax_lossscale.DynamicLossScale`;
      ``"dynamic"`` for that with its defaults; or a number for a fixed scale.
    axis_name: the axis of ``pmap`` or ``shard_map``, or a tuple of axes, over
      which the step is decided together: one device's overflow makes all skip.
      Not needed under sharded ``jit``.
    max_norm: if given, gradients whose global norm is larger are scaled down
      to it, as :func:`optax.clip_by_global_norm` does, but in the same pass
      that tests them; float32 scalar, in units of the unscaled gradients. A
      norm above 1.8e19 (with the scale in it, if ``grads_are_scaled``) cannot
      be squared in float32, and counts as an overflow. With ``axis_name`` it
      needs ``shard_map`` with ``check_vma=True``, which alone tells gradients
      that are shards from those that every device holds whole.
    grads_are_scaled: whether ``update`` is given gradients of the scaled loss,
      which it then unscales.
    skip_nonfinite: if False, the gradients are not tested and every step is
      applied. For a fixed scale only.
    check_updates: if True, an inf or a NaN that ``inner`` produced counts as an
      overflow, too.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` whose state is a
    :class:`LossScalingState`.

  Raises:
    TypeError: if an argument is of the wrong type.
    ValueError: if an argument is out of range; in ``init``, if ``inner``
      scales losses already; in ``update``, if ``max_norm`` cannot be known to
      be that of the whole.

  Examples:
    >>> import jax, optax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def loss_fn(w, x):
    ...   return jnp.mean((w.astype(jnp.float16) * x).astype(jnp.float32) ** 2)
    >>> tx = ols.with_loss_scaling(optax.sgd(0.5))
    >>> w = jnp.array([0.5, 0.25])
    >>> opt_state = tx.init(w)
    >>> x = jnp.array([1.0, 0.5], jnp.float16)
    >>> loss, grad = ols.value_and_grad(loss_fn, opt_state)(w, x)
    >>> updates, opt_state = tx.update(grad, opt_state, w)
    >>> print(loss, optax.apply_updates(w, updates))
    0.1328125 [0.25    0.21875]

  References:
    Micikevicius et al, `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018
  """
  inner = _as_transformation(inner)
  policy = _policies.as_policy(loss_scale)
  _check_options(policy, max_norm, skip_nonfinite, check_updates)

  def init_fn(params):
    inner_state = inner.init(jax.tree.map(_grads.widen, params))
    if _state.holds_loss_scale(inner_state):
      raise ValueError(
        "inner must be an optimizer without loss scaling, got one whose state"
        " holds a loss scale already. Wrap it once, and outermost."
      )
    return LossScalingState(policy.init(), jax.tree.map(_strong, inner_state))

  def update_fn(
    updates,
    state,
    params=None,
    *,
    grads_finite=True,
    cotangents=None,
    **extra_args,
  ):
    _check_state(state)
    grads_finite = _as_flag("grads_finite", grads_finite)
    scale_state, inner_state = state
    unscale = 1 / scale_state.loss_scale if grads_are_scaled else None

    finite, amax, factor = _measure(updates, unscale, max_norm, axis_name)
    finite, amax = _probes.fold(
      cotangents, scale_state.loss_scale, finite, amax
    )
    finite = _axes.all_agree(finite & grads_finite, axis_name)
    amax = _axes.maximum(amax, axis_name)
    if not skip_nonfinite:
      finite = jnp.bool_(True)

    grads = _grads.map_grads(
      lambda leaf: _zero_unless(finite, leaf, factor), updates
    )
    wide_params = jax.tree.map(_grads.widen, params)
    args = grads, inner_state, wide_params
    if check_updates:
      new_updates, new_inner_state = inner.update(*args, **extra_args)
      new_updates = _updates.cast_like(new_updates, params)
      finite &= _axes.all_agree(_grads.sum_is_finite(new_updates), axis_name)
      new_inner_state = _select.keep(finite, new_inner_state, inner_state)
    else:
      new_updates, new_inner_state = _select.update_or_keep(
        inner.update, finite, *args, **extra_args
      )
      new_updates = _updates.cast_like(new_updates, params)

    new_scale_state = policy.adjust(scale_state, finite, grads_amax=amax)
    return _updates.nothing_unless(finite, new_updates), LossScalingState(
      new_scale_state, new_inner_state
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _measure(grads, unscale, max_norm, axis_name):
  """What one pass over the gradients, as they arrive, tells.

  Args:
    grads: the gradients, true or scaled.
    unscale: float32[] by which scaled ones become true ones; None for true.
    max_norm: the largest norm allowed, or None.
    axis_name: the axes over which the norm is taken, or None.

  Returns:
    Whether those of this device are finite once they are true; the largest
    magnitude of its true ones; and the float32[] to multiply the gradients by,
    or None.
  """
  amax = _grads.largest_magnitude(grads)
  if unscale is not None:
    amax *= unscale
  if max_norm is None:
    return _grads.sum_is_finite(grads, unscale), amax, unscale
  norm = _axes.global_norm(grads, axis_name)
  if unscale is not None:
    norm *= unscale
  max_norm = lax.convert_element_type(max_norm, jnp.float32)
  factor = jnp.where(norm > max_norm, max_norm / norm, jnp.float32(1))
  if unscale is not None:
    factor *= unscale
  # A scale below 1 may unscale what is finite to inf.
  return norm <= _grads.LARGEST_GRAD, amax, factor


def _zero_unless(finite, grad, factor):
  """The widened gradient times the factor; zeros unless finite."""
  grad = jnp.asarray(_grads.widen(grad))
  if factor is not None:
    grad = _grads.times(grad, factor)
  return lax.select(finite, grad, jnp.zeros_like(grad))


def _strong(leaf):
  """A leaf without weak type, so that the second step does not trace again."""
  if not _state.is_array(leaf):
    return leaf
  return _state.cast(leaf, jnp.result_type(leaf))


def _as_flag(name, value):
  """A bool, or a number by its truth; a NaN is no answer, and false."""
  rule = f"{name} must be one bool or number, true if the gradients are finite"
  remedy = "Reduce several with jnp.all; leave it out if you have none."
  if not _state.is_array(value):
    raise TypeError(f"{rule}, got {name} = {value!r}. {remedy}")
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    raise TypeError(f"{rule}, got {name} of dtype {dtype}. {remedy}")
  if shape:
    raise ValueError(f"{rule}, got {name} of shape {shape}. {remedy}")
  value = jnp.asarray(value)
  if jnp.issubdtype(dtype, jnp.bool_):
    return value
  return (value != 0) & (value == value)


def _as_transformation(inner):
  if isinstance(inner, optax.MultiSteps):
    # Its gradient_transformation() hides that `update` takes extra arguments.
    inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
  has_methods = callable(getattr(inner, "init", None)) and callable(
    getattr(inner, "update", None)
  )
  if isinstance(inner, type) or not has_methods:
    hint = " Call it to make one." if callable(inner) else ""
    raise TypeError(
      "inner must be an optimizer such as optax.adam(1e-3), got inner ="
      f" {inner!r}.{hint}"
    )
  if not isinstance(inner, optax.GradientTransformation):
    inner = optax.GradientTransformation(inner.init, inner.update)
  return optax.with_extra_args_support(inner)


def _check_options(policy, max_norm, skip_nonfinite, check_updates):
  if max_norm is not None:
    # The largest and the smallest normal float32.
    _state.check_number("max_norm", max_norm, 2.0**-126, 2.0**127)
  if skip_nonfinite:
    return
  if not isinstance(policy, _policies.FixedLossScale):
    raise ValueError(
      "skip_nonfinite=False goes with a fixed scale only, got loss_scale ="
      f" {policy!r}. A scale that moves does so by the steps it skips."
    )
  if check_updates:
    raise ValueError(
      "check_updates must be False if skip_nonfinite is, got"
      " check_updates = True."
    )


def _check_state(state):
  if isinstance(state, LossScalingState):
    return
  if _state.holds_loss_scale(state):
    advice = (
      "with a loss scale in it. If it was read from a checkpoint, read it into"
      " the structure of tx.init(params): give that to Orbax's restore, or to"
      " flax.serialization.from_state_dict(tx.init(params), state). If it is a"
      " larger state, give the LossScalingState that it holds."
    )
  else:
    advice = (
      "without a loss scale. To go on from a state of the bare optimizer, use"
      " tx.init(params)._replace(inner_state=state)."
    )
  raise TypeError(
    "update must be given a LossScalingState, as init returns it, got a"
    f" {type(state).__name__} {advice}"
  )
