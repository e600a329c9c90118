"""Rewrites a jaxpr so that its matmuls run in half precision.

The rewrite evaluates nothing, and every variable keeps its type. It replaces a
matmul with casts of its operands, the same matmul in half precision, and a cast
of the result back to the float32 variable of the original matmul. An operand
that is in half precision already needs no cast. All other equations stay the
same objects, except that the jaxprs inside loops, branches and calls are
rewritten, too. Where one matmul reads the result of another, XLA removes the
pair of casts between them.

The backward pass is not rewritten. JAX differentiates the rewritten forward
pass: the derivative of a half-precision matmul is two half-precision matmuls,
and the derivative of a cast is the reverse cast, so the cotangents of several
uses of one value are added in float32. Only the rules of custom derivatives,
which JAX can't derive from the forward pass, are rewritten as well: the
equation stays, and JAX calls the rewritten fwd, bwd or jvp function.
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
  """The findings of a rewrite, in the order of the program.

  Attributes:
    has_matmuls: whether there are matmuls that were cast or that the filter
      keeps in float32, not counting matmuls that are only in a rule.
    matches: the results of matching the filter against the matmuls; empty if
      the filter has no patterns.
    unentered_eqns: the equations that contain matmuls but can't be rewritten.
    has_opaque_rules: whether there may be matmuls in rules that can't be
      inspected, so that their names are unknown.
  """

  has_matmuls: bool = False
  matches: tuple[_float32_filter.Match, ...] = ()
  unentered_eqns: tuple[core.JaxprEqn, ...] = ()
  has_opaque_rules: bool = False


class RewriteResult(NamedTuple):
  """A rewritten jaxpr.

  Attributes:
    jaxpr: the jaxpr, with inputs and outputs of the same types as before.
    out_half_mask: for each output, whether it is a matmul result that was only
      moved since, for example reshaped or transposed.
    log: the findings in the jaxpr.
  """

  jaxpr: Any
  out_half_mask: list[bool]
  log: RewriteLog


class _EqnRewrite(NamedTuple):
  """The rewrite of one equation.

  Attributes:
    eqns: the equations that replace it.
    half_vars: those of its output variables that are matmul results, possibly
      moved since.
    log: the findings in the equation.
  """

  eqns: list[core.JaxprEqn]
  half_vars: Iterable[Any] = ()
  log: RewriteLog = RewriteLog()


class _EqnContext(NamedTuple):
  """The context for rewriting the equations of one jaxpr.

  Attributes:
    jaxpr: the jaxpr.
    location: the call site of the jaxpr.
    weights: the variables of the jaxpr that are weights.
    half_vars: the variables that hold a matmul result, possibly moved since.
      The set grows from equation to equation.
  """

  jaxpr: core.Jaxpr
  location: _provenance.EqnLocation
  weights: _weights.JaxprWeights
  half_vars: Set[Any]


class Rewriter:
  """Rewrites the jaxprs of one function call, each of them only once.

  Args:
    dtype: the dtype of the matmuls.
    float32_filter: the matmuls that stay in float32.
    program_weights: the weights of the function.
    make_rule_transform: takes the ``map_body`` of a transform of custom
      derivatives, and returns the transform.
  """

  def __init__(
    self,
    dtype: Any,
    float32_filter: _float32_filter.Float32Filter,
    program_weights: _weights.ProgramWeights,
    make_rule_transform: Callable[..., _custom_derivatives.RuleTransform],
  ) -> None:
    self._dtype = dtype
    self._float32_filter = float32_filter
    self._program_weights = program_weights
    self._make_rule_transform = make_rule_transform
    self._matmul_search = _matmuls.MatmulSearch(
      dtype, include_rule_matmuls=True
    )
    # Rewriting a jaxpr twice would make two jaxprs, which JAX would trace,
    # lower and compile separately. The first cache finds a repeated call, the
    # second one an equal result for another call site.
    self._result_cache: dict[Any, RewriteResult] = {}
    self._dedup_cache: dict[Any, RewriteResult] = {}

  def rewrite(
    self,
    jaxpr: _eqns.AnyJaxpr,
    location: _provenance.EqnLocation,
    in_half_mask: Sequence[bool] = (),
    paths: _weights.WeightPaths = _weights.NO_PATHS,
  ) -> RewriteResult:
    """Rewrite a jaxpr.

    Args:
      jaxpr: the jaxpr.
      location: the call site of the jaxpr.
      in_half_mask: for each input, whether it is a matmul result that was only
        moved since; empty if no input is.
      paths: the weight paths of the inputs and outputs.

    Returns:
      A :class:`RewriteResult`.
    """
    input_key = jaxpr, tuple(in_half_mask), paths
    # A name may select one call site of the jaxpr and not another. Without
    # patterns the location has no effect on the result.
    key = input_key, location if self._float32_filter.patterns else None
    if key not in self._result_cache:
      result = self._rewrite_uncached(jaxpr, location, in_half_mask, paths)
      kept_mask = tuple(x.is_kept for x in result.log.matches)
      # Call sites where the filter keeps the same matmuls share one jaxpr.
      # Their logs differ, because these contain the names of the locations.
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
    # A jaxpr is in the order of its data flow, so `half_vars` is complete for
    # the operands of an equation when the loop reaches it.
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
    """Rewrite an equation, which may contain jaxprs."""
    if _matmuls.is_castable_matmul(eqn, self._dtype):
      tagged_eqn = ctx.weights.tag_with_weight(eqn)
      matches = self._match_filter(
        lambda: [ctx.location.locate(tagged_eqn, ctx.jaxpr)]
      )
      log = RewriteLog(has_matmuls=True, matches=matches)
      if any(x.is_kept for x in matches):
        return _EqnRewrite([tagged_eqn], log=log)
      matmul = _primitives.replace_result_dtype(tagged_eqn, self._dtype)
      return _EqnRewrite(cast_eqn(matmul, self._dtype), eqn.outvars, log)
    # A matmul result stays in half precision while it is only moved. XLA then
    # cancels the casts between the two equations, and moves half as many bytes.
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
    # A rule inside `shard_map` may use mesh axes, so it must be traced there.
    rewrite_subjaxprs = functools.partial(self._rewrite_subjaxprs, eqn, ctx)
    eqn_rewrite: _EqnRewrite = _higher_order.call_in_eqn_context(
      eqn, rewrite_subjaxprs
    )
    return eqn_rewrite

  def _rewrite_subjaxprs(
    self, eqn: core.JaxprEqn, ctx: _EqnContext
  ) -> _EqnRewrite:
    """Rewrite the jaxprs and rules inside an equation, or report it."""
    tagged_eqn = ctx.weights.tag_with_weight(eqn)
    # Only patterns need the location: it reads the traceback, which is slow.
    location = ctx.location
    if self._float32_filter.patterns:
      location = location.locate(tagged_eqn, ctx.jaxpr)
    rule = _custom_derivatives.get_custom_rule(eqn)
    if rule is not None:
      return self._rewrite_custom_rule(eqn, tagged_eqn, rule, location, ctx)
    # A call passes its inputs on to its jaxpr and returns the outputs of the
    # jaxpr, so moved matmul results can be followed through it. A loop or a
    # branch may mix them with float32 values.
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
    """Rewrite the function and the rule of a custom derivative.

    Args:
      eqn: the equation.
      tagged_eqn: the equation with the weight path in its name stack.
      rule: the rule of the equation.
      location: the location of the equation.
      ctx: the context of the equation.

    Returns:
      The rewrite; without changes if the filter selects a matmul of the rule,
      or if the parameters of the equation are unknown.
    """
    paths = ctx.weights.get_call_paths(eqn).suffixes
    log = RewriteLog()
    if self._float32_filter.patterns:
      has_matmuls = self._matmul_search.any_inside(eqn)
      # A rule with symbolic zeros may raise an error for some combinations of
      # perturbed inputs, and older versions of JAX then lose the traced rule.
      can_trace_rule = has_matmuls or not rule.symbolic_zeros
      locations, is_complete = _matmuls.find_rule_matmuls(
        tagged_eqn, location, paths, self._dtype, can_trace_rule
      )
      if not has_matmuls and len(locations) == 1:
        return _EqnRewrite([eqn])  # It contains no matmul, so nothing to name.
      matches = self._match_filter(lambda: locations)
      log = RewriteLog(matches=matches, has_opaque_rules=not is_complete)
      # If a pattern selects one matmul, the function and its rule stay in
      # float32 as a whole: which matmul of the rule is the derivative of which
      # matmul of the function is unknown.
      if any(x.is_kept for x in matches):
        return _EqnRewrite([tagged_eqn], log=log)
    logs = [log]

    # `map_body` runs during this rewrite, so the log includes the matmuls of
    # the function. JAX calls the transforms of the rule later.
    def map_body(
      closed_jaxpr: _eqns.ClosedJaxpr, inner_paths: _weights.WeightPaths
    ) -> Any:
      result = self.rewrite(closed_jaxpr, location, (), inner_paths)
      logs.append(result.log)
      return result.jaxpr

    new_eqn = _custom_derivatives.transform_custom_rule(
      tagged_eqn, rule, self._make_rule_transform(map_body), paths
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
    """Rewrite each jaxpr inside an equation, and keep the equation.

    Args:
      eqn: the equation.
      tagged_eqn: the equation with the weight path in its name stack.
      location: the location of the equation.
      ctx: the context of the equation.
      in_half_mask: for a call, which inputs are matmul results that were only
        moved since; empty if the equation is not a call.

    Returns:
      The rewrite.
    """
    results: list[RewriteResult] = []
    body_suffixes = ctx.weights.get_call_paths(eqn).body_suffixes

    def replace(jaxpr: _eqns.AnyJaxpr) -> Any:
      body_jaxpr = _eqns.close_jaxpr(jaxpr).jaxpr
      body_paths = body_suffixes.get(body_jaxpr, _weights.NO_PATHS)
      results.append(self.rewrite(jaxpr, location, in_half_mask, body_paths))
      return results[-1].jaxpr

    new_eqn = _eqns.map_subjaxprs(tagged_eqn, replace)
    # Only a call has a mask, and returns the outputs of its jaxpr. The outputs
    # of other equations count as float32.
    out_half_mask = results[0].out_half_mask if in_half_mask else ()
    half_vars = list(itertools.compress(eqn.outvars, out_half_mask))
    return _EqnRewrite([new_eqn], half_vars, merge_logs(x.log for x in results))

  def _match_filter(
    self, get_locations: Callable[[], list[_provenance.EqnLocation]]
  ) -> tuple[_float32_filter.Match, ...]:
    """Match the filter against locations, which are computed only if needed."""
    return (
      (self._float32_filter.match(*get_locations()),)
      if self._float32_filter.patterns
      else ()
    )


def merge_logs(logs: Iterable[RewriteLog]) -> RewriteLog:
  """Return the findings of several equations as one log."""
  all_logs = list(logs)
  flatten = itertools.chain.from_iterable
  return RewriteLog(
    any(x.has_matmuls for x in all_logs),
    tuple(flatten(x.matches for x in all_logs)),
    tuple(flatten(x.unentered_eqns for x in all_logs)),
    any(x.has_opaque_rules for x in all_logs),
  )


def cast_eqn(eqn: core.JaxprEqn, dtype: Any) -> list[core.JaxprEqn]:
  """Return an equation in half precision, between casts from and to float32.

  Args:
    eqn: the equation.
    dtype: the half precision.

  Returns:
    The casts of the operands, the equation, and the casts of its results to the
    output variables of the original equation.
  """
  eqn = _provenance.tag_autocast(eqn, dtype)
  # Each use of a value has a separate cast, even two uses in one equation. The
  # cotangents of a shared cast would be added in half precision.
  invars = [_replace_float32_var(atom, dtype) for atom in eqn.invars]
  outvars = [_replace_float32_var(var, dtype) for var in eqn.outvars]
  input_casts = [
    _primitives.make_convert_eqn(*pair, eqn)
    for pair in _zip_replaced(eqn.invars, invars)
  ]
  output_casts = [
    _primitives.make_convert_eqn(*pair, eqn)
    for pair in _zip_replaced(outvars, eqn.outvars)
  ]
  return [
    *input_casts,
    eqn.replace(invars=invars, outvars=outvars),
    *output_casts,
  ]


def has_only_half_operands(eqn: core.JaxprEqn, half_vars: Set[Any]) -> bool:
  """Return whether there are float32 inputs, and all are in the set."""
  float32_atoms = [atom for atom in eqn.invars if _is_float32(atom)]
  return bool(float32_atoms) and all(
    _eqns.is_var_in(atom, half_vars) for atom in float32_atoms
  )


def _zip_replaced(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
  """Return the pairs of different variables: input and output of a cast."""
  return [(a, b) for a, b in zip(old, new, strict=True) if a is not b]


def _is_float32(atom: Any) -> bool:
  return getattr(atom.aval, "dtype", None) == jnp.float32


def _replace_float32_var(atom: Any, dtype: Any) -> Any:
  """Return a new variable of a dtype; the same atom if it is not float32."""
  if not _is_float32(atom):
    return atom
  return core.Var(atom.aval.update(dtype=dtype, weak_type=False))
