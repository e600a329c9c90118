"""``find_overflow``: which operation an inf or a NaN comes from."""

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

# What an ``update`` is given, and what it is made of.
_UPDATE_KINDS = {"grads", "unscaled", "updates"}
# How the state of a wrapped optimizer among the arguments is written. It is
# given to its ``update``, too.
_INNER_STATE_RE = re.compile(r"\.inner_state\b")


@_transfer_guard.allow_transfers
def find_overflow(
  fun: Callable[..., Any],
  *args: Any,
  progress: bool = True,
  **kwargs: Any,
) -> _report.Overflow | None:
  """Finds the operation that the infs and NaNs in a result come from.

  Of a training step the gradients that are given to the ``update`` of
  :func:`~optax_lossscale.with_loss_scaling` count as results, too, whatever the
  step returns: a step that is skipped is not finite. So do those that
  :func:`~optax_lossscale.value_and_grad` returns, so that an overflow which the
  step hides from ``update`` is named, and what the function changes in its
  arguments, as Flax NNX does. What reaches an ``update`` is named first. An
  argument that was not finite to begin with and reaches none, such as the mean
  of a metric that an earlier step made NaN, is not named. What is given is left
  as it is: a ``Ref`` of JAX is copied.

  Runs the function once as a whole, compiled as it would be in training, but
  for numbers that XLA would keep in more bits than their dtype has. If the
  result is finite, that is all: what counts is the program, and not what its
  operations would return one by one. If it is not, it is run once more,
  operation by operation, on the host. From there each inf and NaN is followed:
  what never reaches a result is not named, such as a masked logit of -inf, or
  the branch of a ``where`` that is not taken. A function that is called, a loop
  or a branch is run at once, and entered only if its result is not finite; a
  function or a branch with a loop inside is entered in any case, since XLA
  would compile the loop twice. A loop is compiled once, and runs up to the
  next iteration that is not finite: only such are run by operations.
  A function with effects, such as a callback, is run once, by operations. What
  is written into a ``Ref`` of JAX is not followed: what reads it is named.

  Args:
    fun: any function that ``jax.jit`` could take, also one that is jitted or
      differentiated: a training step, or ``ols.grad(loss_fn, opt_state)``.
    *args: its arguments. Among them may be whatever ``fun`` takes: models of
      Flax NNX or Equinox, functions, strings.
    progress: whether to write on the standard error stream which operation is
      run, if it takes over a second. The line is erased at the end. (If ``fun``
      has an argument of this name, bind it with ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    None if all floats in the result are finite, of the whole program or of its
    operations; with a warning, if a step is skipped all the same, ``update``
    did not run, the gradients that it is given are not scaled as it expects, or
    gradients could not be looked at. Otherwise an :class:`Overflow`: the first
    operation, in the order of the program, that had finite inputs and a result
    that was not, and that reached the result. There may be more in its field
    ``other_origins``. An inf that is written in the program is named only if
    there is no other.

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
  caller = "find_overflow"
  with (
    _progress.ProgressLine(
      caller, progress
    ).refresh_in_background() as progress_line,
    _tracing.trace_on_host(caller, fun, args, kwargs) as traced,
  ):
    search_result = search_traced(traced, progress_line)
  if search_result.origin is None:
    for message in [
      *map(str, search_result.mistakes),
      *search_result.limitations,
    ]:
      _warnings.warn(f"find_overflow found no inf or NaN. {message}")
  return search_result.origin


class SearchResult(NamedTuple):
  """What was found in a program that was run.

  Attributes:
    origin: the first origin; None if all results are finite.
    mistakes: in how a step uses its gradients.
    limitations: why a program without an origin may still be wrong.
  """

  origin: _report.Overflow | None
  mistakes: list[_scaling_mistakes.Mistake]
  limitations: list[str]


def search_traced(
  traced: _tracing.TracedFunction, progress: _progress.ProgressLine
) -> SearchResult:
  """Finds the origin of an inf or a NaN in a traced program."""
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
        is_exact=not _scaling_mistakes.has_half_precision_eqn(
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
  """All origins of what is not finite, and what the program returns."""
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
  """The origins that count, those that reach an ``update`` first.

  An argument of a step that reaches no ``update``, such as the mean of a metric
  that an earlier step made NaN, is no fault of this step.
  """
  origins = origin_table.select_origins(values)
  if not traced.grad_outputs or traced.unreached_locations:
    return origins
  pairs = zip(values, traced.outputs, strict=True)
  update_values = [
    value for value, output in pairs if output.kind in _UPDATE_KINDS
  ]
  update_origins = origin_table.select_origins(update_values)
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
  """The whole program, compiled; None if it has effects."""
  if _eqns.has_effectful_eqn(traced.closed_jaxpr.jaxpr):
    return None  # What happens in it is to happen once.
  # Where it drops a conversion to float16 and back, an overflow goes with it.
  options = {"xla_allow_excess_precision": False}
  return jax.jit(
    core.jaxpr_as_fun(traced.closed_jaxpr), compiler_options=options
  )


def _describe_limitations(
  traced: _tracing.TracedFunction, applied_flags: list[Any]
) -> list[str]:
  """Says why a program without an overflow may still be no good."""
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
