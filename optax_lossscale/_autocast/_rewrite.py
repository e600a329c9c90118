"""Rewrites a jaxpr so that its products run in half precision.

Nothing is evaluated, and every variable keeps its type. A product becomes three
kinds of equations: its operands are narrowed, the product runs in half, and its
result is widened to the very variable that it had. So all other equations stay
the same objects, and an equation that holds jaxprs (a loop, a branch, a call)
stays the same but for these jaxprs: nothing else need be known of it. XLA drops
a result that is widened and narrowed again, and the cotangents of several uses
of one value are added in float32.
"""

from collections.abc import Callable, Iterable, Sequence, Set
import functools
import itertools
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._autocast import _float32_filter, _matmuls
from optax_lossscale._jaxprs import (
  _custom_derivatives,
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _weights,
)


class RewriteLog(NamedTuple):
  """What was found on the way, in the order of the program.

  Attributes:
    has_matmuls: whether there are products that run in half, or are kept. Of
      those that a rule alone has it is not known.
    matches: which of them are kept; none, if the user named none.
    unentered_eqns: the equations that hold products and could not be entered.
    has_opaque_rules: whether there are products whose names cannot be known.
  """

  has_matmuls: bool = False
  matches: tuple[_float32_filter.Match, ...] = ()
  unentered_eqns: tuple[core.JaxprEqn, ...] = ()
  has_opaque_rules: bool = False


class RewriteResult(NamedTuple):
  """A rewritten jaxpr.

  Attributes:
    jaxpr: the jaxpr, of the same inputs and outputs.
    out_half_mask: which of its outputs came out of products, and were only
      moved.
    log: what was found in it.
  """

  jaxpr: Any
  out_half_mask: list[bool]
  log: RewriteLog


class _EqnRewrite(NamedTuple):
  """What stands in the place of an equation, and which outputs are half."""

  eqns: list[core.JaxprEqn]
  half_vars: Iterable[Any] = ()
  log: RewriteLog = RewriteLog()


class _EqnContext(NamedTuple):
  """Where an equation stands.

  Attributes:
    jaxpr: the jaxpr that is being rewritten.
    location: where that is called.
    weights: its variables that are weights.
    half_vars: its variables that came out of products, and were only moved
      since.
  """

  jaxpr: core.Jaxpr
  location: _provenance.EqnLocation
  weights: _weights.JaxprWeights
  half_vars: Set[Any]


class Rewriter:
  """What rewrites the jaxprs of one call of a function.

  Args:
    dtype: the dtype of the products.
    float32_filter: the products that stay in float32.
    program_weights: the weights of the function.
    rule_transform: what changes what rules compute, but for its ``body``.
  """

  def __init__(
    self,
    dtype: Any,
    float32_filter: _float32_filter.Float32Filter,
    program_weights: _weights.ProgramWeights,
    rule_transform: _custom_derivatives.RuleTransform,
  ) -> None:
    self._dtype = dtype
    self._float32_filter = float32_filter
    self._program_weights = program_weights
    self._rule_transform = rule_transform
    # A jaxpr that is called twice is searched and rewritten once.
    self._matmul_search = _matmuls.MatmulSearch(include_rule_matmuls=True)
    self._result_cache: dict[Any, RewriteResult] = {}
    self._dedup_cache: dict[Any, RewriteResult] = {}

  def rewrite(
    self,
    jaxpr: _eqns.AnyJaxpr,
    location: _provenance.EqnLocation,
    in_half_mask: Sequence[bool] = (),
    paths: _weights.WeightPaths = _weights.NO_PATHS,
  ) -> RewriteResult:
    """Rewrites a jaxpr.

    Args:
      jaxpr: the jaxpr.
      location: where it is called.
      in_half_mask: of its inputs, whether they came out of products, and were
        only moved since; none did, if this is empty.
      paths: the names of those inputs and outputs that are weights.

    Returns:
      A :class:`RewriteResult`.
    """
    input_key = jaxpr, tuple(in_half_mask), paths
    # Names may tell its callers apart.
    key = input_key, location if self._float32_filter.patterns else None
    if key not in self._result_cache:
      result = self._rewrite_uncached(jaxpr, location, in_half_mask, paths)
      kept_mask = tuple(x.is_kept for x in result.log.matches)
      # Callers that no name tells apart share one, which is compiled once.
      shared_result = self._dedup_cache.setdefault(
        (input_key, kept_mask), result
      )
      self._result_cache[key] = shared_result._replace(log=result.log)
    return self._result_cache[key]

  def _rewrite_uncached(
    self,
    jaxpr: _eqns.AnyJaxpr,
    location: _provenance.EqnLocation,
    in_half_mask: Sequence[bool],
    paths: _weights.WeightPaths,
  ) -> RewriteResult:
    closed_jaxpr = _eqns.close_jaxpr(jaxpr)
    half_vars = set(itertools.compress(closed_jaxpr.jaxpr.invars, in_half_mask))
    weights = self._program_weights.get_jaxpr_weights(closed_jaxpr, paths)
    ctx = _EqnContext(closed_jaxpr.jaxpr, location, weights, half_vars)
    eqn_rewrites = []
    for eqn in closed_jaxpr.jaxpr.eqns:
      eqn_rewrites.append(self._rewrite_eqn(eqn, ctx))
      half_vars.update(eqn_rewrites[-1].half_vars)
    eqns = [eqn for eqn_rewrite in eqn_rewrites for eqn in eqn_rewrite.eqns]
    out_half_mask = [
      _eqns.is_var_in(v, half_vars) for v in closed_jaxpr.jaxpr.outvars
    ]
    log = merge_logs(eqn_rewrite.log for eqn_rewrite in eqn_rewrites)
    return RewriteResult(
      _eqns.replace_jaxpr_fields(jaxpr, eqns=eqns), out_half_mask, log
    )

  def _rewrite_eqn(self, eqn: core.JaxprEqn, ctx: _EqnContext) -> _EqnRewrite:
    """What stands in the place of an equation."""
    if _matmuls.is_castable_matmul(eqn):
      tagged_eqn = ctx.weights.tag_with_weight(eqn)
      matches = self._match_filter(
        lambda: [ctx.location.locate(tagged_eqn, ctx.jaxpr)]
      )
      log = RewriteLog(has_matmuls=True, matches=matches)
      if any(x.is_kept for x in matches):
        return _EqnRewrite([tagged_eqn], log=log)
      matmul = _primitives.replace_result_dtype(tagged_eqn, self._dtype)
      return _EqnRewrite(cast_eqn(matmul, self._dtype), eqn.outvars, log)
    if _primitives.is_data_movement(eqn) and has_only_half_operands(
      eqn, ctx.half_vars
    ):
      return _EqnRewrite(cast_eqn(eqn, self._dtype), eqn.outvars)
    if _matmuls.has_exported_matmul(eqn):
      return _EqnRewrite([eqn], log=RewriteLog(unentered_eqns=(eqn,)))
    if not self._matmul_search.any_inside(
      eqn
    ) and not _matmuls.can_have_rule_matmuls(eqn):
      return _EqnRewrite([eqn])
    # Rules are traced where the axes of the mesh are known.
    rewrite_subjaxprs = functools.partial(self._rewrite_subjaxprs, eqn, ctx)
    eqn_rewrite: _EqnRewrite = _higher_order.call_in_eqn_context(
      eqn, rewrite_subjaxprs
    )
    return eqn_rewrite

  def _rewrite_subjaxprs(
    self, eqn: core.JaxprEqn, ctx: _EqnContext
  ) -> _EqnRewrite:
    """An equation with what it holds rewritten."""
    tagged_eqn = ctx.weights.tag_with_weight(eqn)
    # What nobody asks for need not be found: it takes a look at a traceback.
    location = ctx.location
    if self._float32_filter.patterns:
      location = location.locate(tagged_eqn, ctx.jaxpr)
    rule = _custom_derivatives.get_custom_rule(eqn)
    if rule is not None:
      return self._rewrite_custom_rule(eqn, tagged_eqn, rule, location, ctx)
    if _eqns.get_call_jaxpr(eqn) is not None:
      in_half_mask = [
        _eqns.is_var_in(atom, ctx.half_vars) for atom in eqn.invars
      ]
      return self._rewrite_bodies(eqn, tagged_eqn, location, ctx, in_half_mask)
    if _higher_order.is_control_flow(eqn):
      return self._rewrite_bodies(eqn, tagged_eqn, location, ctx)
    matches = self._match_filter(lambda: [location])
    is_kept = any(x.is_kept for x in matches)
    unentered_eqns = () if is_kept else (eqn,)
    return _EqnRewrite(
      [tagged_eqn],
      log=RewriteLog(matches=matches, unentered_eqns=unentered_eqns),
    )

  def _rewrite_custom_rule(
    self,
    eqn: core.JaxprEqn,
    tagged_eqn: core.JaxprEqn,
    rule: _custom_derivatives.CustomRule,
    location: _provenance.EqnLocation,
    ctx: _EqnContext,
  ) -> _EqnRewrite:
    """An equation whose rule computes in half, if it is understood."""
    paths = ctx.weights.get_call_suffixes(eqn)
    log = RewriteLog()
    if self._float32_filter.patterns:
      has_matmuls = self._matmul_search.any_inside(eqn)
      # One that sees which inputs are perturbed may refuse, and an older JAX
      # then forgets what it has traced of it.
      can_trace_rule = has_matmuls or not rule.symbolic_zeros
      locations, is_complete = _matmuls.find_rule_matmuls(
        tagged_eqn, location, paths, can_trace_rule
      )
      if not has_matmuls and len(locations) == 1:
        return _EqnRewrite([eqn])  # Nothing in it has a name to select.
      matches = self._match_filter(lambda: locations)
      log = RewriteLog(matches=matches, has_opaque_rules=not is_complete)
      # It stays as a whole: nothing tells which of its products is the
      # derivative of which.
      if any(x.is_kept for x in matches):
        return _EqnRewrite([tagged_eqn], log=log)
    logs = [log]

    def body(
      closed_jaxpr: _eqns.ClosedJaxpr, inner_paths: _weights.WeightPaths
    ) -> Any:
      result = self.rewrite(closed_jaxpr, location, (), inner_paths)
      logs.append(result.log)
      return result.jaxpr

    new_eqn = _custom_derivatives.transform_custom_rule(
      tagged_eqn, self._rule_transform._replace(map_body=body), paths
    )
    if new_eqn is None:
      log = log._replace(unentered_eqns=(eqn,))
      return _EqnRewrite([tagged_eqn], log=log)
    return _EqnRewrite([new_eqn], log=merge_logs(logs))

  def _rewrite_bodies(
    self,
    eqn: core.JaxprEqn,
    tagged_eqn: core.JaxprEqn,
    location: _provenance.EqnLocation,
    ctx: _EqnContext,
    in_half_mask: Sequence[bool] = (),
  ) -> _EqnRewrite:
    """The same equation, with each jaxpr that it holds rewritten."""
    results: list[RewriteResult] = []

    def replace(jaxpr: _eqns.AnyJaxpr) -> Any:
      body_jaxpr = _eqns.close_jaxpr(jaxpr).jaxpr
      body_paths = ctx.weights.get_body_suffixes(eqn, body_jaxpr)
      results.append(self.rewrite(jaxpr, location, in_half_mask, body_paths))
      return results[-1].jaxpr

    new_eqn = _eqns.map_subjaxprs(tagged_eqn, replace)
    # A call returns what its function returns.
    out_half_mask = results[0].out_half_mask if in_half_mask else ()
    half_vars = list(itertools.compress(eqn.outvars, out_half_mask))
    return _EqnRewrite([new_eqn], half_vars, merge_logs(x.log for x in results))

  def _match_filter(
    self, get_locations: Callable[[], list[_provenance.EqnLocation]]
  ) -> tuple[_float32_filter.Match, ...]:
    """What is decided of what stands at some places, which may be to find."""
    return (
      (self._float32_filter.match(*get_locations()),)
      if self._float32_filter.patterns
      else ()
    )


def merge_logs(logs: Iterable[RewriteLog]) -> RewriteLog:
  """What was found at several places."""
  all_logs = list(logs)
  flatten = itertools.chain.from_iterable
  return RewriteLog(
    any(x.has_matmuls for x in all_logs),
    tuple(flatten(x.matches for x in all_logs)),
    tuple(flatten(x.unentered_eqns for x in all_logs)),
    any(x.has_opaque_rules for x in all_logs),
  )


def cast_eqn(eqn: core.JaxprEqn, dtype: Any) -> list[core.JaxprEqn]:
  """An equation between conversions, which leaves its variables as they are.

  Values are narrowed for each use, even where one equation uses a value twice:
  the cotangents of a shared copy would be added in half.
  """
  eqn = _provenance.tag_autocast(eqn, dtype)
  to_half = lambda atom: (
    _make_half_var(atom, dtype) if _is_float32(atom) else atom
  )
  invars, outvars = (
    list(map(to_half, eqn.invars)),
    list(map(to_half, eqn.outvars)),
  )
  input_casts = [
    _eqns.make_convert_eqn(*pair, eqn)
    for pair in _zip_replaced(eqn.invars, invars)
  ]
  output_casts = [
    _eqns.make_convert_eqn(*pair, eqn)
    for pair in _zip_replaced(outvars, eqn.outvars)
  ]
  return [
    *input_casts,
    eqn.replace(invars=invars, outvars=outvars),
    *output_casts,
  ]


def has_only_half_operands(eqn: core.JaxprEqn, half_vars: Set[Any]) -> bool:
  """Whether there are float32 inputs, all of which are in the set."""
  float32_atoms = [atom for atom in eqn.invars if _is_float32(atom)]
  return bool(float32_atoms) and all(
    _eqns.is_var_in(atom, half_vars) for atom in float32_atoms
  )


def _zip_replaced(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
  return [(a, b) for a, b in zip(old, new, strict=True) if a is not b]


def _is_float32(atom: Any) -> bool:
  return getattr(atom.aval, "dtype", None) == jnp.float32


def _make_half_var(atom: Any, dtype: Any) -> Any:
  return core.Var(atom.aval.update(dtype=dtype, weak_type=False))
