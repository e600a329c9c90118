"""``compare_precision``: which matmul loses the precision of the gradients.

1. Trace the function, and build a mixed-precision program that takes the mode
of
   each matmul as an array (``_program``). It is compiled once, for all runs.
2. Run it with all matmuls in float32 (the reference), in half precision, and in
   float32 with perturbed operands. An array that the perturbation changes
   much is rounding noise, and is not judged.
3. Run it with the matmuls of one layer in half precision, for each layer; or
   with halves of the layers, to find the worst ones by bisection (``_report``).
4. Report the error that each layer causes alone, and the outliers among them.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _transfer_guard
from optax_lossscale._autocast import _matmuls
from optax_lossscale.diagnostics import _progress, _scaling_mistakes, _tracing
from optax_lossscale.diagnostics._comparison import _program, _report

# If more than this fraction of a matmul's operands or result underflows or is
# subnormal, underflow causes the error, and a larger loss scale is suggested.
_UNDERFLOW_MAJORITY = 0.5
# The largest suggested change of the scale. If all operands are zero, the
# headroom is infinite.
_MAX_BINADES = 126


# An array whose relative error is above this if the operands of matmuls change
# by a relative 2**-20 is rounding noise in float32, too.
_NOISE_THRESHOLD = 0.05


@_transfer_guard.allow_transfers
def compare_precision(
  fun: Callable[..., Any],
  *args: Any,
  search: Literal["exhaustive", "bisect"] = "exhaustive",
  progress: bool = True,
  **kwargs: Any,
) -> _report.PrecisionComparison:
  """Measures which matmuls of a function lose precision in half precision.

  The function contains an :func:`optax_lossscale.autocast`, as in training. It
  runs with all matmuls and convolutions that ``autocast`` casts in float32,
  with all of them in half precision, and once for each layer, with only the
  matmuls of this layer in half precision. All runs share one compiled program.

  Each array is judged individually, since optimizers such as Adam scale each
  gradient relative to its size. Arrays that are only rounding noise are left
  out. They are detected by one more run in float32, in which the operands of
  all matmuls change by a relative 2**-20: rounding noise changes by far more.

  For a training step, only the gradients that the ``update`` of
  :func:`~optax_lossscale.with_loss_scaling` receives are compared. (Updated
  parameters are useless for this: with Adam they move by about the learning
  rate, whatever the gradients are.) For a function without such an ``update``,
  its results are compared.

  Args:
    fun: a function that ``jax.jit`` could take, with an ``autocast`` inside: a
      training step, whatever it returns, or gradients,
      ``ols.grad(ols.autocast(loss_fn), opt_state)``. Callbacks that return
      nothing, such as ``jax.debug.print``, do not run; others run each time.
    *args: its arguments: anything that ``fun`` takes.
    search: ``"exhaustive"`` measures each layer. ``"bisect"`` finds the layers
      with the largest errors by bisection, in few runs, for a large model.
    progress: whether to show on the standard error stream how far it is, after
      a second. (If ``fun`` has an argument of one of these two names, bind it
      with ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionComparison`, which prints as a table, the worst first.

  Raises:
    RuntimeError: if JAX compiles another program than it traces, as with a scan
      under the flag ``jax_scan3``.
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.
    ValueError: if there is no ``autocast`` inside, or it found no matmuls; if
      there is no ``update`` inside, and the results hold no floats; or if
      ``search`` is neither of the two.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(params, x):
    ...   hidden = x @ params["first"]
    ...   scores = 1e4 * hidden @ params["second"]
    ...   return jnp.mean(jax.nn.softmax(scores) ** 2)
    >>> params = {"first": jnp.eye(8), "second": jnp.eye(8)}
    >>> report = diagnostics.compare_precision(
    ...   ols.autocast(loss_fn), params, jnp.full((4, 8), 9.0), progress=False)
    >>> report.error, [name.split(" at ")[0] for name in report.overflowing]
    (inf, ['second'])
  """
  if search not in ("exhaustive", "bisect"):
    raise ValueError(
      f"search must be 'exhaustive' or 'bisect', got search = {search!r}."
    )
  with _tracing.trace_on_host(
    "compare_precision", fun, args, kwargs, progress=progress
  ) as (traced, progress_line):
    if not traced.outputs:
      raise ValueError(_no_floats_message(fun))
    comparison = compare_traced(traced, search, progress_line)
    if comparison is None:
      raise ValueError(_no_matmuls_message(fun, traced))
    return comparison.report


class ComparisonResult(NamedTuple):
  """A comparison of a traced function in half precision with float32.

  Attributes:
    report: the report.
    mistakes: mistakes in how a step uses its gradients.
    underflow_fraction: the fraction of all compared entries that are zero in
      half precision, but not in float32.
  """

  report: _report.PrecisionComparison
  mistakes: list[_scaling_mistakes.Mistake]
  underflow_fraction: float


def compare_traced(
  traced: _tracing.TracedFunction, search: str, progress: _progress.ProgressLine
) -> ComparisonResult | None:
  """Compare a traced function in half precision with float32.

  Args:
    traced: the function.
    search: ``"exhaustive"`` or ``"bisect"``.
    progress: shows how far it is.

  Returns:
    A :class:`ComparisonResult`; None if `autocast` casts no matmul that leads
    to an output.
  """
  limitations = [
    f"Not analyzed: {x}."
    for x in _tracing.describe_unreached(traced.unreached_locations)
  ]
  # Only "grads" are compared. The other kinds are needed to detect mistakes.
  step_kinds = {"grads", "applied", "unscaled"}
  traced = traced.restrict_to_kinds(
    step_kinds if traced.grad_outputs else {"result"}
  )
  table = _program.MatmulTable(traced.closed_jaxpr)
  if not table.sites:
    return None
  limitations += [
    f"Not analyzed: {name}, which runs unchanged in every run."
    for name in table.unanalyzed_names
  ]
  runs = PrecisionRuns(traced, table, progress)
  # With two dtypes, thresholds are those of the one with fewer bits.
  eps = max(float(jnp.finfo(dtype).eps) for dtype in table.dtypes)
  effects_by_site = _measure_sites(search, table, runs, eps)
  report = _build_report(traced, table, runs, effects_by_site, limitations)
  # If the backward pass overflows, the errors of all layers are infinite, so
  # only the loss scale is reported.
  log2_excess = _report.compute_log2_scale_excess(report)
  if log2_excess:
    report = dataclasses.replace(
      report, suggested_log2_scale_change=-log2_excess
    )
  elif report.reference_is_finite:
    report = _add_outliers(report, runs, effects_by_site, eps)
  mistakes = [*traced.mistakes, *runs.mistakes]
  return ComparisonResult(report, mistakes, runs.underflow_fraction)


def _measure_sites(
  search: str, table: _program.MatmulTable, runs: "PrecisionRuns", eps: float
) -> dict[int, np.ndarray]:
  """Return the effects of each matmul site, measured alone or by bisection."""
  site_groups = table.group_by_name()
  if search == "exhaustive":
    return {
      i: runs.measure_effects([i]) for group in site_groups for i in group
    }
  total_effect = runs.compute_effects(runs.half_errors)
  return _report.bisect_effects(
    runs.measure_effects, site_groups, total_effect, eps
  )


def _build_report(
  traced: _tracing.TracedFunction,
  table: _program.MatmulTable,
  runs: "PrecisionRuns",
  effects_by_site: dict[int, np.ndarray],
  limitations: list[str],
) -> _report.PrecisionComparison:
  """Return a report of all measurements, without outliers."""
  matmuls = [
    _as_matmul_precision(i, site_effects[0], table, runs)
    for i, site_effects in effects_by_site.items()
  ]
  # If errors are equal, such as inf, the matmul with the largest numbers is
  # first.
  matmuls.sort(
    key=lambda row: (row.isolated_error, -row.log2_headroom), reverse=True
  )
  names = runs.names
  return _report.PrecisionComparison(
    dtype=" and ".join(sorted(map(str, table.dtypes))),
    target="gradients" if traced.grad_outputs else "results",
    reference_is_zero=runs.is_reference_zero,
    error=runs.half_errors.error,
    cosine=runs.half_errors.cosine,
    reference_is_finite=runs.half_errors.is_finite,
    outliers=(),
    array_errors=dict(
      zip(names, runs.half_errors.array_errors.tolist(), strict=True)
    ),
    matmuls=tuple(matmuls),
    limitations=tuple(dict.fromkeys(limitations)),
    warnings=tuple(map(str, [*traced.mistakes, *runs.mistakes])),
    noise_only_arrays=tuple(itertools.compress(names, runs.noise_mask)),
  )


def _add_outliers(
  report: _report.PrecisionComparison,
  runs: "PrecisionRuns",
  effects_by_site: dict[int, np.ndarray],
  eps: float,
) -> _report.PrecisionComparison:
  """Add the outliers, the inaccurate arrays and a better scale to a report."""
  matmuls = report.matmuls
  effects = np.array([effects_by_site[row.program_index] for row in matmuls])
  inaccurate_arrays = _find_inaccurate_arrays(runs, eps)
  log2_increase = 0
  if inaccurate_arrays:
    worst_index = runs.names.index(inaccurate_arrays[0].name)
    log2_increase = _compute_log2_increase(matmuls, effects[:, 1 + worst_index])
  return dataclasses.replace(
    report,
    outliers=_report.find_outliers([r.name for r in matmuls], effects, eps),
    inaccurate_arrays=tuple(inaccurate_arrays),
    suggested_log2_scale_change=log2_increase,
  )


def _find_inaccurate_arrays(
  runs: "PrecisionRuns", eps: float
) -> list[_report.ArrayError]:
  """Return the arrays with a large error, the worst first."""
  columns = (
    runs.names,
    runs.half_errors.array_errors.tolist(),
    runs.half_errors.norm_fractions.tolist(),
  )
  arrays = map(_report.ArrayError._make, zip(*columns, strict=True))
  # Noise that is not finite in half precision is still an overflow.
  comparable_mask = ~(runs.noise_mask & runs.half_errors.finite_mask)
  inaccurate_arrays = [
    array
    for array in itertools.compress(arrays, comparable_mask)
    if array.error > _report.INACCURATE_EPS * eps
  ]
  return sorted(inaccurate_arrays, key=lambda array: array.error, reverse=True)


def _compute_log2_increase(
  matmuls: Sequence[_report.MatmulPrecision], effects: np.ndarray
) -> int:
  """Return log2 of the factor by which to raise the scale, for one array.

  The result is 0 unless the matmul that causes the largest error is in the
  backward pass and underflows.

  Args:
    matmuls: all matmuls.
    effects: the error of the array if each runs alone in half precision;
      float64[matmuls].
  """
  worst_matmul = matmuls[int(np.argmax(effects))]
  # The loss scale multiplies only the cotangents of the backward pass.
  is_underflow = (
    worst_matmul.backward
    and worst_matmul.underflow_fraction + worst_matmul.subnormal_fraction
    > _UNDERFLOW_MAJORITY
  )
  headroom = min(
    row.log2_headroom for row in matmuls if row.backward or not is_underflow
  )
  return max(math.floor(min(headroom, _MAX_BINADES)), 0) if is_underflow else 0


def _no_floats_message(fun: Callable[..., Any]) -> str:
  name = getattr(fun, "__name__", fun)
  return (
    f"compare_precision has nothing to compare: {name} returns no floats and"
    " passes no gradients to the update of with_loss_scaling. Return the"
    " gradients, or the output of the last layer."
  )


def _no_matmuls_message(
  fun: Callable[..., Any], traced: _tracing.TracedFunction
) -> str:
  name = getattr(fun, "__name__", fun)
  cause = f"{name} has no autocast, or its autocast found no float32 matmuls"
  if _matmuls.MatmulSearch().any_in_jaxpr(traced.closed_jaxpr.jaxpr):
    cause = f"all matmuls of {name} run in float32"
  return (
    f"compare_precision has nothing to compare: {cause}. Pass a function with"
    " an autocast inside, such as ols.grad(ols.autocast(loss_fn), opt_state),"
    " or a training step that differentiates ols.autocast(loss_fn)."
  )


def _as_matmul_precision(
  site_index: int,
  effect: float,
  table: _program.MatmulTable,
  runs: "PrecisionRuns",
) -> _report.MatmulPrecision:
  site = table.sites[site_index]
  stats = runs.site_stats[site_index]
  num_entries = np.maximum(stats.num_entries, 1)
  amax = float(stats.amax)
  dtype_max = float(jnp.finfo(site.dtypes.result).max)
  return _report.MatmulPrecision(
    site.primitive,
    table.names[site_index],
    site.names.name_scope,
    site.names.param_path,
    table.source_lines[site_index],
    site.backward,
    isolated_error=effect,
    amax=amax,
    log2_headroom=math.log2(dtype_max) - math.log2(amax) if amax else math.inf,
    underflow_fraction=float(np.max(stats.num_underflows / num_entries)),
    subnormal_fraction=float(np.max(stats.num_subnormals / num_entries)),
    run_count=round(float(stats.num_executions)),
    program_index=site_index,
  )


class RunErrors(NamedTuple):
  """The errors of the outputs of one run, compared with the run in float32.

  A *result* is an output of the function, or the gradients of one ``update``.
  It has one or more arrays.

  Attributes:
    error: the relative error of the result with the largest one, as a norm.
    cosine: the smallest cosine between a result and its reference.
    is_finite: whether the outputs in float32 can be compared: no array has a
      NaN, or nothing but infs.
    array_errors: the relative error of each array; float64[arrays].
    finite_mask: whether each array has a finite difference; bool[arrays].
    norm_fractions: the norm of each array as a fraction of the norm of its
      result, both in float32; float64[arrays].
    squared_norms: for each array, the squared norms of the difference, of the
      reference and of the array, and the dot product of the latter two;
      float64[arrays, 4].
  """

  error: float
  cosine: float
  is_finite: bool
  array_errors: np.ndarray
  finite_mask: np.ndarray
  norm_fractions: np.ndarray
  squared_norms: np.ndarray


class PrecisionRuns:
  """Runs the program with any modes, and measures the errors of the outputs.

  Attributes:
    site_stats: the statistics of each matmul site in float32.
    half_errors: the errors if all sites run in half precision.
    is_reference_zero: whether all outputs are zero in float32.
    noise_mask: whether each array is only rounding noise in float32, too;
      bool[arrays].
    names: the names of the arrays that are compared.
    mistakes: mistakes in how the step uses its gradients.
    underflow_fraction: the fraction of all compared entries that are zero if
      all sites run in half precision, but not in float32.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    table: _program.MatmulTable,
    progress: _progress.ProgressLine,
  ) -> None:
    self._traced = traced
    self._num_sites = len(table.sites)
    self._progress = progress
    self._num_runs = 0

    @jax.jit
    def run_program(inputs: list[Any], modes: Any) -> Any:
      empty_stats = [_program.make_empty_stats() for _ in table.sites]
      return _program.MixedPrecisionProgram(table, modes).eval_jaxpr(
        traced.closed_jaxpr, inputs, empty_stats
      )

    self._run_program = run_program
    all_sites = list(range(self._num_sites))
    outputs = traced.outputs
    self._compared_indices = [
      i for i, out in enumerate(outputs) if out.kind in ("grads", "result")
    ]
    self.names = [outputs[i].name for i in self._compared_indices]
    # The arrays of a result are contiguous, so reduceat can sum over them.
    groups = [outputs[i].group for i in self._compared_indices]
    _, self._group_starts, self._group_sizes = np.unique(
      groups, return_index=True, return_counts=True
    )
    # The statistics are those of the reference: in half precision, an overflow
    # of one matmul would spread to all later ones.
    reference_outs, self.site_stats = self._run_with_mode([])
    half_outs = self._run_with_mode(all_sites)[0]
    self.mistakes = self._find_mistakes(reference_outs, half_outs)
    self._reference_outs = [reference_outs[i] for i in self._compared_indices]
    self.half_errors = self._compute_errors(half_outs)
    compared_half_outs = [half_outs[i] for i in self._compared_indices]
    self.underflow_fraction = float(
      _compute_underflow_fraction(self._reference_outs, compared_half_outs)
    )
    self.is_reference_zero = not any(jnp.any(x) for x in self._reference_outs)
    perturbed_errors = self._compute_errors(
      self._run_with_mode(all_sites, _program.PERTURBED)[0]
    )
    self.noise_mask = perturbed_errors.array_errors > _NOISE_THRESHOLD

  def measure_effects(self, half_sites: list[int]) -> np.ndarray:
    """Run only these sites in half precision, and return their effects."""
    return self.compute_effects(
      self._compute_errors(self._run_with_mode(half_sites)[0])
    )

  def compute_effects(self, errors: RunErrors) -> np.ndarray:
    """Return the errors that can be attributed to matmuls.

    The error of an array that is only rounding noise is meaningless if it is
    finite: it is left out of the total, and set to zero for the array. The
    relative error of an array that is zero in float32 is meaningless, too, but
    its norm counts in the total.

    Returns:
      The error of all arrays together, and then of each; float64[1 + arrays].
    """
    is_finite_noise = self.noise_mask & errors.finite_mask
    squared_norms = np.where(
      is_finite_noise[:, None], 0.0, errors.squared_norms
    )
    total_error = max(
      map(_compute_relative_error, self._sum_by_result(squared_norms))
    )
    is_uninformative = is_finite_noise | (
      errors.finite_mask & (errors.norm_fractions == 0)
    )
    return np.array(
      [total_error, *np.where(is_uninformative, 0.0, errors.array_errors)]
    )

  def _find_mistakes(
    self, reference_outs: list[Any], half_outs: list[Any]
  ) -> list[_scaling_mistakes.Mistake]:
    """Return mistakes in how the step uses its gradients."""
    mistakes: list[_scaling_mistakes.Mistake] = []
    for outs in reference_outs, half_outs:
      mistakes += _scaling_mistakes.check_applied_flags(
        self._traced.outputs, outs
      )
    mistakes += _scaling_mistakes.check_scale_invariance(
      self._traced.inputs,
      self._traced.scale_indices,
      self._traced.outputs,
      lambda inputs: self._run_program(
        inputs, np.zeros(self._num_sites, np.int32)
      )[0],
      reference_outs,
      is_exact=not _scaling_mistakes.has_narrow_range_eqn(
        self._traced.closed_jaxpr, ignore_autocast=True
      ),
    )
    return list(dict.fromkeys(mistakes))

  def _run_with_mode(
    self, site_indices: list[int], mode: int = _program.HALF
  ) -> Any:
    modes = np.zeros(self._num_sites, np.int32)
    modes[site_indices] = mode
    self._num_runs += 1
    self._progress.set_description(
      f"run {self._num_runs} of {self._num_sites + 3}"
    )
    # Wait, so that the progress line shows the run that is being executed.
    return jax.block_until_ready(self._run_program(self._traced.inputs, modes))

  def _compute_errors(self, outs: list[Any]) -> RunErrors:
    outs = [outs[i] for i in self._compared_indices]
    # float64, since squares of float32 numbers may be out of its range.
    sums = np.array(_compute_sums(self._reference_outs, outs), np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
      # Undo the division by the unit.
      squared_norms = sums[:, :4] * sums[:, 4:5] ** 2
      result_norms = self._sum_by_result(squared_norms)
      squared_fractions = squared_norms[:, 1] / np.repeat(
        result_norms[:, 1], self._group_sizes
      )
    return RunErrors(
      error=max(map(_compute_relative_error, result_norms)),
      cosine=float(
        np.min(list(map(_compute_cosine, result_norms)))
      ),  # NaN if one is.
      is_finite=bool(sums[:, 5].all()),
      array_errors=np.array(list(map(_compute_relative_error, squared_norms))),
      finite_mask=np.isfinite(squared_norms[:, 0]),
      norm_fractions=np.sqrt(np.nan_to_num(squared_fractions)),
      squared_norms=squared_norms,
    )

  def _sum_by_result(self, squared_norms: np.ndarray) -> np.ndarray:
    """Sum over the arrays of each result; float64[results, 4]."""
    with np.errstate(invalid="ignore", over="ignore"):
      return np.add.reduceat(squared_norms, self._group_starts)


@jax.jit
def _compute_underflow_fraction(reference: list[Any], outs: list[Any]) -> Any:
  """Return the fraction of entries that are zero only in ``outs``."""
  pairs = list(zip(reference, outs, strict=True))
  zeros = [jnp.sum((a != 0) & (b == 0), dtype=jnp.float32) for a, b in pairs]
  return sum(zeros) / max(sum(a.size for a in reference), 1)


@jax.jit
def _compute_sums(reference: list[Any], outs: list[Any]) -> list[Any]:
  """Compute sums of squares of each array, its reference and the difference.

  Both arrays are divided by their largest magnitude, the unit, so that squares
  stay in range. If both have the same inf, such as a masked score, it counts as
  equal.

  Returns:
    For each array: the sums of squares of the difference, the reference and the
    array, and their dot product; the unit; and whether the reference is finite
    enough to be compared with.
  """
  rows = []
  for a, b in zip(reference, outs, strict=True):
    is_same = (a == b) & ~jnp.isfinite(a)
    x, y = jnp.where(is_same, 0, a), jnp.where(is_same, 0, b)
    amaxes = [
      jnp.max(jnp.abs(z), initial=0, where=jnp.isfinite(z)) for z in (x, y)
    ]
    amax = jnp.maximum(*amaxes)
    unit = jnp.where(amax > 0, amax, jnp.ones_like(amax))
    x, y = x / unit.astype(x.dtype), y / unit.astype(y.dtype)
    operand_pairs = [(y - x, y - x), (x, x), (y, y), (x, y)]
    is_finite = ~jnp.isnan(a).any() & (jnp.isfinite(a).any() | (a.size == 0))
    rows.append([*(_dot(*pair) for pair in operand_pairs), unit, is_finite])
  return rows


def _dot(x: Any, y: Any) -> Any:
  terms = jnp.real(jnp.conj(x) * y)
  dtype = jnp.promote_types(terms.dtype, jnp.float32)
  return jnp.sum(terms, dtype=dtype)


def _compute_relative_error(sums: Any) -> float:
  """Return the norm of the difference over the norm of the reference."""
  difference, reference, _, _ = sums
  if not math.isfinite(difference):
    return math.inf
  if reference == 0:
    return 0.0 if difference == 0 else math.inf
  return math.sqrt(difference) / math.sqrt(reference)


def _compute_cosine(sums: Any) -> float:
  """Return the cosine between an array and its reference."""
  _, reference, other, dot = map(float, sums)
  if reference == other == 0:
    return 1.0
  norm = math.sqrt(reference) * math.sqrt(other)
  return dot / norm if norm else 0.0
