"""Mistakes in the wiring of a training step, and steps that resemble them.

``check_step`` must find one problem in each step of ``MISTAKES``, and none in
those of ``LOOKALIKES`` and ``UNCHECKED``. For the latter, it must say what it
could not check. A step is made when a test calls the function in its row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from helpers.step_mistakes import devices, gradients, results, states, updates

_SUBJECTS = gradients, states, results, updates, devices


class Row(NamedTuple):
  """A step, and what ``check_step`` must say of it.

  Attributes:
    make: a function that returns the step and its arguments.
    cause: a part of the cause of the problem, or of what is not checked.
    fix: a part of the fix of the problem.
  """

  make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
  cause: str
  fix: str = ""


MISTAKES = {
  name: Row(make, *texts)
  for subject in _SUBJECTS
  for texts, steps in subject.MISTAKES.items()
  for name, make in steps.items()
}
LOOKALIKES = {
  name: make
  for subject in _SUBJECTS
  for name, make in subject.LOOKALIKES.items()
}
UNCHECKED = {
  name: Row(make, cause)
  for subject in _SUBJECTS
  for name, (make, cause) in subject.UNCHECKED.items()
}
