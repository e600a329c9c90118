"""Follows weights through a program, by their paths among the arguments.

A product has the name of the weight that is one of its operands. In the
backward pass of a rule, one without such an operand may return the gradient of
a weight, and has its name.
"""

from collections.abc import Iterable, Mapping, Sequence
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

# The path of a weight, or what is left of it within a call that tells the
# beginning; None of what is no weight.
WeightPath = tuple[str, ...] | None

# The gradient of a weight that was made into others is made from theirs.
_LINEAR_SUMS = {"add", "add_any", "pad", "psum", "psum_invariant", "reduce_sum"}
# Or of those of its parts.
_CONCATENATIONS = {"concatenate", "stack"}


class WeightPaths(NamedTuple):
  """The paths of weights among the inputs and the outputs of a jaxpr.

  Attributes:
    inputs: of each input its path; none is known, if this is empty.
    outputs: of each output the path of the weight whose gradient it is.
  """

  inputs: tuple[WeightPath, ...] = ()
  outputs: tuple[WeightPath, ...] = ()

  def select_inputs(self, indices: Iterable[int]) -> tuple[WeightPath, ...]:
    """The paths of some of the inputs."""
    return tuple(self.inputs[i] for i in indices if self.inputs)


NO_PATHS = WeightPaths()


class ProgramWeights:
  """The paths of all weights in a program, each jaxpr of which is read once.

  Attributes:
    path_by_id: those of the arrays that it closes over, by their identity.
  """

  def __init__(
    self, path_by_id: Mapping[int, WeightPath] = types.MappingProxyType({})
  ):
    self.path_by_id = path_by_id
    self._weights_by_jaxpr: dict[Any, JaxprWeights] = {}

  def get_jaxpr_weights(
    self, closed_jaxpr: _eqns.ClosedJaxpr, paths: WeightPaths
  ) -> "JaxprWeights":
    """The weights in a jaxpr."""
    key = closed_jaxpr.jaxpr, paths
    if key not in self._weights_by_jaxpr:
      self._weights_by_jaxpr[key] = JaxprWeights(self, closed_jaxpr, paths)
    return self._weights_by_jaxpr[key]


class JaxprWeights:
  """The variables of a jaxpr that are weights.

  Args:
    program: what is known of the whole program.
    closed_jaxpr: the jaxpr.
    paths: those of its inputs and outputs.
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
    self._call_paths: dict[core.JaxprEqn, _CallPaths] = {}
    for eqn in reversed(jaxpr.eqns) if self._gradient_paths else ():
      self._propagate_backward(eqn)
    for eqn in jaxpr.eqns if self._weight_paths else ():
      self._propagate_forward(eqn)

  def get_paths(self, atoms: Sequence[Any]) -> list[WeightPath]:
    """The paths of the inputs of an equation, or of other variables."""
    return [_get_path(self._weight_paths, x) for x in atoms]

  def tag_with_weight(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
    """A product with the path of its weights, a call with what they share.

    So calls that share a function go on to share it: what tells them apart
    stands at the call, and what tells their products apart within it.
    """
    if not self._weight_paths and not self._gradient_paths:
      return eqn
    if not _primitives.is_matmul(eqn):
      return _provenance.tag_param_path(eqn, self._get_call_paths(eqn)[0])
    paths = [
      *self.get_paths(eqn.invars[:2]),
      _get_path(self._gradient_paths, eqn.outvars[0]),
    ]
    return _provenance.tag_param_path(eqn, next(filter(None, paths), ()))

  def get_call_suffixes(self, eqn: core.JaxprEqn) -> WeightPaths:
    """What a call leaves open of the paths of its inputs and outputs."""
    return self._get_call_paths(eqn).suffixes

  def get_body_suffixes(
    self, eqn: core.JaxprEqn, body: core.Jaxpr
  ) -> WeightPaths:
    """The same of a jaxpr that the call runs."""
    return self._get_call_paths(eqn).body_suffixes.get(body, NO_PATHS)

  def get_body_weights(
    self, eqn: core.JaxprEqn, body: _eqns.ClosedJaxpr
  ) -> "JaxprWeights":
    """The weights in a jaxpr that the call runs."""
    return self._program.get_jaxpr_weights(
      body, self.get_body_suffixes(eqn, body.jaxpr)
    )

  def _get_call_paths(self, eqn: core.JaxprEqn) -> "_CallPaths":
    if eqn not in self._call_paths:
      inputs = self.get_paths(eqn.invars)
      outputs = [_get_path(self._gradient_paths, x) for x in eqn.outvars]
      self._call_paths[eqn] = _split_call_paths(eqn, inputs, outputs)
    return self._call_paths[eqn]

  def _propagate_forward(self, eqn: core.JaxprEqn) -> None:
    """Notes what an equation makes of weights."""
    paths = self.get_paths(eqn.invars)
    if not any(path is not None for path in paths):
      return
    outs = eqn.outvars
    call_jaxpr = _eqns.get_call_jaxpr(eqn)
    if (
      call_jaxpr is not None
    ):  # What a call returns of a weight is that weight.
      prefix, body_weights = (
        self._get_call_paths(eqn).prefix,
        self.get_body_weights(eqn, call_jaxpr),
      )
      paths = body_weights.get_paths(call_jaxpr.jaxpr.outvars)
      paths = [path if path is None else (*prefix, *path) for path in paths]
    elif eqn.primitive.name not in _primitives.WEIGHT_PRESERVING:
      return
    elif len(outs) == 1:  # A mask beside a weight leaves it a weight.
      distinct_paths = {path for path in paths if path is not None}
      paths = [
        (*path, *_get_static_slice_index(eqn))
        for path in distinct_paths
        if len(distinct_paths) == 1
      ]
    elif paths[0] is not None and len(paths) == 1:
      paths = [(*paths[0], str(i)) for i in range(len(outs))]
    # A barrier has an output for each input.
    self._weight_paths.update(_map_vars_to_paths(outs, paths))

  def _propagate_backward(self, eqn: core.JaxprEqn) -> None:
    """Notes what a gradient of weights is made of."""
    paths = [_get_path(self._gradient_paths, x) for x in eqn.outvars]
    name = eqn.primitive.name
    call_jaxpr = _eqns.get_call_jaxpr(eqn)
    if not any(path is not None for path in paths):
      return
    if call_jaxpr is not None:
      prefix, _, body_suffixes = _split_call_paths(eqn, [], paths)
      body_weights = self._program.get_jaxpr_weights(
        call_jaxpr, body_suffixes[call_jaxpr.jaxpr]
      )
      body_paths = [
        _get_path(body_weights._gradient_paths, x)
        for x in call_jaxpr.jaxpr.invars
      ]
      paths = [
        path if path is None else (*prefix, *path) for path in body_paths
      ]
    elif (
      name not in _primitives.WEIGHT_PRESERVING | _LINEAR_SUMS | _CONCATENATIONS
    ):
      return
    elif len(paths) == 1:  # A barrier has an output for each input.
      is_concatenation = name in _CONCATENATIONS and len(eqn.invars) > 1
      indices = [(str(i),) * is_concatenation for i in range(len(eqn.invars))]
      paths = [(*(paths[0] or ()), *index) for index in indices]
    # One that is the sum of another is made of the same.
    self._gradient_paths = (
      _map_vars_to_paths(eqn.invars, paths) | self._gradient_paths
    )


class _CallPaths(NamedTuple):
  """What the weights of a call have in common, and what is left of each."""

  prefix: tuple[str, ...] = ()
  suffixes: WeightPaths = NO_PATHS
  body_suffixes: Mapping[core.Jaxpr, WeightPaths] = types.MappingProxyType({})


def _split_call_paths(
  eqn: core.JaxprEqn, inputs: list[WeightPath], outputs: list[WeightPath]
) -> _CallPaths:
  if not any(path is not None for path in (*inputs, *outputs)):
    return _CallPaths()
  hop = _higher_order.parse_higher_order(eqn)
  match hop:  # What a loop carries is no weight: it changes.
    case _higher_order.Scan():
      consts, carry, slices = hop.split(inputs)
      inputs = [*consts, *[None] * len(carry), *slices]
    case _higher_order.While():
      cond_consts, body_consts, carry = hop.split(inputs)
      inputs = [*cond_consts, *body_consts, *[None] * len(carry)]
  weight_paths = [path for path in (*inputs, *outputs) if path is not None]
  is_shared = lambda names: len(set(names)) == 1
  shared_levels = itertools.takewhile(
    is_shared, zip(*weight_paths, strict=False)
  )
  prefix = tuple(name for name, *_ in shared_levels)
  strip_prefix = lambda path: None if path is None else path[len(prefix) :]
  suffixes = WeightPaths(
    tuple(map(strip_prefix, inputs)), tuple(map(strip_prefix, outputs))
  )
  bodies_with_inputs = (
    _higher_order.pair_bodies_with_inputs(hop, suffixes.inputs) if hop else []
  )
  body_suffixes = {
    body.jaxpr: WeightPaths(tuple(body_inputs), suffixes.outputs)
    for body, body_inputs in bodies_with_inputs
  }
  return _CallPaths(prefix, suffixes, body_suffixes)


def _map_vars_to_paths(
  atoms: Sequence[Any], paths: Sequence[WeightPath]
) -> dict[Any, WeightPath]:
  pairs = zip(atoms, paths, strict=False)
  is_literal = lambda x: isinstance(x, core.Literal)
  return {x: p for x, p in pairs if p is not None and not is_literal(x)}


def _get_path(paths: dict[Any, WeightPath], atom: Any) -> WeightPath:
  return None if isinstance(atom, core.Literal) else paths.get(atom)


def _get_static_slice_index(eqn: core.JaxprEqn) -> tuple[str, ...]:
  """Which part of a stack of weights is taken, if it is one that is known."""
  if eqn.primitive.name == "slice":
    start: Any = eqn.params["start_indices"][0]
  elif eqn.primitive.name == "dynamic_slice":
    index: Any = eqn.invars[1]
    start = int(index.val) if isinstance(index, core.Literal) else None
  else:
    return ()
  in_aval: Any = eqn.invars[0].aval
  out_aval: Any = eqn.outvars[0].aval
  is_single_slice = out_aval.shape == (1, *in_aval.shape[1:]) != in_aval.shape
  return (str(start),) if is_single_slice and start is not None else ()
