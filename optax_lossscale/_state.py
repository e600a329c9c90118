"""The loss-scale state: its fields, its counts, and its place in any pytree."""

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _host, _paths

_Class = TypeVar("_Class", bound=type)
_Tree = TypeVar("_Tree")


class LossScaleState(NamedTuple):
  """The state of a loss scale: one class for all policies.

  Attributes:
    loss_scale: what the next loss is multiplied by; float32, shape ``()``.
    finite_count: finite steps since the scale last moved or a step was
      skipped; int32, shape ``()``. This and the other counters stay at the
      largest int32 and do not overflow.
    notfinite_count: skips in a row; int32, shape ``()``.
    last_finite: whether the last step was applied; bool, shape ``()``. True
      before the first step.
    total_notfinite: skips since ``init``; int32, shape ``()``.
    policy_state: what the policy keeps besides, such as the remaining
      hysteresis: a named tuple of arrays, or ``()`` if nothing.

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


def get_loss_scale_state(tree: Any) -> LossScaleState:
  """Returns the one loss-scale state that a pytree holds.

  Args:
    tree: a :class:`LossScaleState`, or any pytree that holds exactly one: an
      optimizer state, Flax's ``TrainState``, an ``nnx.Optimizer``, or the
      nested dict that a checkpoint was read into.

  Returns:
    The :class:`LossScaleState`, with plain arrays as its leaves.

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
  _, state = _find_one(tree)
  return _unboxed(state)


@_host.may_transfer
def set_loss_scale(tree: _Tree, value: jax.typing.ArrayLike) -> _Tree:
  """Returns the tree with another loss scale in it.

  ``finite_count``, which counts from the last move of the scale, starts again.
  All other counts stay. At the next step, the policy holds the scale within its
  own bounds.

  Args:
    tree: a pytree that holds exactly one :class:`LossScaleState`, such as the
      state of an optimizer, or a Flax ``TrainState``.
    value: the new scale, a number in [2**-126, 2**126]. It may be traced; it is
      then held within this range, and a NaN leaves the scale as it is.

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
  _checks.check_scale("value", value)
  prefix, _ = _find_one(tree)

  def replace(path: Any, leaf: Any) -> Any:
    inside = path[len(prefix) :] if path[: len(prefix)] == prefix else ()
    field = _paths.key_name(inside[0]) if inside else None
    if field == "loss_scale":
      new = jnp.clip(
        jnp.asarray(value, jnp.float32),
        _checks.SMALLEST_SCALE,
        _checks.LARGEST_SCALE,
      )
      new = jnp.broadcast_to(new, jnp.shape(leaf))
      # A function of the old scale, so that its sharding is kept.
      return jnp.where(jnp.isnan(new), leaf, new)
    if field == "finite_count":
      return jnp.zeros_like(leaf)
    return leaf

  return jax.tree_util.tree_map_with_path(replace, tree)


def select_if_finite(state: Any, new: Any, old: _Tree) -> _Tree:
  """Selects between two pytrees by whether the last step was applied.

  Use it for everything outside the optimizer that must not change on a skipped
  step: batch statistics, which are lost if the forward pass overflowed, a
  moving average of the parameters, or a counter of steps.

  Args:
    state: the state *after* ``update``; a :class:`LossScaleState` or any pytree
      that holds exactly one.
    new: the pytree to return if the last step was applied.
    old: the pytree to return if it was skipped; its leaves have the same paths
      and shapes. The containers may be others, such as a ``FrozenDict`` beside
      a ``dict``.

  Returns:
    One of the two, in the containers and dtypes of ``old``.

  Raises:
    ValueError: if a leaf is in one of the two alone, or is not an array and
      differs between them, or ``state`` does not hold exactly one loss-scale
      state, or it is mapped.

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
  if jnp.shape(finite):
    raise ValueError(
      "select_if_finite expects the state of one loss scale, got last_finite of"
      f" shape {jnp.shape(finite)}. Call select_if_finite inside vmap or pmap,"
      " or map it: jax.vmap(select_if_finite)(state, new, old)."
    )
  structure: Any = jax.tree.structure(new)
  if structure != jax.tree.structure(old):
    new = _in_containers_of(old, new)
  jax.tree_util.tree_map_with_path(_check_selectable, new, old)
  return _arrays.select(finite, new, old)


def initial_state(scale: float, policy_state: Any = ()) -> LossScaleState:
  """The state before the first step. Each field has a buffer of its own."""
  return LossScaleState(
    loss_scale=_arrays.own(scale, jnp.float32),
    finite_count=jnp.zeros((), jnp.int32),
    notfinite_count=jnp.zeros((), jnp.int32),
    last_finite=jnp.ones((), jnp.bool_),
    total_notfinite=jnp.zeros((), jnp.int32),
    policy_state=policy_state,
  )


def record_step(
  state: LossScaleState, grads_finite: jax.typing.ArrayLike
) -> LossScaleState:
  """The state with its counts after one more step, and the same scale."""
  finite = jnp.asarray(grads_finite, jnp.bool_)
  zero = jnp.int32(0)
  skipped = optax.safe_increment(state.total_notfinite)
  in_a_row = optax.safe_increment(state.notfinite_count)
  applied = optax.safe_increment(state.finite_count)
  return state._replace(
    finite_count=jnp.where(finite, applied, zero),
    notfinite_count=jnp.where(finite, zero, in_a_row),
    last_finite=finite,
    total_notfinite=jnp.where(finite, state.total_notfinite, skipped),
  )


def readable_later(kind: _Class) -> _Class:
  """Makes pickles of this class readable that were written with other fields.

  A pickle calls the class with all fields in order. If these are more or fewer,
  it gets a plain tuple, and is lost no more: `policy_state_of` then says what
  to do.
  """
  usual: Any = kind.__new__

  @functools.wraps(usual)  # so that the fields are in its signature
  def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    is_other = args and not kwargs and len(args) != len(cls._fields)
    return args if is_other else usual(cls, *args, **kwargs)

  setattr(kind, "__new__", staticmethod(new))  # noqa: B010
  return kind


def policy_state_of(policy: Any, state: LossScaleState, kind: Any) -> Any:
  """The state of the policy; raises if it is not of this class.

  It is known by its fields, and may be of another class: that of a checkpoint
  is a mapping.
  """
  policy_state, fields = state.policy_state, kind._fields
  if isinstance(policy_state, Mapping) and set(policy_state) == set(fields):
    return kind(**policy_state)
  has_fields = getattr(policy_state, "_fields", None) == fields
  if has_fields and len(policy_state) == len(fields):
    return kind(*policy_state)
  raise ValueError(
    f"state.policy_state must have the fields of {type(policy).__name__}"
    f" ({', '.join(fields)}), got {_describe(policy_state)} of another policy,"
    " or of an earlier version. To keep the loss scale, use"
    " state._replace(policy_state=policy.init().policy_state), where state is"
    " the loss_scale_state of an optimizer state."
  )


def _describe(policy_state: Any) -> str:
  """The fields of a policy state, or how many values it has without names."""
  if not isinstance(policy_state, (Mapping, tuple, list)):
    return f"an object of type {type(policy_state).__name__}"
  is_mapping, count = isinstance(policy_state, Mapping), len(policy_state)
  names = (
    [*policy_state] if is_mapping else [*getattr(policy_state, "_fields", ())]
  )
  if count == 0:
    return "no fields"
  if len(names) == count:
    return ", ".join(map(str, names))
  return f"{count} value{'s' * (count > 1)} without names"


def holds_loss_scale(tree: Any) -> bool:
  """Whether there is a loss-scale state anywhere in the tree."""
  return bool(_find(tree))


def _find_one(tree: Any) -> tuple[Any, Any]:
  """The path of the one loss-scale state in the tree, and the state.

  Raises:
    ValueError: if there is none, or more than one.
  """
  found = _find(tree)
  if not found:
    raise ValueError(
      "state must hold a loss-scale state, got a"
      f" {type(tree).__name__} that holds none. Pass the state that"
      " `tx.init(params)` returned, with tx = with_loss_scaling(optimizer), or"
      " the train state or optimizer object that contains it."
    )
  if len(found) > 1:
    paths = ", ".join(_keystr(path) for path, _ in found)
    raise ValueError(
      "state must hold exactly one loss-scale state, got a"
      f" {type(tree).__name__} that holds {len(found)}: at {paths}."
      " Pass only the part that belongs to this loss."
    )
  return found[0]


def _find(tree: Any) -> list[tuple[Any, Any]]:
  """All (path, loss-scale state) in the tree."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_state)
  return [(path, leaf) for path, leaf in leaves if _is_state(leaf)]


def _is_state(x: Any) -> bool:
  if isinstance(x, LossScaleState):
    return True
  # Checkpoints and nnx.State turn named tuples into mappings, and may leave out
  # an empty `policy_state`.
  fields = set(LossScaleState._fields)
  return (
    isinstance(x, Mapping) and fields - {"policy_state"} <= set(x) <= fields
  )


def _unboxed(state: Any) -> LossScaleState:
  """The state as the named tuple of plain arrays."""
  if isinstance(state, Mapping):
    state = LossScaleState(**state)
  return jax.tree.map(
    lambda x: jax.tree.leaves(x)[0] if _is_box(x) else x,
    state,
    is_leaf=_is_box,
  )


def _is_box(x: Any) -> bool:
  """Whether x is a variable around one array, as Flax NNX keeps them."""
  is_container = isinstance(x, (tuple, list, Mapping))
  if is_container or jax.tree_util.all_leaves([x]):
    return False
  # Only asked whether it is there: to read it of an nnx.Variable is deprecated.
  return "value" in dir(x)


def _check_selectable(path: Any, new: Any, old: Any) -> None:
  """Raises if two leaves differ, and are no arrays to select between."""
  if _arrays.is_array_like(old) or hasattr(old, "dtype"):
    return
  if new is not old and (type(new) is not type(old) or new != old):
    raise ValueError(
      "new and old must be equal in leaves that are not arrays, since only"
      " arrays can be selected on a device, got"
      f" {_checks.came('new', new)} and {_checks.came('old', old)} at"
      f" {_paths.leaf_name(path)}. Remove this leaf from both."
    )


def _in_containers_of(old: Any, new: Any) -> Any:
  """The leaves of ``new``, each where ``old`` has one of this path."""
  in_new, in_old = _by_names(new), _by_names(old)
  for name, has, lacks in ("old", in_old, in_new), ("new", in_new, in_old):
    alone = [path for key, (path, _) in has.items() if key not in lacks]
    if alone:
      path = _paths.leaf_name(alone[0]) or "the root of the tree"
      raise ValueError(
        "new and old must have leaves at the same paths, got"
        f" {path} only in {name}."
      )
  leaves = [in_new[key][1] for key in in_old]
  return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _by_names(tree: Any) -> dict[tuple[Any, ...], tuple[Any, Any]]:
  """The paths and leaves of a tree, by the names of the keys on the way."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    tuple(map(_paths.key_name, path)): (path, leaf) for path, leaf in leaves
  }


def _keystr(path: Any) -> str:
  return jax.tree_util.keystr(path) or "the root of the tree"
