"""``compare_precision``: which layer loses the precision of the gradients."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale._autocast import _matmuls
from optax_lossscale.diagnostics import (
  _instrumented_program,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._precision import (
  _compare_runs,
  _comparison,
  _errors,
)


@_arrays.allow_transfers
def compare_precision(
  fun: Callable[..., Any],
  *args: Any,
  progress: bool = True,
  **kwargs: Any,
) -> _comparison.PrecisionComparison:
  """Measures which layers of a function lose precision in half precision.

  The function computes in float16, bfloat16 or float8, whatever makes it do so:
  :func:`optax_lossscale.autocast`, the ``dtype=`` of a library, or casts by
  hand. It runs as trained, with float32 in place of all half precision, and
  once for each layer, with only the operations of this layer in half precision.
  The runs for the layers share one compiled program. A *layer* is what a
  program computes at one location: a matmul, a normalization, a sum.

  Each array is judged individually, since optimizers such as Adam scale each
  gradient relative to its size. Errors that any rounding would cause are left
  out. They are detected by one more run in float32, in which operands change by
  a relative 2**-20.

  For a training step, the gradients that the optimizer receives are compared,
  and results that don't depend on them, such as running averages. (Updated
  parameters are useless for this: with Adam they move by about the learning
  rate, whatever the gradients are.) They are the gradients that the ``update``
  of :func:`~optax_lossscale.with_loss_scaling` receives, or, in a step without
  it, those that leave the backward pass. For any other function, such as a
  gradient, its results are compared.

  Args:
    fun: a function that ``jax.jit`` could take, and that computes in half
      precision: a training step, whatever it returns, or gradients,
      ``ols.grad(loss_fn, opt_state)``. Callbacks that return nothing, such as
      ``jax.debug.print``, do not run; others are called by each run.
    *args: its arguments: anything that ``fun`` takes.
    progress: whether to show on the standard error stream how far it is, after
      a second. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionComparison`, which prints as a table, the worst first.

  Raises:
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.
    ValueError: if ``fun`` rounds nothing to half precision; or if it is no
      training step, and its results hold no floats.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(params, x):
    ...   hidden = x.astype(jnp.float16) @ params["first"].astype(jnp.float16)
    ...   scores = 1e4 * hidden @ params["second"].astype(jnp.float16)
    ...   return jnp.mean(jax.nn.softmax(scores.astype(jnp.float32)) ** 2)
    >>> params = {"first": jnp.eye(8), "second": jnp.eye(8)}
    >>> report = diagnostics.compare_precision(
    ...   loss_fn, params, jnp.full((4, 8), 9.0), progress=False)
    >>> report.error, len(report.overflowing)
    (inf, 1)

  .. seealso:: :func:`check_step` measures layers only if an error is large.
  """
  with _tracing.trace_on_host(
    "compare_precision",
    fun,
    args,
    kwargs,
    progress=progress,
  ) as (traced, progress_line):
    if not _errors.list_compared_indices(traced.outputs):
      raise ValueError(_no_floats_message(fun))
    program = _instrumented_program.InstrumentedProgram(traced, checked=())
    run = lambda inputs, replaced: program.run(inputs, replaced=replaced).outs
    progress_line.set_description("running the function as trained")
    runs = _step_runs.StepRuns(traced, run, run(traced.inputs, {}))
    result = _compare_runs.compare_runs(runs, progress_line, measures_all=True)
    if result is None or result.report is None:
      raise ValueError(_no_half_message(fun, traced))
    return result.report


def _no_floats_message(fun: Callable[..., Any]) -> str:
  name = getattr(fun, "__name__", fun)
  return (
    f"compare_precision has nothing to compare: {name} returns no floats and"
    " is no training step. Return the gradients, or the output of the last"
    " layer."
  )


def _no_half_message(
  fun: Callable[..., Any], traced: _tracing.TracedFunction
) -> str:
  name = getattr(fun, "__name__", fun)
  message = (
    f"compare_precision has nothing to compare: {name} rounds nothing to"
    " float16, bfloat16 or float8 that leads to a result."
  )
  if _matmuls.MatmulSearch(jnp.float32).any_in_jaxpr(traced.closed_jaxpr.jaxpr):
    message += (
      " Its matmuls run in float32: pass a function with an autocast inside,"
      " such as ols.grad(ols.autocast(loss_fn), opt_state)."
    )
  return message
