"""``find_overflow``: which operation an inf or a NaN comes from.

1. Trace the function; tagged gradients become outputs of the jaxpr.
2. Run the compiled program. If all outputs are finite, there is no overflow.
3. Otherwise, evaluate the jaxpr eqn by eqn. Each nonfinite entry carries taint
   bits, one bit for each origin: an eqn with finite inputs and a nonfinite
   output (``_taint``, ``_taint_interpreter``).
4. Report the origins whose bits reach a nonfinite output, those that reach an
   ``update`` first.
"""

from collections.abc import Callable
import dataclasses
import re
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _transfer_guard, _warnings
from optax_lossscale._jaxprs import _eqns, _provenance
from optax_lossscale.diagnostics import _progress, _scaling_mistakes, _tracing
from optax_lossscale.diagnostics._overflow import (
  _report,
  _runners,
  _taint,
  _taint_arrays,
  _taint_interpreter,
)

# The outputs that show what an ``update`` receives and computes.
_UPDATE_KINDS = {"grads", "unscaled", "updates"}
# Matches the name of an argument in the state of a wrapped optimizer.
# ``update`` receives this state, too.
_INNER_STATE_RE = re.compile(r"\.inner_state\b")


@_transfer_guard.allow_transfers
def find_overflow(
  fun: Callable[..., Any],
  *args: Any,
  progress: bool = True,
  **kwargs: Any,
) -> _report.Overflow | None:
  """Finds the operation that first produced an inf or a NaN.

  The checked values are the outputs of ``fun``; the gradients that the
  ``update`` of :func:`~optax_lossscale.with_loss_scaling` receives, even if
  ``fun`` does not return them; the gradients that
  :func:`~optax_lossscale.value_and_grad` returns, since the step may hide an
  overflow from ``update``; and the arrays that ``fun`` changes in its
  arguments, as Flax NNX does. Origins that reach an ``update`` come first. An
  argument of a training step that is not finite is reported only if it reaches
  an ``update``; the mean of a metric that an earlier step made NaN is not. The
  arguments are not modified: a ``Ref`` of JAX is copied.

  The function first runs as one compiled program, as in training, except that
  XLA may not keep numbers in more bits than their dtype has. If all checked
  values are finite, the search ends. Otherwise the program runs again,
  operation by operation, and each inf and NaN is followed from its origin to
  the result. An inf that reaches no result is not reported, such as a masked
  logit of -inf, or the branch of a ``where`` that is not taken.

  Calls, loops and branches are entered only if their result is not finite, or
  if a call or a branch contains a loop, which XLA would otherwise compile
  twice. A loop is compiled once, and runs up to the next iteration with a
  nonfinite result; only these iterations run operation by operation. A function
  with effects, such as a callback, runs only once, operation by operation.
  Writes into a ``Ref`` of JAX are not followed: the operation that reads the
  ``Ref`` is reported.

  Args:
    fun: any function that ``jax.jit`` could take, also one that is jitted or
      differentiated: a training step, or ``ols.grad(loss_fn, opt_state)``.
    *args: its arguments: anything that ``fun`` takes, such as models of Flax
      NNX or Equinox, functions, strings.
    progress: whether to show on the standard error stream which operation is
      run, after a second. The line is erased at the end. (If ``fun`` has an
      argument of this name, bind it with ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    None if all checked values are finite. ``find_overflow`` then warns if the
    step is skipped nevertheless, ``update`` did not run, ``update`` received
    gradients that are not scaled as it expects, or some gradients were not
    analyzed. Otherwise an :class:`Overflow`: the first operation, in the order
    of the program, that returned an inf or a NaN from finite inputs, and whose
    inf or NaN reached a checked value. Further origins are in its field
    ``other_origins``. An inf that is written in the program is reported only if
    there is no other origin.

  Raises:
    RuntimeError: if JAX compiles another program than it traces, as with a scan
      under the flag ``jax_scan3``.
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, x):
    ...   hidden = jnp.exp(x @ w)
    ...   return jnp.mean(jnp.where(x > 0, hidden, 0).astype(jnp.float32))
    >>> w = jnp.full((2, 2), 4, jnp.float16)
    >>> x = jnp.array([[1, 1], [1, 2]], jnp.float16)
    >>> hit = diagnostics.find_overflow(jax.value_and_grad(loss_fn), w, x)
    >>> print(hit.kind, hit.primitive, hit.inputs[0])
    inf exp float16[2,2] (max abs 12)
    >>> diagnostics.find_overflow(loss_fn, w, x / 2) is None
    True
  """
  with _tracing.trace_on_host(
    "find_overflow", fun, args, kwargs, progress=progress
  ) as (traced, progress_line):
    search_result = search_traced(traced, progress_line)
  if search_result.origin is None:
    for message in [
      *map(str, search_result.mistakes),
      *search_result.limitations,
    ]:
      _warnings.warn(f"find_overflow found no inf or NaN. {message}")
  return search_result.origin


class SearchResult(NamedTuple):
  """Result of the search in a traced program.

  Attributes:
    origin: the first origin; None if all results are finite.
    mistakes: mistakes in how the step uses its gradients.
    limitations: why a program without an origin may still be wrong, in
      sentences.
  """

  origin: _report.Overflow | None
  mistakes: list[_scaling_mistakes.Mistake]
  limitations: list[str]


def search_traced(
  traced: _tracing.TracedFunction, progress: _progress.ProgressLine
) -> SearchResult:
  """Find the origin of an inf or a NaN in a traced program."""
  compiled_fun = _compile_if_pure(traced)
  origins, outs = _find_origins(traced, compiled_fun, progress)
  mistakes = traced.mistakes + _scaling_mistakes.check_applied_flags(
    traced.outputs, outs
  )
  if not origins:
    if compiled_fun is not None:
      mistakes += _scaling_mistakes.check_scale_invariance(
        traced.inputs,
        traced.scale_indices,
        traced.outputs,
        lambda inputs: compiled_fun(*inputs),
        outs,
        is_exact=not _scaling_mistakes.has_narrow_range_eqn(
          traced.closed_jaxpr, ignore_autocast=False
        ),
      )
    applied_flags = traced.select_kind(outs, "applied")
    return SearchResult(
      None, mistakes, _describe_limitations(traced, applied_flags)
    )
  origin = dataclasses.replace(
    origins[0],
    other_origins=tuple(origins[1:]),
    warnings=tuple(map(str, mistakes)),
  )
  return SearchResult(origin, mistakes, [])


def _find_origins(
  traced: _tracing.TracedFunction,
  compiled_fun: Callable[..., list[Any]] | None,
  progress: _progress.ProgressLine,
) -> tuple[list[_report.Overflow], list[Any]]:
  """Run a program, and return all origins and the outputs of the program."""
  progress.set_description("running the compiled function")
  outs = None if compiled_fun is None else compiled_fun(*traced.inputs)
  if outs is not None and all(map(_taint_arrays.all_finite, outs)):
    return [], outs
  origin_table = _taint.OriginTable()
  interpreter = _taint_interpreter.TaintInterpreter(
    origin_table, _runners.Runner(), progress
  )
  inputs = [
    interpreter.make_constant(
      jnp.asarray(x), "argument", _provenance.EqnLocation(eqn_path=(name,))
    )
    for x, name in zip(traced.inputs, traced.input_names, strict=True)
  ]
  # Only nonfinite outputs have an origin, so the eqns that lead to no such
  # output need not be evaluated. Without a compiled run, all outputs are
  # evaluated.
  used_outputs = outs and [not _taint_arrays.all_finite(out) for out in outs]
  values = interpreter.eval_jaxpr(
    traced.closed_jaxpr, inputs, _provenance.EqnLocation(), used_outputs
  )
  origins = _select_relevant_origins(origin_table, values, traced)
  return origins, outs or [value.array for value in values]


def _select_relevant_origins(
  origin_table: _taint.OriginTable,
  values: list[_taint.TaintedArray],
  traced: _tracing.TracedFunction,
) -> list[_report.Overflow]:
  """Select the origins to report; those that reach an ``update`` come first.

  A nonfinite argument of a training step that reaches no ``update``, such as
  the mean of a metric that an earlier step made NaN, is not a fault of this
  step.
  """
  origins = origin_table.select_reported_origins(values)
  if not traced.grad_outputs or traced.unreached_locations:
    return origins
  pairs = zip(values, traced.outputs, strict=True)
  update_values = [
    value for value, output in pairs if output.kind in _UPDATE_KINDS
  ]
  update_origins = origin_table.select_reported_origins(update_values)
  other_origins = [
    x for x in origins if not any(x is other for other in update_origins)
  ]
  return update_origins + [
    x
    for x in other_origins
    if x.primitive != "argument" or _INNER_STATE_RE.search(x.eqn_path)
  ]


def _compile_if_pure(
  traced: _tracing.TracedFunction,
) -> Callable[..., list[Any]] | None:
  """Return the jitted program; None if the program has effects."""
  if _eqns.has_effectful_eqn(traced.closed_jaxpr.jaxpr):
    return None  # Effects must happen only once, in the interpreter.
  # By default, XLA may drop a conversion to float16 and back, and with it the
  # overflow of the conversion.
  options = {"xla_allow_excess_precision": False}
  return jax.jit(
    core.jaxpr_as_fun(traced.closed_jaxpr), compiler_options=options
  )


def _describe_limitations(
  traced: _tracing.TracedFunction, applied_flags: list[Any]
) -> list[str]:
  """Return why a program without an overflow may still be wrong."""
  limitations = [
    f"Not analyzed: {message}."
    for message in _tracing.describe_unreached(traced.unreached_locations)
  ]
  if any(np.any(np.asarray(flag) == 0) for flag in applied_flags):
    limitations.append(
      "A step is skipped, but update received finite gradients, and no"
      " operation overflows. If you pass grads_finite= to update, check its"
      " value. Otherwise the sum of the gradients exceeds the range of float32."
    )
  return limitations
