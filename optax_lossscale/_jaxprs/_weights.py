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
  _equations,
  _higher_order,
  _operations,
  _places,
)

# The path of a weight, or what is left of it within a call that tells the
# beginning; None of what is no weight.
WeightPath = tuple[str, ...] | None

# The gradient of a weight that was made into others is made from theirs.
_ADD = {"add", "add_any", "pad", "psum", "psum_invariant", "reduce_sum"}
# Or of those of its parts.
_JOIN = {"concatenate", "stack"}


class Paths(NamedTuple):
  """The paths of weights among the inputs and the outputs of a jaxpr.

  Attributes:
    inputs: of each input its path; none is known, if this is empty.
    outputs: of each output the path of the weight whose gradient it is.
  """

  inputs: tuple[WeightPath, ...] = ()
  outputs: tuple[WeightPath, ...] = ()

  def of(self, inputs: Iterable[int]) -> tuple[WeightPath, ...]:
    """The paths of some of the inputs."""
    return tuple(self.inputs[i] for i in inputs if self.inputs)


NO_PATHS = Paths()


class ProgramWeights:
  """The paths of all weights in a program, each jaxpr of which is read once.

  Attributes:
    by_id: those of the arrays that it closes over, by their identity.
  """

  def __init__(
    self, by_id: Mapping[int, WeightPath] = types.MappingProxyType({})
  ):
    self.by_id = by_id
    self._read: dict[Any, Weights] = {}

  def of(self, closed: _equations.ClosedJaxpr, paths: Paths) -> "Weights":
    """The weights in a jaxpr."""
    key = closed.jaxpr, paths
    if key not in self._read:
      self._read[key] = Weights(self, closed, paths)
    return self._read[key]


class Weights:
  """The variables of a jaxpr that are weights.

  Args:
    known: what is known of the whole program.
    closed: the jaxpr.
    paths: those of its inputs and outputs.
  """

  def __init__(
    self, known: ProgramWeights, closed: _equations.ClosedJaxpr, paths: Paths
  ) -> None:
    self._known = known
    jaxpr = closed.jaxpr
    of_consts = [known.by_id.get(id(x)) for x in closed.consts]
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    self._weights = _with_path(inputs, [*of_consts, *paths.inputs])
    self._gradients = _with_path(jaxpr.outvars, paths.outputs)
    self._calls: dict[core.JaxprEqn, _Within] = {}
    for eqn in reversed(jaxpr.eqns) if self._gradients else ():
      self._follow_back(eqn)
    for eqn in jaxpr.eqns if self._weights else ():
      self._follow(eqn)

  def of(self, atoms: Sequence[Any]) -> list[WeightPath]:
    """The paths of the inputs of an equation, or of other variables."""
    return [_get(self._weights, x) for x in atoms]

  def named(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
    """A product with the path of its weights, a call with what they share.

    So calls that share a function go on to share it: what tells them apart
    stands at the call, and what tells their products apart within it.
    """
    if not self._weights and not self._gradients:
      return eqn
    if not _operations.is_matmul(eqn):
      return _places.tag_param_path(eqn, self._within(eqn)[0])
    paths = [*self.of(eqn.invars[:2]), _get(self._gradients, eqn.outvars[0])]
    return _places.tag_param_path(eqn, next(filter(None, paths), ()))

  def paths_in(self, eqn: core.JaxprEqn) -> Paths:
    """What a call leaves open of the paths of its inputs and outputs."""
    return self._within(eqn).paths

  def paths_of_body(self, eqn: core.JaxprEqn, body: core.Jaxpr) -> Paths:
    """The same of a jaxpr that the call runs."""
    return self._within(eqn).of_bodies.get(body, NO_PATHS)

  def inside(
    self, eqn: core.JaxprEqn, body: _equations.ClosedJaxpr
  ) -> "Weights":
    """The weights in a jaxpr that the call runs."""
    return self._known.of(body, self.paths_of_body(eqn, body.jaxpr))

  def _within(self, eqn: core.JaxprEqn) -> "_Within":
    if eqn not in self._calls:
      inputs = self.of(eqn.invars)
      outputs = [_get(self._gradients, x) for x in eqn.outvars]
      self._calls[eqn] = _within(eqn, inputs, outputs)
    return self._calls[eqn]

  def _follow(self, eqn: core.JaxprEqn) -> None:
    """Notes what an equation makes of weights."""
    paths = self.of(eqn.invars)
    if not any(path is not None for path in paths):
      return
    outs = eqn.outvars
    called = _equations.get_call_jaxpr(eqn)
    if called is not None:  # What a call returns of a weight is that weight.
      common, inner = self._within(eqn).common, self.inside(eqn, called)
      paths = inner.of(called.jaxpr.outvars)
      paths = [path if path is None else (*common, *path) for path in paths]
    elif eqn.primitive.name not in _operations.WEIGHT_PRESERVING:
      return
    elif len(outs) == 1:  # A mask beside a weight leaves it a weight.
      found = {path for path in paths if path is not None}
      paths = [(*path, *_index(eqn)) for path in found if len(found) == 1]
    elif paths[0] is not None and len(paths) == 1:
      paths = [(*paths[0], str(i)) for i in range(len(outs))]
    # A barrier has an output for each input.
    self._weights.update(_with_path(outs, paths))

  def _follow_back(self, eqn: core.JaxprEqn) -> None:
    """Notes what a gradient of weights is made of."""
    paths = [_get(self._gradients, x) for x in eqn.outvars]
    name = eqn.primitive.name
    called = _equations.get_call_jaxpr(eqn)
    if not any(path is not None for path in paths):
      return
    if called is not None:
      common, _, of_bodies = _within(eqn, [], paths)
      inner = self._known.of(called, of_bodies[called.jaxpr])
      found = [_get(inner._gradients, x) for x in called.jaxpr.invars]
      paths = [path if path is None else (*common, *path) for path in found]
    elif name not in _operations.WEIGHT_PRESERVING | _ADD | _JOIN:
      return
    elif len(paths) == 1:  # A barrier has an output for each input.
      is_joined = name in _JOIN and len(eqn.invars) > 1
      parts = [(str(i),) * is_joined for i in range(len(eqn.invars))]
      paths = [(*(paths[0] or ()), *part) for part in parts]
    # One that is the sum of another is made of the same.
    self._gradients = _with_path(eqn.invars, paths) | self._gradients


class _Within(NamedTuple):
  """What the weights of a call have in common, and what is left of each."""

  common: tuple[str, ...] = ()
  paths: Paths = NO_PATHS
  of_bodies: Mapping[core.Jaxpr, Paths] = types.MappingProxyType({})


def _within(
  eqn: core.JaxprEqn, inputs: list[WeightPath], outputs: list[WeightPath]
) -> _Within:
  if not any(path is not None for path in (*inputs, *outputs)):
    return _Within()
  call = _higher_order.parse_higher_order(eqn)
  match call:  # What a loop carries is no weight: it changes.
    case _higher_order.Scan():
      consts, carry, slices = call.split(inputs)
      inputs = [*consts, *[None] * len(carry), *slices]
    case _higher_order.While():
      first, second, carry = call.split(inputs)
      inputs = [*first, *second, *[None] * len(carry)]
  weights = [path for path in (*inputs, *outputs) if path is not None]
  are_same = lambda names: len(set(names)) == 1
  levels = itertools.takewhile(are_same, zip(*weights, strict=False))
  common = tuple(name for name, *_ in levels)
  left = lambda path: None if path is None else path[len(common) :]
  paths = Paths(tuple(map(left, inputs)), tuple(map(left, outputs)))
  given = (
    _higher_order.pair_bodies_with_inputs(call, paths.inputs) if call else []
  )
  of_bodies = {
    body.jaxpr: Paths(tuple(its_inputs), paths.outputs)
    for body, its_inputs in given
  }
  return _Within(common, paths, of_bodies)


def _with_path(
  atoms: Sequence[Any], paths: Sequence[WeightPath]
) -> dict[Any, WeightPath]:
  pairs = zip(atoms, paths, strict=False)
  is_literal = lambda x: isinstance(x, core.Literal)
  return {x: p for x, p in pairs if p is not None and not is_literal(x)}


def _get(paths: dict[Any, WeightPath], atom: Any) -> WeightPath:
  return None if isinstance(atom, core.Literal) else paths.get(atom)


def _index(eqn: core.JaxprEqn) -> tuple[str, ...]:
  """Which part of a stack of weights is taken, if it is one that is known."""
  if eqn.primitive.name == "slice":
    start: Any = eqn.params["start_indices"][0]
  elif eqn.primitive.name == "dynamic_slice":
    index: Any = eqn.invars[1]
    start = int(index.val) if isinstance(index, core.Literal) else None
  else:
    return ()
  whole: Any = eqn.invars[0].aval
  part: Any = eqn.outvars[0].aval
  is_one = part.shape == (1, *whole.shape[1:]) != whole.shape
  return (str(start),) if is_one and start is not None else ()
