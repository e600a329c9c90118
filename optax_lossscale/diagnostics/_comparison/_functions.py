"""``compare_precision``: which product loses the precision of the results."""

from collections.abc import Callable, Iterable
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _jaxprs
from optax_lossscale._autocast import _kept
from optax_lossscale.diagnostics import _tracing
from optax_lossscale.diagnostics._comparison import (
  _effects,
  _progress,
  _report,
  _rows,
  _runs,
  _statistics,
)

Effects = Literal["all", "worst"]


def compare_precision(
  fun: Callable[..., Any],
  *args: Any,
  dtype: Any = jnp.float16,
  keep_float32: str | Iterable[str] = (),
  effects: Effects = "all",
  progress: bool = True,
  **kwargs: Any,
) -> _report.PrecisionComparison:
  """Says by running a function which of its products lose the precision.

  It runs the function in float32, as :func:`optax_lossscale.autocast` would run
  it, and once for each place that has products, with these alone in half
  precision. All runs share one compiled program.

  Args:
    fun: a float32 function that ``jax.jit`` could take, and best of all one
      that returns gradients: ``ols.grad(loss_fn, opt_state)``. What it returns
      is what is compared. Callbacks that return nothing, such as
      ``jax.debug.print``, do not run; others run each time.
    *args: its arguments. Among them may be whatever ``fun`` takes.
    dtype: float16 or bfloat16.
    keep_float32: names of products that stay in float32, as in
      :func:`optax_lossscale.autocast`.
    effects: ``"all"``, or ``"worst"`` for a large model: the places that do
      most harm are then found by halves, in few runs.
    progress: whether to tell on the standard error stream how far it has come,
      if it takes longer than a second. (If ``fun`` has an argument of one of
      these four names, bind it with ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionComparison`, which prints as a table, the worst first.

  Raises:
    TypeError: if ``fun`` is not callable, an argument is a shape or is traced,
      ``dtype`` is not one of these, or ``keep_float32`` is not made of strings.
    ValueError: if a name in ``keep_float32`` selects no product, or ``effects``
      is neither of the two.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, x):
    ...   with jax.named_scope("first"):
    ...     hidden = x @ w
    ...   with jax.named_scope("second"):
    ...     scores = 1e4 * hidden @ w
    ...   return jnp.mean(jax.nn.softmax(scores) ** 2)
    >>> w, x = jnp.eye(8), jnp.full((4, 8), 9.0)
    >>> report = diagnostics.compare_precision(loss_fn, w, x, progress=False)
    >>> report.error, [name.split(" at ")[0] for name in report.overflowing]
    (inf, ['second'])
  """
  dtype = _check_dtype(dtype)
  if effects not in ("all", "worst"):
    raise ValueError(
      f"effects must be 'all' or 'worst', got effects = {effects!r}."
    )
  kept = _kept.Kept(_kept.as_patterns(keep_float32))
  rows = _rows.Rows(kept)
  with _tracing.not_finite_allowed():
    traced = _tracing.trace(
      "compare_precision", fun, args, kwargs, shapes=False
    )
    rows.find(traced.closed.jaxpr, _jaxprs.Place())
    kept.check()
    with _tracing.mesh_of(traced.inputs):
      bar = _progress.Progress("compare_precision", progress)
      runs = _runs.Runs(traced, rows, dtype, bar)
      places = list(rows.by_name().values())
      found = _EFFECTS[effects](runs.effect, places, runs.half.error)
      bar.end()
  products = [
    _product(i, rows.all[i], effect, runs, dtype) for i, effect in found.items()
  ]
  products.sort(key=_harm, reverse=True)
  return _report.PrecisionComparison(
    dtype=str(dtype),
    error=runs.half.error,
    cosine=runs.half.cosine,
    standing_out=_standing_out(products, dtype),
    errors=dict(zip(traced.results, runs.half.each, strict=True)),
    products=tuple(products),
    notes=_notes(rows, runs),
  )


_EFFECTS = {"all": _effects.each, "worst": _effects.worst}


def _check_dtype(dtype: Any) -> np.dtype:
  as_dtype = _checks.as_float_dtype(dtype)
  if as_dtype not in (jnp.float16, jnp.bfloat16):
    raise TypeError(
      f"dtype must be float16 or bfloat16, got dtype = {as_dtype.name}."
    )
  return as_dtype


def _product(
  i: int,
  row: _rows.Row,
  effect: float,
  runs: _runs.Runs,
  dtype: np.dtype,
) -> _report.ProductPrecision:
  exact, half = runs.exact_notes[i], runs.half_notes[i]
  entries = np.maximum(exact.entries, 1)
  largest = float(exact.largest)
  limit = float(jnp.finfo(dtype).max)
  return _report.ProductPrecision(
    *row,
    effect=effect,
    error=_statistics.distance(exact, half),
    largest=largest,
    headroom=math.log2(limit) - math.log2(largest) if largest else math.inf,
    lost=float(np.max(exact.lost / entries)),
    subnormal=float(np.max(exact.subnormal / entries)),
    times=round(float(exact.times)),
    position=i,
  )


def _notes(rows: _rows.Rows, runs: _runs.Runs) -> tuple[str, ...]:
  notes = [f"Runs as it is written: {where}." for where in rows.not_entered]
  if not runs.is_finite:
    notes.append(
      "The results are not finite in float32 either: find_overflow names the"
      " operation."
    )
  return tuple(dict.fromkeys(notes))


def _harm(row: _report.ProductPrecision) -> tuple[float, float, float]:
  """What rows are sorted by: the effect, and then what overflows furthest."""
  return row.effect, -row.headroom, row.error


def _standing_out(
  products: list[_report.ProductPrecision], dtype: np.dtype
) -> tuple[str, ...]:
  effects: dict[str, float] = {}
  for row in products:
    effects[row.name] = math.hypot(effects.get(row.name, 0.0), row.effect)
  # Of those that are not finite, the first in the table stays the first.
  largest = sorted(effects.items(), key=lambda item: item[1], reverse=True)
  eps = float(jnp.finfo(dtype).eps)
  return tuple(filter(None, _effects.standing_out(dict(largest), eps)))
