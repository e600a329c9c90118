"""Errors of the outputs of a run, compared with those of a run in float32."""

from collections.abc import Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _host_values, _outputs


class RunErrors(NamedTuple):
  """The errors of the outputs of one run, compared with the run in float32.

  A *result* is an output of the function, or the gradients of one ``update``.
  It has one or more arrays.

  Attributes:
    error: the relative error of the result with the largest one, as a norm.
    is_finite: whether the outputs in float32 can be compared: no array has a
      NaN, or nothing but infs.
    is_zero: whether all outputs are zero in float32.
    underflow_fraction: the fraction of entries that are zero, but not in
      float32.
    array_errors: the relative error of each array; float64[arrays].
    squared_norms: for each array, the squared norms of the difference and of
      the reference; float64[arrays, 2].
  """

  error: float
  is_finite: bool
  is_zero: bool
  underflow_fraction: float
  array_errors: np.ndarray
  squared_norms: np.ndarray


class OutputComparison:
  """Compares the outputs of a function with those of a reference run.

  Only the gradients that an ``update`` receives are compared, or else the
  results of the function.

  Args:
    outputs: the outputs of the function.
    reference_outs: their values in float32.

  Attributes:
    names: the names of the arrays that are compared.
  """

  def __init__(
    self,
    outputs: Sequence[_outputs.Output],
    reference_outs: Sequence[Any],
  ) -> None:
    self._indices = list_compared_indices(outputs)
    compared = [outputs[i] for i in self._indices]
    has_grads = any(x.kind == "grads" for x in compared)
    self.names = [
      f"result {x.name}" if has_grads and x.kind != "grads" else x.name
      for x in compared
    ]
    # The arrays of a result are contiguous, so reduceat can sum over them.
    keys = [(x.kind, x.group) for x in compared]
    self._group_starts = [
      i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]
    ]
    # State next to gradients, such as running averages, is judged by itself.
    self._in_total = [
      keys[i][0] == "grads" or not has_grads for i in self._group_starts
    ]
    self._reference = [reference_outs[i] for i in self._indices]

  def compute_errors(self, outs: Sequence[Any]) -> RunErrors:
    """Compare the outputs of a run, and transfer only sums to the host."""
    pairs = zip(self._reference, [outs[i] for i in self._indices], strict=True)
    vectors = _host_values.to_host([_compare_arrays(*pair) for pair in pairs])
    # float64, since squares of float32 numbers may be out of its range.
    *norms, unit, is_finite, is_nonzero, num_underflows = np.array(
      vectors, np.float64
    ).T
    with np.errstate(invalid="ignore", over="ignore"):
      # Undo the division by the unit.
      squared_norms = np.stack(norms, 1) * unit[:, None] ** 2
    num_entries = sum(x.size for x in self._reference)
    return RunErrors(
      error=self._compute_total_error(squared_norms),
      is_finite=bool(is_finite.all()),
      is_zero=not is_nonzero.any(),
      underflow_fraction=float(num_underflows.sum()) / max(num_entries, 1),
      array_errors=np.array(list(map(_compute_relative_error, squared_norms))),
      squared_norms=squared_norms,
    )

  def compute_effects(
    self, errors: RunErrors, noise_mask: np.ndarray
  ) -> np.ndarray:
    """Return the errors that can be attributed to layers.

    A finite error of rounding noise is left out of the total, and is zero for
    the array. The relative error of an array that is
    zero in float32 is meaningless, too, but its norm counts in the total.

    Args:
      errors: the errors of a run.
      noise_mask: the arrays that are only rounding noise; bool[arrays].

    Returns:
      The error of all arrays together, and then of each; float64[1 + arrays].
    """
    is_finite = np.isfinite(errors.squared_norms[:, 0])
    is_noise = noise_mask & is_finite
    squared_norms = np.where(is_noise[:, None], 0.0, errors.squared_norms)
    total_error = self._compute_total_error(squared_norms)
    is_zero = is_finite & (errors.squared_norms[:, 1] == 0)
    array_errors = np.where(is_noise | is_zero, 0.0, errors.array_errors)
    return np.array([total_error, *array_errors])

  def _compute_total_error(self, squared_norms: np.ndarray) -> float:
    """Return the largest error of a result, as a norm over its arrays."""
    with np.errstate(invalid="ignore", over="ignore"):
      result_norms = np.add.reduceat(squared_norms, self._group_starts)
    rows = itertools.compress(result_norms, self._in_total)
    return max(map(_compute_relative_error, rows))


def list_compared_indices(
  outputs: Sequence[_outputs.Output],
) -> list[int]:
  """Return the indices of the outputs that are compared.

  For a step these are the gradients that `update` receives, and results that
  are neither parameters nor metrics, such as running averages.
  """
  if not any(x.kind == "grads" for x in outputs):
    return [i for i, x in enumerate(outputs) if x.kind == "result"]
  is_state = lambda x: (
    x.kind in _outputs.RETURNED_KINDS
    and not x.is_metric
    and not x.depends_on_gradients
    and not x.new_scales
    and not x.new_updates
  )
  return [i for i, x in enumerate(outputs) if x.kind == "grads" or is_state(x)]


# It is compiled once for each shape: XLA would take far longer to compile a
# function of all arrays, and many arrays of a model have one shape.
@_host_values.jit_quickly
def _compare_arrays(reference: Any, other: Any) -> Any:
  """Compare an array with its reference.

  Both arrays are divided by their largest magnitude, the unit, so that squares
  stay in range. If both have the same inf, such as a masked score, it counts as
  equal.

  Returns:
    A vector: the sums of squares of the difference and of the reference, the
    unit (1 if it is zero), whether the reference is finite enough to be
    compared with, whether any of its entries is not zero, and the number of
    entries that are zero only in the other array.
  """
  # An output that is trained in half precision is float32 in the reference.
  a, b = reference, other.astype(reference.dtype)
  is_same = (a == b) & ~jnp.isfinite(a)
  x, y = jnp.where(is_same, 0, a), jnp.where(is_same, 0, b)
  compute_amax = lambda z: jnp.max(jnp.abs(z), initial=0, where=jnp.isfinite(z))
  amax = jnp.maximum(compute_amax(x), compute_amax(y))
  unit = jnp.where(amax > 0, amax, jnp.ones_like(amax))
  x, y = x / unit.astype(x.dtype), y / unit.astype(y.dtype)
  is_finite = ~jnp.isnan(a).any() & (jnp.isfinite(a).any() | (a.size == 0))
  sums = [_sum_squares(y - x), _sum_squares(x)]
  counts = [is_finite, jnp.any(a != 0), jnp.sum((a != 0) & (b == 0))]
  dtype = sums[0].dtype
  return jnp.stack([x.astype(dtype) for x in (*sums, unit, *counts)])


def _sum_squares(x: Any) -> Any:
  terms = jnp.abs(x) ** 2
  dtype = jnp.promote_types(terms.dtype, jnp.float32)
  return jnp.sum(terms, dtype=dtype)


def _compute_relative_error(sums: Any) -> float:
  """Return the norm of the difference over the norm of the reference."""
  difference, reference = sums
  if not math.isfinite(difference):
    return math.inf
  if reference == 0:
    return 0.0 if difference == 0 else math.inf
  return math.sqrt(difference) / math.sqrt(reference)
