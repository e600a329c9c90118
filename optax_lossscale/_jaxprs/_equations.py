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

from optax_lossscale._jaxprs import _types

if TYPE_CHECKING:
  from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
  # Since JAX 0.11 it is another name of Jaxpr. Remove it once jax >= 0.11.
  ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)

AnyJaxpr = core.Jaxpr | ClosedJaxpr
Atom = core.Var | core.Literal  # what an equation reads

# Equations that do nothing but call their jaxpr with all of their inputs.
_CALLS = {
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
_BEHAVES_LIKE = {
  "CheckpointName": "name",
  "CustomJVPTraced": "custom_jvp_call",
  "CustomVJPTraced": "custom_vjp_call",
  "RematTraced": "remat2",
  "Scan3": "scan",
}


def function(eqn: core.JaxprEqn) -> Callable[..., list[Any]]:
  """What an equation computes, as a function of its inputs."""

  def evaluate(*args: Any) -> list[Any]:
    # Each input is a variable of its own, even if one value is given twice.
    inputs: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    alone = _empty().replace(
      invars=inputs,
      outvars=eqn.outvars,
      eqns=[eqn.replace(invars=inputs)],
      effects=eqn.effects,
    )
    return core.jaxpr_as_fun(closed(alone))(*args)

  return evaluate


def equations_of(
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
  with context_of(eqn):
    closed = jax.make_jaxpr(fun)(*[v.aval for v in eqn.invars])
  jaxpr = closed.jaxpr
  made = {v for inner in jaxpr.eqns for v in inner.outvars}
  outs = [v for v in jaxpr.outvars if not isinstance(v, core.Literal)]
  are_distinct = len(set(outs)) == len(jaxpr.outvars)
  are_distinct = are_distinct and made.issuperset(outs)
  if not are_distinct or closed.consts:
    return None
  new: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
  count = len(eqn.outvars)
  new.update(zip(outs[:count], eqn.outvars, strict=True))

  def renamed(atoms: Sequence[Any]) -> list[Any]:
    is_literal = lambda x: isinstance(x, core.Literal)
    return [x if is_literal(x) else new.get(x, x) for x in atoms]

  eqns = [
    inner.replace(
      invars=renamed(inner.invars),
      outvars=renamed(inner.outvars),
      source_info=eqn.source_info,
    )
    for inner in jaxpr.eqns
  ]
  return eqns, outs[count:]


def context_of(
  eqn: core.JaxprEqn,
) -> contextlib.AbstractContextManager[Any]:
  """The settings with which an equation was traced, such as its mesh."""
  context = getattr(eqn, "ctx", None)
  return getattr(context, "manager", None) or contextlib.nullcontext()


def called_jaxpr(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """The jaxpr that an equation calls with all of its inputs, if it does that.

  It is that of a ``jit``, a ``checkpoint``, or a function with a derivative of
  its own.
  """
  if behaves_like(eqn) not in _CALLS:
    return None
  held = list(held_jaxprs(eqn))
  if len(held) != 1 or not fits(held[0], eqn):
    return None
  return held[0]


def behaves_like(eqn: core.JaxprEqn) -> str:
  """The name of the plain primitive that an equation is, or stands for.

  An object of hijax that stands for none has the name of its class.
  """
  name = eqn.primitive.name
  held = hi_primitive(eqn)
  if held is not None:
    return _BEHAVES_LIKE.get(type(held).__name__, type(held).__name__)
  if name == "call_hi_primitive_linearized":
    kind = _BEHAVES_LIKE.get(type(eqn.params.get("_prim")).__name__)
    return "custom_lin" if kind == "custom_vjp_call" else name
  return name


def fits(called: ClosedJaxpr, eqn: core.JaxprEqn) -> bool:
  """Whether a jaxpr has as many inputs and outputs as an equation.

  In an object of hijax they have its types, too: it may have others as well.
  """
  inner = called.jaxpr
  pairs = (inner.invars, eqn.invars), (inner.outvars, eqn.outvars)
  are_many = all(len(inside) == len(outside) for inside, outside in pairs)
  if hi_primitive(eqn) is None or not are_many:
    return are_many
  return all(x for pair in pairs for x in map(_is_of_type, *pair))


def _is_of_type(x: Any, like: Any) -> bool:
  dtypes = (getattr(atom.aval, "dtype", None) for atom in (x, like))
  return shape_of(x) == shape_of(like) and len(set(dtypes)) == 1


def lowered(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """What an equation of hijax computes, in plain equations.

  This is its forward pass: a derivative of its own is lost.

  Returns:
    The jaxpr, of the inputs of the equation; None if the equation is of another
    kind, or cannot be taken apart.
  """
  if hi_primitive(eqn) is None:
    return None
  avals = [var.aval for var in eqn.invars]
  try:
    traced: Any = jax.jit(function(eqn)).trace(*avals)
    # There since JAX 0.10: all that is older has no such equations of its own.
    plain = getattr(traced, "lojax", None)
  except Exception:  # What a primitive of somebody else does is not known.
    return None
  inner = plain and closed(plain.jaxpr)
  # What is left of it would be lowered again and again.
  is_plain = inner is not None and not any(map(hi_primitive, inner.jaxpr.eqns))
  return inner if inner is not None and is_plain and fits(inner, eqn) else None


def shape_of(atom: Any) -> tuple[Any, ...]:
  """The shape of a variable; that of a scalar if it has none."""
  return getattr(atom.aval, "shape", ())


def closed(jaxpr: AnyJaxpr) -> ClosedJaxpr:
  """The jaxpr with its constants.

  Both are the same class since JAX 0.11, where a jaxpr has its constants with
  it. Remove this once jax >= 0.11.
  """
  if isinstance(jaxpr, ClosedJaxpr):
    return jaxpr
  if jaxpr.constvars:  # Without values for them, they are inputs.
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    jaxpr = jaxpr.replace(constvars=[], invars=inputs)
  return ClosedJaxpr(jaxpr, ())


def with_consts(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
  """The jaxpr with these constants."""
  # Remove the second once jax >= 0.11.
  if hasattr(jaxpr, "with_consts"):
    return jaxpr.with_consts(consts)
  return ClosedJaxpr(jaxpr, consts)


def held_jaxprs(eqn: core.JaxprEqn) -> Iterator[ClosedJaxpr]:
  """All jaxprs among the parameters of an equation.

  Those that a primitive of hijax has with it are among them.
  """
  primitive = hi_primitive(eqn)
  its_own = getattr(primitive, "__dict__", {})
  hidden = getattr(primitive, "params", its_own).values()
  # What was traced by ``jax.jit`` has its jaxpr as an attribute.
  params = [*eqn.params.values(), *(getattr(x, "jaxpr", x) for x in hidden)]
  for param in params:
    for value in param if isinstance(param, (tuple, list)) else (param,):
      if isinstance(value, (core.Jaxpr, ClosedJaxpr)):
        yield closed(value)


def hi_primitive(eqn: core.JaxprEqn) -> Any:
  """The object that an equation of hijax calls; None for all others."""
  if eqn.primitive.name != "call_hi_primitive":
    return None
  (only, *others) = eqn.params.values()
  return eqn.params.get("_prim") if others else only


def exported_text(eqn: core.JaxprEqn) -> str:
  """The code of a function that was exported; empty of all other equations."""
  exported: Any = eqn.params.get("exported")
  return exported.mlir_module() if hasattr(exported, "mlir_module") else ""


def with_jaxprs(
  eqn: core.JaxprEqn, replace: Callable[[AnyJaxpr], AnyJaxpr]
) -> core.JaxprEqn:
  """The same equation, with each jaxpr that it holds replaced.

  Args:
    eqn: the equation.
    replace: a function from a jaxpr, as it is held, to one of the same kind,
      inputs and outputs, such as one by ``with_fields``.

  Returns:
    The equation. All other parameters stay as they are, whatever they are.
  """
  held = hi_primitive(eqn)
  of = eqn.params if held is None else held.params
  params = {k: _replaced(v, replace) for k, v in of.items()}
  if held is None:
    return eqn.replace(params=params)
  return with_object(eqn, held, with_parts(held, **params))


def with_object(eqn: core.JaxprEqn, old: Any, new: Any) -> core.JaxprEqn:
  """The same equation, which calls another object of hijax."""
  params = {k: new if v is old else v for k, v in eqn.params.items()}
  return eqn.replace(params=params)


def with_parts(held: Any, **parts: Any) -> Any:
  """An object of hijax that holds other functions and jaxprs of these types."""
  new = copy.copy(held)
  new.params = {**held.params, **parts}
  vars(new).update(parts)
  return new


def _replaced(param: Any, replace: Callable[[AnyJaxpr], AnyJaxpr]) -> Any:
  if isinstance(param, (core.Jaxpr, ClosedJaxpr)):
    return replace(param)
  if type(param) is tuple:
    return tuple(_replaced(x, replace) for x in param)
  return param


def conversion(old: Any, new: Any, like: core.JaxprEqn) -> core.JaxprEqn:
  """What converts a variable to another one, at the line of an equation."""
  cast = _conversion_to(new.aval.dtype)
  # The product of two Python numbers' arrays is weakly typed, and stays so.
  params = {**cast.params, "weak_type": new.aval.weak_type}
  return like.replace(
    invars=[old],
    outvars=[new],
    primitive=cast.primitive,
    params={name: params[name] for name in cast.params},
    effects=cast.effects,
  )


@functools.cache
def _conversion_to(dtype: Any) -> core.JaxprEqn:
  cast = jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))
  (eqn,) = cast(jax.ShapeDtypeStruct((), jnp.int8)).eqns
  return eqn


def with_fields(jaxpr: AnyJaxpr, **fields: Any) -> AnyJaxpr:
  """A jaxpr with other fields, and the constants that it has."""
  # The first is a closed one, too, since JAX 0.11, and keeps its constants.
  if isinstance(jaxpr, core.Jaxpr):
    return jaxpr.replace(**fields)
  return ClosedJaxpr(jaxpr.jaxpr.replace(**fields), jaxpr.consts)


def is_one_of(atom: Any, variables: Container[Any]) -> bool:
  """Whether an input or output is one of these variables, and no literal."""
  return not isinstance(atom, core.Literal) and atom in variables


def has_effect(eqn: core.JaxprEqn) -> bool:
  """Whether something happens beside the result: it must happen only once.

  A callback counts even if it says that it is pure. What is written to a Ref
  that ends with the equation does not count.
  """
  # The effect of a sum over devices only says that it needs their axis.
  effects = {type(effect).__name__ for effect in eqn.effects}
  has_some = bool(effects - {"NamedAxisEffect"})
  return has_some or _takes_ref(eqn) or _calls_back(eqn)


def _takes_ref(eqn: core.JaxprEqn) -> bool:
  """Whether it could write to a Ref, even if it does not say so."""
  return any(_types.is_ref(atom.aval) for atom in eqn.invars)


def _calls_back(eqn: core.JaxprEqn) -> bool:
  return "callback" in eqn.primitive.name or any(
    _calls_back(inner) for held in held_jaxprs(eqn) for inner in held.jaxpr.eqns
  )


def has_effects(jaxpr: core.Jaxpr) -> bool:
  """Whether an equation in a jaxpr has an effect."""
  return any(map(has_effect, jaxpr.eqns))


def needed_equations(
  jaxpr: core.Jaxpr, used: list[bool] | None = None
) -> list[tuple[core.JaxprEqn, list[Any]]]:
  """The equations that matter, and what is read for the last time by each.

  Args:
    jaxpr: the jaxpr.
    used: which of its outputs are used; all, if not given.

  Returns:
    A list, in their order, of the equations that have an effect or whose
    outputs are read, each with the variables that can be forgotten after it.
  """
  used = [True] * len(jaxpr.outvars) if used is None else used
  outputs = zip(jaxpr.outvars, used, strict=True)
  read = set(_variables([var for var, is_used in outputs if is_used]))
  needed = []
  for eqn in reversed(jaxpr.eqns):
    acts = bool(eqn.effects) or _takes_ref(eqn)
    if not acts and not any(v in read for v in eqn.outvars):
      continue
    inputs = set(_variables(eqn.invars))
    unread = [v for v in eqn.outvars if v not in read]
    needed.append((eqn, [*(inputs - read), *unread]))
    read |= inputs
  return needed[::-1]


def _variables(atoms: list[Any]) -> Iterator[Any]:
  return (atom for atom in atoms if not isinstance(atom, core.Literal))


@functools.cache
def _empty() -> Any:
  """A jaxpr whose fields can be replaced. What makes one differs."""
  empty = jax.make_jaxpr(lambda: ())()
  return getattr(empty, "jaxpr", empty)
