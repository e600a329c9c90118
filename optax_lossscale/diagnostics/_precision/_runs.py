"""The runs of a function in float32 and in half precision."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
import numpy as np

from optax_lossscale.diagnostics import (
  _host_values,
  _progress,
  _tracing,
)
from optax_lossscale.diagnostics._precision import (
  _errors,
  _layers,
  _outliers,
  _reference_program,
)

# An array whose relative error is above this if operands change by a relative
# 2**-20 is rounding noise in float32, too.
_NOISE_THRESHOLD = 0.05
# An error is expected if it is at most this many times as large as the error
# that rounding causes in matmul operands and casts alone. Other operations
# round, too.
_MAX_AMPLIFIED_ROUNDINGS = 4.0

RunFn = Callable[[list[Any]], Sequence[Any]]


class ReferenceRuns:
  """Runs a function in float32, and compares it with the function as trained.

  Args:
    traced: the function.
    eps: the spacing of numbers at 1 in half precision.
    run_as_trained: a function from the inputs of the function to its outputs.
    half_outs: the outputs as trained.
    progress: shows how far it is.

  Attributes:
    names: the names of the arrays that are compared.
    half_errors: the errors as trained.
    noise_mask: whether each array is only rounding noise in float32, too;
      bool[arrays].
    amplified_mask: whether each array has a large error that any rounding may
      cause, since the function amplifies roundings; bool[arrays].
    outs: the outputs in float32.
    underflow_fraction: the fraction of all compared entries that are zero as
      trained, but not in float32.
    layers: the layers; empty if they are not needed.
    stats: the statistics of layers in float32, by the index of the layer.
    limitations: what was not compared, in sentences.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    eps: float,
    run_as_trained: RunFn,
    half_outs: Sequence[Any],
    progress: _progress.ProgressLine,
  ) -> None:
    self._traced = traced
    self._eps = eps
    self._run_as_trained = run_as_trained
    self._progress = progress
    self.layers: list[_layers.Layer] = []
    self._has_overflow = self._has_nonfinite_grads(half_outs)
    indices = _errors.list_compared_indices(traced.outputs)
    measured: list[int] = []
    if self._has_overflow or not _host_values.all_finite(
      [half_outs[i] for i in indices]
    ):
      # The magnitudes of the matmuls explain an overflow.
      self.layers = _layers.list_rounding_layers(traced.closed_jaxpr)
      measured = [i for i, x in enumerate(self.layers) if x.has_matmul]
    self._program = _reference_program.ReferenceProgram(
      traced.closed_jaxpr, traced.inputs, self.layers, measured
    )
    reference = self._run()
    self.outs = reference.outs
    self.limitations = list(self._program.limitations)
    self.stats = _host_values.to_host(reference.stats)
    self._comparison = _errors.OutputComparison(traced.outputs, reference.outs)
    self.names = self._comparison.names
    self.half_errors = self._comparison.compute_errors(half_outs)
    self.underflow_fraction = self.half_errors.num_underflows / max(
      self._comparison.num_entries, 1
    )
    self.noise_mask, self.amplified_mask = self._judge_large_errors()

  @property
  def half_effects(self) -> np.ndarray:
    """The errors as trained that layers are to blame for; float64[1 + arrays].

    See :meth:`_errors.OutputComparison.compute_effects`.
    """
    return self._compute_effects(self.half_errors, self._has_overflow)

  def compute_effects_without(self, mask: np.ndarray) -> np.ndarray:
    """Return the errors as trained without these arrays.

    Returns:
      See :attr:`half_effects`.
    """
    return self._comparison.compute_effects(
      self.half_errors, self.noise_mask | mask
    )

  def measure_effects_at(self, log2_factor: int) -> np.ndarray:
    """Run the function as trained with another loss scale.

    Args:
      log2_factor: log2 of the factor on the loss scale.

    Returns:
      See :attr:`half_effects`.
    """
    outs = self._run_as_trained(self._traced.scale_inputs(2.0**log2_factor))
    unscaled_outs = [
      # With `grads_are_scaled`, an `update` receives gradients times the scale.
      x * np.asarray(2.0**-log2_factor, x.dtype)
      if output.tag_kind == "scaled_grads"
      else x
      for output, x in zip(self._traced.outputs, outs, strict=True)
    ]
    errors = self._comparison.compute_errors(unscaled_outs)
    return self._compute_effects(errors, self._has_nonfinite_grads(outs))

  def _compute_effects(
    self, errors: _errors.RunErrors, has_overflow: bool
  ) -> np.ndarray:
    effects = self._comparison.compute_effects(errors, self.noise_mask)
    return np.maximum(effects, math.inf) if has_overflow else effects

  def _has_nonfinite_grads(self, outs: Sequence[Any]) -> bool:
    """Return whether a gradient is not finite, even if `update` doesn't see it.

    A step may hide it, or not call `update`.
    """
    unscaled = self._traced.select_kind(outs, "unscaled")
    return not _host_values.all_finite(unscaled)

  def _judge_large_errors(self) -> tuple[np.ndarray, np.ndarray]:
    """Return which arrays are noise, and which have an expected error."""
    errors = self.half_errors.array_errors
    none = np.zeros(len(self.names), bool)
    total_error = np.array([self.half_errors.error])
    is_large = _outliers.exceeds_limits(
      np.append(total_error, errors), self._eps
    )
    # Half precision makes noise of numbers that are less exact by far.
    if not is_large.any() and not (errors > _NOISE_THRESHOLD).any():
      return none, none
    outs = self._run(is_perturbed=True).outs
    perturbed_errors = self._comparison.compute_errors(outs).array_errors
    # A rounding changes a number by half of the spacing at most.
    amplification = perturbed_errors / _reference_program.PERTURBATION
    expected_errors = _MAX_AMPLIFIED_ROUNDINGS * amplification * self._eps / 2
    is_noise = perturbed_errors > _NOISE_THRESHOLD
    is_amplified = (errors <= expected_errors) & (
      errors > _outliers.INACCURATE_EPS * self._eps
    )
    return is_noise, is_amplified & ~is_noise

  def run(self, inputs: list[Any]) -> Sequence[Any]:
    """Run the function in float32, with other inputs."""
    return self._program.run(inputs).outs

  def _run(self, *, is_perturbed: bool = False) -> _reference_program.RunResult:
    self._progress.set_description("running the function in float32")
    # Wait, so that the progress line shows what is being executed.
    return jax.block_until_ready(
      self._program.run(self._traced.inputs, is_perturbed=is_perturbed)
    )


class LayerRuns:
  """Runs a function with single layers in half precision.

  Args:
    traced: the function.
    layers: its layers.
    noise_mask: the arrays that are only rounding noise; bool[arrays].
    progress: shows how far it is.

  Attributes:
    stats: the statistics of the layers in float32.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    layers: Sequence[_layers.Layer],
    noise_mask: np.ndarray,
    progress: _progress.ProgressLine,
  ) -> None:
    self._inputs = traced.inputs
    self._noise_mask = noise_mask
    self._progress = progress
    self._num_runs = 0
    self._program = _reference_program.ReferenceProgram(
      traced.closed_jaxpr,
      traced.inputs,
      layers,
      measured=range(len(layers)),
      has_flags=True,
    )
    reference = self._run(())
    self.stats = _host_values.to_host(reference.stats)
    self._comparison = _errors.OutputComparison(traced.outputs, reference.outs)

  def measure_effects(self, half_layers: Sequence[int]) -> np.ndarray:
    """Run only these layers in half precision.

    Returns:
      See :meth:`_errors.OutputComparison.compute_effects`.
    """
    outs = self._run(half_layers).outs
    errors = self._comparison.compute_errors(outs)
    return self._comparison.compute_effects(errors, self._noise_mask)

  def _run(self, half_layers: Sequence[int]) -> _reference_program.RunResult:
    self._num_runs += 1
    self._progress.set_description(f"measuring layers, run {self._num_runs}")
    return jax.block_until_ready(self._program.run(self._inputs, half_layers))
