"""A problem of a training step: its cause and its fix."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Problem(NamedTuple):
  """A problem of a training step.

  Attributes:
    cause: the fault, with a number.
    fix: the fix; a line of code if possible.
    keep_float32: the layers to pass to ``keep_float32=`` of
      :func:`optax_lossscale.autocast`, if that is the fix; else empty.
    loss_scale: the loss scale to set, if that is the fix; else None.

  Examples:
    >>> from optax_lossscale import diagnostics
    >>> problem = diagnostics.Problem(
    ...   "up overflows in the forward pass.",
    ...   "ols.autocast(loss_fn, keep_float32='up')",
    ...   keep_float32=("up",))
    >>> print(problem.loss_scale)
    None
  """

  cause: str
  fix: str
  keep_float32: tuple[str, ...] = ()
  loss_scale: float | None = None

  def __str__(self) -> str:
    return f"{self.cause} {self.fix}"


def fill_in_names(
  problem: Problem,
  names: Sequence[str] = (),
  all_names: Sequence[str] = (),
  **kwargs: Any,
) -> Problem:
  """Insert names into a message; none if all gradients are affected."""
  name_list = f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
  names_text = "" if len(names) == len(all_names) else name_list
  return problem._replace(
    cause=problem.cause.format(names=names_text, **kwargs)
  )
