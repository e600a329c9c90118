"""Which arguments, gradients and random numbers reach an array entry by entry.

A new parameter is computed from the old one, its gradient and its moments,
entry by entry: all of them have one shape. The norm of all gradients, by which
a step clips them, is a scalar, and mixes no entries of two arrays.
"""

from collections.abc import Callable, Sequence

from optax_lossscale._jaxprs import (
  _eqns,
  _tagged_values,
  _walk,
)

# The index of an argument, a tag, or one of the strings below.
Label = int | str
Labels = frozenset[Label]
# The entries depend on random numbers, other than through a gradient.
RANDOM = "random"
# The array depends on a gradient, by entries or not.
AFTER_GRADIENT = "after gradient"

_RANDOM_PRIMITIVES = {
  "random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32",
}  # fmt: skip


class EntryFlow(_walk.Dataflow):
  """The sources of each result of a program, entry by entry.

  Args:
    closed_jaxpr: the program.
    is_gradient: returns whether a tag marks a gradient. The flow begins again
      at a gradient: it ignores the sources of the gradient.

  Attributes:
    labels: what reaches each output.
    in_loss: the arguments that enter a function that is differentiated.
    before_gradients: the arguments from which gradients are computed by
      entries where they have a tag, such as a sum of earlier ones.
  """

  def __init__(
    self, closed_jaxpr: _eqns.ClosedJaxpr, is_gradient: Callable[[str], bool]
  ) -> None:
    super().__init__()
    self._is_gradient = is_gradient
    self.in_loss: set[int] = set()
    self.before_gradients: set[int] = set()
    inputs = [Labels({i}) for i, _ in enumerate(closed_jaxpr.jaxpr.invars)]
    self.labels = self.propagate_jaxpr(closed_jaxpr, inputs)

  def list_arguments(self, output_index: int) -> set[int]:
    """Return the arguments that reach an output entry by entry."""
    return _list_arguments([self.labels[output_index]])

  def propagate_eqn(
    self, visit: _walk.EqnVisit, operands: list[Labels]
  ) -> list[Labels]:
    num_outs = len(visit.eqn.outvars)
    tag = _tagged_values.get_tag(visit.eqn)
    if tag is not None and self._is_gradient(tag):
      self.before_gradients |= _list_arguments(operands)
      return [Labels({tag, AFTER_GRADIENT})]
    if visit.stack_location.is_backward:
      return [_walk.NOTHING] * num_outs
    if visit.stack_location.is_differentiated:
      self.in_loss |= _list_arguments(operands)
    if visit.eqn.primitive.name in _RANDOM_PRIMITIVES:
      return [Labels({RANDOM})] * num_outs
    return super().propagate_eqn(visit, operands)

  def transfer(
    self, visit: _walk.EqnVisit, operands: list[Labels]
  ) -> list[Labels]:
    """Join what reaches the operands; by entries if they have one shape."""
    get_entry_labels = lambda shape: _walk.NOTHING.union(
      *(
        labels if _eqns.get_shape(atom) == shape else labels & {AFTER_GRADIENT}
        for atom, labels in zip(visit.eqn.invars, operands, strict=True)
      )
    )
    return [get_entry_labels(_eqns.get_shape(x)) for x in visit.eqn.outvars]


def _list_arguments(operands: Sequence[Labels]) -> set[int]:
  return {x for labels in operands for x in labels if isinstance(x, int)}
