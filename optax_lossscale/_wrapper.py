"""``with_loss_scaling``: the loss scaler as an Optax transformation."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale import (
  _arrays,
  _axes,
  _checks,
  _grads,
  _measurement,
  _named_values,
  _policies,
  _select,
  _state,
)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


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


def _without_options(
  fun: Callable[_Args, _Result],
) -> Callable[_Args, _Result]:
  """The same function, which says where the options of a policy belong."""

  @functools.wraps(fun)
  def called(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    _policies.refuse_options(kwargs)
    return fun(*args, **kwargs)

  return called


@_without_options
def with_loss_scaling(
  inner: optax.GradientTransformation | optax.MultiSteps,
  loss_scale: _policies.PolicyLike = "dynamic",
  *,
  axis_name: _axes.AxisName | None = None,
  max_norm: jax.typing.ArrayLike | None = None,
  grads_are_scaled: bool = False,
  check_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer in loss scaling: skips bad steps, moves the scale.

  Differentiate with :func:`~optax_lossscale.value_and_grad`, and give
  ``update`` the gradients that it returns. If they hold an inf or a NaN, the
  step is skipped, and only the loss-scale state changes: the updates are -0.0,
  which changes no bit of a parameter, and the inner state is kept. Nothing is
  read back to the host. On CPU any sum may make a subnormal parameter zero;
  :func:`~optax_lossscale.select_if_finite` keeps these, too.

  Wrap the whole chain. Clipping outside could hide an overflow, and weight
  decay outside would act on a skipped step.

  ``update`` takes two extra arguments of its own, and passes all others to
  ``inner``:

  * ``grads_finite`` is further evidence of whether the backward pass
    overflowed: a bool, or a number that is false if it is 0 or NaN. If it is
    false, the step is skipped and the scale is lowered, as after an overflow.
    For a condition that has nothing to do with the scale, wrap
    :func:`optax.transforms.conditionally_mask` instead.
  * ``grads_amax`` is the largest magnitude in the backward pass, without the
    loss scale: a number, for a policy such as
    :class:`~optax_lossscale.HeadroomLossScale`. The policy is given this or the
    largest gradient, whichever is larger. A NaN is ignored.

  :func:`~optax_lossscale.diagnostics.probe_update_kwargs` returns both, from
  what probes have counted.

  ``inner`` is given float32 in place of float16 and float8 gradients and
  parameters, in ``init`` as in ``update``. The updates are returned in the
  dtypes of the parameters.

  Args:
    inner: the optimizer to wrap.
    loss_scale: a policy; ``"dynamic"`` or ``"headroom"``, for
      :class:`~optax_lossscale.DynamicLossScale` or
      :class:`~optax_lossscale.HeadroomLossScale` with its defaults; or a number
      for a fixed scale.
    axis_name: the axis of ``pmap`` or ``shard_map``, or a tuple of axes, over
      which the step is decided together: if one device overflows, all skip. Not
      needed under sharded ``jit``.
    max_norm: if given, gradients whose global norm is larger are scaled down
      to it, as :func:`optax.clip_by_global_norm` does, but in the same pass
      that tests them; float32 scalar, in units of the unscaled gradients. A
      norm above 1.8e19 (with the scale in it, if ``grads_are_scaled``) cannot
      be squared in float32, and counts as an overflow. Together with
      ``axis_name`` it needs ``shard_map`` with ``check_vma=True``, since only
      this tells gradients that are shards from gradients that are whole on
      every device.
    grads_are_scaled: whether ``update`` is given gradients of the scaled loss,
      which it then unscales.
    check_updates: whether an inf or a NaN in the updates that ``inner``
      computed counts as an overflow, too.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` whose state is a
    :class:`WithLossScalingState`.

  Raises:
    TypeError: if an argument is of the wrong type.
    ValueError: if an argument is out of range; in ``init``, if ``inner``
      scales losses already; in ``update``, if it cannot be known which
      gradients are shards and ``max_norm`` needs it.

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
  inner = _on_float32(_as_transformation(inner))
  policy = _policies.as_policy(loss_scale)
  if max_norm is not None:
    # The smallest and the largest power of two that are normal in float32.
    _checks.check_number("max_norm", max_norm, 2.0**-126, 2.0**127)

  kind: _named_values.Kind = "scaled_grads" if grads_are_scaled else "grads"
  is_fixed = isinstance(policy, _policies.FixedLossScale)
  scale_kind: _named_values.Kind = (
    "fixed_update_scale" if is_fixed else "update_scale"
  )

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
    scale_state, inner_state = state
    # Ahead of the gradients, so that the tag says whose gradients follow.
    loss_scale = _named_values.marked_scale(
      scale_kind, scale_state.loss_scale, jax.tree.leaves(updates)
    )
    grads, put_back = _grads.split(_named_values.marked_tree(kind, updates))
    found = _measurement.measure(
      grads,
      _measurement.Evidence(grads_finite, grads_amax),
      loss_scale=loss_scale if grads_are_scaled else None,
      max_norm=max_norm,
      axis_name=axis_name,
    )
    found = found._replace(finite=_named_values.marked("applied", found.finite))
    grads = put_back([_measurement.true_or_zeros(x, found) for x in grads])
    finite = found.finite
    if check_updates:
      made, made_state = inner.update(grads, inner_state, params, **extra_args)
      made = _named_values.marked_tree("updates", made)
      inexact, _ = _grads.split(made)
      finite &= _axes.all_agree(_grads.sum_is_finite(inexact), axis_name)
      kept_state = _select.keep_unless(finite, made_state, inner_state)
    else:
      made, kept_state = _select.update_or_keep(
        inner.update, finite, grads, inner_state, params, **extra_args
      )
    adjusted = policy.adjust(scale_state, finite, grads_amax=found.amax)
    applied = _nothing_unless(finite, made)
    return applied, WithLossScalingState(adjusted, kept_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _on_float32(
  inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer that is given float32 in place of narrow parameters.

  Its updates are in the dtypes of the parameters. Its first state has no weak
  types, so that the second step does not trace again.
  """

  def init_fn(params: Any) -> Any:
    state = inner.init(jax.tree.map(_arrays.widen, params))
    return jax.tree.map(_arrays.cast_like, state, state)

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    wide = jax.tree.map(_arrays.widen, params)
    made, new_state = inner.update(updates, state, wide, **extra_args)
    return _cast_like(made, params), new_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_transformation(
  inner: Any,
) -> optax.GradientTransformationExtraArgs:
  if isinstance(inner, optax.MultiSteps):
    # Its gradient_transformation() hides that `update` takes extra arguments.
    inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
  has_methods = callable(getattr(inner, "init", None)) and callable(
    getattr(inner, "update", None)
  )
  if isinstance(inner, type) or not has_methods:
    hint = " Call it to create the optimizer." if callable(inner) else ""
    raise TypeError(
      "inner must be an optimizer such as optax.adam(1e-3), got"
      f" {_checks.came('inner', inner)}.{hint}"
    )
  if not isinstance(inner, optax.GradientTransformation):
    inner = optax.GradientTransformation(inner.init, inner.update)
  return optax.with_extra_args_support(inner)


def _check_inner_state(inner_state: Any) -> None:
  if _state.holds_loss_scale(inner_state):
    raise ValueError(
      "inner must be an optimizer without loss scaling, got an optimizer whose"
      " state already holds a loss scale. Call with_loss_scaling only once, as"
      " the outermost wrapper."
    )


def _check_state(state: Any) -> None:
  if isinstance(state, WithLossScalingState):
    return
  if _state.holds_loss_scale(state):
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


def _cast_like(updates: Any, params: Any) -> Any:
  """The updates in the dtypes of the params, where there are params."""
  if params is None:
    return updates

  def cast(path: Any, update: Any, param: Any) -> Any:
    if not _grads.is_grad(path, update) or not _arrays.is_inexact(param):
      return update
    update = jnp.asarray(update)
    return _arrays.cast_real_or_complex(update, jnp.result_type(param))

  # The updates may have None or MaskedNode where the params have a leaf.
  is_leaf = lambda x: x is None or isinstance(x, optax.MaskedNode)
  return jax.tree_util.tree_map_with_path(
    cast, updates, params, is_leaf=is_leaf
  )


def _nothing_unless(finite: jax.Array, updates: Any) -> Any:
  """The updates if ``finite``, else updates that leave the params as they are.

  These are 0 for an integer, and else -0.0: 0.0 + (-0.0) and -0.0 + (-0.0) keep
  their sign, and -0.0 + 0.0 does not. Leaves that are not added to a parameter
  stay as they are. (Where XLA flushes subnormal numbers, no update could keep
  subnormal params, since any sum is flushed.)
  """

  def choose(path: Any, update: Any) -> Any:
    if not _arrays.is_array_like(update) or _grads.is_overwritten(path):
      return update
    update = jnp.asarray(update)
    if _arrays.is_inexact(update):
      nothing = _negative_zeros_like(update)
    elif jnp.issubdtype(update.dtype, jnp.integer):
      nothing = jnp.zeros_like(update)
    else:
      return update
    return lax.select(finite, update, nothing)

  return jax.tree_util.tree_map_with_path(choose, updates)


def _negative_zeros_like(x: jax.Array) -> jax.Array:
  if _arrays.is_complex(x.dtype):
    return lax.complex(
      _negative_zeros_like(x.real), _negative_zeros_like(x.imag)
    )
  return jnp.full_like(x, -0.0)
