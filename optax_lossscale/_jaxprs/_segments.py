"""Evaluate a jaxpr in segments of equations, under a trace.

Tracing the equations of a segment together takes half as long as tracing them
one at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _avals, _eqns


def eval_with_substitutes(
  closed_jaxpr: _eqns.ClosedJaxpr,
  substitute_fns: Mapping[Any, Callable[[Any], Any]],
) -> list[Any]:
  """Evaluate a jaxpr without inputs, and substitute some of its values.

  A value is substituted before an equation reads it. The equations between two
  substitutions are evaluated together. Dead code is skipped.

  Args:
    closed_jaxpr: the jaxpr.
    substitute_fns: for variables that an equation defines, a function from the
      value of the variable to the value that later equations read.

  Returns:
    A value for each output of the jaxpr.
  """
  jaxpr = closed_jaxpr.jaxpr
  eqns = [eqn for eqn, _ in _eqns.live_eqns(jaxpr)]
  segments = list(_split_before_reads(eqns, substitute_fns))
  env = dict(zip(jaxpr.constvars, closed_jaxpr.consts, strict=True))
  outvars = list(_eqns.drop_literals(jaxpr.outvars))
  for segment, invars, outs in find_signatures(segments, outvars):
    values = _eqns.eqns_as_fun(segment, invars, outs)(*map(env.get, invars))
    for var, value in zip(outs, values, strict=True):
      substitute_fn = substitute_fns.get(var)
      env[var] = value if substitute_fn is None else substitute_fn(value)
  return [
    atom.val if isinstance(atom, core.Literal) else env[atom]
    for atom in jaxpr.outvars
  ]


def _split_before_reads(
  eqns: Sequence[core.JaxprEqn], variables: Mapping[Any, Any]
) -> Iterator[list[core.JaxprEqn]]:
  """Split equations into segments that don't read variables they define.

  Args:
    eqns: the equations.
    variables: the variables that may be read only in later segments.

  Yields:
    The segments. An equation with effects is a segment by itself, because its
    effects may refer to the positions of its inputs.
  """
  segment: list[core.JaxprEqn] = []
  defined_vars: set[Any] = set()
  for eqn in eqns:
    reads_defined_var = any(
      _eqns.is_var_in(atom, defined_vars) for atom in eqn.invars
    )
    has_effects = any(e.effects for e in (*segment[-1:], eqn))
    if segment and (reads_defined_var or has_effects):
      yield segment
      segment, defined_vars = [], set()
    segment.append(eqn)
    defined_vars.update(v for v in eqn.outvars if v in variables)
  if segment:
    yield segment


def find_signatures(
  segments: Sequence[list[core.JaxprEqn]], outvars: Sequence[Any]
) -> list[tuple[list[core.JaxprEqn], list[Any], list[Any]]]:
  """Return each segment with the variables that it reads and that it defines.

  The latter are only those that a later segment reads, or that are outputs.
  """
  live_vars = dict.fromkeys(outvars)
  signatures = []
  for segment in reversed(segments):
    defined_vars = [v for eqn in segment for v in eqn.outvars]
    outs = [v for v in defined_vars if v in live_vars]
    operands = (v for eqn in segment for v in eqn.invars)
    invars = dict.fromkeys(_eqns.drop_literals(operands))
    for var in defined_vars:
      live_vars.pop(var, None)
      invars.pop(var, None)
    live_vars |= invars
    signatures.append((segment, list(invars), outs))
  return signatures[::-1]


def get_current_eqn_ctx() -> Any:
  """Return the context (config and mesh) that new equations have here.

  Raises:
    Exception: if equations have no context in this version of JAX, or can't be
      evaluated one by one.
  """
  (eqn,) = jax.make_jaxpr(lambda x: -x)(0.0).eqns
  jax.eval_shape(_eqns.eqn_as_fun(eqn), 0.0)
  return eqn.ctx


def can_substitute_result(eqn: core.JaxprEqn, ctx: Any) -> bool:
  """Return whether another value may replace the result of an equation.

  It may not if the equation runs in another context, such as on another mesh,
  or if it has a sharding as a parameter: XLA would choose the sharding of the
  new value.

  Args:
    eqn: the equation.
    ctx: the context of the new value, by :func:`get_current_eqn_ctx`.
  """
  is_sharding = lambda x: isinstance(x, jax.sharding.Sharding)
  constrains_sharding = any(map(is_sharding, jax.tree.leaves(eqn.params)))
  return eqn.ctx == ctx and not constrains_sharding


def as_array(x: Any, atom: _eqns.Atom) -> Any:
  """Convert the value of a variable or literal to an array, unless it is a Ref.

  Literals of a jaxpr may have a class that is private to JAX.
  """
  aval: Any = atom.aval
  is_array_or_ref = _avals.is_ref(aval) or isinstance(x, jax.Array)
  return x if is_array_or_ref else jnp.asarray(x, aval.dtype)


def replace_outvars(
  closed_jaxpr: _eqns.ClosedJaxpr, outvars: Sequence[Any]
) -> _eqns.ClosedJaxpr:
  """Replace the outputs of a jaxpr by any of its variables."""
  # The debug info has a path for each old output.
  debug_info = closed_jaxpr.jaxpr.debug_info._replace(result_paths=None)
  new_jaxpr: Any = _eqns.replace_jaxpr_fields(
    closed_jaxpr, outvars=list(outvars), debug_info=debug_info
  )
  return new_jaxpr
