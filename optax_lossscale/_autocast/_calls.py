"""Calls a function with its products in half precision."""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_lossscale import _warnings
from optax_lossscale._autocast import _kept, _messages, _rewrite
from optax_lossscale._jaxprs import _equations, _places, _rules, _weights


class Settings(NamedTuple):
  """What is asked of one function.

  Attributes:
    dtype: the dtype of the products.
    kept: the products that stay in float32.
    paths: the names of arrays that are weights, by their identity.
    of_results: of each array that the function returns, the name of the weight
      whose gradient it is; none is known, if this is empty.
  """

  dtype: Any
  kept: _kept.Kept = _kept.Kept()
  paths: Mapping[int, _weights.WeightPath] = types.MappingProxyType({})
  of_results: Sequence[_weights.WeightPath] = ()


class Result(NamedTuple):
  """What a function returned, with its products in half.

  Attributes:
    out: what it returned. What it did not compute are the same objects.
    paths: the name of each array in it that is a weight.
    found: what was found in it.
    message: what there is to tell of products that were not reached.
    jaxpr: the program, with its products in half.
  """

  out: Any
  paths: list[_weights.WeightPath]
  found: _rewrite.Found
  message: str
  jaxpr: _equations.ClosedJaxpr


def call(fun: Callable[[], Any], settings: Settings) -> Result:
  """Calls a function without arguments, with its products in half.

  The function closes over its arguments. So it is given the very same ones:
  traced values keep their types, and other objects need no care.

  Args:
    fun: the function.
    settings: the dtype of the products, which ones stay, and their names.

  Returns:
    A :class:`Result`.
  """
  returned: list[Any] = []

  # JAX names the user's function, and not this one, if a tracer leaks from it.
  @functools.wraps(fun, updated=())
  def traced() -> list[Any]:
    leaves, structure = jax.tree.flatten(fun(), is_leaf=_rules.is_symbolic_zero)
    is_traced = [isinstance(x, jax.core.Tracer) for x in leaves]
    pairs = list(zip(leaves, is_traced, strict=True))
    others = [None if traced else x for x, traced in pairs]
    returned.append((structure, is_traced, others))
    return [x for x, traced in pairs if traced]

  closed = jax.make_jaxpr(traced)()
  ((structure, is_traced, others),) = returned
  of_results = tuple(itertools.compress(settings.of_results, is_traced))
  paths = _weights.WeightPaths((), of_results)
  new, of_outs, message = _rewritten(closed, paths, settings)
  outs, its_paths = iter(core.jaxpr_as_fun(new.jaxpr)()), iter(of_outs)
  pairs = [
    (next(outs), next(its_paths)) if traced else (x, None)
    for x, traced in zip(others, is_traced, strict=True)
  ]
  return Result(
    jax.tree.unflatten(structure, [x for x, _ in pairs]),
    [path for _, path in pairs],
    new.found,
    message,
    new.jaxpr,
  )


def _rewritten(
  closed: _equations.ClosedJaxpr,
  paths: _weights.WeightPaths,
  settings: Settings,
) -> tuple[_rewrite.Rewritten, list[_weights.WeightPath], str]:
  """A jaxpr in half, the paths of its outputs, and what there is to tell."""
  dtype, known = settings.dtype, _weights.ProgramWeights(settings.paths)
  in_rule = _rules.RuleTransform(
    map_body=lambda closed, _: closed,
    map_derivative=functools.partial(_derivative_in_rule, dtype=dtype),
    map_call=functools.partial(_call_in_rule, dtype=dtype),
  )

  def rewritten(kept: _kept.Kept) -> _rewrite.Rewritten:
    rewriter = _rewrite.Rewriter(dtype, kept, known, in_rule)
    return rewriter.rewrite(closed, _places.EqnLocation(), (), paths)

  new = rewritten(settings.kept)
  kept = settings.kept.with_exact(new.found.decisions)
  if kept != settings.kept:
    new = rewritten(kept)
  of_outs = known.get_jaxpr_weights(closed, paths).get_paths(
    closed.jaxpr.outvars
  )
  missed = set(new.found.missed)
  message = _messages.of_missed(closed, missed, dtype) if missed else ""
  return new, of_outs, message


def _derivative_in_rule(
  closed: _equations.ClosedJaxpr, paths: _weights.WeightPaths, *, dtype: Any
) -> tuple[Any, list[_weights.WeightPath]]:
  """A jaxpr of a rule, where there is nobody else to tell what was missed."""
  new, of_outs, message = _rewritten(closed, paths, Settings(dtype))
  if message:
    _warnings.warn(message)
  return new.jaxpr, of_outs


def _call_in_rule(
  fun: Callable[[], Any],
  inputs: Sequence[Any],
  paths: _weights.WeightPaths,
  *,
  dtype: Any,
) -> tuple[Any, list[_weights.WeightPath]]:
  """Calls a part of a rule."""
  by_id = {id(x): path for x, path in zip(inputs, paths.inputs, strict=False)}
  settings = Settings(dtype, paths=by_id, of_results=paths.outputs)
  result = call(fun, settings)
  if result.message:
    _warnings.warn(result.message)
  return result.out, result.paths
