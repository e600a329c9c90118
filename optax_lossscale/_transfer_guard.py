"""Lets public calls on the host read from devices, and give to them."""

from collections.abc import Callable
import functools
from typing import ParamSpec, TypeVar

import jax

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def allow_transfers(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
  """The same function, whose transfers ``jax.transfer_guard`` lets pass.

  Trainers set it to find transfers that they did not mean. Those of a report
  are meant.
  """

  @functools.wraps(fun)
  def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    with jax.transfer_guard("allow"):
      return fun(*args, **kwargs)

  return wrapper
