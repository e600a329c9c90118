"""``precision_report``: in which dtype a function computes, line by line."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import _limits, _tracing
from optax_lossscale.diagnostics._precision import _flops, _risks, _walk


class Flops(NamedTuple):
  """The matrix products and convolutions of one kind.

  Attributes:
    operands: the dtype of what is multiplied; the wider one of two.
    accumulation: the dtype of the result, in which the program asks to add the
      products. XLA adds those of 16 bits in float32, and rounds the sum once.
    flops: how many floating-point operations they are.
    share: their share of all.
  """

  operands: str
  accumulation: str
  flops: int
  share: float


class WideProduct(NamedTuple):
  """Matrix products or convolutions of one line in a wider dtype.

  Attributes:
    primitive: JAX's name of the operation.
    operands: the dtype of what is multiplied.
    accumulation: the dtype of the result, in which the program asks to add the
      products. XLA adds those of 16 bits in float32, and rounds the sum once.
    flops: how many floating-point operations they are.
    share: their share of all.
    times: how often they run.
    source: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to a backward pass.
  """

  primitive: str
  operands: str
  accumulation: str
  flops: int
  share: float
  times: int
  source: str
  backward: bool


class Risk(NamedTuple):
  """Operations of one line that may overflow or lose small numbers.

  Attributes:
    primitive: JAX's name of the operation.
    reason: what may go wrong.
    times: how often they run.
    source: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to a backward pass.
  """

  primitive: str
  reason: str
  times: int
  source: str
  backward: bool


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
  """What :func:`precision_report` returns. It prints as a table.

  Attributes:
    dtype: the dtype that it is about, as a string.
    total_flops: the flops of all matrix products and convolutions.
    share: the share of them whose operands are in this dtype, or in one with as
      few bits; 1.0 if there are none.
    flops: a :class:`Flops` for each pair of dtypes, the largest first.
    wider: a :class:`WideProduct` for each line that multiplies in a wider
      dtype, the largest first.
    at_risk: a :class:`Risk` for each line that does something in this dtype
      that may go wrong, in the order of the program.
    notes: what could not be known from shapes.
  """

  dtype: str
  total_flops: int
  share: float
  flops: tuple[Flops, ...]
  wider: tuple[WideProduct, ...]
  at_risk: tuple[Risk, ...]
  notes: tuple[str, ...]

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    rows = ("flops", "wider", "at_risk")
    fields = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
    }
    return {
      name: [row._asdict() for row in value] if name in rows else value
      for name, value in (fields | {"notes": list(self.notes)}).items()
    }

  def __str__(self) -> str:
    parts = ["No matrix products and no convolutions."]
    if self.flops:
      parts = [
        f"{self.total_flops:.3g} flops in matrix products and convolutions,"
        f" {self.share:.1%} of them in {self.dtype}:",
        _table(
          ("operands", "accumulation", "flops", "share"),
          [(r[0], r[1], f"{r[2]:.3g}", f"{r[3]:.1%}") for r in self.flops],
          left=2,
        ),
      ]
    if self.wider:
      parts += [
        f"In a wider dtype than {self.dtype}:",
        _table(
          ("", "line", "operands", "times", "share"),
          [
            (r[0], _where(r), r.operands, str(r.times), f"{r.share:.1%}")
            for r in self.wider
          ],
          left=3,
        ),
      ]
    if self.at_risk:
      parts += [
        f"At risk in {self.dtype}:",
        _table(
          ("", "line", "times", "why"),
          [(r[0], _where(r), str(r.times), r.reason) for r in self.at_risk],
          left=4,
        ),
      ]
    return "\n".join([*parts, *(f"Not known: {note}" for note in self.notes)])


def precision_report(
  fun: Callable[..., Any],
  *args: Any,
  dtype: Any = jnp.float16,
  **kwargs: Any,
) -> PrecisionReport:
  """Says in which dtypes a function computes, and where float16 is a risk.

  Everything is taken from shapes: nothing is computed.

  Args:
    fun: any function that ``jax.jit`` could take, such as
      ``jax.value_and_grad(loss_fn)``.
    *args: its arguments, of which arrays may be ``jax.ShapeDtypeStruct``.
    dtype: the dtype that you want it to compute in, a float dtype of at most 32
      bits. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionReport`, which prints as a table. What runs in a
    ``scan`` is counted as often as it runs, in a ``while`` loop once, in a
    ``cond`` for the branch with the most flops, and under ``shard_map`` on all
    devices together.

  Raises:
    TypeError: if ``fun`` is not callable, an argument is traced, or ``dtype``
      is not such a dtype.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, x):
    ...   return jnp.mean(jnp.exp(x @ w.astype(jnp.float16)))
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((128, 64), jnp.float16)
    >>> report = diagnostics.precision_report(loss_fn, w, x)
    >>> report.total_flops, report.share
    (1048576, 1.0)
    >>> [risk.primitive for risk in report.at_risk]
    ['exp']
  """
  as_dtype = _limits.as_small_float(dtype)
  traced = _tracing.trace("precision_report", fun, args, kwargs, shapes=True)
  steps = _walk.Walk(traced.closed).steps
  products = _flops.products_in(steps)
  total = sum(product.flops for product in products)
  narrow = [p for p in products if not _is_wider(p.operands, as_dtype)]
  wide = [p for p in products if _is_wider(p.operands, as_dtype)]
  return PrecisionReport(
    dtype=str(as_dtype),
    total_flops=total,
    share=_share(sum(product.flops for product in narrow), total),
    flops=_flops_by_dtype(products, total),
    wider=_wide_rows(wide, total),
    at_risk=_risk_rows(steps, as_dtype),
    notes=_notes(steps),
  )


def _is_wider(operands: str, dtype: np.dtype) -> bool:
  kind = jnp.dtype(operands)
  if not jnp.issubdtype(kind, jnp.inexact):
    return False
  return jnp.finfo(kind).bits > jnp.finfo(dtype).bits


def _share(flops: int, total: int) -> float:
  return flops / total if total else 1.0


def _flops_by_dtype(
  products: list[_flops.Product], total: int
) -> tuple[Flops, ...]:
  sums: dict[tuple[str, str], int] = {}
  for product in products:
    key = product.operands, product.accumulation
    sums[key] = sums.get(key, 0) + product.flops
  rows = [Flops(*key, n, _share(n, total)) for key, n in sums.items()]
  return tuple(sorted(rows, key=lambda row: row.flops, reverse=True))


def _wide_rows(
  products: list[_flops.Product], total: int
) -> tuple[WideProduct, ...]:
  sums: dict[tuple[tuple[str, str, str], str, bool], tuple[int, int]] = {}
  for p in products:
    kind = p.primitive, p.operands, p.accumulation
    key = kind, p.place.source, p.place.backward
    flops, times = sums.get(key, (0, 0))
    sums[key] = flops + p.flops, times + p.times
  rows = [
    WideProduct(*kind, flops, _share(flops, total), times, source, backward)
    for (kind, source, backward), (flops, times) in sums.items()
  ]
  return tuple(sorted(rows, key=lambda row: row.flops, reverse=True))


def _risk_rows(steps: list[_walk.Step], dtype: np.dtype) -> tuple[Risk, ...]:
  sums: dict[Any, int] = {}
  for eqn, place, known, times, _, runs_others, _ in steps:
    if runs_others:
      continue
    for reason in _risks.risks_of(
      eqn, dtype, place.line, known.number, known.terms
    ):
      key = _jaxprs.name_of(eqn), reason, place.source, place.backward
      sums[key] = sums.get(key, 0) + times
  return tuple(
    Risk(name, reason, times, source, backward)
    for (name, reason, source, backward), times in sums.items()
  )


def _notes(steps: list[_walk.Step]) -> tuple[str, ...]:
  notes = [f"{step.note}, {step.place.source}" for step in steps if step.note]
  return tuple(dict.fromkeys(notes))


def _where(row: WideProduct | Risk) -> str:
  backward = ", backward" if row.backward else ""
  return f"{row.source or 'unknown'}{backward}"


def _table(
  header: tuple[str, ...], rows: list[tuple[str, ...]], left: int
) -> str:
  """A table whose first columns are aligned to the left."""
  table = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in table
  )
