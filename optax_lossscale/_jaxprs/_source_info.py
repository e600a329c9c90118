"""Source info of equations and warnings: operations and the user's lines."""

import functools
import inspect
import os
import sys
import sysconfig
import traceback
import types
from typing import Any, NamedTuple
import warnings

import jax
from jax.extend import core

from optax_lossscale._jaxprs import _eqns

# A line in one of these packages is not a line of the user.
_LIBRARIES = (
  "beartype", "chex", "equinox", "flax", "haiku", "jax", "jaxlib", "jaxtyping",
  "keras", "optax", "optax_lossscale",
)  # fmt: skip
# In a traceback, the frames outside of these are callers of the function that
# `autocast` wraps.
_PACKAGE_DIR = os.path.dirname(os.path.dirname(__file__))
_AUTOCAST_DIR = os.path.join(_PACKAGE_DIR, "_autocast", "")
# Each library differentiates by a call of one of these functions of JAX.
_AUTODIFF_FUNCTIONS = {
  "jacfwd", "jacrev", "jvp", "linearize", "value_and_grad", "vjp"
}  # fmt: skip


class SourceLine(NamedTuple):
  """A line of a user's program: ``model.py:32 (Block.__call__)``."""

  file_name: str
  lineno: int
  function: str

  @property
  def basename(self) -> str:
    """The name of the file without its directory; ``cell`` in a notebook."""
    folder, name = os.path.split(self.file_name)
    # IPython names the file of a cell after a hash of its text.
    is_cell = os.path.basename(folder).startswith("ipykernel_")
    return "cell" if is_cell else name

  def __str__(self) -> str:
    return f"{self.basename}:{self.lineno} ({self.function})"

  @property
  def selectors(self) -> list[str]:
    """The names that select this line, its function or its file."""
    name = self.basename
    return [
      str(self),
      f"{name} ({self.function})",
      f"{name}:{self.lineno}",
      name,
    ]


def format_call(eqn: core.JaxprEqn) -> str:
  """Format an equation as a part of an equation path: ``jit(block)``."""
  name = eqn.params.get("name")
  op_name = _eqns.get_primitive_name(eqn)
  return f"{op_name}({name})" if isinstance(name, str) else op_name


def is_library_rule(eqn: core.JaxprEqn) -> bool:
  """Return whether a library defines the custom derivative of an equation."""
  jaxprs = [x.jaxpr for x in _eqns.subjaxprs(eqn)]
  debug_infos = [
    getattr(x, "debug_info", None) for x in (*jaxprs, *eqn.params.values())
  ]
  files = [
    str(debug_info.func_filename) for debug_info in debug_infos if debug_info
  ]
  # `jax.custom_gradient` wraps a function of the user: then all files are this
  # one, and the rule is the user's.
  jax_file_mask = [file.endswith("custom_derivatives.py") for file in files]
  return not any(map(is_user_file, files)) and not all(jax_file_mask)


def get_user_lines(
  eqn: core.JaxprEqn, jaxpr: core.Jaxpr
) -> tuple[tuple[SourceLine, ...], bool]:
  """Return the user's lines of an equation, within the function of its jaxpr.

  JAX traces a jitted function such as ``jnp.where`` once, and reuses the jaxpr
  in later calls. The outer frames of the traceback then belong to the first
  call, so they are ignored.

  Args:
    eqn: the equation.
    jaxpr: the jaxpr that contains it.

  Returns:
    The lines, the innermost first; and whether they are complete, since the
    traceback leads to the function that ``autocast`` wraps.
  """
  traceback: Any = eqn.source_info.traceback
  file_name = getattr(jaxpr.debug_info, "func_filename", None)
  first_lineno = getattr(jaxpr.debug_info, "func_lineno", None)
  lines: list[SourceLine] = []
  for frame in traceback.frames if traceback else ():
    if frame.file_name.startswith(_AUTOCAST_DIR):
      return tuple(lines), True
    if is_user_file(frame.file_name):
      function = frame.function_name.rsplit("<locals>.", 1)[-1]
      lines.append(SourceLine(frame.file_name, frame.line_num, function))
    if (frame.file_name, frame.function_start_line) == (
      file_name,
      first_lineno,
    ):
      break
  # In newer versions of JAX a traceback ends at the traced function.
  return tuple(lines), False


def strip_source_info(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """Return the equation without traceback and name stack.

  If JAX evaluates an equation, it assigns the equation's source info to all
  that it traces for it, such as a rule. Without it, the equations of the rule
  keep their own lines and scopes.
  """
  source_info: Any = eqn.source_info
  empty_stack = type(source_info.name_stack)()
  return eqn.replace(source_info=type(source_info)(None, empty_stack))


@functools.cache
def is_user_file(file_name: str) -> bool:
  """Return whether a file belongs to the user instead of a library."""
  if file_name.startswith(("<frozen", "<@beartype")):
    return False
  stdlib_dir = sysconfig.get_paths()["stdlib"] + os.sep
  is_stdlib = file_name.startswith(stdlib_dir) and not any(
    part in file_name for part in ("site-packages", "dist-packages")
  )
  # Libraries that are not imported can't be in a traceback.
  library_files = (
    getattr(sys.modules.get(n), "__file__", None) for n in _LIBRARIES
  )
  library_dirs = tuple(
    os.path.dirname(file) + os.sep for file in library_files if file
  )
  return not is_stdlib and not file_name.startswith(library_dirs)


def warn_user(message: str) -> None:
  """Warn at the innermost line of user code on the call stack.

  The frames between that line and the caller belong to this package, to JAX,
  and to libraries such as Flax that call the function being traced.
  """
  frames = traceback.walk_stack(inspect.currentframe())
  levels = (
    level
    for level, (frame, _) in enumerate(frames)
    if is_user_file(frame.f_code.co_filename)
  )
  # If no frame is the user's, point to this function.
  warnings.warn(message, stacklevel=next(levels, 0) + 1)


def is_autodiff_code(code: types.CodeType) -> bool:
  """Return whether this is the code of a JAX function that differentiates."""
  name = code.co_qualname.partition(".")[0]
  if name not in _AUTODIFF_FUNCTIONS:
    return False
  # Private functions of JAX in other files have the same names.
  jax_function: Any = inspect.unwrap(getattr(jax, name))
  return code.co_filename == jax_function.__code__.co_filename
