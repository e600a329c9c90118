"""Runs an inner update, so that a skipped step keeps the old state.

The old state is not selected after the update but within it: where each new
leaf of the state is computed. ARCHITECTURE.md says why.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.extend import core

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _equations, _interpret, _types


def update_or_keep(
  update: Callable[..., Any],
  finite: jax.Array,
  grads: Any,
  state: Any,
  params: Any,
  **extra_args: Any,
) -> tuple[Any, Any]:
  """Calls ``update`` and keeps the old state unless ``finite``.

  ``jnp.where(finite, new, old)`` after the update would be correct, but slow.
  The updates are computed from the new moments. XLA would compute these twice,
  once for the state and once for the updates, and would need the old moments to
  the end, so that it could not overwrite them. Instead, each new leaf of the
  state is selected right where it is computed, and all that follows reads the
  selected one. On an applied step this is the same number. On a skipped step
  the updates are thrown away. If the selected leaf would differ from the new
  one in more than its numbers, it is selected after the update.

  Args:
    update: the update function of an optimizer.
    finite: whether to take the new state; bool, shape ``()``.
    grads: the gradients.
    state: the optimizer's state.
    params: the parameters, or None.
    **extra_args: further arguments of ``update``, which may be functions.

  Returns:
    The updates as ``update`` gave them, and the selected state in the
    structure and dtypes of ``state``.

  Raises:
    ValueError: if ``update`` returns a state of another structure.
  """
  # Outside jit nothing is fused, and leaves of the state may be any object.
  context = _context_here() if isinstance(finite, jax.core.Tracer) else None
  if context is None:
    updates, new_state = update(grads, state, params, **extra_args)
    return updates, keep_unless(finite, new_state, state)

  def run() -> tuple[Any, Any]:
    updates, new_state = update(grads, state, params, **extra_args)
    _check_structure(new_state, state)
    return updates, jax.tree.map(_arrays.cast_like, new_state, state)

  return _run_with_selects(run, finite, state, context)


def keep_unless(finite: jax.Array, new_state: Any, state: Any) -> Any:
  """The new state if ``finite``, else the old one, selected after the update.

  Raises:
    ValueError: if the two differ in structure.
  """
  _check_structure(new_state, state)
  return _arrays.select(finite, new_state, state)


def _context_here() -> Any:
  """The settings that hold here, to compare those of equations with.

  None if equations cannot be taken apart: a new version of JAX may describe
  what a function computes in another way. To select within an update saves
  time, and to select after it is always right.
  """
  try:
    return _interpret.context_here()
  except Exception:
    return None


def _run_with_selects(
  run: Callable[[], tuple[Any, Any]], finite: jax.Array, state: Any, here: Any
) -> tuple[Any, Any]:
  # `run` takes no arguments but closes over everything. So traced values become
  # constants of the jaxpr, and keep their shardings and manual axes, and
  # functions among the arguments need no care.
  closed, shapes = jax.make_jaxpr(run, return_shape=True)()
  old_leaves = jax.tree.leaves(state)
  first = len(closed.jaxpr.outvars) - len(old_leaves)
  new_vars = closed.jaxpr.outvars[first:]
  # If a value becomes two leaves of the state, it is selected for the first.
  old: dict[Any, Any] = {}
  for var, leaf in zip(new_vars, old_leaves, strict=True):
    if not isinstance(var, core.Literal):
      old.setdefault(var, leaf)
  selected: dict[Any, Any] = {}

  def step(eqn: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
    outs = _equations.function(eqn)(*inputs)
    return list(map(functools.partial(select, eqn), eqn.outvars, outs))

  def select(eqn: core.JaxprEqn, var: Any, out: Any) -> Any:
    if var not in old or not _may_select(eqn, out, old[var], finite, here):
      return out
    selected[var] = old[var]
    return _arrays.select(finite, out, old[var])

  outs = _interpret.interpret(closed, [], step)

  def select_if_not_yet(var: Any, out: Any, leaf: Any) -> Any:
    if out is leaf:  # The update left it as it was.
      return out
    is_selected = _equations.is_one_of(var, selected) and selected[var] is leaf
    return out if is_selected else _arrays.select(finite, out, leaf)

  new_leaves = map(select_if_not_yet, new_vars, outs[first:], old_leaves)
  updates = jax.tree.unflatten(jax.tree.structure(shapes[0]), outs[:first])
  return updates, jax.tree.unflatten(jax.tree.structure(state), new_leaves)


def _may_select(
  eqn: core.JaxprEqn, value: Any, old: Any, finite: jax.Array, here: Any
) -> bool:
  """Whether all that reads the value may read the selected one instead.

  It may not if the selected one is of another type, since what follows was
  traced with the type of this one, or if the equation says that it may not. And
  it may not if one of these cannot be known.
  """
  try:
    return (
      _types.varying(finite) <= _types.varying(value)
      and jax.typeof(value) == jax.typeof(old)
      and _interpret.may_change_result(eqn, here)
    )
  except Exception:
    return False


def _check_structure(new_state: Any, state: Any) -> None:
  new: Any = jax.tree.structure(new_state)
  old: Any = jax.tree.structure(state)
  if new != old:
    raise ValueError(
      "The state of inner must keep its structure, because a skipped step"
      f" restores the old state, got {new} from update and {old} before it. If"
      " inner contains optax.monitor, move it outside: optax.chain("
      "optax.monitor(...), with_loss_scaling(optimizer)). Or use"
      " optax.snapshot, whose state keeps its structure."
    )
