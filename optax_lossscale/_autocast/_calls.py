"""Traces a function, rewrites its jaxpr to half precision and evaluates it."""

from collections.abc import Callable, Mapping, Sequence, Set
import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_lossscale._autocast import (
  _float32_filter,
  _matmuls,
  _rewrite,
)
from optax_lossscale._jaxprs import (
  _custom_derivatives,
  _eqns,
  _provenance,
  _source_info,
  _walk,
  _weights,
)

_MAX_LISTED_EQNS = 3


class AutocastConfig(NamedTuple):
  """The options of one autocast call, and the names of its arrays.

  Rules of custom derivatives receive the same config, with ``_replace`` for the
  fields that hold names, so that they keep every option.

  Attributes:
    dtype: the dtype of the matmuls.
    float32_filter: the matmuls that stay in float32.
    paths_by_id: the weight paths of arrays, by the ``id`` of the array.
    output_paths: for each leaf of the output, the path of the weight whose
      gradient it is; empty if no output is a gradient.
  """

  dtype: Any
  float32_filter: _float32_filter.Float32Filter = (
    _float32_filter.Float32Filter()
  )
  paths_by_id: Mapping[int, _weights.WeightPath] = types.MappingProxyType({})
  output_paths: Sequence[_weights.WeightPath] = ()

  def without_names(self) -> "AutocastConfig":
    """Return the config for the rules of a custom derivative.

    The caller matched the filter against the whole equation already. The arrays
    of a rule are other objects than those of the function.
    """
    defaults = self._field_defaults
    return self._replace(
      float32_filter=defaults["float32_filter"],
      paths_by_id=defaults["paths_by_id"],
      output_paths=defaults["output_paths"],
    )


class AutocastResult(NamedTuple):
  """The result of an autocast call.

  Attributes:
    out: the output of the function. Leaves that were not traced are the same
      objects that the function returned.
    out_paths: for each leaf of the output, the path of the weight that it is;
      None if it is not a weight.
    log: what the rewrite found in the jaxpr.
    message: a warning about matmuls that stayed in float32; empty if there are
      none.
    jaxpr: the rewritten jaxpr.
    old_jaxpr: the jaxpr before the rewrite.
  """

  out: Any
  out_paths: list[_weights.WeightPath]
  log: _rewrite.RewriteLog
  message: str
  jaxpr: _eqns.ClosedJaxpr
  old_jaxpr: _eqns.ClosedJaxpr


def call_with_autocast(
  fun: Callable[[], Any], config: AutocastConfig
) -> AutocastResult:
  """Call a function without arguments, with its matmuls in half precision.

  The function closes over its arguments, so that it receives the caller's
  objects: tracers keep their types, and arguments need not be arrays.

  Args:
    fun: the function.
    config: the options, and the names of the arrays that it closes over.

  Returns:
    A :class:`AutocastResult`.
  """
  trace_outputs: list[Any] = []

  # With the name of `fun`, JAX's error about a leaked tracer points to the
  # user's function instead of this wrapper.
  @functools.wraps(fun, updated=())
  def flat_fun() -> list[Any]:
    leaves, structure = jax.tree.flatten(
      fun(), is_leaf=_custom_derivatives.is_symbolic_zero
    )
    # `make_jaxpr` accepts only arrays as outputs. All other leaves, such as
    # strings and symbolic zeros, leave the trace through `trace_outputs`.
    tracer_mask = [isinstance(x, jax.core.Tracer) for x in leaves]
    pairs = list(zip(leaves, tracer_mask, strict=True))
    untraced_leaves = [None if is_tracer else x for x, is_tracer in pairs]
    trace_outputs.append((structure, tracer_mask, untraced_leaves))
    return [x for x, is_tracer in pairs if is_tracer]

  closed_jaxpr = jax.make_jaxpr(flat_fun)()
  ((structure, tracer_mask, untraced_leaves),) = trace_outputs
  output_paths = tuple(itertools.compress(config.output_paths, tracer_mask))
  paths = _weights.WeightPaths((), output_paths)
  rewrite_result, out_paths, message = rewrite_program(
    closed_jaxpr, paths, config
  )
  # The outputs of the rewritten jaxpr replace the tracers, in the same order.
  out_iter, path_iter = (
    iter(core.jaxpr_as_fun(rewrite_result.jaxpr)()),
    iter(out_paths),
  )
  pairs = [
    (next(out_iter), next(path_iter)) if is_tracer else (x, None)
    for x, is_tracer in zip(untraced_leaves, tracer_mask, strict=True)
  ]
  return AutocastResult(
    jax.tree.unflatten(structure, [x for x, _ in pairs]),
    [path for _, path in pairs],
    rewrite_result.log,
    message,
    rewrite_result.jaxpr,
    closed_jaxpr,
  )


def rewrite_program(
  closed_jaxpr: _eqns.ClosedJaxpr,
  paths: _weights.WeightPaths,
  config: AutocastConfig,
) -> tuple[_rewrite.RewriteResult, list[_weights.WeightPath], str]:
  """Rewrite the jaxpr of a whole function or rule.

  Args:
    closed_jaxpr: the jaxpr.
    paths: the weight paths of its inputs and outputs.
    config: the options.

  Returns:
    The rewritten jaxpr, the weight paths of its outputs, and a warning about
    matmuls that stayed in float32.
  """
  program_weights = _weights.ProgramWeights(config.paths_by_id)
  # JAX may call both after the trace has ended, so they close over no tracers.
  rule_config = config.without_names()
  make_rule_transform = functools.partial(
    _custom_derivatives.RuleTransform,
    map_jaxpr=functools.partial(_rewrite_rule_jaxpr, config=rule_config),
    map_call=functools.partial(_autocast_rule_call, config=rule_config),
  )

  def rewrite_with(
    float32_filter: _float32_filter.Float32Filter,
  ) -> _rewrite.RewriteResult:
    rewriter = _rewrite.Rewriter(
      config.dtype, float32_filter, program_weights, make_rule_transform
    )
    return rewriter.rewrite(closed_jaxpr, _provenance.EqnLocation(), (), paths)

  result = rewrite_with(config.float32_filter)
  # A pattern may be the literal name of a matmul, such as `blocks[0]`. That is
  # known only after a rewrite. It is rare, so the usual case rewrites once.
  float32_filter = config.float32_filter.with_literal_names(result.log.matches)
  if float32_filter != config.float32_filter:
    result = rewrite_with(float32_filter)
  out_paths = program_weights.get_jaxpr_weights(closed_jaxpr, paths).get_paths(
    closed_jaxpr.jaxpr.outvars
  )
  message = _describe_unentered(
    closed_jaxpr, set(result.log.unentered_eqns), config.dtype
  )
  return result, out_paths, message


def _describe_unentered(
  closed_jaxpr: _eqns.ClosedJaxpr,
  unentered_eqns: Set[core.JaxprEqn],
  dtype: Any,
) -> str:
  """Return the warning about matmuls that autocast could not rewrite.

  Args:
    closed_jaxpr: the jaxpr before the rewrite.
    unentered_eqns: the equations that can't be rewritten. Some may contain no
      matmul, but a rule that may contain matmuls.
    dtype: the half precision.

  Returns:
    The warning; empty if no equation contains a matmul.
  """
  if not unentered_eqns:
    return ""
  search = _matmuls.MatmulSearch(dtype)
  locations = list(
    dict.fromkeys(
      _provenance.format_location(
        _eqns.get_primitive_name(visit.eqn), visit.location.source_line
      )
      for visit in _walk.walk(closed_jaxpr, _matmuls.subjaxprs_to_search)
      if visit.eqn in unentered_eqns
      and (
        _matmuls.has_exported_matmul(visit.eqn) or search.any_inside(visit.eqn)
      )
    )
  )
  if not locations:
    return ""
  listed = ", ".join(locations[:_MAX_LISTED_EQNS])
  if len(locations) > _MAX_LISTED_EQNS:
    listed += f" and {len(locations) - _MAX_LISTED_EQNS} more"
  return (
    f"autocast left {listed} unchanged: the matmuls and convolutions inside run"
    f" in float32 instead of {dtype}. To keep them in float32 and silence this"
    " warning, wrap the function that calls them in"
    " optax_lossscale.keep_float32."
  )


def _rewrite_rule_jaxpr(
  closed_jaxpr: _eqns.ClosedJaxpr,
  paths: _weights.WeightPaths,
  *,
  config: AutocastConfig,
) -> tuple[Any, list[_weights.WeightPath]]:
  """Rewrite the jaxpr of a rule, and return the weight paths of its outputs.

  JAX calls rules after `autocast` has returned, so a warning is issued here.
  """
  result, out_paths, message = rewrite_program(closed_jaxpr, paths, config)
  if message:
    _source_info.warn_user(message)
  return result.jaxpr, out_paths


def _autocast_rule_call(
  fun: Callable[[], Any],
  inputs: Sequence[Any],
  paths: _weights.WeightPaths,
  *,
  config: AutocastConfig,
) -> tuple[Any, list[_weights.WeightPath]]:
  """Call the Python function of a rule with its matmuls in half precision.

  Args:
    fun: the call of the function, without arguments.
    inputs: the arrays that the function closes over.
    paths: the weight paths of the inputs, and of the leaves of the output.
    config: the options.

  Returns:
    The output, and the weight paths of its leaves.
  """
  # The cotangents follow the residuals in `inputs`, and have no paths.
  paths_by_id = {
    id(x): path for x, path in zip(inputs, paths.inputs, strict=False)
  }
  result = call_with_autocast(
    fun, config._replace(paths_by_id=paths_by_id, output_paths=paths.outputs)
  )
  if result.message:
    _source_info.warn_user(result.message)
  return result.out, result.out_paths
