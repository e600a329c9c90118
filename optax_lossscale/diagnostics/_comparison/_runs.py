"""The runs of a function in float32 and in half precision."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_lossscale.diagnostics import (
  _array_tests,
  _effects,
  _host_values,
  _mistakes,
  _progress,
  _scaling_mistakes,
  _tracing,
)
from optax_lossscale.diagnostics._comparison import (
  _matmul_table,
  _output_errors,
  _program,
)

# An array whose relative error is above this if the operands of matmuls change
# by a relative 2**-20 is rounding noise in float32, too.
_NOISE_THRESHOLD = 0.05


class PrecisionRuns:
  """Runs a function in different precisions, and measures its errors.

  Args:
    traced: the function.
    table: its matmul sites.
    progress: shows how far it is.
    half_outs: the outputs of the function as trained, if known.
    measures_sites: whether single sites will run in half precision in any case.

  Attributes:
    names: the names of the arrays that are compared.
    half_errors: the errors as trained.
    noise_mask: whether each array is only rounding noise in float32, too;
      bool[arrays].
    mistakes: mistakes in how the step uses its gradients.
    underflow_fraction: the fraction of all compared entries that are zero as
      trained, but not in float32.
    site_stats: the statistics of each matmul site in float32, by its index;
      empty until they are needed.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    table: _matmul_table.MatmulTable,
    progress: _progress.ProgressLine,
    half_outs: Sequence[Any] | None,
    *,
    measures_sites: bool,
  ) -> None:
    self._traced = traced
    self._table = table
    self._progress = progress
    self._num_runs = 0
    # Each site, as trained, and in float32. Bisection stops at some time.
    self._num_all_runs = len(table.sites) + 2 if measures_sites else None
    if half_outs is None:
      self._show_next_run()
      run_as_trained = _effects.compile_without_prints(
        traced.closed_jaxpr, traced.inputs
      )
      half_outs = jax.block_until_ready(run_as_trained(traced.inputs))
    indices = _output_errors.list_compared_indices(traced.outputs)
    has_overflow = not _array_tests.all_finite([half_outs[i] for i in indices])
    # The magnitudes of the matmuls explain an overflow.
    reference_outs = self._start_program(
      has_stats=measures_sites or has_overflow, has_flags=measures_sites
    )
    self.names = self._comparison.names
    self.half_errors = self._comparison.compute_errors(half_outs)
    self.underflow_fraction = self.half_errors.num_underflows / max(
      self._comparison.num_entries, 1
    )
    self.noise_mask = self._find_noise()
    self.mistakes = self._find_mistakes(reference_outs, half_outs)

  def start_measuring(self) -> None:
    """Compile a program in which single sites can run in half precision."""
    self._start_program(has_stats=True, has_flags=True)

  def measure_effects(self, half_sites: Sequence[int]) -> np.ndarray:
    """Run only these sites in half precision, and return their effects.

    Returns:
      See :meth:`compute_effects`.
    """
    outs = self._run(half_sites).outs
    return self.compute_effects(self._comparison.compute_errors(outs))

  def compute_effects(self, errors: _output_errors.RunErrors) -> np.ndarray:
    """Return the errors that can be attributed to matmuls.

    Returns:
      The error of all arrays together, and then of each; float64[1 + arrays].
    """
    return self._comparison.compute_effects(errors, self.noise_mask)

  def _start_program(self, *, has_stats: bool, has_flags: bool) -> list[Any]:
    """Compile a program, run it in float32, and return the outputs."""
    self._program = _program.ExactProgram(
      self._traced.closed_jaxpr,
      self._table,
      self._traced.inputs,
      has_stats=has_stats,
      has_flags=has_flags,
    )
    result = self._run()
    self.site_stats = _host_values.to_host(result.stats)
    self._comparison = _output_errors.OutputComparison(
      self._traced.outputs, result.outs
    )
    return result.outs

  def _find_noise(self) -> np.ndarray:
    """Return which arrays are only rounding noise in float32; bool[arrays]."""
    noise_mask = np.zeros(len(self.names), bool)
    # Half precision makes noise of numbers that are less exact by far.
    if (self.half_errors.array_errors > _NOISE_THRESHOLD).any():
      self._num_all_runs = self._num_all_runs and self._num_all_runs + 1
      outs = self._run(is_perturbed=True).outs
      errors = self._comparison.compute_errors(outs)
      noise_mask = errors.array_errors > _NOISE_THRESHOLD
    return noise_mask

  def _find_mistakes(
    self, reference_outs: Sequence[Any], half_outs: Sequence[Any]
  ) -> list[_mistakes.Mistake]:
    """Return mistakes in how the step uses its gradients."""
    mistakes: list[_mistakes.Mistake] = []
    for outs in reference_outs, half_outs:
      mistakes += _scaling_mistakes.check_applied_flags(self._traced, outs)
    mistakes += _scaling_mistakes.check_scale_invariance(
      self._traced,
      lambda inputs: self._program.run(inputs).outs,
      reference_outs,
      is_exact=not _scaling_mistakes.has_narrow_range_eqn(
        self._traced.closed_jaxpr, ignore_autocast=True
      ),
    )
    return list(dict.fromkeys(mistakes))

  def _run(
    self, half_sites: Sequence[int] = (), *, is_perturbed: bool = False
  ) -> _program.RunResult:
    self._show_next_run()
    # Wait, so that the progress line shows the run that is being executed.
    return jax.block_until_ready(
      self._program.run(
        self._traced.inputs, half_sites, is_perturbed=is_perturbed
      )
    )

  def _show_next_run(self) -> None:
    self._num_runs += 1
    total = f" of {self._num_all_runs}" if self._num_all_runs else ""
    self._progress.set_description(f"run {self._num_runs}{total}")
