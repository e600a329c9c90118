"""``compare_precision``: which product loses the precision of the gradients."""

from collections.abc import Callable
import dataclasses
import itertools
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _host
from optax_lossscale._autocast import _products
from optax_lossscale.diagnostics import _tracing
from optax_lossscale.diagnostics._comparison import (
  _effects,
  _progress,
  _report,
  _rows,
  _runs,
)

# An array is lost below what half precision holds if more than this share of
# what its worst product reads or returns is.
_MOSTLY = 0.5
# That of a product of zeros has no bound.
_MOST_BINADES = 126


@_host.may_transfer
def compare_precision(
  fun: Callable[..., Any],
  *args: Any,
  effects: Literal["all", "worst"] = "all",
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
    effects: ``"all"``, or ``"worst"`` for a large model: the places that do
      most harm are then found by halves, in few runs.
    progress: whether to tell on the standard error stream how far it has come,
      if it takes over a second. (If ``fun`` has an argument of one of these two
      names, bind it with ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionComparison`, which prints as a table, the worst first.

  Raises:
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.
    ValueError: if there is no ``autocast`` inside, or it found no products; if
      there is no ``update`` inside, and the results hold no floats; or if
      ``effects`` is neither of the two.

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
  if effects not in ("all", "worst"):
    raise ValueError(
      f"effects must be 'all' or 'worst', got effects = {effects!r}."
    )
  bar = _progress.Progress(progress)
  with _tracing.traced_on_host(
    "compare_precision", fun, args, kwargs
  ) as traced:
    return _compared(fun, traced, effects, bar)


def _compared(
  fun: Callable[..., Any],
  traced: _tracing.Traced,
  effects: str,
  bar: _progress.Progress,
) -> _report.PrecisionComparison:
  notes = [f"Not looked at: {x}." for x in _tracing.told(traced.shut)]
  judged = {"grads", "applied", "unscaled"}
  traced = traced.only(judged if traced.grads else {"result"})
  rows = _rows.Rows(traced.closed)
  _check(fun, traced, rows)
  notes += [f"Runs as it is written: {name}." for name in rows.not_entered]
  runs = _runs.Runs(traced, rows, bar)
  eps = max(float(jnp.finfo(dtype).eps) for dtype in rows.dtypes)
  places = rows.by_name()
  if effects == "all":
    found = {i: runs.harm([i]) for place in places for i in place}
  else:
    total = np.array([runs.half.error, *runs.blamed(runs.half)])
    found = _effects.worst(runs.harm, places, total, eps)
  bar.end()
  products = [_product(i, its[0], rows, runs) for i, its in found.items()]
  # Of equal effects, what overflows furthest comes first.
  products.sort(key=lambda row: (row.effect, -row.headroom), reverse=True)
  names = runs.names
  report = _report.PrecisionComparison(
    dtype=" and ".join(sorted(map(str, rows.dtypes))),
    compared="gradients" if traced.grads else "results",
    is_zero=runs.is_zero,
    error=runs.half.error,
    cosine=runs.half.cosine,
    is_finite=runs.half.is_finite,
    standing_out=(),
    errors=dict(zip(names, runs.half.of_arrays.tolist(), strict=True)),
    products=tuple(products),
    notes=tuple(dict.fromkeys(notes)),
    warnings=(*traced.warnings, *runs.told),
    rounding=tuple(itertools.compress(names, runs.is_rounding)),
  )
  # Among infinities every place would be guilty.
  if not report.is_finite or report.excess:
    return report
  far_off = _far_off(names, runs, eps)
  worst = names.index(far_off[0].name) if far_off else None
  harm = np.array([found[row.position] for row in products])
  return dataclasses.replace(
    report,
    standing_out=_effects.standing_out([r.name for r in products], harm, eps),
    far_off=tuple(far_off),
    shortfall=0 if worst is None else _shortfall(products, harm[:, 1 + worst]),
  )


def _far_off(
  names: list[str], runs: _runs.Runs, eps: float
) -> list[_report.FarOff]:
  """The arrays that are far off, the worst first."""
  columns = names, runs.half.of_arrays.tolist(), runs.half.shares.tolist()
  arrays = map(_report.FarOff._make, zip(*columns, strict=True))
  are_judged = ~(runs.is_rounding & runs.half.are_finite)
  found = [
    array
    for array in itertools.compress(arrays, are_judged)
    if array.error > _effects.FAR_OFF * eps
  ]
  return sorted(found, key=lambda array: array.error, reverse=True)


def _shortfall(
  products: list[_report.ProductPrecision], effects: np.ndarray
) -> int:
  """How many binades a larger scale may have, if that is what an array lacks.

  Args:
    products: all products.
    effects: the effect of each on the array; float64[products].
  """
  worst = products[int(np.argmax(effects))]
  is_lost = worst.backward and worst.lost + worst.subnormal > _MOSTLY
  room = min(row.headroom for row in products if row.backward or not is_lost)
  return max(math.floor(min(room, _MOST_BINADES)), 0) if is_lost else 0


def _check(
  fun: Callable[..., Any], traced: _tracing.Traced, rows: _rows.Rows
) -> None:
  name = getattr(fun, "__name__", fun)
  if not traced.outputs:
    raise ValueError(
      f"compare_precision compares floats, got {name}, whose results hold none,"
      " and which gives no gradients to the update of with_loss_scaling. Return"
      " gradients, or what the last layer returns."
    )
  if not rows.all:
    found = "which has none, or one that found no float32 products"
    if _products.Search().in_jaxpr(traced.closed.jaxpr):
      found = "whose products run in float32, as they are written"
    raise ValueError(
      "compare_precision needs a function with an autocast inside, such as"
      " ols.grad(ols.autocast(loss_fn), opt_state), or a training step of such,"
      f" got {name}, {found}."
    )


def _product(
  i: int, effect: float, rows: _rows.Rows, runs: _runs.Runs
) -> _report.ProductPrecision:
  row = rows.all[i]
  notes = runs.notes[i]
  entries = np.maximum(notes.entries, 1)
  largest = float(notes.largest)
  limit = float(jnp.finfo(row.dtype).max)
  return _report.ProductPrecision(
    row.primitive,
    rows.names[i],
    row.names.scope,
    row.names.weights,
    rows.sources[i],
    row.backward,
    effect=effect,
    largest=largest,
    headroom=math.log2(limit) - math.log2(largest) if largest else math.inf,
    lost=float(np.max(notes.lost / entries)),
    subnormal=float(np.max(notes.subnormal / entries)),
    times=round(float(notes.times)),
    position=i,
  )
