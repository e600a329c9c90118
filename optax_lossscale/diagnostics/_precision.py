"""``precision_report``: in which dtype a function computes, line by line."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _host
from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _lines,
  _operations,
  _places,
  _walk,
)
from optax_lossscale.diagnostics import _numbers, _tracing

# A sum of more terms than this is long. Even 256 terms of 256 are too much for
# float16.
_LONG = 256
_LOGARITHMS = {"log", "log2"}
_POWERS = {"integer_pow", "pow", "rsqrt", "square"}
_OVER_DEVICES = {"psum", "psum_invariant", "reduce_scatter"}
# Nobody adds or divides by zero or inf on purpose.
_NEVER_ON_PURPOSE = {"add", "sub", "div"}


# What these hold only says how two numbers become one.
_COMBINERS = ("arg", "cum", "reduce", "scatter", "select_and", "sort", "top_k")


class Flops(NamedTuple):
  """The matmuls and convolutions of one pair of dtypes.

  Attributes:
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result. XLA accumulates 16-bit matmuls in
      float32, and rounds the result once.
    flops: the number of floating-point operations.
    fraction: the fraction of all FLOPs.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.dot, *[jnp.eye(8)] * 2)
    >>> report.flops[0].operand_dtype, report.flops[0].flops
    ('float32', 1024)
  """

  operand_dtype: str
  result_dtype: str
  flops: int
  fraction: float


class UnconvertedMatmul(NamedTuple):
  """Matmuls or convolutions of one layer whose operands are in a wider dtype.

  Attributes:
    primitive: JAX's name of the operation.
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result.
    flops: the number of floating-point operations.
    fraction: the fraction of all FLOPs.
    run_count: the number of times that they run.
    name: what ``keep_float32=`` of :func:`optax_lossscale.autocast` takes: the
      path of the weights or the scopes, with the line if they do not tell.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.dot, jnp.eye(8), jnp.eye(8))
    >>> report.unconverted[0].primitive, report.unconverted[0].operand_dtype
    ('dot_general', 'float32')
  """

  primitive: str
  operand_dtype: str
  result_dtype: str
  flops: int
  fraction: float
  run_count: int
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool


class Risk(NamedTuple):
  """Operations of one line that may overflow or underflow.

  Attributes:
    primitive: JAX's name of the operation.
    reason: how they may overflow or underflow.
    run_count: the number of times that they run.
    name: what ``keep_float32=`` of :func:`optax_lossscale.autocast` takes: the
      path of the weights or the scopes, with the line if they do not tell.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.exp, jnp.ones(8, jnp.float16))
    >>> report.at_risk[0].reason
    'exp overflows above 11.1'
  """

  primitive: str
  reason: str
  run_count: int
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool


@dataclasses.dataclass(frozen=True)
class PrecisionReport(_numbers.PrintedReport):
  """The report of :func:`precision_report`: how much runs in which dtype.

  Attributes:
    dtype: the dtype in which the function should compute, as a string.
    total_flops: the FLOPs of all matmuls and convolutions.
    fraction: the fraction of them whose operands are in this dtype, or in
      another dtype with as few bits; 1.0 if there are none.
    flops: a :class:`Flops` for each pair of dtypes, the largest first.
    unconverted: a :class:`UnconvertedMatmul` for each layer whose operands are
      in a wider dtype, the largest first.
    at_risk: a :class:`Risk` for each line with an operation in this dtype that
      may overflow or underflow, in the order of the program.
    limitations: the parts of the program that were not analyzed.
    warnings: mistakes in the training step as a whole, in sentences: ``update``
      receives gradients that are not scaled as it expects.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(
    ...   ols.autocast(jnp.dot), jnp.eye(8), jnp.eye(8))
    >>> report.fraction, report.unconverted
    (1.0, ())
  """

  dtype: str
  total_flops: int
  fraction: float
  flops: tuple[Flops, ...]
  unconverted: tuple[UnconvertedMatmul, ...]
  at_risk: tuple[Risk, ...]
  limitations: tuple[str, ...]
  warnings: tuple[str, ...] = ()

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    lists = {
      "limitations": list(self.limitations),
      "warnings": list(self.warnings),
    }
    fields = vars(self) | lists
    for name in ("flops", "unconverted", "at_risk"):
      fields[name] = [row._asdict() for row in fields[name]]
    return fields

  def __str__(self) -> str:
    flops = [
      {
        "operand dtype": row.operand_dtype,
        "result dtype": row.result_dtype,
        "flops": f"{row.flops:.3g}",
        "fraction": f"{row.fraction:.1%}",
      }
      for row in self.flops
    ]
    unconverted = [
      _numbers.where(row)
      | {
        "operand dtype": row.operand_dtype,
        "count": str(row.run_count),
        "fraction": f"{row.fraction:.1%}",
      }
      for row in self.unconverted
    ]
    at_risk = [
      _numbers.where(row) | {"count": str(row.run_count), "reason": row.reason}
      for row in self.at_risk
    ]
    parts = [
      *self.warnings,
      *self._conclusion(),
      *(f"Not analyzed: {limitation}" for limitation in self.limitations),
    ]
    for title, rows, left in (
      (f"FLOPs of matmuls and convolutions: {self.total_flops:.3g}", flops, 2),
      (f"Matmuls and convolutions not in {self.dtype}:", unconverted, 3),
      (f"At risk in {self.dtype}:", at_risk, 4),
    ):
      parts += [title, _numbers.table(rows, left)] if rows else []
    return "\n".join(parts)

  def _conclusion(self) -> list[str]:
    """Say how much runs in the dtype, and how more of it does."""
    if not self.flops:
      return ["The function has no matmuls and no convolutions."]
    autocast = "ols.autocast(loss_fn)"
    if self.dtype != "float16":
      autocast = f"ols.autocast(loss_fn, jnp.{self.dtype})"
    lines = [
      f"{self.fraction:.1%} of the matmul and convolution FLOPs run in"
      f" {self.dtype}."
    ]
    if self.unconverted:
      lines.append(
        f"Fix: {autocast}, or cast the operands of the layers below. (Ignore"
        " this for layers that you keep in float32.)"
      )
    return lines


class Product(NamedTuple):
  """Some equal matrix products or convolutions.

  Attributes:
    primitive: JAX's name of the operation.
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result.
    flops: the flops of all of them.
    step: where and how often it runs.
  """

  primitive: str
  operand_dtype: str
  result_dtype: str
  flops: int
  step: _walk.Step


@_host.may_transfer
def precision_report(
  fun: Callable[..., Any],
  *args: Any,
  dtype: Any = jnp.float16,
  **kwargs: Any,
) -> PrecisionReport:
  """Reports in which dtypes a function computes, and where float16 is a risk.

  The function is traced and not run. Operations count if they lead to a result,
  to a change of an argument, or to the gradients that the ``update`` of
  :func:`~optax_lossscale.with_loss_scaling` receives.

  Args:
    fun: any function that ``jax.jit`` could take, such as a training step, or
      ``jax.value_and_grad(loss_fn)``.
    *args: its arguments. Arrays may be ``jax.ShapeDtypeStruct``.
    dtype: the dtype in which the function should compute, a float dtype of at
      most 32 bits. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionReport`. It prints a conclusion and tables. The body of a
    ``scan`` is counted once per iteration, the body of a ``while`` loop once,
    the branch with the most FLOPs of a ``cond``, and the body of a
    ``shard_map`` once per device.

  Raises:
    TypeError: if ``fun`` is not callable, an argument is traced, or ``dtype``
      is not a float dtype of at most 32 bits.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, x):
    ...   return jnp.mean(jnp.exp(x @ w.astype(jnp.float16)))
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((128, 64), jnp.float16)
    >>> report = diagnostics.precision_report(loss_fn, w, x)
    >>> report.total_flops, report.fraction
    (1048576, 1.0)
    >>> [risk.primitive for risk in report.at_risk]
    ['exp']
  """
  as_dtype = _numbers.as_small_float(dtype)
  traced = _tracing.trace("precision_report", fun, args, kwargs, shapes=True)
  return report_precision(traced, as_dtype)


def report_precision(
  traced: _tracing.Traced, as_dtype: np.dtype
) -> PrecisionReport:
  """Returns the report of a traced function."""
  steps = list(_walk.walk(traced.closed, _inside, only_needed=True))
  limitations = _tracing.told(traced.unreached)
  limitations += [
    f"whether update runs, in {where}" for where in traced.in_branches
  ]
  limitations += list(filter(None, map(_limitation, steps)))
  report = _reported(steps, as_dtype, limitations)
  return dataclasses.replace(report, warnings=tuple(map(str, traced.mistakes)))


def _reported(
  steps: list[_walk.Step], as_dtype: np.dtype, limitations: list[str]
) -> PrecisionReport:
  products = _products_in(steps)
  total = sum(product.flops for product in products)
  right = sum(
    p.flops for p in products if not _is_wider(p.operand_dtype, as_dtype)
  )
  return PrecisionReport(
    dtype=str(as_dtype),
    total_flops=total,
    fraction=_fraction(right, total),
    flops=_with_fractions(map(_flops_row, products), total),
    unconverted=_with_fractions(_wide_rows(products, as_dtype), total),
    at_risk=tuple(_added(_risk_rows(steps, as_dtype))),
    limitations=tuple(dict.fromkeys(limitations)),
  )


def _is_wider(operand_dtype: str, dtype: np.dtype) -> bool:
  kind = jnp.dtype(operand_dtype)
  if jnp.issubdtype(kind, jnp.inexact):
    bits = jnp.finfo(kind).bits
  else:  # Booleans have a byte.
    bits = 8 * kind.itemsize
  return bits > jnp.finfo(dtype).bits


def _flops_row(product: Product) -> Flops:
  return Flops(product.operand_dtype, product.result_dtype, product.flops, 0.0)


def _wide_rows(
  products: list[Product], dtype: np.dtype
) -> Iterator[UnconvertedMatmul]:
  places = [p.step.place for p in products]
  told = _places.telling_names([(x.names, x.backward) for x in places])
  for p, place, (name, source) in zip(products, places, told, strict=True):
    if _is_wider(p.operand_dtype, dtype):
      # Without weights, it is for the line that it is told.
      with_line = _places.place_name(place.names.best()[0], source)
      has_line = name.endswith(source)
      own_name = name if place.weights or has_line else with_line
      where = _whereabouts(place, own_name)
      kind = p.primitive, p.operand_dtype, p.result_dtype
      numbers = p.flops, 0.0, p.step.times
      yield UnconvertedMatmul._make((*kind, *numbers, *where))


def _risk_rows(steps: list[_walk.Step], dtype: np.dtype) -> Iterator[Risk]:
  numbers, outer = _Numbers(), {step.around for step in steps}
  for step in steps:
    if step in outer:  # It only runs what it holds.
      continue
    for reason in _risks_of(step, dtype, numbers):
      name = _lines.name_of(step.eqn)
      where = _whereabouts(step.place, step.place.name)
      yield Risk(name, reason, step.times, *where)


def _whereabouts(
  place: _places.Place, name: str
) -> tuple[str, str, str, str, bool]:
  names = place.names
  return name, names.scope, names.weights, place.source, place.backward


def _with_fractions(rows: Iterable[Any], total: int) -> tuple[Any, ...]:
  """The rows with their fractions of the flops, the largest first."""
  added = sorted(_added(rows), key=lambda row: row.flops, reverse=True)
  return tuple(x._replace(fraction=_fraction(x.flops, total)) for x in added)


def _fraction(flops: int, total: int) -> float:
  return flops / total if total else 1.0


def _added(rows: Iterable[Any]) -> Iterator[Any]:
  """The rows, of which those that differ in numbers alone are added up."""
  groups: dict[Any, collections.Counter[str]] = {}
  for row in rows:
    numbers = {x: v for x, v in row._asdict().items() if type(v) is int}
    key = row._replace(**dict.fromkeys(numbers, 0))
    groups.setdefault(key, collections.Counter()).update(numbers)
  return (key._replace(**numbers) for key, numbers in groups.items())


def _products_in(steps: list[_walk.Step]) -> list[Product]:
  """The products, of each ``cond`` those of its largest branch."""
  products = [
    _as_product(step, flops * step.times)
    for step in steps
    if (flops := _operations.flops_of(step.eqn)) is not None
  ]
  by_branch: collections.Counter[Any] = collections.Counter()
  for product in products:
    for branch in product.step.branches:
      by_branch[branch] += product.flops
  # The largest comes last, and takes the place of the others.
  largest = dict(sorted(by_branch, key=lambda branch: by_branch[branch]))
  return [
    product
    for product in products
    if all(largest[cond] == i for cond, i in product.step.branches)
  ]


def _as_product(step: _walk.Step, flops: int) -> Product:
  # What follows are the sizes of groups.
  operands: list[Any] = [v.aval for v in step.eqn.invars[:2]]
  widest = max(operands, key=lambda aval: aval.dtype.itemsize).dtype
  result_dtype = _operations.result_dtype_of(step.eqn)
  name = _lines.name_of(step.eqn)
  return Product(name, str(widest), str(result_dtype), flops, step)


def _risks_of(
  step: _walk.Step, dtype: np.dtype, numbers: "_Numbers"
) -> Iterator[str]:
  """Why an operation is at risk in this dtype, and in no other one."""
  kinds = [getattr(v.aval, "dtype", None) for v in step.eqn.outvars]
  if dtype in kinds:
    yield from _of_function(step, dtype, numbers)
    yield from _of_sum(step, dtype, numbers)
    yield from _of_constants(step, dtype, numbers)


def _of_function(
  step: _walk.Step, dtype: np.dtype, numbers: "_Numbers"
) -> Iterator[str]:
  name = step.eqn.primitive.name
  if name in _numbers.LARGEST_EXPONENTS:
    yield f"{name} overflows above {_numbers.largest_exponent(name, dtype)}"
  elif name in _LOGARITHMS:
    yield f"{name} of an underflowed value is -inf"
  elif name in _POWERS:
    yield "power: may overflow or underflow (squaring doubles the exponent)"
  elif name == "div":
    divisor = numbers.of(step, step.eqn.invars[1])
    if divisor is None or not 1 <= abs(divisor) < math.inf:
      yield "division: the divisor may have underflowed to zero"


def _of_sum(
  step: _walk.Step, dtype: np.dtype, numbers: "_Numbers"
) -> Iterator[str]:
  summing = step.eqn
  if step.eqn.primitive.name == "convert_element_type":
    summing = numbers.maker(step, step.eqn.invars[0]) or summing
  terms = _operations.terms_in_sum(summing)
  if step.eqn.primitive.name in _OVER_DEVICES:
    yield f"sum over devices in {dtype}"
  elif terms > _LONG and summing.primitive.name in _operations.BY_INDEX:
    yield f"sum by index of up to {terms} terms"
  elif terms > _LONG:
    yield f"sum of {terms} terms"


def _of_constants(
  step: _walk.Step, dtype: np.dtype, numbers: "_Numbers"
) -> Iterator[str]:
  name = step.eqn.primitive.name
  for atom in step.eqn.invars:
    number = numbers.of(step, atom)
    if number is None:
      continue
    with np.errstate(all="ignore"):
      becomes = float(np.asarray(number).astype(dtype))
    is_lost = becomes == 0 or math.isinf(becomes)
    if name == "convert_element_type" and becomes != number and is_lost:
      yield f"constant {number:g} becomes {becomes:g} in {dtype}"
    # JAX has converted the constant, so its first value is unknown.
    is_literal = isinstance(atom, core.Literal)
    if name in _NEVER_ON_PURPOSE and is_literal and is_lost:
      flows = "underflowed" if becomes == 0 else "overflowed"
      yield (
        f"constant is {number:g}; it may have {flows} when cast to {dtype}"
      )


class _Numbers:
  """What is known of values before anything is computed."""

  def __init__(self) -> None:
    self._makers: dict[core.Jaxpr, dict[Any, core.JaxprEqn]] = {}

  def of(self, step: _walk.Step, atom: Any) -> float | None:
    """The number that all entries of what a step reads are, if it is one."""
    if isinstance(atom, core.Literal):
      return _as_number(atom.val)
    maker, jaxpr = self.maker(step, atom), step.closed.jaxpr
    if maker is not None:
      moves = maker.primitive.name in _operations.SPREAD
      return self.of(step, maker.invars[0]) if moves else None
    if atom in jaxpr.constvars:
      return _as_number(step.closed.consts[jaxpr.constvars.index(atom)])
    given = dict(zip(jaxpr.invars, _given_to(step), strict=False))
    if step.around is None or atom not in given:
      return None
    return self.of(step.around, given[atom])

  def maker(self, step: _walk.Step, atom: Any) -> core.JaxprEqn | None:
    """The equation of which what a step reads is the first output."""
    jaxpr = step.closed.jaxpr
    if jaxpr not in self._makers:
      makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars[:1]}
      self._makers[jaxpr] = makers
    is_literal = isinstance(atom, core.Literal)
    return None if is_literal else self._makers[jaxpr].get(atom)


def _given_to(step: _walk.Step) -> Sequence[Any]:
  """What the first inputs of the jaxpr around a step are, each time it runs."""
  eqn: Any = step.around and step.around.eqn
  match step.around and step.around.call:
    case _higher_order.Call() | _higher_order.ShardMap():
      return eqn.invars
    case _higher_order.Cond():
      return eqn.invars[1:]
    case _higher_order.Scan(consts=count):
      return eqn.invars[:count]
    case _:
      return ()


def _as_number(const: Any) -> float | None:
  """A real scalar as a number."""
  if isinstance(const, jax.core.Tracer):
    return None  # A solver closes over what was traced around it.
  is_real = jnp.issubdtype(jnp.result_type(const), jnp.floating)
  return float(const) if is_real and jnp.shape(const) == () else None


def _inside(eqn: core.JaxprEqn) -> list[_equations.ClosedJaxpr]:
  """The jaxprs that an equation runs."""
  call = _higher_order.higher_order_of(eqn)
  return _held(eqn) if call is None else _higher_order.bodies_of(call)


def _held(eqn: core.JaxprEqn) -> list[_equations.ClosedJaxpr]:
  """The jaxprs that an equation holds, but for those that combine numbers."""
  is_combiner = _lines.name_of(eqn).startswith(_COMBINERS)
  return [] if is_combiner else list(_equations.held_jaxprs(eqn))


def _limitation(step: _walk.Step) -> str:
  """Return what cannot be known of an equation from its shapes, or ``""``."""
  reason = ""
  if isinstance(step.call, _higher_order.While):
    reason = "only one iteration is counted"
  elif step.call is not None:
    pass
  elif _held(step.eqn):
    reason = "its body is counted once"
  elif _equations.hi_primitive(step.eqn) is not None:
    reason = "it is unknown, and counted as no FLOPs"
  elif (
    _operations.is_matrix_product(step.eqn)
    and _operations.flops_of(step.eqn) is None
  ):
    reason = "its FLOPs are not counted"
  where = f" at {step.place.source}" if step.place.source else ""
  return f"{_lines.name_of(step.eqn)}{where}: {reason}" if reason else ""
