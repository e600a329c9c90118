"""``count_flops``: how many FLOPs a function computes in which dtype.

The function is traced, and its jaxpr is walked without running it. Each matmul
and convolution contributes FLOPs to a pair of dtypes, times the number of its
executions.
"""

import collections
from collections.abc import Callable
import dataclasses
from typing import Any

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks
from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _walk,
)
from optax_lossscale.diagnostics import (
  _reports,
  _tracing,
)
from optax_lossscale.diagnostics._precision import _layers

# The jaxpr inside of these primitives only combines two numbers. It is not
# counted as a body that runs.
_REDUCER_PREFIXES = (
  "arg",
  "cum",
  "reduce",
  "scatter",
  "select_and",
  "sort",
  "top_k",
)


@dataclasses.dataclass(frozen=True)
class FlopCount(_reports.PrintedReport):
  """The report of :func:`count_flops`: how much runs in which dtype.

  Attributes:
    dtype: the dtype in which the function should compute, as a string.
    total_flops: the FLOPs of all matmuls and convolutions outside of the
      optimizer.
    fraction: the fraction of them whose operands are in this dtype, or in one
      with fewer bits; 1.0 if there are none. In another dtype with as many
      bits, they don't count: float16 hardware may not have bfloat16.
    flops_by_dtype: the FLOPs by the dtype of the operands, the wider one of
      two; the largest first.
    unconverted: a :class:`LayerPrecision` for each layer whose operands are in
      another dtype, the largest first.
    can_autocast: whether :func:`optax_lossscale.autocast` can cast any of these
      layers: they are in float32, and the function has no ``autocast`` yet.
    limitations: the parts of the program that were not analyzed.
    optimizer_flops: the FLOPs of the matmuls and convolutions of the optimizer
      that :func:`~optax_lossscale.with_loss_scaling` wraps, such as Muon. No
      other field counts them.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.count_flops(
    ...   ols.autocast(jnp.dot), jnp.eye(8), jnp.eye(8))
    >>> report.fraction, report.unconverted
    (1.0, ())
  """

  dtype: str
  total_flops: int
  fraction: float
  flops_by_dtype: dict[str, int]
  unconverted: tuple[_reports.LayerPrecision, ...]
  can_autocast: bool
  limitations: tuple[str, ...]
  optimizer_flops: int = 0

  def __str__(self) -> str:
    flops = [
      {
        "operand dtype": dtype,
        "flops": f"{count:.3g}",
        "fraction": f"{count / max(self.total_flops, 1):.1%}",
      }
      for dtype, count in self.flops_by_dtype.items()
    ]
    unconverted = [
      _reports.format_location_cells(row, has_line=not row.param_path)
      | {
        "operand dtype": row.dtype,
        "count": str(row.run_count),
        "fraction": f"{row.fraction:.1%}",
      }
      for row in self.unconverted
    ]
    optimizer_line = (
      f"FLOPs of the matmuls of the optimizer: {self.optimizer_flops:.3g}, not"
      " counted below."
    )
    return "\n".join(
      [
        *self._format_conclusion(),
        *[optimizer_line] * bool(self.optimizer_flops),
        *(f"Not analyzed: {limitation}" for limitation in self.limitations),
        *_reports.format_table(
          flops,
          1,
          title=f"FLOPs of matmuls and convolutions: {self.total_flops:.3g}",
        ),
        *_reports.format_table(
          unconverted,
          3,
          title=f"Matmuls and convolutions not in {self.dtype}:",
          full_list="report.unconverted",
        ),
      ]
    )

  def _format_conclusion(self) -> list[str]:
    """Return the fraction that runs in the dtype, and how to raise it."""
    if not self.flops_by_dtype:
      suffix = " outside of the optimizer" * bool(self.optimizer_flops)
      return [f"The function has no matmuls and no convolutions{suffix}."]
    lines = [
      f"{self.fraction:.1%} of the matmul and convolution FLOPs run in"
      f" {self.dtype}."
    ]
    if self.unconverted:
      dtype = "" if self.dtype == "float16" else f", jnp.{self.dtype}"
      cast = "cast the operands of the layers below"
      fix = (
        f"ols.autocast(loss_fn{dtype}), or {cast}"
        if self.can_autocast
        else cast
      )
      lines.append(
        f"Fix: {fix}. (Ignore this for layers that you keep in a wider dtype.)"
      )
    return lines


@_arrays.allow_transfers
def count_flops(
  fun: Callable[..., Any],
  *args: Any,
  dtype: Any = None,
  **kwargs: Any,
) -> FlopCount:
  """Reports how many matmul FLOPs a function computes in which dtype.

  The function is traced and not run. Operations count if they lead to a result,
  to a change of an argument, or to the gradients that the ``update`` of
  :func:`~optax_lossscale.with_loss_scaling` receives.

  Args:
    fun: any function that ``jax.jit`` could take, such as a training step, or
      ``jax.value_and_grad(loss_fn)``.
    *args: its arguments. Arrays may be ``jax.ShapeDtypeStruct``.
    dtype: the dtype in which the function should compute, a float dtype of at
      most 32 bits. By default, the one of float16 and bfloat16 that computes
      more FLOPs. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`FlopCount`. It prints a conclusion and tables. The body of a
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
    >>> report = diagnostics.count_flops(loss_fn, w, x)
    >>> report.total_flops, report.fraction
    (1048576, 1.0)

  .. seealso:: :func:`compare_precision` measures the error of each layer.
  """
  if dtype is not None:
    dtype = _checks.as_float_dtype(dtype, max_bits=32)
  traced = _tracing.trace("count_flops", fun, args, kwargs, allow_abstract=True)
  return count_traced(traced, dtype)


def count_traced(
  traced: _tracing.TracedFunction, dtype: np.dtype | None = None
) -> FlopCount:
  """Return the report of a traced function."""
  # Only live equations, since XLA removes the others.
  visits = list(
    _walk.walk(traced.closed_jaxpr, _executed_subjaxprs, only_live=True)
  )
  limitations = [
    *_tracing.describe_unreached(traced.unreached_locations),
    *(f"whether update runs, in {x}" for x in traced.cond_branch_locations),
    *filter(None, map(_describe_limitation, visits)),
  ]
  all_matmuls = _list_matmuls(visits)
  matmuls = [x for x in all_matmuls if not x.stack_location.is_in_optimizer]
  layers = _layers.group_by_layer(matmuls, _get_operand_dtype)
  flops: collections.Counter[str] = collections.Counter()
  for layer in layers:
    flops[str(layer.dtype)] += layer.flops
  dtype = dtype or np.dtype(max("float16", "bfloat16", key=lambda x: flops[x]))
  total_flops = flops.total()
  unconverted = sorted(
    (
      x
      for x in layers
      if x.dtype != dtype and x.dtype.itemsize >= dtype.itemsize
    ),
    key=lambda layer: layer.flops,
    reverse=True,
  )
  flops_in_dtype = total_flops - sum(x.flops for x in unconverted)
  return FlopCount(
    dtype=str(dtype),
    total_flops=total_flops,
    fraction=flops_in_dtype / total_flops if total_flops else 1.0,
    flops_by_dtype=dict(flops.most_common()),
    unconverted=tuple(
      x.as_row(fraction=x.flops / max(total_flops, 1)) for x in unconverted
    ),
    can_autocast=not any(x.in_autocast for x in layers)
    and any(_is_castable(x.eqn) for layer in unconverted for x in layer.visits),
    limitations=tuple(dict.fromkeys(limitations)),
    optimizer_flops=_layers.count_flops(all_matmuls) - total_flops,
  )


def _is_castable(eqn: core.JaxprEqn) -> bool:
  """Return whether `autocast` could cast the operands of a matmul."""
  avals: Any = (v.aval for v in (*eqn.invars[:2], *eqn.outvars))
  return _primitives.has_castable_dtypes(eqn) and all(
    aval.dtype == jnp.float32 for aval in avals
  )


def _list_matmuls(visits: list[_walk.EqnVisit]) -> list[_walk.EqnVisit]:
  """Return all matmuls, from each ``cond`` only those of its largest branch."""
  matmuls, flops_by_branch = [], collections.Counter[Any]()
  for visit in visits:
    if _primitives.count_eqn_flops(visit.eqn) is not None:
      matmuls.append(visit)
      for branch in visit.cond_branches:
        flops_by_branch[branch] += _layers.count_flops([visit])
  # Maps each cond to its branch with the most FLOPs, which is the last one in
  # ascending order, and so overwrites the others.
  largest_branches = dict(
    branch for branch, _ in reversed(flops_by_branch.most_common())
  )
  return [
    visit
    for visit in matmuls
    if all(largest_branches[cond] == i for cond, i in visit.cond_branches)
  ]


def _get_operand_dtype(eqn: core.JaxprEqn) -> np.dtype:
  """Return the dtype of the operands of a matmul; the wider one of two."""
  # A ragged_dot has a third input, the sizes of the groups.
  avals: list[Any] = [v.aval for v in eqn.invars[:2]]
  return max((x.dtype for x in avals), key=lambda dtype: dtype.itemsize)


def _executed_subjaxprs(eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
  """Return the jaxprs that an equation runs."""
  call = _higher_order.parse_higher_order(eqn)
  return (
    _non_reducer_subjaxprs(eqn)
    if call is None
    else _higher_order.get_bodies(call)
  )


def _non_reducer_subjaxprs(eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
  """Return the jaxprs in an equation, except those that combine two numbers."""
  is_reducer = _eqns.get_primitive_name(eqn).startswith(_REDUCER_PREFIXES)
  return [] if is_reducer else list(_eqns.subjaxprs(eqn))


def _describe_limitation(visit: _walk.EqnVisit) -> str:
  """Return the limitation of counting an equation by shapes, or ``""``."""
  eqn = visit.eqn
  if isinstance(visit.hop, _higher_order.While):
    reason = "only one iteration is counted"
  elif visit.hop is not None:
    return ""
  elif _non_reducer_subjaxprs(eqn):
    reason = "its body is counted once"
  elif _primitives.count_eqn_flops(eqn) is None and (
    _primitives.is_matmul(eqn) or _eqns.get_hi_primitive(eqn)
  ):
    reason = "its FLOPs are not counted"
  else:
    return ""
  name = _eqns.get_primitive_name(eqn)
  where = _provenance.format_location(name, visit.location.source_line)
  return f"{where}: {reason}"
