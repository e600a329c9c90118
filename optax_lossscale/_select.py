"""Run an inner update and keep its old state if the step is skipped.

The select between the new and the old state is inside the update: after the
equation that computes each new leaf. ARCHITECTURE.md has the reasons.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _eqns, _primitives


def update_with_selects(
  update: Callable[..., Any],
  finite: jax.Array,
  grads: Any,
  state: Any,
  params: Any,
  **extra_args: Any,
) -> tuple[Any, Any]:
  """Call ``update`` and keep the old state unless ``finite``.

  ``jnp.where(finite, new, old)`` after the update would be correct, but slow.
  The updates are computed from the new moments. XLA would compute the moments
  twice, once for the state and once for the updates, and would need the old
  moments until the end, so it could not overwrite them.

  Instead, each new leaf of the state is selected when an equation has computed
  it, and later equations read the selected leaf. In an applied step
  the selected leaf is the new one. In a skipped step the updates are discarded.
  A leaf whose type would change by the select is selected after the update.

  Args:
    update: the update function of an optimizer.
    finite: whether to take the new state; bool, shape ``()``.
    grads: the gradients.
    state: the optimizer's state.
    params: the parameters, or None.
    **extra_args: further arguments of ``update``, which may be functions.

  Returns:
    The updates that ``update`` returned, and the selected state in the
    structure and dtypes of ``state``. In a skipped step the updates are
    arbitrary.

  Raises:
    ValueError: if ``update`` returns a state of another structure.
  """
  # Outside jit there is nothing to gain, since XLA fuses nothing, and leaves of
  # the state may be any Python object.
  ctx = _get_eqn_ctx_or_none() if isinstance(finite, jax.core.Tracer) else None
  if ctx is None:
    updates, new_state = update(grads, state, params, **extra_args)
    return updates, select_state(finite, new_state, state)

  def run() -> tuple[Any, Any]:
    updates, new_state = update(grads, state, params, **extra_args)
    _check_tree_structure(new_state, state)
    return updates, jax.tree.map(_arrays.cast_like, new_state, state)

  return _run_with_selects(run, finite, state, ctx)


def select_state(finite: jax.Array, new_state: Any, state: Any) -> Any:
  """Return the new state if ``finite``, else the old state.

  Raises:
    ValueError: if the two differ in structure.
  """
  _check_tree_structure(new_state, state)
  return _arrays.select(finite, new_state, state)


def _get_eqn_ctx_or_none() -> Any:
  """Return the context of equations traced here; None if JAX has none.

  None means that this version of JAX can't evaluate equations one by one. The
  select after the update is then the fallback: it is slower but always correct.
  """
  try:
    return _eqns.get_current_eqn_ctx()
  except Exception:
    return None


def _run_with_selects(
  run: Callable[[], tuple[Any, Any]], finite: jax.Array, state: Any, ctx: Any
) -> tuple[Any, Any]:
  """Trace ``run`` and evaluate its jaxpr, selecting new leaves of the state.

  Args:
    run: a function without arguments that returns the updates and the new
      state, in the structure and dtypes of ``state``.
    finite: whether to take the new state.
    state: the old state.
    ctx: the context of equations that may be followed by a select.

  Returns:
    The updates and the selected state.
  """
  # `run` takes no arguments but closes over everything, so traced values become
  # constants of the jaxpr. They keep their shardings and manual axes, and the
  # extra arguments may be functions.
  closed_jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)()
  old_leaves = jax.tree.leaves(state)
  num_update_outs = len(closed_jaxpr.jaxpr.outvars) - len(old_leaves)
  new_vars = closed_jaxpr.jaxpr.outvars[num_update_outs:]
  # If the same variable is two leaves of the state, it is selected for the
  # first; `select_remaining` selects the second after the update.
  old_by_var: dict[Any, Any] = {}
  for var, leaf in zip(new_vars, old_leaves, strict=True):
    if not isinstance(var, core.Literal):
      old_by_var.setdefault(var, leaf)
  selected_by_var: dict[Any, Any] = {}

  def select_output(eqn: core.JaxprEqn, var: Any, new: Any) -> Any:
    if var not in old_by_var:
      return new
    old = old_by_var[var]
    if not _can_replace_by_select(eqn, var, old, finite, ctx):
      return new
    selected_by_var[var] = old
    return _arrays.select(finite, new, old)

  outs = _eqns.eval_jaxpr(closed_jaxpr, select_output)

  def select_remaining(var: Any, out: Any, leaf: Any) -> Any:
    if out is leaf:  # The update returned the old leaf.
      return out
    is_selected = (
      _eqns.is_var_in(var, selected_by_var) and selected_by_var[var] is leaf
    )
    return out if is_selected else _arrays.select(finite, out, leaf)

  new_leaves = map(
    select_remaining, new_vars, outs[num_update_outs:], old_leaves
  )
  updates = jax.tree.unflatten(
    jax.tree.structure(shapes[0]), outs[:num_update_outs]
  )
  return updates, jax.tree.unflatten(jax.tree.structure(state), new_leaves)


def _can_replace_by_select(
  eqn: core.JaxprEqn, var: Any, old: Any, finite: jax.Array, ctx: Any
) -> bool:
  """Return whether later equations may read the selected value instead.

  Args:
    eqn: the equation that computes the new value.
    var: the variable of the new value.
    old: the old leaf of the state.
    finite: the condition of the select.
    ctx: the context in which the select would be traced.

  Returns:
    False if the selected value would have another type or placement than the
    value with which later equations were traced, or if this is unknown.
  """
  try:
    return (
      # The result of the select also varies over the mesh axes of `finite`, so
      # the value must already vary over them.
      _primitives.get_varying_axes(finite)
      <= _primitives.get_aval_varying_axes(var.aval)
      and var.aval == jax.typeof(old)
      and _eqns.can_substitute_result(eqn, ctx)
    )
  except Exception:
    return False


def _check_tree_structure(new_state: Any, state: Any) -> None:
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
