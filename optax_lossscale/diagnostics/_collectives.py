"""Find the sums over devices that XLA inserts, in a compiled module.

Under sharded ``jit`` the jaxpr has no collectives: XLA sums a gradient over the
devices that share a parameter, in the dtype of the gradient.
"""

from collections.abc import Iterator
import re
from typing import Any, NamedTuple

import jax
from jax.extend import core
import numpy as np

from optax_lossscale.diagnostics import _tracing

# An instruction such as `%x = (f16[2,8]{1,0}, f32[]) all-reduce(...)`.
_COLLECTIVE_RE = re.compile(
  r"= (?P<types>\(.*?\)|\S+) (?P<name>all-reduce|reduce-scatter)(?:-start)?\("
)
_OP_NAME_RE = re.compile(r'op_name="([^"]*)"')
_HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class DeviceSum(NamedTuple):
  """A sum over devices.

  Attributes:
    primitive: XLA's name of the instruction.
    name_scope: the scopes and parameter paths of the operation that is summed.
    backward: whether it belongs to a backward pass.
  """

  primitive: str
  name_scope: str
  backward: bool


def compile_if_sharded(traced: _tracing.TracedFunction) -> str:
  """Return the text of the compiled module; empty if no input is sharded."""
  if not any(map(_is_on_several_devices, traced.inputs)):
    return ""
  compiled: Any = (
    jax.jit(core.jaxpr_as_fun(traced.closed_jaxpr))
    .lower(*traced.inputs)
    .compile()
  )
  return compiled.as_text() or ""


def _is_on_several_devices(array: Any) -> bool:
  sharding = getattr(array, "sharding", None)
  return len(getattr(sharding, "device_set", ())) > 1


def find_device_sums(hlo_text: str, dtype: np.dtype) -> Iterator[DeviceSum]:
  """Yield the sums over devices in a dtype.

  Args:
    hlo_text: the text of a compiled module.
    dtype: the dtype.
  """
  hlo_dtype = _HLO_DTYPES.get(str(dtype), str(dtype))
  for line in hlo_text.splitlines():
    match = _COLLECTIVE_RE.search(line)
    if match and re.search(rf"\b{hlo_dtype}\[", match["types"]):
      op_name = _OP_NAME_RE.search(line)
      yield from _parse_op_name(match["name"], op_name[1] if op_name else "")


def _parse_op_name(primitive: str, op_name: str) -> Iterator[DeviceSum]:
  """Yield a sum for each operation in the name of an instruction.

  The name of combined sums is ``jit(f)/(transpose(jvp(up))/add:jvp(x)/mul)``.
  """
  path = re.sub(r"\bjit\([^()]*\)/", "", op_name)
  is_combined = path.startswith("(") and path.endswith(")")
  for part in path[1:-1].split(":") if is_combined else [path]:
    *scopes, _ = part.split("/")
    # A scope may be wrapped: `transpose(jvp(head))`.
    names = [re.sub(r"^(?:\w+\()+|\)+$", "", scope) for scope in scopes]
    name_scope = "/".join(x for x in names if not x.startswith("autocast-"))
    yield DeviceSum(primitive, name_scope, "transpose(" in part)
