"""``compare_precision``: which product loses the precision of the gradients."""

from collections.abc import Callable
import dataclasses
import itertools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _host
from optax_lossscale._autocast import _products
from optax_lossscale.diagnostics import _progress, _step_checks, _tracing
from optax_lossscale.diagnostics._comparison import _program, _report

# An array is lost below what half precision holds if more than this share of
# what its worst product reads or returns is.
_MOSTLY = 0.5
# That of a product of zeros has no bound.
_MOST_BINADES = 126


# What changes by more than this, if the operands of products are off by 2**-20
# of themselves, is rounding in float32, too.
_ROUNDING = 0.05


@_host.allow_transfers
def compare_precision(
  fun: Callable[..., Any],
  *args: Any,
  search: Literal["exhaustive", "bisect"] = "exhaustive",
  progress: bool = True,
  **kwargs: Any,
) -> _report.PrecisionComparison:
  """Says by running a function which of its products lose the precision.

  The function is the one that is trained, with :func:`optax_lossscale.autocast`
  inside. It is run with all that ``autocast`` casts in float32, as it is, and
  once for each place that has such products, with these alone in half
  precision. All runs share one compiled program.

  Each array is judged by itself, as optimizers such as Adam do, which take a
  gradient relative to its own size. What is zero but for rounding is left out:
  one more run in float32, in which each number that a product reads is off by
  2**-20 of itself, tells it, since it changes by far more.

  Of a training step, the gradients that are given to the ``update`` of
  :func:`~optax_lossscale.with_loss_scaling` are compared, and nothing else:
  parameters move by the learning rate alone, whatever the gradients are. Of a
  function without such an ``update``, its results are compared.

  Args:
    fun: a function that ``jax.jit`` could take, with an ``autocast`` inside: a
      training step, whatever it returns, or gradients,
      ``ols.grad(ols.autocast(loss_fn), opt_state)``. Callbacks that return
      nothing, such as ``jax.debug.print``, do not run; others run each time.
    *args: its arguments. Among them may be whatever ``fun`` takes.
    search: ``"exhaustive"``, or ``"bisect"`` for a large model: the layers that
      do most harm are then found by bisection, in few runs.
    progress: whether to tell on the standard error stream how far it has come,
      if it takes over a second. (If ``fun`` has an argument of one of these two
      names, bind it with ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionComparison`, which prints as a table, the worst first.

  Raises:
    RuntimeError: if JAX compiles another program than it traces, as with a scan
      under the flag ``jax_scan3``.
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.
    ValueError: if there is no ``autocast`` inside, or it found no products; if
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
  name = "compare_precision"
  with (
    _progress.ProgressLine(name, progress).refresh_in_background() as bar,
    _tracing.trace_on_host(name, fun, args, kwargs) as traced,
  ):
    if not traced.outputs:
      raise ValueError(_no_floats_message(fun))
    comparison = compare(traced, search, bar)
    if comparison is None:
      raise ValueError(_no_matmuls_message(fun, traced))
    return comparison.report


class Comparison(NamedTuple):
  """A comparison of a traced function in half precision with float32.

  Attributes:
    report: the report.
    mistakes: in how a step uses its gradients.
    underflow_fraction: the fraction of all compared entries that are zero in
      half precision alone.
  """

  report: _report.PrecisionComparison
  mistakes: list[_step_checks.Mistake]
  underflow_fraction: float


def compare(
  traced: _tracing.TracedFunction, search: str, bar: _progress.ProgressLine
) -> Comparison | None:
  """Compares a traced function in half precision with float32.

  Args:
    traced: the function.
    search: ``"exhaustive"`` or ``"bisect"``.
    bar: shows how far it is.

  Returns:
    A :class:`Comparison`; None if `autocast` casts no matmul that leads to an
    output.
  """
  notes = [
    f"Not analyzed: {x}."
    for x in _tracing.describe_unreached(traced.unreached_locations)
  ]
  judged = {"grads", "applied", "unscaled"}
  traced = traced.restrict_to_kinds(
    judged if traced.grad_outputs else {"result"}
  )
  rows = _program.MatmulTable(traced.closed_jaxpr)
  if not rows.sites:
    return None
  notes += [
    f"Not analyzed: {name}, which runs unchanged in every run."
    for name in rows.unanalyzed_names
  ]
  runs = Runs(traced, rows, bar)
  eps = max(float(jnp.finfo(dtype).eps) for dtype in rows.dtypes)
  places = rows.group_by_name()
  if search == "exhaustive":
    found = {i: runs.harm([i]) for place in places for i in place}
  else:
    total = runs.blamed(runs.half)
    found = _report.bisect_effects(runs.harm, places, total, eps)
  products = [_product(i, its[0], rows, runs) for i, its in found.items()]
  # Of equal effects, what overflows furthest comes first.
  products.sort(
    key=lambda row: (row.isolated_error, -row.log2_headroom), reverse=True
  )
  names = runs.names
  report = _report.PrecisionComparison(
    dtype=" and ".join(sorted(map(str, rows.dtypes))),
    target="gradients" if traced.grad_outputs else "results",
    reference_is_zero=runs.is_zero,
    error=runs.half.error,
    cosine=runs.half.cosine,
    reference_is_finite=runs.half.is_finite,
    outliers=(),
    array_errors=dict(zip(names, runs.half.of_arrays.tolist(), strict=True)),
    matmuls=tuple(products),
    limitations=tuple(dict.fromkeys(notes)),
    warnings=tuple(map(str, [*traced.mistakes, *runs.mistakes])),
    noise_only_arrays=tuple(itertools.compress(names, runs.is_rounding)),
  )
  # Among infinities every place would be guilty.
  excess = _report.compute_log2_scale_excess(report)
  comparison = Comparison(
    dataclasses.replace(report, suggested_log2_scale_change=-excess),
    [*traced.mistakes, *runs.mistakes],
    runs.underflow_fraction,
  )
  if not report.reference_is_finite or excess:
    return comparison
  inaccurate_arrays = _inaccurate_arrays(names, runs, eps)
  worst = names.index(inaccurate_arrays[0].name) if inaccurate_arrays else None
  harm = np.array([found[row.program_index] for row in products])
  report = dataclasses.replace(
    report,
    outliers=_report.find_outliers([r.name for r in products], harm, eps),
    inaccurate_arrays=tuple(inaccurate_arrays),
    suggested_log2_scale_change=(
      0 if worst is None else _log2_increase(products, harm[:, 1 + worst])
    ),
  )
  return comparison._replace(report=report)


def _inaccurate_arrays(
  names: list[str], runs: "Runs", eps: float
) -> list[_report.ArrayError]:
  """The arrays that are far off, the worst first."""
  columns = names, runs.half.of_arrays.tolist(), runs.half.shares.tolist()
  arrays = map(_report.ArrayError._make, zip(*columns, strict=True))
  are_judged = ~(runs.is_rounding & runs.half.are_finite)
  found = [
    array
    for array in itertools.compress(arrays, are_judged)
    if array.error > _report.INACCURATE_EPS * eps
  ]
  return sorted(found, key=lambda array: array.error, reverse=True)


def _log2_increase(
  products: list[_report.MatmulPrecision], effects: np.ndarray
) -> int:
  """How many binades a larger scale may have, if that is what an array lacks.

  Args:
    products: all products.
    effects: the effect of each on the array; float64[products].
  """
  worst = products[int(np.argmax(effects))]
  is_lost = (
    worst.backward
    and worst.underflow_fraction + worst.subnormal_fraction > _MOSTLY
  )
  room = min(
    row.log2_headroom for row in products if row.backward or not is_lost
  )
  return max(math.floor(min(room, _MOST_BINADES)), 0) if is_lost else 0


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
  if _products.MatmulSearch().any_in_jaxpr(traced.closed_jaxpr.jaxpr):
    cause = f"all matmuls of {name} run in float32"
  return (
    f"compare_precision has nothing to compare: {cause}. Pass a function with"
    " an autocast inside, such as ols.grad(ols.autocast(loss_fn), opt_state),"
    " or a training step that differentiates ols.autocast(loss_fn)."
  )


def _product(
  i: int, effect: float, rows: _program.MatmulTable, runs: "Runs"
) -> _report.MatmulPrecision:
  row = rows.sites[i]
  notes = runs.notes[i]
  entries = np.maximum(notes.entries, 1)
  amax = float(notes.largest)
  limit = float(jnp.finfo(row.dtype).max)
  return _report.MatmulPrecision(
    row.primitive,
    rows.names[i],
    row.names.name_scope,
    row.names.param_path,
    rows.source_lines[i],
    row.backward,
    isolated_error=effect,
    amax=amax,
    log2_headroom=math.log2(limit) - math.log2(amax) if amax else math.inf,
    underflow_fraction=float(np.max(notes.lost / entries)),
    subnormal_fraction=float(np.max(notes.subnormal / entries)),
    run_count=round(float(notes.times)),
    program_index=i,
  )


class Errors(NamedTuple):
  """How far the outputs of a run are from those in float32.

  Attributes:
    error: the relative error, as a norm, of the result, or of the gradients of
      one ``update``, that are furthest off.
    cosine: the smallest cosine between those of both.
    is_finite: whether there are outputs in float32 to compare with: no NaN, and
      no array that holds nothing but infs.
    of_arrays: the relative error of each array; float64[arrays].
    are_finite: whether each differs by a finite number; bool[arrays].
    shares: the share of each in the norm in float32 of the result, or of the
      gradients, that it is part of; float64[arrays].
    squares: of each array the squared norms of the difference, of the array in
      float32 and of this one, and the product of both; float64[arrays, 4].
  """

  error: float
  cosine: float
  is_finite: bool
  of_arrays: np.ndarray
  are_finite: np.ndarray
  shares: np.ndarray
  squares: np.ndarray


class Runs:
  """The runs of a program, and what comes out of each.

  Attributes:
    notes: what was noted of each row in float32.
    half: the errors if all rows run in half precision.
    is_zero: whether all outputs are zero in float32.
    is_rounding: which arrays are zero but for rounding in float32, too;
      bool[arrays].
    names: the names of the arrays that are compared.
    mistakes: in how the step uses its gradients.
    underflow_fraction: the fraction of all compared entries that are zero if
      all rows run in half precision, and not zero in float32.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    rows: _program.MatmulTable,
    progress: _progress.ProgressLine,
  ) -> None:
    self._traced = traced
    self._count = len(rows.sites)
    self._progress = progress
    self._done = 0

    @jax.jit
    def run(inputs: list[Any], ways: Any) -> Any:
      empty = [_program.make_empty_stats() for _ in rows.sites]
      return _program.MixedPrecisionProgram(rows, ways).eval_jaxpr(
        traced.closed_jaxpr, inputs, empty
      )

    self._run = run
    every = list(range(self._count))
    outputs = traced.outputs
    self._compared = [
      i for i, out in enumerate(outputs) if out.kind in ("grads", "result")
    ]
    self.names = [outputs[i].name for i in self._compared]
    # The arrays of a result follow each other.
    groups = [outputs[i].group for i in self._compared]
    _, self._starts, self._sizes = np.unique(
      groups, return_index=True, return_counts=True
    )
    reference, self.notes = self._call([])
    in_half = self._call(every)[0]
    self.mistakes = self._mistakes(reference, in_half)
    self._reference = [reference[i] for i in self._compared]
    self.half = self._errors(in_half)
    halves = [in_half[i] for i in self._compared]
    self.underflow_fraction = float(_underflow(self._reference, halves))
    self.is_zero = not any(jnp.any(x) for x in self._reference)
    off = self._errors(self._call(every, _program.PERTURBED)[0])
    self.is_rounding = off.of_arrays > _ROUNDING

  def harm(self, in_half: list[int]) -> np.ndarray:
    """What :meth:`blamed` says if these rows alone run in half precision."""
    return self.blamed(self._errors(self._call(in_half)[0]))

  def blamed(self, errors: Errors) -> np.ndarray:
    """The errors for which a product is to blame.

    An array that is zero but for rounding in float32, too, has no error that
    says anything, as long as it stays finite. It counts neither among all
    arrays nor alone. Nor does the error of one that is zero in float32 say
    anything, but among all arrays.

    Returns:
      The error of all arrays together, and then of each; float64[1 + arrays].
    """
    is_noise = self.is_rounding & errors.are_finite
    squares = np.where(is_noise[:, None], 0.0, errors.squares)
    together = max(map(_relative, self._of_results(squares)))
    says_nothing = is_noise | (errors.are_finite & (errors.shares == 0))
    return np.array([together, *np.where(says_nothing, 0.0, errors.of_arrays)])

  def _mistakes(
    self, reference: list[Any], in_half: list[Any]
  ) -> list[_step_checks.Mistake]:
    """Checks how the step uses its gradients."""
    mistakes: list[_step_checks.Mistake] = []
    for outs in reference, in_half:
      mistakes += _step_checks.check_applied_flags(self._traced.outputs, outs)
    mistakes += _step_checks.check_scale_invariance(
      self._traced.inputs,
      self._traced.scale_indices,
      self._traced.outputs,
      lambda inputs: self._run(inputs, np.zeros(self._count, np.int32))[0],
      reference,
      is_exact=not _step_checks.has_half_precision_eqn(
        self._traced.closed_jaxpr, ignore_autocast=True
      ),
    )
    return list(dict.fromkeys(mistakes))

  def _call(self, rows: list[int], way: int = _program.HALF) -> Any:
    ways = np.zeros(self._count, np.int32)
    ways[rows] = way
    self._done += 1
    self._progress.set_description(f"run {self._done} of {self._count + 3}")
    return jax.block_until_ready(self._run(self._traced.inputs, ways))

  def _errors(self, outs: list[Any]) -> Errors:
    outs = [outs[i] for i in self._compared]
    # Float64, since squares of float32 may be out of range.
    sums = np.array(_sums(self._reference, outs), np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
      squares = sums[:, :4] * sums[:, 4:5] ** 2
      of_results = self._of_results(squares)
      shares = squares[:, 1] / np.repeat(of_results[:, 1], self._sizes)
    return Errors(
      error=max(map(_relative, of_results)),
      cosine=float(np.min(list(map(_cosine, of_results)))),  # NaN if one is.
      is_finite=bool(sums[:, 5].all()),
      of_arrays=np.array(list(map(_relative, squares))),
      are_finite=np.isfinite(squares[:, 0]),
      shares=np.sqrt(np.nan_to_num(shares)),
      squares=squares,
    )

  def _of_results(self, squares: np.ndarray) -> np.ndarray:
    """The sums over the arrays of each result; float64[results, 4]."""
    with np.errstate(invalid="ignore", over="ignore"):
      return np.add.reduceat(squares, self._starts)


@jax.jit
def _underflow(reference: list[Any], outs: list[Any]) -> Any:
  """Returns the fraction of entries that are zero in the second alone."""
  pairs = list(zip(reference, outs, strict=True))
  zeros = [jnp.sum((a != 0) & (b == 0), dtype=jnp.float32) for a, b in pairs]
  return sum(zeros) / max(sum(a.size for a in reference), 1)


@jax.jit
def _sums(reference: list[Any], outs: list[Any]) -> list[Any]:
  """Of each array, four sums, the unit of both, and whether it can be compared.

  An inf that both have, such as that of a masked score, is no difference.
  """
  rows = []
  for a, b in zip(reference, outs, strict=True):
    is_same = (a == b) & ~jnp.isfinite(a)
    x, y = jnp.where(is_same, 0, a), jnp.where(is_same, 0, b)
    sizes = [
      jnp.max(jnp.abs(z), initial=0, where=jnp.isfinite(z)) for z in (x, y)
    ]
    top = jnp.maximum(*sizes)
    unit = jnp.where(top > 0, top, jnp.ones_like(top))
    x, y = x / unit.astype(x.dtype), y / unit.astype(y.dtype)
    products = [(y - x, y - x), (x, x), (y, y), (x, y)]
    is_finite = ~jnp.isnan(a).any() & (jnp.isfinite(a).any() | (a.size == 0))
    rows.append([*(_dot(*pair) for pair in products), unit, is_finite])
  return rows


def _dot(x: Any, y: Any) -> Any:
  products = jnp.real(jnp.conj(x) * y)
  dtype = jnp.promote_types(products.dtype, jnp.float32)
  return jnp.sum(products, dtype=dtype)


def _relative(sums: Any) -> float:
  difference, reference, _, _ = sums
  if not math.isfinite(difference):
    return math.inf
  if reference == 0:
    return 0.0 if difference == 0 else math.inf
  return math.sqrt(difference) / math.sqrt(reference)


def _cosine(sums: Any) -> float:
  _, reference, other, both = map(float, sums)
  if reference == other == 0:
    return 1.0
  norm = math.sqrt(reference) * math.sqrt(other)
  return both / norm if norm else 0.0
