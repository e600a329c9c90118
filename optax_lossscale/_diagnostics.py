"""What a training loop can log, and what tells why its steps are skipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _exponents, _grads, _leaves, _scaling, _state


def loss_scale_metrics(tree: Any) -> dict[str, jax.Array]:
  """Returns what there is to log of a loss scale, for any logger.

  Works under ``jit``, and reads nothing back to the host.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one.

  Returns:
    A dict of arrays of shape ``()``, keyed by the names of the fields of
    :class:`LossScaleState` (all but ``memory``), and ``log2_loss_scale``,
    float32, which is what a plot wants.

  Raises:
    ValueError: if ``tree`` does not hold exactly one loss-scale state.

  Examples:
    >>> import optax_lossscale as ols
    >>> metrics = ols.loss_scale_metrics(ols.DynamicLossScale().init())
    >>> {name: x.item() for name, x in sorted(metrics.items())}
    {'finite_count': 0, 'last_finite': True, 'log2_loss_scale': 15.0,
     'loss_scale': 32768.0, 'notfinite_count': 0, 'total_notfinite': 0}
  """
  metrics = _state.get_loss_scale_state(tree)._asdict()
  del metrics["memory"]
  return metrics | {"log2_loss_scale": _exponents.log2(metrics["loss_scale"])}


def finite_per_leaf(grads: Any) -> Any:
  """Tells of each leaf whether it is finite; works under ``jit``.

  For use inside the step, when only the flags shall leave it. Outside,
  :func:`nonfinite_leaves` says more.

  Args:
    grads: any pytree.

  Returns:
    A pytree of the same structure, its leaves bools of shape ``()``; True for
    those that are no gradients, such as integers.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> flags = ols.finite_per_leaf({"a": jnp.ones(3), "b": jnp.array(jnp.nan)})
    >>> print(flags["a"], flags["b"])
    True False
  """

  def is_finite(path, leaf):
    if _grads.is_overwritten(path) or not _state.is_array(leaf):
      return jnp.bool_(True)
    return _scaling.all_finite(leaf)

  return jax.tree_util.tree_map_with_path(is_finite, grads)


class NonfiniteLeaf(NamedTuple):
  """A leaf that holds an inf or a NaN.

  Attributes:
    name: its path in the tree, such as ``"layers/0/weight"``.
    shape: its shape.
    dtype: its dtype.
    inf_count: how many entries are infinite, of either sign.
    nan_count: how many are NaN.
    first_index: the index of the first of them, in row-major order.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  inf_count: int
  nan_count: int
  first_index: tuple[int, ...]

  def __str__(self):
    index = "".join(f"[{i}]" for i in self.first_index)
    return (
      f"{self.name} {self.dtype}{list(self.shape)}: {self.inf_count} inf,"
      f" {self.nan_count} NaN of {int(np.prod(self.shape))}, first at"
      f" {index or 'the scalar itself'}"
    )


def nonfinite_leaves(grads: Any) -> list[NonfiniteLeaf]:
  """Lists the leaves that hold an inf or a NaN.

  To be called outside ``jit``. Each leaf is reduced where it lies, sharded or
  not, and only the counts are read back.

  Args:
    grads: a pytree, such as the gradients that
      :func:`~optax_lossscale.value_and_grad` returns, a Flax NNX state or an
      Equinox model. Leaves that are no floats are left out, as is Flax's
      ``_overwrite_with_gradient`` collection.

  Returns:
    A list of named tuples, in the order of the tree, with the fields ``name``,
    ``shape``, ``dtype``, ``inf_count``, ``nan_count`` and ``first_index``.
    Empty if all is finite. They print as a sentence.

  Raises:
    TypeError: if called under ``jit``.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> grads = {"w": jnp.array([[1.0, 2.0], [jnp.inf, jnp.nan]]), "b": 0.5}
    >>> for leaf in ols.nonfinite_leaves(grads):
    ...   print(leaf)
    w float32[2, 2]: 1 inf, 1 NaN of 4, first at [1][0]
  """
  leaves = _leaves.named_grads(grads, "nonfinite_leaves")
  # All are on their way before the first is read.
  found = jax.device_get([_find_nonfinite(leaf) for _, leaf in leaves])
  return [
    NonfiniteLeaf(
      name,
      tuple(leaf.shape),
      np.dtype(leaf.dtype),
      int(inf_count),
      int(nan_count),
      tuple(int(i) for i in index),
    )
    for (name, leaf), (inf_count, nan_count, index) in zip(
      leaves, found, strict=True
    )
    if inf_count or nan_count
  ]


class LossScaleError(RuntimeError):
  """Raised by :func:`raise_if_stuck`; its message says why and what to do."""

  __module__ = "optax_lossscale"  # where users find it


def raise_if_stuck(
  tree: Any,
  max_consecutive_skips: int = 50,
  *,
  grads: Any = None,
  min_scale: float = 1.0,
) -> None:
  """Raises if the last steps were all skipped, and says why.

  Nothing in this package raises by itself after an overflow. Call this now and
  then in the training loop, outside ``jit``: it reads two scalars back, and
  the gradients' counts only when it raises.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one, such
      as the optimizer state. Of a state with a leading axis (``vmap``,
      ``pmap``) the member with the most skips counts.
    max_consecutive_skips: how many skips in a row are too many.
    grads: the gradients of the last step, if at hand; names the leaves and
      tells NaNs of the model from an overflow.
    min_scale: the lowest scale that the policy allows.

  Raises:
    LossScaleError: if as many steps or more were skipped in a row.
    TypeError: if an argument is of the wrong type, or under ``jit``.
    ValueError: if one is out of range, or ``tree`` does not hold exactly one
      loss-scale state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(init_scale=4.0)
    >>> state = policy.init()
    >>> for _ in range(3):
    ...   state = policy.adjust(state, jnp.array(False))
    >>> ols.raise_if_stuck(state)
    >>> ols.raise_if_stuck(state, max_consecutive_skips=3)
    Traceback (most recent call last):
      ...
    optax_lossscale.LossScaleError: The last 3 steps were all skipped. The loss
    scale is 1, the lowest allowed (min_scale = 1), and gradients still overflow
    or are NaN. Pass grads to see which. If they overflow, lower min_scale of
    the policy, or compute the layer that overflows in float32 or bfloat16. If
    they are NaN, no loss scale can cure it: look for it in the data, in
    activations that overflow in the forward pass, or in too large a learning
    rate.
  """
  _state.check_number(
    "max_consecutive_skips", max_consecutive_skips, 1, 2**31 - 1, integer=True
  )
  _state.check_number(
    "min_scale", min_scale, _state.SMALLEST_SCALE, _state.LARGEST_SCALE
  )
  state = _state.get_loss_scale_state(tree)
  if isinstance(state.notfinite_count, jax.core.Tracer):
    raise TypeError(
      "raise_if_stuck must be called outside jit, since it reads the state, got"
      " a tracer. Return the optimizer state from the jitted function."
    )
  skips = np.ravel(jax.device_get(state.notfinite_count))
  worst = np.argmax(skips)
  if skips[worst] < max_consecutive_skips:
    return
  scale = np.ravel(jax.device_get(state.loss_scale))[worst]
  nonfinite = None if grads is None else nonfinite_leaves(grads)
  raise LossScaleError(
    f"The last {skips[worst]} steps were all skipped."
    f" {_why_stuck(float(scale), float(min_scale), nonfinite)}"
    + "".join(f"\n  {leaf}" for leaf in nonfinite or ())
  )


_CURE_OVERFLOW = (
  "lower min_scale of the policy, or compute the layer that overflows in"
  " float32 or bfloat16"
)
_CURE_NAN = (
  "no loss scale can cure it: look for it in the data, in activations that"
  " overflow in the forward pass, or in too large a learning rate"
)


def _why_stuck(scale, min_scale, nonfinite):
  """The cause, as far as it can be told, and the remedy."""
  if nonfinite == []:
    return (
      "The gradients given are finite. If they are those of the last step, the"
      " reason is grads_finite=, check_updates=True or another device."
    )
  only_nan = nonfinite and not any(leaf.inf_count for leaf in nonfinite)
  if scale > min_scale:
    why = (
      f"The loss scale is {scale:g}, above the lowest allowed (min_scale ="
      f" {min_scale:g}): it is fixed, or was too high to come down in so few"
      " steps. Use DynamicLossScale, start it lower, or allow more skips."
    )
    if only_nan:
      why += f" If a NaN is the model's own, {_CURE_NAN}."
    return why + (" These leaves are not finite:" if nonfinite else "")
  at_floor = (
    f"The loss scale is {scale:g}, the lowest allowed (min_scale ="
    f" {min_scale:g}), and"
  )
  # What overflows is an inf first, and a NaN only where infs then meet. At the
  # floor NaNs alone come from elsewhere.
  if only_nan:
    return (
      f"{at_floor} gradients are NaN, none of them infinite;"
      f" {_CURE_NAN}. These leaves are NaN:"
    )
  if nonfinite:
    return (
      f"{at_floor} gradients still overflow: {_CURE_OVERFLOW}. These leaves"
      " are not finite:"
    )
  return (
    f"{at_floor} gradients still overflow or are NaN. Pass grads to see which."
    f" If they overflow, {_CURE_OVERFLOW}. If they are NaN, {_CURE_NAN}."
  )


@_leaves.reduce_on_device
def _find_nonfinite(xp, leaf):
  """The counts of infs and NaNs, and the index of the first of them."""
  is_nan, is_inf = xp.isnan(leaf), xp.isinf(leaf)
  mask = is_nan | is_inf
  index = []
  # Axis by axis, since a reshape would gather a sharded array.
  for axis, length in enumerate(leaf.shape):
    shape = [1] * leaf.ndim
    shape[axis] = length
    position = xp.arange(length, dtype=xp.int32).reshape(shape)
    first = xp.min(xp.where(mask, position, length), initial=length)
    mask = mask & (position == first)
    index.append(first)
  return _leaves.count(xp, is_inf), _leaves.count(xp, is_nan & ~is_inf), index
