"""An operand of an operation in a report: its type and its magnitude."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from optax_lossscale._jaxprs import _avals


class Operand(NamedTuple):
  """An operand of an operation.

  Attributes:
    shape: the shape, under ``shard_map`` the shape on one device.
    dtype: the dtype.
    amax: the largest finite magnitude; 0.0 if no entry is finite, None if the
      entries are not numbers.
    all_finite: whether all entries are finite.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> hit = diagnostics.find_overflow(jnp.exp, jnp.float16(12))
    >>> hit.inputs[0].amax, hit.inputs[0].all_finite
    (12.0, True)
  """

  shape: tuple[int, ...]
  dtype: Any
  amax: float | None
  all_finite: bool

  def __str__(self) -> str:
    text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
    details = []
    if self.amax is not None:
      details.append(f"max abs {format_number(self.amax)}")
    if not self.all_finite:
      details.append("contains inf or NaN")
    return f"{text} ({', '.join(details)})" if details else text


def make_operand(aval: Any, is_nonfinite: bool, amax: float | None) -> Operand:
  """Return an operand of this type."""
  is_number = jnp.issubdtype(aval.dtype, jnp.number) and not _avals.is_ref(aval)
  if not is_number or 0 in aval.shape:
    return Operand(tuple(aval.shape), aval.dtype, None, True)
  return Operand(tuple(aval.shape), aval.dtype, amax, not is_nonfinite)


def format_number(number: float) -> str:
  """Format a number: 65504, 9.3e+04, 0.0132."""
  if number == 65504:  # Every reader knows the largest number of float16.
    return "65504"
  return f"{float(f'{number:.3g}'):g}"
