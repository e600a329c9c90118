"""The names of equations, and the user's lines that they come from."""

import functools
import inspect
import os
import sys
import sysconfig
import types
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_lossscale._jaxprs import _equations

# A line of these is not the user's.
_LIBRARIES = (
  "beartype", "chex", "equinox", "flax", "haiku", "jax", "jaxlib", "jaxtyping",
  "keras", "optax", "optax_lossscale",
)  # fmt: skip
_NAMES = {"remat2": "checkpoint"}
# Behind its lines in a traceback is what called the function that it was given.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_AUTOCAST = os.path.join(_PACKAGE, "_autocast", "")
# Whatever differentiates calls one of these functions of JAX.
_DIFFERENTIATE = {
  "jacfwd", "jacrev", "jvp", "linearize", "value_and_grad", "vjp"
}  # fmt: skip


class Line(NamedTuple):
  """A line of a program, which prints as ``model.py:32 (Block.__call__)``."""

  file_name: str
  number: int
  function: str

  @property
  def short_name(self) -> str:
    """The name of the file without its folder."""
    folder, name = os.path.split(self.file_name)
    # The files of a notebook's cells are named after a hash.
    is_cell = os.path.basename(folder).startswith("ipykernel_")
    return "cell" if is_cell else name

  def __str__(self) -> str:
    return f"{self.short_name}:{self.number} ({self.function})"

  @property
  def names(self) -> list[str]:
    """The names by which a user may select it, or all lines of its function."""
    name = self.short_name
    in_file = f"{name} ({self.function})", f"{name}:{self.number}"
    return [str(self), *in_file, name]


def name_of(eqn: core.JaxprEqn) -> str:
  """The name of the operation, the same in all versions of JAX.

  A primitive of hijax has its own name, and not that of the call.
  """
  name = _equations.get_canonical_name(eqn)
  return _NAMES.get(name, name)


def call_name(eqn: core.JaxprEqn) -> str:
  """How a path names an equation that calls a jaxpr: ``jit(block)``."""
  name = eqn.params.get("name")
  primitive = name_of(eqn)
  return f"{primitive}({name})" if isinstance(name, str) else primitive


def is_rule_of_library(eqn: core.JaxprEqn) -> bool:
  """Whether a function with a rule, or the rule, was written in a library."""
  held = [x.jaxpr for x in _equations.subjaxprs(eqn)]
  infos = [
    getattr(x, "debug_info", None) for x in (*held, *eqn.params.values())
  ]
  files = [str(info.func_filename) for info in infos if info]
  # What ``jax.custom_gradient`` makes of a user's function is all in one file.
  are_public = [file.endswith("custom_derivatives.py") for file in files]
  return not any(map(is_users, files)) and not all(are_public)


def lines_of(
  eqn: core.JaxprEqn, jaxpr: core.Jaxpr
) -> tuple[tuple[Line, ...], bool]:
  """The user's lines that led to an equation, within the function of its jaxpr.

  JAX traces a function such as ``jnp.where`` once, and hands out the same jaxpr
  again wherever it is called. What is outside of this function in a traceback
  is only where it was called first.

  Returns:
    The lines, the nearest first; and whether they lead to the function that was
    given to `autocast`, so that nothing is missing.
  """
  traceback: Any = eqn.source_info.traceback
  info = jaxpr.debug_info
  file_name = getattr(info, "func_filename", None)
  first_line = getattr(info, "func_lineno", None)
  lines: list[Line] = []
  for frame in traceback.frames if traceback else ():
    if frame.file_name.startswith(_AUTOCAST):
      return tuple(lines), True
    if is_users(frame.file_name):
      lines.append(_line(frame))
    at_function = frame.function_start_line == first_line
    if at_function and frame.file_name == file_name:
      break
  # Newer versions of JAX end a traceback at the function by themselves.
  return tuple(lines), False


def without_source(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The equation, so that what it traces has lines and scopes of its own.

  JAX gives all that an equation traces, such as a rule, the equation's line.
  """
  info: Any = eqn.source_info
  no_scope = type(info.name_stack)()
  return eqn.replace(source_info=type(info)(None, no_scope))


def _line(frame: Any) -> Line:
  function = frame.function_name.rsplit("<locals>.", 1)[-1]
  return Line(frame.file_name, frame.line_num, function)


@functools.cache
def is_users(file_name: str) -> bool:
  """Whether a file is the user's, and not one of a library."""
  if file_name.startswith(("<frozen", "<@beartype")):
    return False
  standard = sysconfig.get_paths()["stdlib"] + os.sep
  is_standard = file_name.startswith(standard) and not any(
    part in file_name for part in ("site-packages", "dist-packages")
  )
  # A library that is not loaded has no line in a traceback.
  files = (getattr(sys.modules.get(n), "__file__", None) for n in _LIBRARIES)
  folders = tuple(os.path.dirname(file) + os.sep for file in files if file)
  return not is_standard and not file_name.startswith(folders)


def differentiates(code: types.CodeType) -> bool:
  """Whether a frame of this code is a call of JAX that differentiates."""
  name = code.co_qualname.partition(".")[0]
  if name not in _DIFFERENTIATE:
    return False
  # Functions inside of JAX have the same names, but stand in other files.
  public: Any = inspect.unwrap(getattr(jax, name))
  return code.co_filename == public.__code__.co_filename
