"""Call a function with a list of arrays in place of its arguments.

The arguments may be anything. Arrays in them become inputs, and float results
and arrays that the function changes in its arguments become outputs.
"""

from collections.abc import Callable
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _state, _trees
from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import _outputs


class FlatCall:
  """The call of a function with a list of arrays in place of its arguments.

  What a call finds are Python objects, which a traced function cannot return. A
  second call overwrites them.

  Args:
    fun: the function, for the names of its arguments.
    args: its arguments.
    kwargs: its keyword arguments.

  Attributes:
    inputs: the arrays among the arguments.
    input_names: their names.
    outputs: the outputs of the last call.
    scale_indices: the indices of the inputs that are loss scales.
  """

  def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
    self._num_args = len(args)
    self._kwarg_names = sorted(kwargs)  # in the order in which JAX flattens
    self._names = _get_positional_names(fun, len(args)) + self._kwarg_names
    arg_trees = [*args, *(kwargs[name] for name in self._kwarg_names)]
    self._flat_args = flat_args = self._flatten(arg_trees)
    self._leaf_indices = [
      i for i, leaf in enumerate(flat_args.leaves) if _is_input(leaf)
    ]
    self.input_names = [flat_args.names[i] for i in self._leaf_indices]
    self.inputs = [
      _eqns.read_ref(flat_args.leaves[i]) for i in self._leaf_indices
    ]
    self.outputs: list[_outputs.Output] = []
    self.scale_indices: tuple[int, ...] = ()

  def __call__(self, fun: Callable[..., Any], *tracers: Any) -> list[Any]:
    """Call a function, and return the arrays that become outputs."""
    flat_args = self._flat_args
    call_leaves = list(flat_args.leaves)
    for i, x in zip(self._leaf_indices, tracers, strict=True):
      # The function may write to a Ref, and must not change the caller's.
      is_ref = _eqns.is_ref_object(call_leaves[i])
      call_leaves[i] = jax.new_ref(x) if is_ref else x
    call_trees = flat_args.unflatten(call_leaves)
    states = _state.find_loss_scale_states(call_trees)
    self.scale_indices = tuple(
      i
      for i, k in enumerate(self._leaf_indices)
      if any(call_leaves[k] is state.loss_scale for state in states)
    )
    args, others = call_trees[: self._num_args], call_trees[self._num_args :]
    result = fun(*args, **dict(zip(self._kwarg_names, others, strict=True)))
    output_pairs = _collect_float_results(result)
    flat_after_call = self._flatten(call_trees)
    if flat_after_call.structure == flat_args.structure:
      output_pairs += _collect_changed_arguments(
        flat_args.names, call_leaves, flat_after_call.leaves
      )
    output_pairs += _collect_scale_states(result, call_trees, call_leaves)
    self.outputs = [output for output, _ in output_pairs]
    return [leaf for _, leaf in output_pairs]

  def _flatten(self, trees: list[Any]) -> Any:
    pairs = list(zip(self._names, trees, strict=True))
    return _trees.flatten_named_trees(pairs)


def _get_positional_names(fun: Callable[..., Any], num_args: int) -> list[str]:
  """Return a name for each positional argument."""
  try:
    parameters = list(inspect.signature(fun).parameters.values())
  except (TypeError, ValueError):  # The signature is unknown.
    parameters = []
  # The enum lists POSITIONAL_ONLY and POSITIONAL_OR_KEYWORD before
  # VAR_POSITIONAL.
  names = [p.name for p in parameters[:num_args] if p.kind < p.VAR_POSITIONAL]
  return names + [f"args[{i}]" for i in range(len(names), num_args)]


def _is_input(leaf: Any) -> bool:
  if isinstance(leaf, (np.ndarray, np.generic)):
    # Integers of NumPy may be sizes and indices, which must stay concrete.
    return _arrays.is_inexact(leaf)
  is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
  return is_array or _eqns.is_ref_object(leaf)


def _collect_float_results(
  out: Any,
) -> list[tuple[_outputs.Output, Any]]:
  """Return the float arrays in the result of a function, with their names.

  The items of a tuple are separate results, such as a loss and gradients.
  """
  # Only plain tuples are split: a named tuple, a dict or a list is one result.
  is_result = lambda x: type(x) is not tuple
  results = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_result)
  leaves = [
    (i, (*outer_path, *inner_path), leaf)
    for i, (outer_path, result) in enumerate(results)
    for inner_path, leaf in jax.tree_util.tree_leaves_with_path(result)
  ]
  names = _trees.leaf_names(path for _, path, _ in leaves)
  return [
    (
      _outputs.Output(
        "result" if _is_float_array(leaf) else "integers", name, i
      ),
      leaf,
    )
    for name, (i, _, leaf) in zip(names, leaves, strict=True)
    if _is_float_array(leaf) or _is_integer_array(leaf)
  ]


def _collect_changed_arguments(
  names: list[str], leaves: list[Any], leaves_after_call: list[Any]
) -> list[tuple[_outputs.Output, Any]]:
  """Return the float arrays that a function changed in its arguments.

  Flax NNX changes models and optimizers in place: their arrays are other
  objects after the call. A Ref is the same object, and always included.
  """
  return [
    (_outputs.Output("argument", name, 0), _eqns.read_ref(new))
    for name, old, new in zip(names, leaves, leaves_after_call, strict=True)
    if (new is not old or _eqns.is_ref_object(new)) and _is_float_array(new)
  ]


def _collect_scale_states(
  result: Any, call_trees: list[Any], call_leaves: list[Any]
) -> list[tuple[_outputs.Output, Any]]:
  """Return fields of each loss-scale state that a function returns or changes.

  Args:
    result: the result of the function.
    call_trees: its arguments, after the call.
    call_leaves: the leaves of its arguments before the call.
  """
  is_changed = lambda state: (
    _eqns.is_ref_object(state.loss_scale)
    or not any(state.loss_scale is leaf for leaf in call_leaves)
  )
  states = [
    *_state.find_loss_scale_states(result),
    *filter(is_changed, _state.find_loss_scale_states(call_trees)),
  ]
  # A tree of shardings may have the structure of a state.
  states = [x for x in states if _arrays.is_array_like(x.loss_scale)]
  return [
    (
      _outputs.Output(kind, field, i),
      jnp.asarray(_eqns.read_ref(getattr(state, field))),
    )
    for i, state in enumerate(states)
    for kind, field in (
      ("state_scale", "loss_scale"),
      ("state_skip_count", "total_notfinite"),
    )
  ]


def _is_integer_array(leaf: Any) -> bool:
  is_array = _arrays.is_array_like(leaf) and hasattr(leaf, "dtype")
  return is_array and jnp.issubdtype(leaf.dtype, jnp.integer)


def _is_float_array(leaf: Any) -> bool:
  return _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)
