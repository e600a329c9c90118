"""The loss-scale state: its fields, and functions to find and change it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _trees

_Tree = TypeVar("_Tree")


class LossScaleState(NamedTuple):
  """The state of a loss scale: one class for all policies.

  Attributes:
    loss_scale: the factor that multiplies the next loss; float32, shape ``()``.
    finite_count: the number of finite steps since the scale last changed or a
      step was skipped; int32, shape ``()``. All counters stay at the largest
      int32 instead of overflowing.
    notfinite_count: the number of skips in a row; int32, shape ``()``.
    last_finite: whether the last step was applied; bool, shape ``()``. True
      before the first step.
    total_notfinite: the number of skips since ``init``; int32, shape ``()``.
    policy_state: policy-specific state, such as the remaining hysteresis: a
      named tuple of arrays, or ``()`` if the policy has none.

  Examples:
    >>> import optax_lossscale as ols
    >>> state = ols.DynamicLossScale(init_scale=8.0).init()
    >>> print(state.loss_scale, state.total_notfinite, state.last_finite)
    8.0 0 True
  """

  loss_scale: jax.Array
  finite_count: jax.Array
  notfinite_count: jax.Array
  last_finite: jax.Array
  total_notfinite: jax.Array
  policy_state: Any = ()


def get_loss_scale_state(state: Any) -> LossScaleState:
  """Returns the one loss-scale state that a pytree holds.

  Args:
    state: a :class:`LossScaleState`, or any pytree that holds exactly one: an
      optimizer state, Flax's ``TrainState``, an ``nnx.Optimizer``, or the
      nested dict of a checkpoint.

  Returns:
    The :class:`LossScaleState`, with plain arrays as its leaves.

  Raises:
    ValueError: if ``state`` holds none, or more than one.

  Examples:
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
    >>> opt_state = tx.init({"w": 1.0})
    >>> print(ols.get_loss_scale_state(opt_state).loss_scale)
    32768.0
  """
  _, loss_scale_state = _find_single_state(state)
  return _unwrap_variables(loss_scale_state)


@_arrays.allow_transfers
def set_loss_scale(state: _Tree, value: jax.typing.ArrayLike) -> _Tree:
  """Returns the state with another loss scale in it.

  ``finite_count``, which counts from the last change of the scale, restarts at
  0. All other counts are kept. At the next step, the policy clips the scale to
  its bounds.

  Args:
    state: a :class:`LossScaleState`, or any pytree that holds exactly one, such
      as the state of an optimizer, or a Flax ``TrainState``.
    value: the new scale, a number in [2**-126, 2**126]. A traced value is
      clipped to this range, and a traced NaN leaves the scale unchanged.

  Returns:
    A pytree of the same structure, shapes, dtypes and shardings.

  Raises:
    TypeError: if ``value`` is not a number.
    ValueError: if ``value`` is out of range, or ``state`` does not hold exactly
      one loss-scale state.

  Examples:
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
    >>> opt_state = ols.set_loss_scale(tx.init({"w": 1.0}), 2.0**10)
    >>> print(ols.get_loss_scale_state(opt_state).loss_scale)
    1024.0
  """
  _checks.check_scale("value", value)
  prefix, _ = _find_single_state(state)

  def replace(path: Any, leaf: Any) -> Any:
    subpath = path[len(prefix) :] if path[: len(prefix)] == prefix else ()
    field = _trees.key_name(subpath[0]) if subpath else None
    if field == "loss_scale":
      new = jnp.clip(
        jnp.asarray(value, jnp.float32),
        _checks.MIN_LOSS_SCALE,
        _checks.MAX_LOSS_SCALE,
      )
      new = jnp.broadcast_to(new, jnp.shape(leaf))
      # The result depends on the old scale, so XLA keeps its sharding.
      return jnp.where(jnp.isnan(new), leaf, new)
    if field == "finite_count":
      return jnp.zeros_like(leaf)
    return leaf

  return jax.tree_util.tree_map_with_path(replace, state)


def select_if_applied(state: Any, new: Any, old: _Tree) -> _Tree:
  """Selects between two pytrees by whether the last step was applied.

  Use it for everything outside the optimizer that must not change on a skipped
  step: batch statistics, which are lost if the forward pass overflowed, a
  moving average of the parameters, or a counter of steps.

  Args:
    state: the state *after* ``update``; a :class:`LossScaleState` or any pytree
      that holds exactly one.
    new: the pytree to return if the last step was applied.
    old: the pytree to return if it was skipped; its leaves have the same paths
      and shapes. The containers may differ, such as a ``FrozenDict`` and a
      ``dict``.

  Returns:
    One of the two, in the containers and dtypes of ``old``.

  Raises:
    ValueError: if a leaf is in only one of the two, or is not an array and
      differs between them, or ``state`` does not hold exactly one loss-scale
      state, or the state is mapped.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> state = ols.DynamicLossScale().init()
    >>> state = ols.DynamicLossScale().adjust(state, jnp.array(False))
    >>> old, new = {"mean": jnp.array(1.0)}, {"mean": jnp.array(jnp.nan)}
    >>> print(ols.select_if_applied(state, new, old)["mean"])
    1.0
  """
  finite = get_loss_scale_state(state).last_finite
  if jnp.shape(finite):
    raise ValueError(
      "select_if_applied expects the state of one loss scale, got last_finite"
      f" of shape {jnp.shape(finite)}. Call select_if_applied inside vmap or"
      " pmap, or map it: jax.vmap(select_if_applied)(state, new, old)."
    )
  structure: Any = jax.tree.structure(new)
  if structure != jax.tree.structure(old):
    new = _unflatten_like(old, new)
  jax.tree_util.tree_map_with_path(_check_selectable, new, old)
  return _arrays.select(finite, new, old)


def make_initial_state(scale: float, policy_state: Any = ()) -> LossScaleState:
  """Return the state before the first step."""
  # Each field has its own buffer, because a jitted step that donates its state
  # can't donate a shared buffer twice.
  return LossScaleState(
    loss_scale=_arrays.copy_as(scale, jnp.float32),
    finite_count=jnp.zeros((), jnp.int32),
    notfinite_count=jnp.zeros((), jnp.int32),
    last_finite=jnp.ones((), jnp.bool_),
    total_notfinite=jnp.zeros((), jnp.int32),
    policy_state=policy_state,
  )


def record_step(
  state: LossScaleState, grads_finite: jax.typing.ArrayLike
) -> LossScaleState:
  """Return the state with its counts after a step, and the same scale."""
  finite = jnp.asarray(grads_finite, jnp.bool_)
  zero = jnp.int32(0)
  total_skips = optax.safe_increment(state.total_notfinite)
  consecutive_skips = optax.safe_increment(state.notfinite_count)
  finite_steps = optax.safe_increment(state.finite_count)
  return state._replace(
    finite_count=jnp.where(finite, finite_steps, zero),
    notfinite_count=jnp.where(finite, zero, consecutive_skips),
    last_finite=finite,
    total_notfinite=jnp.where(finite, state.total_notfinite, total_skips),
  )


def get_policy_state(policy: Any, state: LossScaleState, cls: Any) -> Any:
  """Return the policy state as an instance of ``cls``.

  Args:
    policy: the policy, for the error message.
    state: the loss-scale state.
    cls: the named tuple class of the policy's state. The state is recognized by
      its fields, since checkpoints restore it as a mapping or another class.

  Raises:
    ValueError: if the policy state has other fields.
  """
  policy_state, fields = state.policy_state, cls._fields
  if isinstance(policy_state, Mapping) and set(policy_state) == set(fields):
    return cls(**policy_state)
  has_fields = getattr(policy_state, "_fields", None) == fields
  if has_fields and len(policy_state) == len(fields):
    return cls(*policy_state)
  is_mapping = isinstance(policy_state, Mapping)
  names = policy_state if is_mapping else getattr(policy_state, "_fields", ())
  raise ValueError(
    f"state.policy_state must have the fields of {type(policy).__name__}"
    f" ({', '.join(fields)}), got {', '.join(map(str, names)) or 'no names'}"
    f" in a {type(policy_state).__name__} of another policy,"
    " or of an earlier version. To keep the loss scale, use"
    " state._replace(policy_state=policy.init().policy_state), where state is"
    " the loss_scale_state of an optimizer state."
  )


def has_loss_scale(tree: Any) -> bool:
  """Return whether the tree holds a loss-scale state."""
  return bool(_find_states(tree))


def find_loss_scale_states(tree: Any) -> list[LossScaleState]:
  """Return all loss-scale states in the tree."""
  return [_unwrap_variables(state) for _, state in _find_states(tree)]


def _find_single_state(tree: Any) -> tuple[Any, Any]:
  """Return the path of the only loss-scale state in the tree, and the state.

  Raises:
    ValueError: if there is none, or more than one.
  """
  matches = _find_states(tree)
  if not matches:
    raise ValueError(
      "state must hold a loss-scale state, got a"
      f" {type(tree).__name__} that holds none. Pass the state that"
      " `tx.init(params)` returned, with tx = with_loss_scaling(optimizer), or"
      " the train state or optimizer object that contains it."
    )
  if len(matches) > 1:
    paths = ", ".join(_format_path(path) for path, _ in matches)
    raise ValueError(
      "state must hold exactly one loss-scale state, got a"
      f" {type(tree).__name__} that holds {len(matches)}: at {paths}."
      " Pass only the part that belongs to this loss."
    )
  return matches[0]


def _find_states(tree: Any) -> list[tuple[Any, Any]]:
  """Return all pairs (path, loss-scale state) in the tree."""
  leaves = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=_is_loss_scale_state
  )
  return [(path, leaf) for path, leaf in leaves if _is_loss_scale_state(leaf)]


def _is_loss_scale_state(x: Any) -> bool:
  """Return whether x is a loss-scale state, or a mapping with its fields."""
  if isinstance(x, LossScaleState):
    return True
  # Checkpoints and nnx.State turn named tuples into mappings, and may omit an
  # empty `policy_state`.
  fields = set(LossScaleState._fields)
  return (
    isinstance(x, Mapping) and fields - {"policy_state"} <= set(x) <= fields
  )


def _unwrap_variables(state: Any) -> LossScaleState:
  """Convert a state to the named tuple, and its variables to plain arrays."""
  if isinstance(state, Mapping):
    state = LossScaleState(**state)
  return jax.tree.map(
    lambda x: jax.tree.leaves(x)[0] if _is_variable(x) else x,
    state,
    is_leaf=_is_variable,
  )


def _is_variable(x: Any) -> bool:
  """Return whether x wraps one array, as an nnx.Variable does."""
  is_container = isinstance(x, (tuple, list, Mapping))
  if is_container or jax.tree_util.all_leaves([x]):
    return False
  # Not hasattr, which would read the attribute: that is deprecated in Flax NNX.
  return "value" in dir(x)


def _check_selectable(path: Any, new: Any, old: Any) -> None:
  """Raise if two leaves differ and are not arrays."""
  if _arrays.is_array_like(old) or hasattr(old, "dtype"):
    return
  if new is not old and (type(new) is not type(old) or new != old):
    raise ValueError(
      "new and old must be equal in leaves that are not arrays, since only"
      " arrays can be selected on a device, got"
      f" {_checks.describe_arg('new', new)} and"
      f" {_checks.describe_arg('old', old)} at"
      f" {_trees.leaf_name(path)}. Remove this leaf from both."
    )


def _unflatten_like(old: Any, new: Any) -> Any:
  """Return the leaves of ``new`` in the structure of ``old``, by their paths.

  Raises:
    ValueError: if the leaves are not at the same paths.
  """
  new_by_path, old_by_path = (
    _index_leaves_by_path(new),
    _index_leaves_by_path(old),
  )
  for name, by_path, other_by_path in (
    ("old", old_by_path, new_by_path),
    ("new", new_by_path, old_by_path),
  ):
    unmatched_paths = [
      path for key, (path, _) in by_path.items() if key not in other_by_path
    ]
    if unmatched_paths:
      path = _trees.leaf_name(unmatched_paths[0]) or "the root of the tree"
      raise ValueError(
        "new and old must have leaves at the same paths, got"
        f" {path} only in {name}."
      )
  leaves = [new_by_path[key][1] for key in old_by_path]
  return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _index_leaves_by_path(tree: Any) -> dict[tuple[Any, ...], tuple[Any, Any]]:
  """Index the (path, leaf) pairs of a tree by the names of the path's keys."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    tuple(map(_trees.key_name, path)): (path, leaf) for path, leaf in leaves
  }


def _format_path(path: Any) -> str:
  return jax.tree_util.keystr(path) or "the root of the tree"
