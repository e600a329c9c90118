"""``with_loss_scaling``: loss scaling as an Optax gradient transformation."""

from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale import (
  _arrays,
  _axes,
  _checks,
  _grad_stats,
  _grads,
  _master_weights,
  _policies,
  _select,
  _state,
  _tags,
)
from optax_lossscale._jaxprs import _provenance


class WithLossScalingState(NamedTuple):
  """The state of :func:`with_loss_scaling`.

  Attributes:
    loss_scale_state: the :class:`LossScaleState`.
    inner_state: the state of the wrapped optimizer.

  Examples:
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
    >>> opt_state = tx.init({"w": 1.0})
    >>> print(opt_state.loss_scale_state.loss_scale)
    32768.0
  """

  loss_scale_state: _state.LossScaleState
  inner_state: Any

  def __getattr__(self, name: str) -> NoReturn:
    _master_weights.raise_missing_attribute(self, name)


def with_loss_scaling(
  inner: optax.GradientTransformation | optax.MultiSteps,
  loss_scale: _policies.PolicyLike = "dynamic",
  *,
  axis_name: _axes.AxisName | None = None,
  max_norm: jax.typing.ArrayLike | None = None,
  grads_are_scaled: bool = False,
  check_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer: skips nonfinite steps and adjusts the loss scale.

  Differentiate with :func:`~optax_lossscale.value_and_grad`, and pass the
  gradients to ``update``. If they hold an inf or a NaN, the step is skipped,
  and only the loss-scale state changes: the updates are -0.0, which changes no
  bit of a parameter, and the inner state is kept. Nothing is read back to the
  host. On CPU any sum may make a subnormal parameter zero;
  :func:`~optax_lossscale.select_if_applied` preserves subnormal parameters,
  too.

  Wrap the whole chain. Clipping outside could hide an overflow, and weight
  decay outside would act on a skipped step.

  ``update`` takes two extra arguments, and passes all others to ``inner``:

  * ``grads_finite``: pass False to skip the step and decrease the scale, as
    after an overflow, for example if you detected an overflow yourself. A bool,
    or a number (0 and NaN count as False). For a condition that has nothing to
    do with the scale, wrap :func:`optax.transforms.conditionally_mask` instead.
  * ``grads_amax``: the largest unscaled magnitude in the backward pass, a
    number, for a policy such as :class:`~optax_lossscale.HeadroomLossScale`.
    The policy receives ``grads_amax`` or the largest gradient, whichever is
    larger. A NaN is ignored.

  :func:`~optax_lossscale.diagnostics.probe_update_kwargs` returns both, from
  the counts of probes.

  ``inner`` receives float16 and float8 gradients and parameters in float32, in
  ``init`` and in ``update``. The updates are returned in the dtypes of the
  parameters.

  Args:
    inner: the optimizer to wrap.
    loss_scale: a policy; ``"dynamic"`` or ``"headroom"``, for
      :class:`~optax_lossscale.DynamicLossScale` or
      :class:`~optax_lossscale.HeadroomLossScale` with its defaults; or a number
      for a fixed scale.
    axis_name: the axis of ``pmap`` or ``shard_map``, or a tuple of axes, whose
      devices skip a step together: if one device overflows, all skip. Not
      needed under sharded ``jit``.
    max_norm: the largest global norm, a float32 scalar in units of the unscaled
      gradients. Gradients with a larger norm are scaled down to it, as by
      :func:`optax.clip_by_global_norm`, but in the same pass that tests them.
      Around :class:`optax.MultiSteps` this clips each micro-batch. To clip
      their mean, put :func:`optax.clip_by_global_norm` inside of
      ``MultiSteps``. A norm above 1.8e19 (of the scaled gradients, if
      ``grads_are_scaled``) can't be squared in float32, and counts as an
      overflow. Together with ``axis_name`` it requires ``shard_map`` with
      ``check_vma=True``, which distinguishes sharded from replicated gradients.
    grads_are_scaled: whether ``update`` receives gradients of the scaled loss
      and unscales them.
    check_updates: whether an inf or a NaN in the updates of ``inner`` counts as
      an overflow, too.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` whose state is a
    :class:`WithLossScalingState`.

  Raises:
    TypeError: if an argument is of the wrong type.
    NameError: in ``update``, if ``axis_name`` is no mapped axis.
    ValueError: if an argument is out of range; in ``init``, if ``inner``
      scales losses already, or has master weights; in ``update``, if
      ``max_norm`` can't distinguish sharded from replicated gradients.

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
  inner = _with_float32_params(_as_transformation(inner))
  policy = _policies.as_policy(loss_scale)
  if max_norm is not None:
    # The bounds are the smallest and the largest normal power of two.
    _checks.check_number("max_norm", max_norm, 2.0**-126, 2.0**127)

  grads_tag_kind: _tags.TagKind = (
    "scaled_grads" if grads_are_scaled else "grads"
  )
  is_fixed = isinstance(policy, _policies.FixedLossScale)
  scale_tag_kind: _tags.TagKind = (
    "fixed_update_scale" if is_fixed else "update_scale"
  )
  lowest_scale, _ = _policies.get_scale_bounds(policy)

  def init_fn(params: Any) -> WithLossScalingState:
    inner_state = inner.init(params)
    _check_inner_state(inner_state)
    return WithLossScalingState(policy.init(), inner_state)

  def update_fn(
    updates: Any,
    state: WithLossScalingState,
    params: Any = None,
    *,
    grads_finite: jax.typing.ArrayLike = True,
    grads_amax: jax.typing.ArrayLike | None = None,
    **extra_args: Any,
  ) -> tuple[Any, WithLossScalingState]:
    _check_state(state)
    _check_updates(updates, params)
    scale_state, inner_state = state
    # Tag the scale before the gradients: reports match the gradients of an
    # update with the scale whose tag precedes theirs.
    loss_scale = _tags.tag_scale(
      scale_tag_kind,
      scale_state.loss_scale,
      jax.tree.leaves(updates),
      path="" if lowest_scale is None else str(lowest_scale),
    )
    grads, combine = _grads.partition_grads(
      _tags.tag_tree(grads_tag_kind, updates)
    )
    stats = _grad_stats.measure_grads(
      grads,
      grads_finite=grads_finite,
      grads_amax=grads_amax,
      needs_amax=_policies.uses_grads_amax(policy),
      loss_scale=loss_scale if grads_are_scaled else None,
      max_norm=max_norm,
      axis_name=axis_name,
    )
    stats = stats._replace(finite=_tags.tag_value("applied", stats.finite))
    # The inner update also runs in a skipped step. It receives zeros, because a
    # line search may fail on a NaN, and jax_debug_nans raises an error.
    grads = combine([_grad_stats.unscale_or_zero(x, stats) for x in grads])
    finite = stats.finite
    if check_updates:
      # Whether the step is applied depends on the updates, so the state can be
      # selected only after the inner update.
      with jax.named_scope(_provenance.OPTIMIZER_SCOPE):
        inner_updates, candidate_inner_state = inner.update(
          grads, inner_state, params, **extra_args
        )
      inner_updates = _tags.tag_tree("updates", inner_updates)
      update_grads, _ = _grads.partition_grads(inner_updates)
      finite &= _axes.all_reduce_and(
        _grads.all_finite_by_sum(update_grads), axis_name
      )
      new_inner_state = _select.select_state(
        finite, candidate_inner_state, inner_state
      )
    else:
      with jax.named_scope(_provenance.OPTIMIZER_SCOPE):
        inner_updates, new_inner_state = _select.update_with_selects(
          inner.update, finite, grads, inner_state, params, **extra_args
        )
    new_scale_state = policy.adjust(scale_state, finite, grads_amax=stats.amax)
    masked_updates = _tags.tag_tree(
      "masked_updates", _mask_updates(finite, inner_updates)
    )
    return masked_updates, WithLossScalingState(
      _tag_new_state(new_scale_state, finite), new_inner_state
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _tag_new_state(
  state: _state.LossScaleState, finite: jax.Array
) -> _state.LossScaleState:
  """Tag the fields by which reports recognize the state after an update."""
  return state._replace(
    loss_scale=_tags.tag_scale("new_scale", state.loss_scale, [finite]),
    total_notfinite=_tags.tag_value("new_skip_count", state.total_notfinite),
  )


def _with_float32_params(
  inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer to receive float16 and float8 parameters in float32.

  The updates are returned in the dtypes of the parameters.
  """

  def init_fn(params: Any) -> Any:
    state = inner.init(jax.tree.map(_arrays.upcast_to_float32, params))
    # Remove weak types, which would make `jit` trace the second step again.
    return jax.tree.map(_arrays.cast_like, state, state)

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    float32_params = jax.tree.map(_arrays.upcast_to_float32, params)
    inner_updates, new_state = inner.update(
      updates, state, float32_params, **extra_args
    )
    # Before the cast, in which small updates of float16 parameters become zero.
    inner_updates = _tags.tag_tree("new_updates", inner_updates)
    return _cast_updates_like(inner_updates, params), new_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_transformation(
  inner: Any,
) -> optax.GradientTransformationExtraArgs:
  """Convert ``inner`` to a transformation; raise if it isn't an optimizer."""
  if isinstance(inner, optax.MultiSteps):
    # Not inner.gradient_transformation(), whose `update` takes no extra
    # arguments.
    inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
  has_methods = callable(getattr(inner, "init", None)) and callable(
    getattr(inner, "update", None)
  )
  if isinstance(inner, type) or not has_methods:
    hint = " Call it to create the optimizer." if callable(inner) else ""
    raise TypeError(
      "inner must be an optimizer such as optax.adam(1e-3), got"
      f" {_checks.describe_arg('inner', inner)}.{hint}"
    )
  if not isinstance(inner, optax.GradientTransformation):
    inner = optax.GradientTransformation(inner.init, inner.update)
  return optax.with_extra_args_support(inner)


def _check_inner_state(inner_state: Any) -> None:
  """Raise if the inner optimizer scales losses, or has master weights."""
  if _state.has_loss_scale(inner_state):
    raise ValueError(
      "inner must be an optimizer without loss scaling, got an optimizer whose"
      " state already holds a loss scale. Call with_loss_scaling only once, as"
      " the outermost wrapper."
    )
  if _master_weights.find_master_weights_states(inner_state):
    # Its updates would be rounded to the dtypes of the parameters.
    raise ValueError(
      "inner must be an optimizer without master weights, got an optimizer"
      " whose state holds a MasterWeightsState. Use"
      " with_master_weights(with_loss_scaling(optimizer))."
    )


def _check_state(state: Any) -> None:
  """Raise unless ``state`` is the state of `with_loss_scaling`."""
  if isinstance(state, WithLossScalingState):
    return
  if _state.has_loss_scale(state):
    advice = (
      "that holds a loss scale. If the state comes from a checkpoint, restore"
      " it into the structure of tx.init(params): pass tx.init(params) to"
      " Orbax's restore, or call"
      " flax.serialization.from_state_dict(tx.init(params), state). If the"
      " WithLossScalingState is part of a larger state, pass only that part."
    )
  else:
    advice = (
      "without a loss scale. To continue from a state of the bare optimizer,"
      " use tx.init(params)._replace(inner_state=state)."
    )
  raise TypeError(
    "update takes a WithLossScalingState, as init returns it, got a"
    f" {type(state).__name__} {advice}"
  )


def _check_updates(updates: Any, params: Any) -> None:
  """Raise if the gradients are in the pair that `value_and_grad` returns."""
  is_pair = isinstance(updates, tuple) and len(updates) == 2
  structure: Any = jax.tree.structure(params)
  if (
    is_pair
    and params is not None
    and structure == jax.tree.structure(updates[1])
    and structure != jax.tree.structure(updates)
  ):
    raise TypeError(
      "update takes the gradients, got a pair whose second item has the"
      " structure of params, such as the (loss, grads) of value_and_grad. Write"
      " loss, grads = value_and_grad(loss_fn, opt_state)(params, batch), and"
      " pass grads."
    )


def _cast_updates_like(updates: Any, params: Any) -> Any:
  """Cast the updates to the dtypes of the parameters, if there are any."""
  if params is None:
    return updates

  def cast_leaf(path: Any, update: Any, param: Any) -> Any:
    if not _grads.is_grad(path, update) or not _arrays.is_inexact(param):
      return update
    update, dtype = jnp.asarray(update), jnp.result_type(param)
    is_same_field = _arrays.is_complex(dtype) == _arrays.is_complex(
      update.dtype
    )
    return update.astype(dtype) if is_same_field else update

  # The updates may hold None or MaskedNode where the parameters have a leaf.
  is_leaf = lambda x: x is None or isinstance(x, optax.MaskedNode)
  return jax.tree_util.tree_map_with_path(
    cast_leaf, updates, params, is_leaf=is_leaf
  )


def _mask_updates(finite: jax.Array, updates: Any) -> Any:
  """Return the updates if ``finite``, else updates that change no parameter.

  The latter are 0 for integers and -0.0 for floats: adding -0.0 keeps the sign
  of 0.0 and of -0.0, but -0.0 + 0.0 is 0.0. Leaves that are not added to a
  parameter are returned unchanged. (If XLA flushes subnormal numbers, no update
  can preserve a subnormal parameter, since any sum is flushed.)
  """

  def mask_leaf(path: Any, update: Any) -> Any:
    if not _arrays.is_array_like(update) or _grads.is_fp8_stat(path):
      return update
    update = jnp.asarray(update)
    if _arrays.is_inexact(update):
      noop_update = _negative_zeros_like(update)
    elif jnp.issubdtype(update.dtype, jnp.integer):
      noop_update = jnp.zeros_like(update)
    else:
      return update
    return lax.select(finite, update, noop_update)

  return jax.tree_util.tree_map_with_path(mask_leaf, updates)


def _negative_zeros_like(x: jax.Array) -> jax.Array:
  if _arrays.is_complex(x.dtype):
    return lax.complex(
      _negative_zeros_like(x.real), _negative_zeros_like(x.imag)
    )
  return lax.full_like(x, -0.0)
