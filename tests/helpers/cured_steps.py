"""A step with a problem, and the same step after its fix."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
  """A step with a problem.

  Attributes:
    cause: a part of the cause.
    fix: a part of the fix.
    check: checks the step.
    check_cured: checks the step to which the fix was applied.
  """

  cause: str
  fix: str
  check: Callable[[], Any]
  check_cured: Callable[[], Any]
