"""What ``find_overflow`` tells: an operation, what it read, and where it is."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import _places
from optax_lossscale.diagnostics._overflow import _bits


class Operand(NamedTuple):
  """What an operation read.

  Attributes:
    shape: the shape, under ``shard_map`` that on one device.
    dtype: the dtype.
    amax: the largest magnitude of what is finite; 0.0 if nothing is, None
      if these are no numbers.
    all_finite: whether all of it is finite.
  """

  shape: tuple[int, ...]
  dtype: Any
  amax: float | None
  all_finite: bool

  def __str__(self) -> str:
    text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
    if self.amax is not None:
      text += f" up to {float(f'{self.amax:.3g}'):g}"
    return text if self.all_finite else f"{text} beside inf or nan"


@dataclasses.dataclass(frozen=True)
class Overflow:
  """Where an inf or a NaN in a result comes from.

  Attributes:
    primitive: the operation: JAX's name of the primitive. ``"argument"`` and
      ``"constant"`` stand for a number that was not finite to begin with.
    dtype: the dtype of its result.
    kind: ``"inf"`` or ``"nan"``. An inf is told before a NaN.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    name: what ``keep_float32=`` of :func:`optax_lossscale.autocast` takes: the
      path of the weights or the scopes, and the line.
    source_line: the user's line, ``"model.py:32 (Block.__call__)"``; empty if
      none is known. In the backward pass it is the line that is differentiated.
    eqn_path: the way to it, ``"jit(block)/scan[3]/dot_general"``. Iterations
      are counted from 0. In the backward pass over a scan, they have the
      numbers of the forward pass. For an argument, it is its name.
    backward: whether it belongs to the backward pass, where a lower loss scale
      helps. A derivative inside of the loss is part of the forward pass.
    inputs: an :class:`Operand` for each of its inputs.
    other_origins: further origins, in the order in which they were found; those
      that reach an ``update`` come first. Theirs is empty.
    warnings: what is wrong with the training step as a whole, in sentences:
      ``update`` did not run, or does not see the overflow, or is given
      gradients of another scale. Often empty.
  """

  primitive: str
  dtype: np.dtype
  kind: str
  name_scope: str
  param_path: str
  name: str
  source_line: str
  eqn_path: str
  backward: bool
  inputs: tuple[Operand, ...]
  other_origins: tuple["Overflow", ...] = ()
  warnings: tuple[str, ...] = ()

  def __str__(self) -> str:
    is_argument = self.primitive == "argument"
    within = self.eqn_path if is_argument else self.eqn_path.rpartition("/")[0]
    parts = [
      f"{self.kind} in {self.dtype} from {self.primitive}",
      f"in {within}" if within else "",
      self.name,
      "backward" if self.backward else "",
    ]
    text = ", ".join(part for part in parts if part)
    if self.inputs:
      text += f":\n  inputs {', '.join(map(str, self.inputs))}"
    if self.other_origins:
      text += f"\n  and from {len(self.other_origins)} more: see other_origins"
    return "\n".join([*self.warnings, text])


def describe(
  primitive: str,
  inputs: list[Any],
  place: _places.Place,
  axis: int,
  out: jax.Array,
  own: np.ndarray,
) -> Overflow:
  """What to tell of an operation.

  Args:
    primitive: its name.
    inputs: the arrays that it read.
    place: where it stands.
    axis: the axis of an array that is the first axis within the jaxpr.
    out: an output that is not finite.
    own: which entries of it are this operation's own.

  Returns:
    An :class:`Overflow`.
  """
  is_argument = primitive == "argument"
  path = place.path if is_argument else (*place.path, primitive)
  return Overflow(
    primitive=primitive,
    dtype=np.dtype(out.dtype),
    kind="inf" if (np.isinf(_bits.as_numbers(out)) & own).any() else "nan",
    name_scope=place.scope,
    param_path=place.weights,
    name=place.name,
    source_line=place.source,
    eqn_path="/".join(path),
    backward=place.backward,
    inputs=tuple(_operand(array, axis) for array in inputs),
  )


def _operand(array: Any, axis: int) -> Operand:
  shape = tuple(array.shape[axis:])
  is_number = isinstance(array, jax.Array) and jnp.issubdtype(
    array.dtype, jnp.number
  )
  if not is_number or array.size == 0:
    return Operand(shape, array.dtype, None, True)
  numbers = _bits.as_numbers(array)
  finite = np.isfinite(numbers)
  sizes = np.abs(np.where(finite, numbers, np.zeros_like(numbers)))
  return Operand(shape, array.dtype, float(sizes.max()), bool(finite.all()))
