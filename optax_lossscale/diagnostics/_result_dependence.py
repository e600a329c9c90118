"""Do the results of a step depend on what ``update`` returns?

``_scale_dependence`` finds which updates and new loss scales reach each output.
"""

from collections.abc import Sequence
import itertools
import math
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _eqns, _walk
from optax_lossscale.diagnostics import (
  _problem,
  _scale_dependence,
  _tracing,
)

_OLD_STATE = _problem.Problem(
  "The step returns an old loss-scale state instead of the one that update"
  " returns, so the loss scale never changes.",
  "Return the opt_state that update returns, unchanged:"
  " updates, opt_state = tx.update(grads, opt_state, params).",
)
_NO_STATE = _problem.Problem(
  "The step does not return the opt_state that update returns, so the loss"
  " scale never changes, and the optimizer learns nothing from its steps.",
  "Return it: updates, opt_state = tx.update(grads, opt_state, params).",
)
NO_PARAMS = _problem.Problem(
  "The step does not return parameters that depend on the updates, so nothing"
  " is trained.",
  "Return the new parameters: params = optax.apply_updates(params, updates).",
)
_OLD_INNER_STATE = _problem.Problem(
  "The step returns an old state of the inner optimizer, which learns nothing"
  " from its steps.",
  "Return the opt_state that update returns, unchanged:"
  " updates, opt_state = tx.update(grads, opt_state, params).",
)


def check_dependence(
  traced: _tracing.TracedFunction,
  ran_indices: list[int],
) -> list[_problem.Problem] | None:
  """Check that the results depend on what each `update` returns.

  Args:
    traced: the step.
    ran_indices: the indices of the updates that ran.

  Returns:
    The mistakes; None if no result is an optimizer state or depends on what any
    `update` returns, so that the step seems to be a part of another one.
  """
  outvars = traced.closed_jaxpr.jaxpr.outvars
  results = [
    (x, _eqns.get_shape(var))
    for x, var in zip(traced.outputs, outvars, strict=True)
    if x.kind in _scale_dependence.RETURNED_KINDS
  ]
  states = [x for x in traced.outputs if x.kind == "state_scale"]
  update_pairs = [
    (x.group, _eqns.get_shape(var))
    for x, var in zip(traced.outputs, outvars, strict=True)
    if x.kind == "new_updates"
  ]
  update_shapes = [shape for _, shape in update_pairs]
  returned_params = frozenset().union(
    *(
      x.new_updates
      for x, shape in results
      if _may_be_param(shape, update_shapes)
    )
  )
  # A state may be returned as a list of leaves, which nothing identifies.
  returned_states = frozenset().union(
    *(x.new_scales for x in states or [x for x, _ in results])
  )
  if not states and not returned_params and not returned_states:
    return None
  indices_with_updates = {group for group, _ in update_pairs}
  mistakes: dict[_problem.Problem, None] = {}
  for i in ran_indices:
    if i not in returned_states:
      mistakes[_OLD_STATE if states else _NO_STATE] = None
    if i in indices_with_updates - returned_params:
      mistakes[NO_PARAMS] = None
  if not mistakes and _has_old_inner_state(results):
    return [_OLD_INNER_STATE]
  return list(mistakes)


def _has_old_inner_state(
  results: Sequence[tuple[_scale_dependence.Output, tuple[int, ...]]],
) -> bool:
  """Return whether no array of an inner state depends on the gradients.

  Moments may restart from zero, but then they depend on them, too.

  Args:
    results: the results of the step, and their shapes.
  """
  depends = [
    output.depends_on_update
    for output, shape in results
    if shape
    and "inner_state" in output.name.split("/")
    and "hyperparams" not in output.name.split("/")
  ]
  return bool(depends) and not any(depends)


def _may_be_param(
  shape: tuple[int, ...], update_shapes: Sequence[tuple[int, ...]]
) -> bool:
  """Return whether a result that depends on updates may be parameters.

  It may also be a metric, such as the norm of the updates, or the losses of all
  steps of a loop.

  Args:
    shape: the shape of the result.
    update_shapes: the shapes of the updates. Those of a loop are stacked.
  """
  if math.prod(shape) <= 1:
    return max(map(math.prod, update_shapes), default=0) <= 1
  # The number of leading axes that all updates share, and that may be stacked.
  is_shared = lambda sizes: len(set(sizes)) == 1
  columns = zip(*update_shapes, strict=False)
  num_shared = len([*itertools.takewhile(is_shared, columns)])
  is_param_shape = any(
    shape == x[i:] for x in update_shapes for i in range(num_shared + 1)
  )
  # The parameters may be one array.
  return is_param_shape or math.prod(shape) >= min(
    map(math.prod, update_shapes), default=0
  )


def converts_to_integers(traced: _tracing.TracedFunction) -> bool:
  """Return whether parameters may be quantized or rounded by their bits."""

  def converts(eqn: core.JaxprEqn) -> bool:
    is_cast = eqn.primitive.name == "convert_element_type"
    if not is_cast and eqn.primitive.name != "bitcast_convert_type":
      return False
    avals: list[Any] = [eqn.invars[0].aval, eqn.outvars[0].aval]
    old, new = (aval.dtype for aval in avals)
    is_quantized = jnp.issubdtype(new, jnp.integer) and new.itemsize == 1
    return jnp.issubdtype(old, jnp.inexact) and (is_quantized or not is_cast)

  search = _walk.EqnSearch(converts, _eqns.subjaxprs)
  return search.any_in_jaxpr(traced.closed_jaxpr.jaxpr)
