"""A decorator that lets reports transfer data under ``jax.transfer_guard``."""

from collections.abc import Callable
import functools
from typing import ParamSpec, TypeVar

import jax

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def allow_transfers(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
  """Decorate a function to allow transfers between host and devices.

  Training loops set the guard to find unintended transfers. A report has to
  transfer data.
  """

  @functools.wraps(fun)
  def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    with jax.transfer_guard("allow"):
      return fun(*args, **kwargs)

  return wrapper
