"""Dataflow analysis of weights: which parameter path does each matmul have?

A matmul has the path of the weight that is one of its operands. In the backward
pass of a custom rule, a matmul without a weight as its operand may return the
gradient of a weight, and has the path of this weight. So paths of weights are
propagated forward, and paths of gradients backward.
"""

from collections.abc import Mapping, Sequence
import itertools
import types
from typing import Any, NamedTuple

from jax.extend import core

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
)

# The keys of a weight among the arguments. If a call is tagged with the first
# keys, the jaxpr of the call has the remaining keys. None for a value that is
# not a weight.
WeightPath = tuple[str, ...] | None

# If the output of one of these is the gradient of a weight, each operand is a
# contribution to this gradient.
_LINEAR_SUMS = {"add", "add_any", "pad", "psum", "psum_invariant", "reduce_sum"}
# If the output of one of these is the gradient of a stack of weights, the
# operands are the gradients of its parts.
_CONCATENATIONS = {"concatenate", "stack"}


class WeightPaths(NamedTuple):
  """The weight paths of the inputs and outputs of a jaxpr or an equation.

  Attributes:
    inputs: the path of each input; empty if none is a weight.
    outputs: for each output the path of the weight whose gradient it is.
  """

  inputs: tuple[WeightPath, ...] = ()
  outputs: tuple[WeightPath, ...] = ()


NO_PATHS = WeightPaths()


class ProgramWeights:
  """The weights of a program, cached for each jaxpr and its weight paths.

  Attributes:
    path_by_id: the paths of weights that the program closes over, by the id of
      the array.
  """

  def __init__(
    self, path_by_id: Mapping[int, WeightPath] = types.MappingProxyType({})
  ):
    self.path_by_id = path_by_id
    self._weights_by_jaxpr: dict[Any, JaxprWeights] = {}

  def get_jaxpr_weights(
    self, closed_jaxpr: _eqns.ClosedJaxpr, paths: WeightPaths
  ) -> "JaxprWeights":
    """Return the weights in a jaxpr, given the paths at its boundary."""
    key = closed_jaxpr.jaxpr, paths
    if key not in self._weights_by_jaxpr:
      self._weights_by_jaxpr[key] = JaxprWeights(self, closed_jaxpr, paths)
    return self._weights_by_jaxpr[key]


class JaxprWeights:
  """The variables of a jaxpr that are weights.

  Args:
    program: the weights of the whole program.
    closed_jaxpr: the jaxpr.
    paths: the weight paths of its inputs and outputs.
  """

  def __init__(
    self,
    program: ProgramWeights,
    closed_jaxpr: _eqns.ClosedJaxpr,
    paths: WeightPaths,
  ) -> None:
    self._program = program
    jaxpr = closed_jaxpr.jaxpr
    const_paths = [program.path_by_id.get(id(x)) for x in closed_jaxpr.consts]
    invars = [*jaxpr.constvars, *jaxpr.invars]
    self._weight_paths = _map_vars_to_paths(
      invars, [*const_paths, *paths.inputs]
    )
    self._gradient_paths = _map_vars_to_paths(jaxpr.outvars, paths.outputs)
    self._call_paths: dict[core.JaxprEqn, CallPaths] = {}
    # One pass in each direction is enough, since the equations of a jaxpr are
    # in topological order.
    for eqn in reversed(jaxpr.eqns) if self._gradient_paths else ():
      self._propagate_backward(eqn)
    for eqn in jaxpr.eqns:
      self._propagate_forward(eqn)

  def get_paths(self, atoms: Sequence[Any]) -> list[WeightPath]:
    """Return the weight path of each variable or literal."""
    # JAX may write an array that a function closes over into its equations.
    path_by_id = self._program.path_by_id
    return [
      path_by_id.get(id(x.val))
      if isinstance(x, core.Literal)
      else self._weight_paths.get(x)
      for x in atoms
    ]

  def tag_with_weight(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Tag an equation with its parameter path, by a scope in its name stack.

    The tag of a call is the common prefix of the paths of its weights, and the
    matmuls in its jaxpr are tagged with the suffixes. So layers whose calls
    share one jaxpr still share it: the layers differ in the prefix.
    """
    if not _primitives.is_matmul(eqn):
      return _provenance.tag_param_path(eqn, self.get_call_paths(eqn).prefix)
    # A weight among the operands has priority over a gradient as the result.
    paths = [
      *self.get_paths(eqn.invars[:2]),
      *_get_paths(self._gradient_paths, eqn.outvars),
    ]
    return _provenance.tag_param_path(eqn, next(filter(None, paths), ()))

  def get_body_weights(
    self, eqn: core.JaxprEqn, body: _eqns.ClosedJaxpr
  ) -> "JaxprWeights":
    """Return the weights in a jaxpr that a call runs."""
    body_suffixes = self.get_call_paths(eqn).body_suffixes
    return self._program.get_jaxpr_weights(
      body, body_suffixes.get(body.jaxpr, NO_PATHS)
    )

  def get_call_paths(self, eqn: core.JaxprEqn) -> "CallPaths":
    """Return the cached paths of an equation."""
    if eqn not in self._call_paths:
      self._call_paths[eqn] = _split_call_paths(
        eqn,
        self.get_paths(eqn.invars),
        _get_paths(self._gradient_paths, eqn.outvars),
      )
    return self._call_paths[eqn]

  def _propagate_forward(self, eqn: core.JaxprEqn) -> None:
    """Record the outputs of an equation that are weights."""
    paths = self.get_paths(eqn.invars)
    if all(path is None for path in paths):
      return
    call_jaxpr = _eqns.get_call_jaxpr(eqn)
    if call_jaxpr is not None:  # A call may return a weight, such as a cast.
      prefix = self.get_call_paths(eqn).prefix
      body_weights = self.get_body_weights(eqn, call_jaxpr)
      paths = body_weights.get_paths(call_jaxpr.jaxpr.outvars)
      paths = [path if path is None else (*prefix, *path) for path in paths]
    elif eqn.primitive.name not in _primitives.WEIGHT_PRESERVING:
      return
    elif len(eqn.outvars) == 1:
      # The operands may include a mask or an index, which have no path. The
      # result of operands from two weights is neither of them.
      distinct_paths = {path for path in paths if path is not None}
      paths = [
        (*path, *_get_static_slice_index(eqn))
        for path in distinct_paths
        if len(distinct_paths) == 1
      ]
    elif paths[0] is not None and len(paths) == 1:
      # A split: its outputs are the parts of one weight.
      paths = [(*paths[0], str(i)) for i in range(len(eqn.outvars))]
    # Otherwise it is an `optimization_barrier`, with an output for each input.
    self._weight_paths.update(_map_vars_to_paths(eqn.outvars, paths))

  def _propagate_backward(self, eqn: core.JaxprEqn) -> None:
    """Record the inputs of an equation that its output gradients consist of."""
    paths = _get_paths(self._gradient_paths, eqn.outvars)
    if all(path is None for path in paths):
      return
    name = eqn.primitive.name
    if (
      name not in _primitives.WEIGHT_PRESERVING | _LINEAR_SUMS | _CONCATENATIONS
    ):
      return
    if len(paths) == 1:  # Otherwise it is an `optimization_barrier`.
      is_concatenation = name in _CONCATENATIONS and len(eqn.invars) > 1
      indices = [(str(i),) * is_concatenation for i in range(len(eqn.invars))]
      paths = [(*(paths[0] or ()), *index) for index in indices]
    # A variable that already has a path keeps the path. Such a variable is the
    # gradient of one weight and contributes to the gradient of another one.
    self._gradient_paths = (
      _map_vars_to_paths(eqn.invars, paths) | self._gradient_paths
    )


class CallPaths(NamedTuple):
  """The weight paths of a higher-order equation, split at their common prefix.

  Attributes:
    prefix: the keys that all paths of the equation have in common.
    suffixes: the remaining keys of each input and output.
    body_suffixes: the same for the inputs and outputs of each jaxpr, if any has
      a path.
  """

  prefix: tuple[str, ...] = ()
  suffixes: WeightPaths = NO_PATHS
  body_suffixes: Mapping[core.Jaxpr, WeightPaths] = types.MappingProxyType({})


def _split_call_paths(
  eqn: core.JaxprEqn, inputs: list[WeightPath], outputs: list[WeightPath]
) -> CallPaths:
  """Split the weight paths of an equation at their common prefix.

  Args:
    eqn: the equation.
    inputs: the weight path of each input.
    outputs: for each output the path of the weight whose gradient it is.
  """
  if all(path is None for path in (*inputs, *outputs)):
    return CallPaths()
  hop = _higher_order.parse_higher_order(eqn)
  # A loop changes its carry, so that is not a weight after the first iteration.
  inputs = _higher_order.mask_carry(hop, inputs)
  weight_paths = [path for path in (*inputs, *outputs) if path is not None]
  is_shared = lambda names: len(set(names)) == 1
  # `zip` ends with the shortest path, so a prefix is never longer than a path.
  shared_levels = itertools.takewhile(
    is_shared, zip(*weight_paths, strict=False)
  )
  prefix = tuple(name for name, *_ in shared_levels)
  strip_prefix = lambda path: None if path is None else path[len(prefix) :]
  suffixes = WeightPaths(
    tuple(map(strip_prefix, inputs)), tuple(map(strip_prefix, outputs))
  )
  body_suffixes = {
    body.jaxpr: WeightPaths(tuple(body_inputs), suffixes.outputs)
    for body, body_inputs in _higher_order.pair_bodies_with_inputs(
      hop, suffixes.inputs
    )
  }
  return CallPaths(prefix, suffixes, body_suffixes)


def _map_vars_to_paths(
  atoms: Sequence[Any], paths: Sequence[WeightPath]
) -> dict[Any, WeightPath]:
  """Return the paths by variable, without literals and values without path."""
  return {
    atom: path
    for atom, path in zip(atoms, paths, strict=False)
    if path is not None and not isinstance(atom, core.Literal)
  }


def _get_paths(
  paths: dict[Any, WeightPath], atoms: Sequence[Any]
) -> list[WeightPath]:
  """Return the path of each variable or literal; None if it has none."""
  return [
    None if isinstance(atom, core.Literal) else paths.get(atom)
    for atom in atoms
  ]


def _get_static_slice_index(eqn: core.JaxprEqn) -> tuple[str, ...]:
  """Return the index of an equation that takes one layer of a weight stack.

  Returns:
    The index as a string in a tuple; empty for all other equations, and for an
    index that depends on data.
  """
  if eqn.primitive.name == "slice":
    start: Any = eqn.params["start_indices"][0]
  elif eqn.primitive.name == "dynamic_slice":
    index: Any = eqn.invars[1]
    start = int(index.val) if isinstance(index, core.Literal) else None
  else:
    return ()
  in_aval: Any = eqn.invars[0].aval
  out_aval: Any = eqn.outvars[0].aval
  # Only the first axis of a stack counts the layers.
  is_single_slice = out_aval.shape == (1, *in_aval.shape[1:]) != in_aval.shape
  return (str(start),) if is_single_slice and start is not None else ()
