"""Calls a function with its products in half precision."""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_lossscale import _warnings
from optax_lossscale._autocast import _float32_filter, _messages, _rewrite
from optax_lossscale._jaxprs import (
  _custom_derivatives,
  _eqns,
  _provenance,
  _weights,
)


class AutocastConfig(NamedTuple):
  """What is asked of one function.

  Attributes:
    dtype: the dtype of the products.
    float32_filter: the products that stay in float32.
    paths_by_id: the names of arrays that are weights, by their identity.
    output_paths: of each array that the function returns, the name of the
      weight whose gradient it is; none is known, if this is empty.
  """

  dtype: Any
  float32_filter: _float32_filter.Float32Filter = (
    _float32_filter.Float32Filter()
  )
  paths_by_id: Mapping[int, _weights.WeightPath] = types.MappingProxyType({})
  output_paths: Sequence[_weights.WeightPath] = ()


class AutocastResult(NamedTuple):
  """What a function returned, with its products in half.

  Attributes:
    out: what it returned. What it did not compute are the same objects.
    out_paths: the name of each array in it that is a weight.
    log: what was found in it.
    message: what there is to tell of products that were not reached.
    jaxpr: the program, with its products in half.
  """

  out: Any
  out_paths: list[_weights.WeightPath]
  log: _rewrite.RewriteLog
  message: str
  jaxpr: _eqns.ClosedJaxpr


def call_with_autocast(
  fun: Callable[[], Any], config: AutocastConfig
) -> AutocastResult:
  """Calls a function without arguments, with its products in half.

  The function closes over its arguments. So it is given the very same ones:
  traced values keep their types, and other objects need no care.

  Args:
    fun: the function.
    config: the dtype of the products, which ones stay, and their names.

  Returns:
    A :class:`AutocastResult`.
  """
  trace_outputs: list[Any] = []

  # JAX names the user's function, and not this one, if a tracer leaks from it.
  @functools.wraps(fun, updated=())
  def flat_fun() -> list[Any]:
    leaves, structure = jax.tree.flatten(
      fun(), is_leaf=_custom_derivatives.is_symbolic_zero
    )
    tracer_mask = [isinstance(x, jax.core.Tracer) for x in leaves]
    pairs = list(zip(leaves, tracer_mask, strict=True))
    untraced_leaves = [None if is_tracer else x for x, is_tracer in pairs]
    trace_outputs.append((structure, tracer_mask, untraced_leaves))
    return [x for x, is_tracer in pairs if is_tracer]

  closed_jaxpr = jax.make_jaxpr(flat_fun)()
  ((structure, tracer_mask, untraced_leaves),) = trace_outputs
  output_paths = tuple(itertools.compress(config.output_paths, tracer_mask))
  paths = _weights.WeightPaths((), output_paths)
  rewrite_result, out_paths, message = _rewrite_program(
    closed_jaxpr, paths, config
  )
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
  )


def _rewrite_program(
  closed_jaxpr: _eqns.ClosedJaxpr,
  paths: _weights.WeightPaths,
  config: AutocastConfig,
) -> tuple[_rewrite.RewriteResult, list[_weights.WeightPath], str]:
  """A jaxpr in half, the paths of its outputs, and what there is to tell."""
  dtype, program_weights = (
    config.dtype,
    _weights.ProgramWeights(config.paths_by_id),
  )
  rule_transform = _custom_derivatives.RuleTransform(
    map_body=lambda closed, _: closed,
    map_derivative=functools.partial(_rewrite_rule_jaxpr, dtype=dtype),
    map_call=functools.partial(_autocast_rule_call, dtype=dtype),
  )

  def rewrite_with(
    float32_filter: _float32_filter.Float32Filter,
  ) -> _rewrite.RewriteResult:
    rewriter = _rewrite.Rewriter(
      dtype, float32_filter, program_weights, rule_transform
    )
    return rewriter.rewrite(closed_jaxpr, _provenance.EqnLocation(), (), paths)

  result = rewrite_with(config.float32_filter)
  float32_filter = config.float32_filter.with_literal_names(result.log.matches)
  if float32_filter != config.float32_filter:
    result = rewrite_with(float32_filter)
  out_paths = program_weights.get_jaxpr_weights(closed_jaxpr, paths).get_paths(
    closed_jaxpr.jaxpr.outvars
  )
  unentered_eqns = set(result.log.unentered_eqns)
  message = (
    _messages.describe_unentered(closed_jaxpr, unentered_eqns, dtype)
    if unentered_eqns
    else ""
  )
  return result, out_paths, message


def _rewrite_rule_jaxpr(
  closed_jaxpr: _eqns.ClosedJaxpr,
  paths: _weights.WeightPaths,
  *,
  dtype: Any,
) -> tuple[Any, list[_weights.WeightPath]]:
  """A jaxpr of a rule, where there is nobody else to tell what was missed."""
  result, out_paths, message = _rewrite_program(
    closed_jaxpr, paths, AutocastConfig(dtype)
  )
  if message:
    _warnings.warn(message)
  return result.jaxpr, out_paths


def _autocast_rule_call(
  fun: Callable[[], Any],
  inputs: Sequence[Any],
  paths: _weights.WeightPaths,
  *,
  dtype: Any,
) -> tuple[Any, list[_weights.WeightPath]]:
  """Calls a part of a rule."""
  paths_by_id = {
    id(x): path for x, path in zip(inputs, paths.inputs, strict=False)
  }
  config = AutocastConfig(
    dtype, paths_by_id=paths_by_id, output_paths=paths.outputs
  )
  result = call_with_autocast(fun, config)
  if result.message:
    _warnings.warn(result.message)
  return result.out, result.out_paths
