"""Runs an inner update, so that a skipped step keeps the old state.

The old state is not selected after the update but within it: where each new
leaf of the state is computed. docs/design.md says why.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_lossscale import _arrays, _jaxprs


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
  here = _jit_called_here() if isinstance(finite, jax.core.Tracer) else None
  if here is None:
    updates, new_state = update(grads, state, params, **extra_args)
    return updates, keep_unless(finite, new_state, state)

  def run() -> tuple[Any, Any]:
    updates, new_state = update(grads, state, params, **extra_args)
    _check_structure(new_state, state)
    return updates, jax.tree.map(_arrays.cast_like, new_state, state)

  return _run_with_selects(run, finite, state, here)


def keep_unless(finite: jax.Array, new_state: Any, state: Any) -> Any:
  """The new state if ``finite``, else the old one, selected after the update.

  Raises:
    ValueError: if the two differ in structure.
  """
  _check_structure(new_state, state)
  return _arrays.select(finite, new_state, state)


def _run_with_selects(
  run: Callable[[], tuple[Any, Any]],
  finite: jax.Array,
  state: Any,
  here: core.JaxprEqn,
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
  outs, selected = _evaluate(closed.jaxpr, closed.consts, finite, old, here)

  def select_if_not_yet(var: Any, out: Any, leaf: Any) -> Any:
    if out is leaf:  # The update left it as it was.
      return out
    is_selected = _jaxprs.is_one_of(var, selected) and selected[var] is leaf
    return out if is_selected else _arrays.select(finite, out, leaf)

  new_leaves = map(select_if_not_yet, new_vars, outs[first:], old_leaves)
  updates = jax.tree.unflatten(jax.tree.structure(shapes[0]), outs[:first])
  return updates, jax.tree.unflatten(jax.tree.structure(state), new_leaves)


def _jit_called_here() -> core.JaxprEqn | None:
  """The equation of a jit without any options, to compare others with.

  None if its jaxpr cannot be taken apart: a new version of JAX may describe
  what a function computes in another way. To select within an update saves
  time, and to select after it is always right.
  """
  try:
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: -x))(0.0).eqns
    jax.eval_shape(_jaxprs.function(eqn), 0.0)
  except Exception:
    return None
  return eqn


def _evaluate(
  jaxpr: core.Jaxpr,
  args: list[Any],
  finite: jax.Array,
  old: dict[Any, Any],
  here: core.JaxprEqn,
) -> tuple[list[Any], dict[Any, Any]]:
  """Evaluates a jaxpr, and selects each output right where it is computed.

  Args:
    jaxpr: the jaxpr.
    args: a value for each of its constants and inputs.
    finite: whether to take the new values.
    old: the values to keep, by output variable.
    here: what ``_jit_called_here`` returns.

  Returns:
    The outputs, and for each variable that was selected the value to keep.
  """
  env = dict(zip(jaxpr.constvars + jaxpr.invars, args, strict=True))
  selected: dict[Any, Any] = {}

  def read(var: Any) -> Any:
    return var.val if isinstance(var, core.Literal) else env[var]

  for eqn in jaxpr.eqns:
    inputs = list(map(read, eqn.invars))
    entry = _entry(eqn, here)
    if entry is not None:
      outs, within = _enter(entry, inputs, eqn.outvars, finite, old, here)
      env.update(zip(eqn.outvars, outs, strict=True))
      selected |= within
      continue
    outs = _jaxprs.function(eqn)(*inputs)
    env.update(zip(eqn.outvars, outs, strict=True))
    for var in eqn.outvars:
      if var in old and _may_select(eqn, env[var], finite, old[var], here):
        env[var] = _arrays.select(finite, env[var], old[var])
        selected[var] = old[var]
  return [read(var) for var in jaxpr.outvars], selected


class _Entry(NamedTuple):
  """What it takes to enter a jit: its jaxpr, and the scope of its call."""

  inner: _jaxprs.ClosedJaxpr
  scope: str


def _enter(
  entry: _Entry,
  args: list[Any],
  outvars: Sequence[Any],
  finite: jax.Array,
  old: dict[Any, Any],
  here: core.JaxprEqn,
) -> tuple[list[Any], dict[Any, Any]]:
  """Does what ``_evaluate`` does, for the function that a jit calls."""
  inner = entry.inner
  # By the variable inside. If it is returned twice, it is selected once.
  pairs = {
    i: o
    for i, o in zip(inner.jaxpr.outvars, outvars, strict=True)
    if o in old and not isinstance(i, core.Literal)
  }
  inner_old = {i: old[o] for i, o in pairs.items()}
  # Profiles go on to show the scopes around the call, and its name.
  with jax.named_scope(entry.scope):
    outs, selected = _evaluate(
      inner.jaxpr, [*inner.consts, *args], finite, inner_old, here
    )
  return outs, {pairs[i]: leaf for i, leaf in selected.items()}


def _entry(eqn: core.JaxprEqn, here: core.JaxprEqn) -> _Entry | None:
  """How to select inside this equation, if it is a jit without options.

  Shardings, donation and other options of the jit would be lost. A jit with one
  result is not entered, since nothing in it could read the selected value. Nor
  is one that is not understood.
  """
  if eqn.primitive is not here.primitive or len(eqn.outvars) < 2:
    return None
  try:
    inner = _jaxprs.called_jaxpr(eqn)
    is_as_here = eqn.ctx == here.ctx and not _has_options(eqn, here)
    call = f"jit({eqn.params['name']})"
    scope = str(eqn.source_info.name_stack.extend(call))
  except Exception:
    return None
  return _Entry(inner, scope) if inner and is_as_here else None


def _has_options(eqn: core.JaxprEqn, here: core.JaxprEqn) -> bool:
  """Whether a jit was given an option that the one here was not given.

  The one here has one argument and one result: what an option says of them, it
  may say of each argument and result of the other.
  """
  return any(
    option not in _one_for_each(here.params[name])
    for name, options in eqn.params.items()
    if name not in ("jaxpr", "name")
    for option in _one_for_each(options)
  )


def _one_for_each(param: Any) -> tuple[Any, ...]:
  return param if isinstance(param, tuple) else (param,)


def _may_select(
  eqn: core.JaxprEqn,
  value: Any,
  finite: jax.Array,
  old: Any,
  here: core.JaxprEqn,
) -> bool:
  """Whether all that reads the value may read the selected one instead.

  It may not if the selected one is of another type, since what follows was
  traced with the type of this one. It may not on another device or mesh than
  that of this call, such as between operations of the host. And it may not if
  the equation says where its result is placed, since XLA would choose a place
  for the selected one. And it may not if one of these cannot be known.
  """
  try:
    shardings = map(_is_sharding, jax.tree.leaves(eqn.params))
    return (
      _jaxprs.varying(finite) <= _jaxprs.varying(value)
      and jax.typeof(value) == jax.typeof(old)
      and eqn.ctx == here.ctx
      and not any(shardings)
    )
  except Exception:
    return False


def _is_sharding(x: Any) -> bool:
  return isinstance(x, jax.sharding.Sharding)


def _check_structure(new_state: Any, state: Any) -> None:
  new: Any = jax.tree.structure(new_state)
  old: Any = jax.tree.structure(state)
  if new != old:
    raise ValueError(
      "The state of inner must keep its structure, so that a skipped step can"
      f" keep the old one; got {new} from update and {old} before it."
    )
