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

from optax_lossscale._jaxprs import _eqns

# A line of these is not the user's.
_LIBRARIES = (
  "beartype", "chex", "equinox", "flax", "haiku", "jax", "jaxlib", "jaxtyping",
  "keras", "optax", "optax_lossscale",
)  # fmt: skip
_ALIASES = {"remat2": "checkpoint"}
# Behind its lines in a traceback is what called the function that it was given.
_PACKAGE_DIR = os.path.dirname(os.path.dirname(__file__))
_AUTOCAST_DIR = os.path.join(_PACKAGE_DIR, "_autocast", "")
# Whatever differentiates calls one of these functions of JAX.
_AUTODIFF_FUNCTIONS = {
  "jacfwd", "jacrev", "jvp", "linearize", "value_and_grad", "vjp"
}  # fmt: skip


class SourceLine(NamedTuple):
  """A line of a program, which prints as ``model.py:32 (Block.__call__)``."""

  file_name: str
  lineno: int
  function: str

  @property
  def basename(self) -> str:
    """The name of the file without its folder."""
    folder, name = os.path.split(self.file_name)
    # The files of a notebook's cells are named after a hash.
    is_cell = os.path.basename(folder).startswith("ipykernel_")
    return "cell" if is_cell else name

  def __str__(self) -> str:
    return f"{self.basename}:{self.lineno} ({self.function})"

  @property
  def selectors(self) -> list[str]:
    """The names by which a user may select it, or all lines of its function."""
    name = self.basename
    file_selectors = f"{name} ({self.function})", f"{name}:{self.lineno}"
    return [str(self), *file_selectors, name]


def get_op_name(eqn: core.JaxprEqn) -> str:
  """The name of the operation, the same in all versions of JAX.

  A primitive of hijax has its own name, and not that of the call.
  """
  name = _eqns.get_canonical_name(eqn)
  return _ALIASES.get(name, name)


def format_call(eqn: core.JaxprEqn) -> str:
  """How a path names an equation that calls a jaxpr: ``jit(block)``."""
  name = eqn.params.get("name")
  op_name = get_op_name(eqn)
  return f"{op_name}({name})" if isinstance(name, str) else op_name


def is_library_rule(eqn: core.JaxprEqn) -> bool:
  """Whether a function with a rule, or the rule, was written in a library."""
  jaxprs = [x.jaxpr for x in _eqns.subjaxprs(eqn)]
  debug_infos = [
    getattr(x, "debug_info", None) for x in (*jaxprs, *eqn.params.values())
  ]
  files = [
    str(debug_info.func_filename) for debug_info in debug_infos if debug_info
  ]
  # What ``jax.custom_gradient`` makes of a user's function is all in one file.
  jax_file_mask = [file.endswith("custom_derivatives.py") for file in files]
  return not any(map(is_user_file, files)) and not all(jax_file_mask)


def get_user_lines(
  eqn: core.JaxprEqn, jaxpr: core.Jaxpr
) -> tuple[tuple[SourceLine, ...], bool]:
  """The user's lines that led to an equation, within the function of its jaxpr.

  JAX traces a function such as ``jnp.where`` once, and hands out the same jaxpr
  again wherever it is called. What is outside of this function in a traceback
  is only where it was called first.

  Returns:
    The lines, the nearest first; and whether they lead to the function that was
    given to `autocast`, so that nothing is missing.
  """
  traceback: Any = eqn.source_info.traceback
  debug_info = jaxpr.debug_info
  file_name = getattr(debug_info, "func_filename", None)
  first_lineno = getattr(debug_info, "func_lineno", None)
  lines: list[SourceLine] = []
  for frame in traceback.frames if traceback else ():
    if frame.file_name.startswith(_AUTOCAST_DIR):
      return tuple(lines), True
    if is_user_file(frame.file_name):
      lines.append(_line_from_frame(frame))
    is_function_frame = frame.function_start_line == first_lineno
    if is_function_frame and frame.file_name == file_name:
      break
  # Newer versions of JAX end a traceback at the function by themselves.
  return tuple(lines), False


def strip_source_info(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The equation, so that what it traces has lines and scopes of its own.

  JAX gives all that an equation traces, such as a rule, the equation's line.
  """
  source_info: Any = eqn.source_info
  empty_stack = type(source_info.name_stack)()
  return eqn.replace(source_info=type(source_info)(None, empty_stack))


def _line_from_frame(frame: Any) -> SourceLine:
  function = frame.function_name.rsplit("<locals>.", 1)[-1]
  return SourceLine(frame.file_name, frame.line_num, function)


@functools.cache
def is_user_file(file_name: str) -> bool:
  """Whether a file is the user's, and not one of a library."""
  if file_name.startswith(("<frozen", "<@beartype")):
    return False
  stdlib_dir = sysconfig.get_paths()["stdlib"] + os.sep
  is_stdlib = file_name.startswith(stdlib_dir) and not any(
    part in file_name for part in ("site-packages", "dist-packages")
  )
  # A library that is not loaded has no line in a traceback.
  library_files = (
    getattr(sys.modules.get(n), "__file__", None) for n in _LIBRARIES
  )
  library_dirs = tuple(
    os.path.dirname(file) + os.sep for file in library_files if file
  )
  return not is_stdlib and not file_name.startswith(library_dirs)


def is_autodiff_code(code: types.CodeType) -> bool:
  """Whether a frame of this code is a call of JAX that differentiates."""
  name = code.co_qualname.partition(".")[0]
  if name not in _AUTODIFF_FUNCTIONS:
    return False
  # Functions inside of JAX have the same names, but stand in other files.
  jax_function: Any = inspect.unwrap(getattr(jax, name))
  return code.co_filename == jax_function.__code__.co_filename
