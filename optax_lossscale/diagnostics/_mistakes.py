"""The messages of reports on mistakes in a training step."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Mistake(NamedTuple):
  """A mistake in a training step.

  Attributes:
    cause: the mistake and its consequence.
    fix: the change to make.
  """

  cause: str
  fix: str

  def __str__(self) -> str:
    return f"{self.cause} {self.fix}"


def fill_in_names(
  mistake: Mistake,
  names: Sequence[str] = (),
  all_names: Sequence[str] = (),
  **kwargs: Any,
) -> Mistake:
  """Insert names into a message; none if all gradients are affected."""
  name_list = f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
  names_text = "" if len(names) == len(all_names) else name_list
  return mistake._replace(
    cause=mistake.cause.format(names=names_text, **kwargs)
  )
