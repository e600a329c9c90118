"""Equations and the jaxprs that they hold: find, replace, evaluate.

JAX is moving to objects, those of hijax, which hide their jaxprs. Since 0.12
``lax.custom_root``, ``jnp.ldexp`` and others are such, and the flags
``jax_remat3``, ``jax_custom_vjp3`` and ``jax_custom_jvp3`` make such of
``checkpoint`` and of functions with rules. Each is taken for the primitive that
it stands for.
"""

from collections.abc import Callable, Container, Iterator, Sequence
import contextlib
import copy
import functools
from typing import Any, TYPE_CHECKING

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _avals

if TYPE_CHECKING:
  from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
  # Since JAX 0.11 it is another name of Jaxpr. Remove it once jax >= 0.11.
  ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)

AnyJaxpr = core.Jaxpr | ClosedJaxpr
Atom = core.Var | core.Literal  # what an equation reads

# Equations that do nothing but call their jaxpr with all of their inputs.
_CALL_PRIMITIVES = {
  "call",  # The first two end with JAX 0.10: remove once jax >= 0.11.
  "closed_call",
  "compute_on",
  "custom_jvp_call",
  "custom_vjp_call",
  "eval_jaxpr",
  "jit",
  "remat2",
  "xla_metadata_call",
}
# The class of an object of hijax, and which plain primitive it stands for.
_CANONICAL_NAMES = {
  "CheckpointName": "name",
  "CustomJVPTraced": "custom_jvp_call",
  "CustomVJPTraced": "custom_vjp_call",
  "RematTraced": "remat2",
  "Scan3": "scan",
}


def eqn_as_fun(eqn: core.JaxprEqn) -> Callable[..., list[Any]]:
  """What an equation computes, as a function of its inputs."""

  def eval_eqn(*args: Any) -> list[Any]:
    # Each input is a variable of its own, even if one value is given twice.
    invars: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    single_eqn_jaxpr = _make_template_jaxpr().replace(
      invars=invars,
      outvars=eqn.outvars,
      eqns=[eqn.replace(invars=invars)],
      effects=eqn.effects,
    )
    return core.jaxpr_as_fun(close_jaxpr(single_eqn_jaxpr))(*args)

  return eval_eqn


def trace_replacement_eqns(
  fun: Callable[..., list[Any]], eqn: core.JaxprEqn
) -> tuple[list[core.JaxprEqn], list[Any]] | None:
  """The equations of a function, to stand in the place of another equation.

  Args:
    fun: the function, of the inputs of the equation. It may return more.
    eqn: the equation.

  Returns:
    The equations, between the very variables of the one that they replace, and
    at its line; and the variables of what the function returns beyond its
    outputs. None if they cannot stand there.
  """
  with get_eqn_ctx_manager(eqn):
    closed_jaxpr = jax.make_jaxpr(fun)(*[v.aval for v in eqn.invars])
  jaxpr = closed_jaxpr.jaxpr
  defined_vars = {v for inner_eqn in jaxpr.eqns for v in inner_eqn.outvars}
  outs = [v for v in jaxpr.outvars if not isinstance(v, core.Literal)]
  has_distinct_outs = len(set(outs)) == len(jaxpr.outvars)
  has_distinct_outs = has_distinct_outs and defined_vars.issuperset(outs)
  if not has_distinct_outs or closed_jaxpr.consts:
    return None
  substitution: dict[Any, Any] = dict(
    zip(jaxpr.invars, eqn.invars, strict=True)
  )
  num_outs = len(eqn.outvars)
  substitution.update(zip(outs[:num_outs], eqn.outvars, strict=True))

  def substitute(atoms: Sequence[Any]) -> list[Any]:
    is_literal = lambda x: isinstance(x, core.Literal)
    return [x if is_literal(x) else substitution.get(x, x) for x in atoms]

  eqns = [
    inner_eqn.replace(
      invars=substitute(inner_eqn.invars),
      outvars=substitute(inner_eqn.outvars),
      source_info=eqn.source_info,
    )
    for inner_eqn in jaxpr.eqns
  ]
  return eqns, outs[num_outs:]


def get_eqn_ctx_manager(
  eqn: core.JaxprEqn,
) -> contextlib.AbstractContextManager[Any]:
  """The settings with which an equation was traced, such as its mesh."""
  ctx = getattr(eqn, "ctx", None)
  return getattr(ctx, "manager", None) or contextlib.nullcontext()


def get_call_jaxpr(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """The jaxpr that an equation calls with all of its inputs, if it does that.

  It is that of a ``jit``, a ``checkpoint``, or a function with a derivative of
  its own.
  """
  if get_canonical_name(eqn) not in _CALL_PRIMITIVES:
    return None
  bodies = list(subjaxprs(eqn))
  if len(bodies) != 1 or not has_same_signature(bodies[0], eqn):
    return None
  return bodies[0]


def get_canonical_name(eqn: core.JaxprEqn) -> str:
  """The name of the plain primitive that an equation is, or stands for.

  An object of hijax that stands for none has the name of its class.
  """
  name = eqn.primitive.name
  hi_prim = get_hi_primitive(eqn)
  if hi_prim is not None:
    return _CANONICAL_NAMES.get(type(hi_prim).__name__, type(hi_prim).__name__)
  if name == "call_hi_primitive_linearized":
    plain_name = _CANONICAL_NAMES.get(type(eqn.params.get("_prim")).__name__)
    return "custom_lin" if plain_name == "custom_vjp_call" else name
  return name


def has_same_signature(closed_jaxpr: ClosedJaxpr, eqn: core.JaxprEqn) -> bool:
  """Whether a jaxpr has as many inputs and outputs as an equation.

  In an object of hijax they have its types, too: it may have others as well.
  """
  jaxpr = closed_jaxpr.jaxpr
  pairs = (jaxpr.invars, eqn.invars), (jaxpr.outvars, eqn.outvars)
  has_same_arity = all(
    len(inner_vars) == len(outer_vars) for inner_vars, outer_vars in pairs
  )
  if get_hi_primitive(eqn) is None or not has_same_arity:
    return has_same_arity
  return all(x for pair in pairs for x in map(_has_same_aval, *pair))


def _has_same_aval(a: Any, b: Any) -> bool:
  dtypes = (getattr(atom.aval, "dtype", None) for atom in (a, b))
  return get_shape(a) == get_shape(b) and len(set(dtypes)) == 1


def lower_hijax(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """What an equation of hijax computes, in plain equations.

  This is its forward pass: a derivative of its own is lost.

  Returns:
    The jaxpr, of the inputs of the equation; None if the equation is of another
    kind, or cannot be taken apart.
  """
  if get_hi_primitive(eqn) is None:
    return None
  avals = [var.aval for var in eqn.invars]
  try:
    traced: Any = jax.jit(eqn_as_fun(eqn)).trace(*avals)
    # There since JAX 0.10: all that is older has no such equations of its own.
    lojax = getattr(traced, "lojax", None)
  except Exception:  # What a primitive of somebody else does is not known.
    return None
  lojax_jaxpr = lojax and close_jaxpr(lojax.jaxpr)
  # What is left of it would be lowered again and again.
  is_lojax = lojax_jaxpr is not None and not any(
    map(get_hi_primitive, lojax_jaxpr.jaxpr.eqns)
  )
  return (
    lojax_jaxpr
    if lojax_jaxpr is not None
    and is_lojax
    and has_same_signature(lojax_jaxpr, eqn)
    else None
  )


def get_shape(atom: Any) -> tuple[Any, ...]:
  """The shape of a variable; that of a scalar if it has none."""
  return getattr(atom.aval, "shape", ())


def close_jaxpr(jaxpr: AnyJaxpr) -> ClosedJaxpr:
  """The jaxpr with its constants.

  Both are the same class since JAX 0.11, where a jaxpr has its constants with
  it. Remove this once jax >= 0.11.
  """
  if isinstance(jaxpr, ClosedJaxpr):
    return jaxpr
  if jaxpr.constvars:  # Without values for them, they are inputs.
    invars = [*jaxpr.constvars, *jaxpr.invars]
    jaxpr = jaxpr.replace(constvars=[], invars=invars)
  return ClosedJaxpr(jaxpr, ())


def with_consts(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
  """The jaxpr with these constants."""
  # Remove the second once jax >= 0.11.
  if hasattr(jaxpr, "with_consts"):
    return jaxpr.with_consts(consts)
  return ClosedJaxpr(jaxpr, consts)


def subjaxprs(eqn: core.JaxprEqn) -> Iterator[ClosedJaxpr]:
  """All jaxprs among the parameters of an equation.

  Those that a primitive of hijax has with it are among them.
  """
  hi_prim = get_hi_primitive(eqn)
  prim_attrs = getattr(hi_prim, "__dict__", {})
  hi_params = getattr(hi_prim, "params", prim_attrs).values()
  # What was traced by ``jax.jit`` has its jaxpr as an attribute.
  params = [*eqn.params.values(), *(getattr(x, "jaxpr", x) for x in hi_params)]
  for param in params:
    for value in param if isinstance(param, (tuple, list)) else (param,):
      if isinstance(value, (core.Jaxpr, ClosedJaxpr)):
        yield close_jaxpr(value)


def get_hi_primitive(eqn: core.JaxprEqn) -> Any:
  """The object that an equation of hijax calls; None for all others."""
  if eqn.primitive.name != "call_hi_primitive":
    return None
  (first_param, *more_params) = eqn.params.values()
  return eqn.params.get("_prim") if more_params else first_param


def get_exported_mlir(eqn: core.JaxprEqn) -> str:
  """The code of a function that was exported; empty of all other equations."""
  exported: Any = eqn.params.get("exported")
  return exported.mlir_module() if hasattr(exported, "mlir_module") else ""


def map_subjaxprs(
  eqn: core.JaxprEqn, map_fn: Callable[[AnyJaxpr], AnyJaxpr]
) -> core.JaxprEqn:
  """The same equation, with each jaxpr that it holds replaced.

  Args:
    eqn: the equation.
    map_fn: a function from a jaxpr, as it is held, to one of the same kind,
      inputs and outputs, such as one by ``replace_jaxpr_fields``.

  Returns:
    The equation. All other parameters stay as they are, whatever they are.
  """
  hi_prim = get_hi_primitive(eqn)
  old_params = eqn.params if hi_prim is None else hi_prim.params
  params = {k: _map_param(v, map_fn) for k, v in old_params.items()}
  if hi_prim is None:
    return eqn.replace(params=params)
  return replace_hi_primitive(
    eqn, hi_prim, replace_hi_params(hi_prim, **params)
  )


def replace_hi_primitive(
  eqn: core.JaxprEqn, old: Any, new: Any
) -> core.JaxprEqn:
  """The same equation, which calls another object of hijax."""
  params = {k: new if v is old else v for k, v in eqn.params.items()}
  return eqn.replace(params=params)


def replace_hi_params(hi_prim: Any, **new_params: Any) -> Any:
  """An object of hijax that holds other functions and jaxprs of these types."""
  new_prim = copy.copy(hi_prim)
  new_prim.params = {**hi_prim.params, **new_params}
  vars(new_prim).update(new_params)
  return new_prim


def _map_param(param: Any, map_fn: Callable[[AnyJaxpr], AnyJaxpr]) -> Any:
  if isinstance(param, (core.Jaxpr, ClosedJaxpr)):
    return map_fn(param)
  if type(param) is tuple:
    return tuple(_map_param(x, map_fn) for x in param)
  return param


def make_convert_eqn(
  invar: Any, outvar: Any, template: core.JaxprEqn
) -> core.JaxprEqn:
  """What converts a variable to another one, at the line of an equation."""
  convert_eqn = _trace_convert_eqn(outvar.aval.dtype)
  # The product of two Python numbers' arrays is weakly typed, and stays so.
  params = {**convert_eqn.params, "weak_type": outvar.aval.weak_type}
  return template.replace(
    invars=[invar],
    outvars=[outvar],
    primitive=convert_eqn.primitive,
    params={name: params[name] for name in convert_eqn.params},
    effects=convert_eqn.effects,
  )


@functools.cache
def _trace_convert_eqn(dtype: Any) -> core.JaxprEqn:
  trace_convert = jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))
  (eqn,) = trace_convert(jax.ShapeDtypeStruct((), jnp.int8)).eqns
  return eqn


def replace_jaxpr_fields(jaxpr: AnyJaxpr, **fields: Any) -> AnyJaxpr:
  """A jaxpr with other fields, and the constants that it has."""
  # The first is a closed one, too, since JAX 0.11, and keeps its constants.
  if isinstance(jaxpr, core.Jaxpr):
    return jaxpr.replace(**fields)
  return ClosedJaxpr(jaxpr.jaxpr.replace(**fields), jaxpr.consts)


def is_var_in(atom: Any, variables: Container[Any]) -> bool:
  """Whether an input or output is one of these variables, and no literal."""
  return not isinstance(atom, core.Literal) and atom in variables


def has_effect(eqn: core.JaxprEqn) -> bool:
  """Whether something happens beside the result: it must happen only once.

  A callback counts even if it says that it is pure. What is written to a Ref
  that ends with the equation does not count.
  """
  # The effect of a sum over devices only says that it needs their axis.
  effects = {type(effect).__name__ for effect in eqn.effects}
  has_jax_effect = bool(effects - {"NamedAxisEffect"})
  return has_jax_effect or _has_ref_operand(eqn) or _has_callback(eqn)


def _has_ref_operand(eqn: core.JaxprEqn) -> bool:
  """Whether it could write to a Ref, even if it does not say so."""
  return any(_avals.is_ref(atom.aval) for atom in eqn.invars)


def _has_callback(eqn: core.JaxprEqn) -> bool:
  return "callback" in eqn.primitive.name or any(
    _has_callback(inner_eqn)
    for subjaxpr in subjaxprs(eqn)
    for inner_eqn in subjaxpr.jaxpr.eqns
  )


def has_effectful_eqn(jaxpr: core.Jaxpr) -> bool:
  """Whether an equation in a jaxpr has an effect."""
  return any(map(has_effect, jaxpr.eqns))


def live_eqns(
  jaxpr: core.Jaxpr, used_outputs: list[bool] | None = None
) -> list[tuple[core.JaxprEqn, list[Any]]]:
  """The equations that matter, and what is read for the last time by each.

  Args:
    jaxpr: the jaxpr.
    used_outputs: which of its outputs are used; all, if not given.

  Returns:
    A list, in their order, of the equations that have an effect or whose
    outputs are read, each with the variables that can be forgotten after it.
  """
  used_outputs = (
    [True] * len(jaxpr.outvars) if used_outputs is None else used_outputs
  )
  outputs = zip(jaxpr.outvars, used_outputs, strict=True)
  live_vars = set(_drop_literals([var for var, is_used in outputs if is_used]))
  eqns_with_dead_vars = []
  for eqn in reversed(jaxpr.eqns):
    is_effectful = bool(eqn.effects) or _has_ref_operand(eqn)
    if not is_effectful and not any(v in live_vars for v in eqn.outvars):
      continue
    operands = set(_drop_literals(eqn.invars))
    unused_outvars = [v for v in eqn.outvars if v not in live_vars]
    eqns_with_dead_vars.append(
      (eqn, [*(operands - live_vars), *unused_outvars])
    )
    live_vars |= operands
  return eqns_with_dead_vars[::-1]


def _drop_literals(atoms: list[Any]) -> Iterator[Any]:
  return (atom for atom in atoms if not isinstance(atom, core.Literal))


@functools.cache
def _make_template_jaxpr() -> Any:
  """A jaxpr whose fields can be replaced. What makes one differs."""
  closed_jaxpr = jax.make_jaxpr(lambda: ())()
  return getattr(closed_jaxpr, "jaxpr", closed_jaxpr)
