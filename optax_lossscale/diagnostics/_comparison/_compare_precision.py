"""``compare_precision``: which matmul loses the precision of the gradients.

1. Trace the function, and run it as trained.
2. Run it with all matmuls in float32 (the reference), and with perturbed
   operands. An array that the perturbation changes much is rounding noise, and
   is not judged (``_runs``, ``_program``).
3. Run it with the matmuls of one layer in half precision, for each layer; or,
   if an error is large, with halves of the layers, to find the worst ones by
   bisection (``_outliers``). One program serves all of these runs.
4. Report the error that each layer causes alone, and the outliers among them.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _transfer_guard
from optax_lossscale._autocast import _matmuls
from optax_lossscale.diagnostics import (
  _mistakes,
  _progress,
  _tracing,
)
from optax_lossscale.diagnostics._comparison import (
  _matmul_table,
  _outliers,
  _report,
  _runs,
)

# If more than this fraction of a matmul's operands or result underflows or is
# subnormal, underflow causes the error, and a larger loss scale is suggested.
_UNDERFLOW_MAJORITY = 0.5
# The largest suggested change of the scale. If all operands are zero, the
# headroom is infinite.
_MAX_BINADES = 126


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
  runs as trained, with all matmuls and convolutions that ``autocast``
  casts in float32, and once for each layer, with only the matmuls of this layer
  in half precision. The runs for the layers share one compiled program.

  Each array is judged individually, since optimizers such as Adam scale each
  gradient relative to its size. Arrays that are only rounding noise are left
  out. They are detected by one more run in float32, in which an operand of each
  matmul changes by a relative 2**-20: rounding noise changes by far more.

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
    search: ``"exhaustive"`` measures each layer. ``"bisect"``, for a large
      model, measures layers only if an error is large, and finds the layers
      that cause it by bisection, in few runs.
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
  mistakes: list[_mistakes.Mistake]
  underflow_fraction: float


def compare_traced(
  traced: _tracing.TracedFunction,
  search: str,
  progress: _progress.ProgressLine,
  half_outs: Sequence[Any] | None = None,
) -> ComparisonResult | None:
  """Compare a traced function in half precision with float32.

  Args:
    traced: the function.
    search: ``"exhaustive"`` or ``"bisect"``.
    progress: shows how far it is.
    half_outs: the values of ``traced.outputs`` as trained, if they are known;
      by default, another program is compiled to compute them.

  Returns:
    A :class:`ComparisonResult`; None if `autocast` casts no matmul that leads
    to an output.
  """
  limitations = [
    f"Not analyzed: {x}."
    for x in _tracing.describe_unreached(traced.unreached_locations)
  ]
  traced, half_outs = _select_outputs(traced, half_outs)
  table = _matmul_table.MatmulTable(traced.closed_jaxpr)
  if not table.sites:
    return None
  limitations += [
    f"Not analyzed: {name}, which runs unchanged in every run."
    for name in table.unanalyzed_names
  ]
  runs = _runs.PrecisionRuns(
    traced, table, progress, half_outs, measures_sites=search == "exhaustive"
  )
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
  elif report.reference_is_finite and report.matmuls:
    report = _add_outliers(report, runs, effects_by_site, eps)
  mistakes = [*traced.mistakes, *runs.mistakes]
  return ComparisonResult(report, mistakes, runs.underflow_fraction)


def _select_outputs(
  traced: _tracing.TracedFunction, half_outs: Sequence[Any] | None
) -> tuple[_tracing.TracedFunction, Sequence[Any] | None]:
  """Drop the outputs that the comparison doesn't need, and their values."""
  # Only "grads" are compared. The other kinds are needed to detect mistakes.
  step_kinds = {"grads", "applied", "unscaled"}
  kinds = step_kinds if traced.grad_outputs else {"result"}
  mask = [output.kind in kinds for output in traced.outputs]
  if half_outs is not None:
    half_outs = list(itertools.compress(half_outs, mask))
  return traced.restrict_outputs(mask), half_outs


def _measure_sites(
  search: str,
  table: _matmul_table.MatmulTable,
  runs: _runs.PrecisionRuns,
  eps: float,
) -> dict[int, np.ndarray]:
  """Return the effects of each matmul site, measured alone or by bisection.

  Bisection measures nothing unless an error is large.
  """
  site_groups = table.group_by_name()
  if search == "exhaustive":
    return {
      i: runs.measure_effects([i]) for group in site_groups for i in group
    }
  total_effect = runs.compute_effects(runs.half_errors)
  errors = runs.half_errors
  can_have_outlier = _outliers.exceeds_limits(total_effect, eps).any()
  if errors.is_zero or not errors.is_finite or not can_have_outlier:
    return {}
  # If matmuls overflow, they are the cause, and their effects need not be
  # measured.
  overflowing_sites = [
    i for i in runs.site_stats if _compute_log2_headroom(i, table, runs) < 0
  ]
  if overflowing_sites:
    overflow_effect = np.where(np.isinf(total_effect), math.inf, 0.0)
    return dict.fromkeys(overflowing_sites, overflow_effect)
  runs.start_measuring()
  return _outliers.bisect_effects(
    runs.measure_effects, site_groups, total_effect, eps
  )


def _compute_log2_headroom(
  site_index: int, table: _matmul_table.MatmulTable, runs: _runs.PrecisionRuns
) -> float:
  """Return log2 of the largest number over the largest magnitude of a site."""
  amax = float(runs.site_stats[site_index].amax)
  dtype_max = float(jnp.finfo(table.sites[site_index].dtypes.result).max)
  return math.log2(dtype_max) - math.log2(amax) if amax else math.inf


def _build_report(
  traced: _tracing.TracedFunction,
  table: _matmul_table.MatmulTable,
  runs: _runs.PrecisionRuns,
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
    reference_is_zero=runs.half_errors.is_zero,
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
  runs: _runs.PrecisionRuns,
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
    outliers=_outliers.find_outliers([r.name for r in matmuls], effects, eps),
    inaccurate_arrays=tuple(inaccurate_arrays),
    suggested_log2_scale_change=log2_increase,
  )


def _find_inaccurate_arrays(
  runs: _runs.PrecisionRuns, eps: float
) -> list[_report.ArrayError]:
  """Return the arrays with a large error, the worst first."""
  arrays = map(
    _report.ArrayError,
    runs.names,
    runs.half_errors.array_errors.tolist(),
    runs.half_errors.norm_fractions.tolist(),
  )
  # Noise that is not finite in half precision is still an overflow.
  comparable_mask = ~(runs.noise_mask & runs.half_errors.finite_mask)
  inaccurate_arrays = [
    array
    for array in itertools.compress(arrays, comparable_mask)
    if array.error > _outliers.INACCURATE_EPS * eps
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
  # Without autocast there is no half precision to which operands are cast.
  if _matmuls.MatmulSearch(jnp.float32).any_in_jaxpr(traced.closed_jaxpr.jaxpr):
    cause = f"all matmuls of {name} run in float32"
  return (
    f"compare_precision has nothing to compare: {cause}. Pass a function with"
    " an autocast inside, such as ols.grad(ols.autocast(loss_fn), opt_state),"
    " or a training step that differentiates ols.autocast(loss_fn)."
  )


def _as_matmul_precision(
  site_index: int,
  effect: float,
  table: _matmul_table.MatmulTable,
  runs: _runs.PrecisionRuns,
) -> _report.MatmulPrecision:
  site = table.sites[site_index]
  stats = runs.site_stats[site_index]
  num_entries = np.maximum(stats.num_entries, 1)
  return _report.MatmulPrecision(
    site.primitive,
    table.names[site_index],
    site.names.name_scope,
    site.names.param_path,
    table.source_lines[site_index],
    site.backward,
    isolated_error=effect,
    amax=float(stats.amax),
    log2_headroom=_compute_log2_headroom(site_index, table, runs),
    underflow_fraction=float(np.max(stats.num_underflows / num_entries)),
    subnormal_fraction=float(np.max(stats.num_subnormals / num_entries)),
    run_count=round(float(stats.num_executions)),
    program_index=site_index,
  )
