"""When to stop running the iterations of a loop step by step."""

import collections

import numpy as np

from optax_lossscale.diagnostics._overflow import _marks

# A loop may go wrong in each of a million iterations. After as many as this
# that went wrong in the same way, meaning in the same inputs and outputs, what
# is not finite is blamed on what was found before.
_MOST_ITERATIONS = 30


class Patience:
  """How many more iterations of a loop to run step by step.

  An iteration goes wrong in a way: which inputs and outputs are finite.
  """

  def __init__(self, origins: _marks.Origins) -> None:
    self._origins = origins
    self._seen: collections.Counter[tuple[bool, ...]] = collections.Counter()
    # A value of its own, so that none of its bits is given to another origin.
    self._found = _marks.Value(None)

  @property
  def known(self) -> int:
    """The bits of the origins that were found in this loop."""
    return self._found.bits

  def is_over(self, way: tuple[bool, ...]) -> bool:
    """Whether it is over for iterations that go wrong in this way."""
    return self.known > 0 and self._seen[way] >= _MOST_ITERATIONS

  def note(self, way: tuple[bool, ...], bits: int) -> None:
    """Notes the bits that were found in an iteration."""
    self._seen[way] += 1
    self._found = self._origins.value(None, np.array([self.known | bits]))
