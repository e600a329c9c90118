"""The loss-scale state: what it holds, and how to find it in any pytree."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

# The scale and its reciprocal are both normal float32 numbers between these
# two. The reciprocal of 2**127 is subnormal, XLA flushes it to zero, and every
# unscaled gradient would be a finite, silent zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

# Flax keeps the statistics of its fp8 layers in this collection. They arrive
# beside the gradients, but are values to be stored, not gradients.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


class LossScaleState(NamedTuple):
  """The state of a loss scale: one class for all policies.

  Attributes:
    loss_scale: what the next loss is multiplied by; float32, shape ``()``.
    finite_count: finite steps since the scale last moved or a step was
      skipped; int32, shape ``()``. Stays at its maximum rather than overflow,
      as do the other counters.
    notfinite_count: skips in a row; int32, shape ``()``.
    last_finite: whether the last step was applied; bool, shape ``()``. True
      before the first step.
    total_notfinite: skips since ``init``; int32, shape ``()``.
    memory: a pytree of what this policy alone remembers, such as the
      hysteresis left; ``()`` if nothing.
  """

  loss_scale: jax.Array
  finite_count: jax.Array
  notfinite_count: jax.Array
  last_finite: jax.Array
  total_notfinite: jax.Array
  memory: Any = ()


def get_loss_scale_state(tree: Any) -> LossScaleState:
  """Returns the one loss-scale state that a pytree holds.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one: an
      optimizer state, Flax's ``TrainState``, an ``nnx.Optimizer``, or the
      nested dict that a checkpoint was read into.

  Returns:
    The :class:`LossScaleState`, its leaves plain arrays.

  Raises:
    ValueError: if the tree holds none, or more than one.

  Examples:
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
    >>> opt_state = tx.init({"w": 1.0})
    >>> print(ols.get_loss_scale_state(opt_state).loss_scale)
    32768.0
  """
  (_, found), *others = _find(tree) or [(None, None)]
  if found is None:
    raise ValueError(
      "state must hold a loss-scale state, got a"
      f" {type(tree).__name__} that holds none. Pass what `tx.init(params)`"
      " returned, with tx = with_loss_scaling(optimizer), or the train state"
      " or optimizer object that contains it."
    )
  if others:
    paths = ", ".join(_keystr(path) for path, _ in _find(tree))
    raise ValueError(
      "state must hold exactly one loss-scale state, got a"
      f" {type(tree).__name__} that holds {1 + len(others)}: at {paths}."
      " Pass the part that belongs to this loss."
    )
  return _unboxed(found)


def set_loss_scale(tree: Any, value: jax.typing.ArrayLike) -> Any:
  """Returns the tree with another loss scale in it.

  Counts of the past stay; ``finite_count``, which counts from the last move of
  the scale, starts again. A policy holds the scale within its own bounds at the
  next step.

  Args:
    tree: a pytree that holds exactly one :class:`LossScaleState`.
    value: the new scale, a number in [2**-126, 2**126]; may be traced, and is
      then held in that range (a NaN leaves the scale as it is).

  Returns:
    A tree of the same structure, shapes, dtypes and shardings.

  Raises:
    TypeError: if ``value`` is not a number.
    ValueError: if ``value`` is out of range, or ``tree`` does not hold exactly
      one loss-scale state.

  Examples:
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
    >>> opt_state = ols.set_loss_scale(tx.init({"w": 1.0}), 2.0**10)
    >>> print(ols.get_loss_scale_state(opt_state).loss_scale)
    1024.0
  """
  check_number("value", value, SMALLEST_SCALE, LARGEST_SCALE)
  get_loss_scale_state(tree)
  ((prefix, _),) = _find(tree)

  def replace(path, leaf):
    inside = path[len(prefix) :] if path[: len(prefix)] == prefix else ()
    field = _key_name(inside[0]) if inside else None
    if field == "loss_scale":
      new = jnp.clip(
        jnp.asarray(value, jnp.float32), SMALLEST_SCALE, LARGEST_SCALE
      )
      new = jnp.broadcast_to(new, jnp.shape(leaf))
      # Through the old scale, so that its sharding is kept.
      return jnp.where(jnp.isnan(new), leaf, new)
    if field == "finite_count":
      return jnp.zeros_like(leaf)
    return leaf

  return jax.tree_util.tree_map_with_path(replace, tree)


def select_if_finite(state: Any, applied: Any, skipped: Any) -> Any:
  """Selects between two pytrees by whether the last step was applied.

  For everything beside the optimizer that must not move on a skipped step:
  batch statistics computed by an overflowing forward pass, a moving average of
  the params, a step counter.

  Args:
    state: the state *after* ``update``; a :class:`LossScaleState` or any pytree
      that holds exactly one.
    applied: the pytree to return if the last step was applied.
    skipped: the pytree to return if it was skipped; same structure and shapes.

  Returns:
    One of the two, leaf by leaf, in the dtypes of ``skipped``.

  Raises:
    ValueError: if the two differ in structure, or ``state`` does not hold
      exactly one loss-scale state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> state = ols.DynamicLossScale().init()
    >>> state = ols.DynamicLossScale().adjust(state, jnp.array(False))
    >>> old, new = {"mean": jnp.array(1.0)}, {"mean": jnp.array(jnp.nan)}
    >>> print(ols.select_if_finite(state, new, old)["mean"])
    1.0
  """
  finite = get_loss_scale_state(state).last_finite
  new: Any = jax.tree.structure(applied)
  old: Any = jax.tree.structure(skipped)
  if new != old:
    raise ValueError(
      "applied and skipped must have the same structure, got applied ="
      f" {new} and skipped = {old}."
    )
  return select(finite, applied, skipped)


def select(finite: jax.typing.ArrayLike, new: Any, old: Any) -> Any:
  """``new`` where ``finite``, else ``old``, in the dtypes of ``old``."""
  return jax.tree.map(lambda n, o: select_leaf(finite, n, o), new, old)


def select_leaf(finite: jax.typing.ArrayLike, new: Any, old: Any) -> Any:
  """``new`` if ``finite``, else ``old``; what is not an array stays ``old``."""
  if not is_array(old):
    return old
  old = jnp.asarray(old)
  return lax.select(jnp.asarray(finite), cast(new, old.dtype), old)


def cast(x: Any, dtype: Any) -> Any:
  """``x`` as a strongly typed array; PRNG keys as they are."""
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    return x
  return lax.convert_element_type(x, dtype)


def is_array(x: Any) -> bool:
  """Whether JAX can compute on this leaf: an array or a Python number."""
  dtype = getattr(x, "dtype", None)
  if dtype is None:
    return isinstance(x, (bool, int, float, complex))
  return dtype != jax.dtypes.float0 and not isinstance(x, jax.ShapeDtypeStruct)


def holds_loss_scale(tree: Any) -> bool:
  """Whether there is a loss-scale state anywhere in the tree."""
  return bool(_find(tree))


def check_number(
  name: str, value: Any, low: float, high: float, *, integer: bool = False
) -> None:
  """Raises unless ``value`` is a number in [low, high]; traced ones pass."""
  if isinstance(value, jax.core.Tracer):
    return
  kind = "an integer" if integer else "a number"
  rule = f"{name} must be {kind} in [{show_bound(low)}, {show_bound(high)}]"
  is_number = isinstance(value, (int, float)) or (
    hasattr(value, "dtype") and getattr(value, "shape", None) == ()
  )
  if isinstance(value, (bool, complex)) or not is_number:
    raise TypeError(f"{rule}, got {name} = {value!r}.")
  if hasattr(value, "dtype"):
    if value.dtype == bool or jnp.issubdtype(value.dtype, jnp.complexfloating):
      raise TypeError(f"{rule}, got {name} = {value!r}.")
    value = value.item()
  in_range = low <= value <= high  # False for NaN, too.
  if not in_range or (integer and value != int(value)):
    raise ValueError(f"{rule}, got {name} = {value!r}.")


def show_bound(value: float) -> str:
  """A bound as people write it: ``2**126``, ``0.5``, ``2147483647``."""
  exponent = round(math.log2(value)) if 0 < value < math.inf else 0
  if abs(exponent) > 20 and value == 2.0**exponent:
    return f"2**{exponent}"
  return str(value) if isinstance(value, int) else f"{value:.8g}"


def _find(tree):
  """All (path, loss-scale state) in the tree."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_state)
  return [(path, leaf) for path, leaf in leaves if _is_state(leaf)]


def _is_state(x):
  if isinstance(x, LossScaleState):
    return True
  # Checkpoints and nnx.State turn named tuples into mappings, and may drop
  # an empty `memory`.
  fields = set(LossScaleState._fields)
  return isinstance(x, Mapping) and fields - {"memory"} <= set(x) <= fields


def _unboxed(state):
  """The state as the named tuple of plain arrays."""
  if isinstance(state, Mapping):
    state = LossScaleState(**state)
  return jax.tree.map(
    lambda x: jax.tree.leaves(x)[0] if _is_box(x) else x,
    state,
    is_leaf=_is_box,
  )


def _is_box(x):
  """Whether x is a variable around one array, as Flax NNX keeps them."""
  is_container = isinstance(x, (tuple, list, Mapping))
  if is_container or jax.tree_util.all_leaves([x]):
    return False
  # By its name alone: to read it off an nnx.Variable is deprecated.
  return "value" in dir(x)


def _key_name(key):
  return getattr(key, "name", getattr(key, "key", None))


def _keystr(path):
  return jax.tree_util.keystr(path) or "the tree itself"
