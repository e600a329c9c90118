"""Errors of the outputs of a run, compared with those of a run in float32."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _host_values, _outputs

# The outputs of a function, or some of them by their indices.
_Outs = Sequence[Any] | Mapping[int, Any]


class RunErrors(NamedTuple):
  """The errors of the outputs of one run, compared with the run in float32.

  Attributes:
    array_errors: the relative error of each array; float64[arrays].
    squared_norms: for each array, the squared norms of the difference and of
      the reference; float64[arrays, 2].
    is_finite: whether the outputs in float32 can be compared: no array has a
      NaN, or nothing but infs.
    is_zero: whether all outputs are zero in float32.
    underflow_fraction: the fraction of entries that are zero, but not in
      float32.
    has_overflow: whether an unscaled gradient is not finite. A step may hide
      it from `update`, or not call `update`.
  """

  array_errors: np.ndarray
  squared_norms: np.ndarray
  is_finite: bool
  is_zero: bool
  underflow_fraction: float
  has_overflow: bool


class OutputComparison:
  """Compares the outputs of a function with those of a reference run.

  Args:
    outputs: the outputs of the function.
    reference_outs: their values in float32, by their indices.

  Attributes:
    names: the names of the arrays that are compared.
  """

  def __init__(
    self,
    outputs: Sequence[_outputs.Output],
    reference_outs: _Outs,
  ) -> None:
    indices = list_compared_indices(outputs)
    self._unscaled = [i for i in indices if outputs[i].kind == "unscaled"]
    self._reference = {
      i: reference_outs[i] for i in indices if i not in self._unscaled
    }
    compared = [outputs[i] for i in self._reference]
    has_grads = any(x.kind == "grads" for x in compared)
    self.names = [
      f"result {x.name}" if has_grads and x.kind != "grads" else x.name
      for x in compared
    ]
    # The arrays of each result of the function, or of the gradients of each
    # `update`. State next to gradients, such as averages, is judged by itself.
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(compared):
      if x.kind == "grads" or not has_grads:
        groups.setdefault((x.kind, x.group), []).append(i)
    self._groups = list(groups.values())

  def compute_errors(self, outs: _Outs) -> RunErrors:
    """Compare the outputs of a run, and transfer only sums to the host."""
    vectors = _host_values.to_host(
      [_compare_arrays(x, outs[i]) for i, x in self._reference.items()]
    )
    # float64, since squares of float32 numbers may be out of its range.
    *norms, unit, is_finite, is_nonzero, num_underflows = np.array(
      vectors, np.float64
    ).T
    with np.errstate(invalid="ignore", over="ignore"):
      # Undo the division by the unit.
      squared_norms = np.stack(norms, 1) * unit[:, None] ** 2
    num_entries = sum(x.size for x in self._reference.values())
    return RunErrors(
      array_errors=np.array(list(map(_compute_relative_error, squared_norms))),
      squared_norms=squared_norms,
      is_finite=bool(is_finite.all()),
      is_zero=not is_nonzero.any(),
      underflow_fraction=float(num_underflows.sum()) / max(num_entries, 1),
      has_overflow=not _host_values.all_finite(outs[i] for i in self._unscaled),
    )

  def compute_effects(
    self, errors: RunErrors, excluded_mask: np.ndarray
  ) -> np.ndarray:
    """Return the errors that can be attributed to layers.

    A finite error of an excluded array is left out of the total, and is zero
    for the array. The relative error of an array that is zero in float32 is
    meaningless, too, but its norm counts in the total.

    Args:
      errors: the errors of a run.
      excluded_mask: the arrays whose errors are expected; bool[arrays].

    Returns:
      The largest error of a result, as a norm over its arrays, and then that
      of each array; float64[1 + arrays]. All are inf after an overflow.
    """
    is_finite = np.isfinite(errors.squared_norms[:, 0])
    is_excluded = excluded_mask & is_finite
    squared_norms = np.where(is_excluded[:, None], 0.0, errors.squared_norms)
    with np.errstate(invalid="ignore", over="ignore"):
      total_error = max(
        _compute_relative_error(squared_norms[group].sum(0))
        for group in self._groups
      )
    is_zero = is_finite & (errors.squared_norms[:, 1] == 0)
    array_errors = np.where(is_excluded | is_zero, 0.0, errors.array_errors)
    effects = np.array([total_error, *array_errors])
    return np.maximum(effects, math.inf) if errors.has_overflow else effects

  def measure_effects(
    self, outs: _Outs, excluded_mask: np.ndarray
  ) -> np.ndarray:
    """Return the effects of a run: see :meth:`compute_effects`."""
    return self.compute_effects(self.compute_errors(outs), excluded_mask)


def list_compared_indices(outputs: Sequence[_outputs.Output]) -> list[int]:
  """Return the indices of the outputs that a comparison needs.

  For a step these are the gradients that `update` receives, the unscaled
  gradients, and results that are neither parameters nor metrics, such as
  running averages.
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
  kinds = "grads", "unscaled"
  return [i for i, x in enumerate(outputs) if x.kind in kinds or is_state(x)]


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
  sums = [jnp.sum(jnp.abs(z) ** 2) for z in (y - x, x)]
  is_finite = ~jnp.isnan(a).any() & (jnp.isfinite(a).any() | (a.size == 0))
  counts = [is_finite, jnp.any(a != 0), jnp.sum((a != 0) & (b == 0))]
  return jnp.stack([x.astype(unit.dtype) for x in (*sums, unit, *counts)])


def _compute_relative_error(sums: Any) -> float:
  """Return the norm of the difference over the norm of the reference."""
  difference, reference = sums
  if not math.isfinite(difference):
    return math.inf
  if reference == 0:
    return 0.0 if difference == 0 else math.inf
  return math.sqrt(difference) / math.sqrt(reference)
