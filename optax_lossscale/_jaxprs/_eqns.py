"""Operations on equations and their sub-jaxprs: find, replace, evaluate.

JAX is moving to hijax, whose primitives are Python objects that hide their
jaxprs. Since 0.12 ``lax.custom_root``, ``jnp.ldexp`` and others are hijax
primitives, and so are, under the flags ``jax_remat3``, ``jax_custom_vjp3`` and
``jax_custom_jvp3``, ``checkpoint`` and functions with custom derivatives. The
package treats such a primitive as the plain one that it replaces: see
``get_primitive_name``.
"""

from collections.abc import (
  Callable,
  Container,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import contextlib
import copy
import functools
import itertools
from typing import Any, TYPE_CHECKING

import jax
from jax.extend import core

if TYPE_CHECKING:
  from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
  # Since JAX 0.11 a Jaxpr has its constants. Remove this once jax >= 0.11.
  ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)

AnyJaxpr = core.Jaxpr | ClosedJaxpr

# Equations that only call their jaxpr with all of their inputs.
_CALL_PRIMITIVES = {
  "call",  # Remove once jax >= 0.11, and closed_call.
  "checkpoint",
  "closed_call",
  "compute_on",
  "custom_jvp_call",
  "custom_vjp_call",
  "eval_jaxpr",
  "jit",
  "xla_metadata_call",
}
# For each class of hijax primitives the plain primitive that it replaces; and
# the name of an operation, where it differs from that of its primitive.
_CANONICAL_NAMES = {
  "CheckpointName": "name",
  "CustomJVPTraced": "custom_jvp_call",
  "CustomVJPTraced": "custom_vjp_call",
  "RematTraced": "checkpoint",
  "Scan3": "scan",
  "remat2": "checkpoint",
}


def eqn_as_fun(eqn: core.JaxprEqn) -> Callable[..., list[Any]]:
  """Return a function that evaluates an equation for given inputs."""

  def eval_eqn(*args: Any) -> list[Any]:
    # The inputs of a jaxpr must be distinct variables, even if the equation
    # reads one variable twice.
    invars: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    jaxpr = _make_template_jaxpr().replace(
      invars=invars,
      outvars=eqn.outvars,
      eqns=[eqn.replace(invars=invars)],
      effects=eqn.effects,
    )
    return core.jaxpr_as_fun(close_jaxpr(jaxpr))(*args)

  return eval_eqn


def eval_jaxpr(
  closed_jaxpr: ClosedJaxpr,
  map_output: Callable[[core.JaxprEqn, Any, Any], Any],
) -> list[Any]:
  """Evaluate a jaxpr without inputs, and replace values; skip dead code.

  Args:
    closed_jaxpr: the jaxpr.
    map_output: takes an equation, one of its output variables and the value of
      the variable. Returns the value that later equations read.

  Returns:
    A value for each output of the jaxpr.
  """
  jaxpr = closed_jaxpr.jaxpr
  env = dict(zip(jaxpr.constvars, closed_jaxpr.consts, strict=True))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]
  for _, eqn, _ in live_eqns(jaxpr):
    outs = eqn_as_fun(eqn)(*map(read, eqn.invars))
    for var, value in zip(eqn.outvars, outs, strict=True):
      env[var] = map_output(eqn, var, value)
  return list(map(read, jaxpr.outvars))


def trace_replacement_eqns(
  fun: Callable[..., list[Any]], eqn: core.JaxprEqn
) -> tuple[list[core.JaxprEqn], list[Any]] | None:
  """Trace a function to equations that replace another equation.

  Args:
    fun: the function. It takes the inputs of the equation, and returns its
      outputs, which further outputs may follow.
    eqn: the equation to replace.

  Returns:
    The equations, which read and define the same variables as the old one and
    have its source info; and the variables of the further outputs. None if the
    function returns an input, a constant or a value twice, or closes over an
    array.
  """
  with get_eqn_ctx_manager(eqn):
    closed_jaxpr = jax.make_jaxpr(fun)(*[v.aval for v in eqn.invars])
  jaxpr = closed_jaxpr.jaxpr
  # Each outvar of the old equation must be defined by exactly one of the new
  # ones, since the substitution below renames variables.
  defined_vars = {v for inner_eqn in jaxpr.eqns for v in inner_eqn.outvars}
  defined_outs = defined_vars.intersection(drop_literals(jaxpr.outvars))
  if len(defined_outs) < len(jaxpr.outvars) or closed_jaxpr.consts:
    return None
  num_outs = len(eqn.outvars)
  old_vars = [*jaxpr.invars, *jaxpr.outvars[:num_outs]]
  new_vars = [*eqn.invars, *eqn.outvars]
  substitution: dict[Any, Any] = dict(zip(old_vars, new_vars, strict=True))

  def substitute(atoms: Sequence[Any]) -> list[Any]:
    return [substitution[x] if is_var_in(x, substitution) else x for x in atoms]

  eqns = [
    inner_eqn.replace(
      invars=substitute(inner_eqn.invars),
      outvars=substitute(inner_eqn.outvars),
      source_info=eqn.source_info,
    )
    for inner_eqn in jaxpr.eqns
  ]
  return eqns, jaxpr.outvars[num_outs:]


def get_eqn_ctx_manager(
  eqn: core.JaxprEqn,
) -> contextlib.AbstractContextManager[Any]:
  """Return a context manager for the config and mesh of an equation."""
  ctx = getattr(eqn, "ctx", None)
  return getattr(ctx, "manager", None) or contextlib.nullcontext()


def get_current_eqn_ctx() -> Any:
  """Return the context (config and mesh) that new equations have here.

  Raises:
    Exception: if equations have no context in this version of JAX, or can't be
      evaluated one by one.
  """
  (eqn,) = jax.make_jaxpr(lambda x: -x)(0.0).eqns
  jax.eval_shape(eqn_as_fun(eqn), 0.0)
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


def get_call_jaxpr(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """Return the jaxpr that an equation calls with all of its inputs.

  Calls are ``jit``, ``checkpoint`` and functions with a custom derivative. For
  all other equations the result is None.
  """
  is_call = get_primitive_name(eqn) in _CALL_PRIMITIVES
  bodies = list(subjaxprs(eqn)) if is_call else []
  has_one_body = len(bodies) == 1 and has_same_signature(bodies[0], eqn)
  return bodies[0] if has_one_body else None


def get_primitive_name(eqn: core.JaxprEqn) -> str:
  """Return the name of the plain primitive that an equation is or replaces.

  It is the same in all versions of JAX. A hijax primitive that replaces none
  has the name of its class.
  """
  name = eqn.primitive.name
  hi_prim = get_hi_primitive(eqn)
  if hi_prim is not None:
    return _CANONICAL_NAMES.get(type(hi_prim).__name__, type(hi_prim).__name__)
  if name == "call_hi_primitive_linearized":
    plain_name = _CANONICAL_NAMES.get(type(eqn.params.get("_prim")).__name__)
    return "custom_lin" if plain_name == "custom_vjp_call" else name
  return _CANONICAL_NAMES.get(name, name)


def has_same_signature(closed_jaxpr: ClosedJaxpr, eqn: core.JaxprEqn) -> bool:
  """Return whether a jaxpr has as many inputs and outputs as an equation.

  For a hijax primitive the shapes and dtypes must be equal, too: not each jaxpr
  among its attributes computes its outputs from its inputs.
  """
  jaxpr = closed_jaxpr.jaxpr
  pairs = (jaxpr.invars, eqn.invars), (jaxpr.outvars, eqn.outvars)
  if get_hi_primitive(eqn) is None:
    return all(len(inner) == len(outer) for inner, outer in pairs)
  # The dtypes are strings, since `np.dtype("float64") == None` is True.
  list_types = lambda atoms: [
    (get_shape(v), str(getattr(v.aval, "dtype", ""))) for v in atoms
  ]
  return all(list_types(inner) == list_types(outer) for inner, outer in pairs)


def lower_hijax(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """Trace an equation of hijax to plain equations.

  The result computes the forward pass only: a custom derivative is lost.

  Returns:
    The jaxpr, which takes the inputs of the equation; None if the equation is
    not one of hijax, or can't be lowered.
  """
  if get_hi_primitive(eqn) is None:
    return None
  avals = [var.aval for var in eqn.invars]
  try:
    traced: Any = jax.jit(eqn_as_fun(eqn)).trace(*avals)
    # JAX has `lojax` since 0.10. Older versions make no equations of hijax.
    lojax_jaxpr = close_jaxpr(traced.lojax.jaxpr)
  except Exception:  # The primitive of another library may raise any error.
    return None
  # A result with equations of hijax would be lowered in an endless recursion.
  is_lojax = not any(map(get_hi_primitive, lojax_jaxpr.jaxpr.eqns))
  can_replace_eqn = is_lojax and has_same_signature(lojax_jaxpr, eqn)
  return lojax_jaxpr if can_replace_eqn else None


def get_shape(atom: Any) -> tuple[Any, ...]:
  """Return the shape of a variable or literal; ``()`` if its type has none."""
  return getattr(atom.aval, "shape", ())


def close_jaxpr(jaxpr: AnyJaxpr) -> ClosedJaxpr:
  """Return a jaxpr as a closed one.

  Both classes are the same since JAX 0.11, where a jaxpr has its constants.
  Remove this function once jax >= 0.11.
  """
  if isinstance(jaxpr, ClosedJaxpr):
    return jaxpr
  if jaxpr.constvars:  # Constants without values become the first inputs.
    invars = [*jaxpr.constvars, *jaxpr.invars]
    jaxpr = jaxpr.replace(constvars=[], invars=invars)
  return ClosedJaxpr(jaxpr, ())


def with_consts(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
  """Return the closed jaxpr of a jaxpr and its constants."""
  # Remove the second return once jax >= 0.11.
  if hasattr(jaxpr, "with_consts"):
    return jaxpr.with_consts(consts)
  return ClosedJaxpr(jaxpr, consts)


def subjaxprs(eqn: core.JaxprEqn) -> Iterator[ClosedJaxpr]:
  """Yield all jaxprs among the parameters of an equation.

  The jaxprs that a hijax primitive has as attributes are included.
  """
  hi_params = getattr(get_hi_primitive(eqn), "params", {}).values()
  # A hijax primitive has a `Traced` of `jax.jit`, which contains a jaxpr.
  params = [*eqn.params.values(), *(getattr(x, "jaxpr", x) for x in hi_params)]
  for param in params:
    for value in param if isinstance(param, (tuple, list)) else (param,):
      if isinstance(value, (core.Jaxpr, ClosedJaxpr)):
        yield close_jaxpr(value)


def get_hi_primitive(eqn: core.JaxprEqn) -> Any:
  """Return the hijax primitive that an equation calls; None if there is none.

  The result is an object that contains the rules of the primitive, as opposed
  to ``eqn.primitive``, which is the same for all equations of hijax.
  """
  if eqn.primitive.name != "call_hi_primitive":
    return None
  # Versions of JAX with a single parameter have different names for it.
  (first_param, *more_params) = eqn.params.values()
  return eqn.params.get("_prim") if more_params else first_param


def get_exported_mlir(eqn: core.JaxprEqn) -> str:
  """Return the MLIR of the call of an exported function; else ``""``."""
  exported: Any = eqn.params.get("exported")
  return exported.mlir_module() if hasattr(exported, "mlir_module") else ""


def map_subjaxprs(
  eqn: core.JaxprEqn, map_fn: Callable[[AnyJaxpr], AnyJaxpr]
) -> core.JaxprEqn:
  """Replace each jaxpr among the parameters of an equation.

  Args:
    eqn: the equation.
    map_fn: a function from a jaxpr to one of the same class, inputs and
      outputs, such as one that calls ``replace_jaxpr_fields``.

  Returns:
    The new equation. Its other parameters are the same objects.
  """
  hi_prim = get_hi_primitive(eqn)
  old_params: Any = getattr(hi_prim, "params", eqn.params)
  new_params = {k: _map_param(v, map_fn) for k, v in old_params.items()}
  return replace_params(eqn, hi_prim, new_params)


def replace_params(
  eqn: core.JaxprEqn, hi_prim: Any, new_params: Mapping[str, Any]
) -> core.JaxprEqn:
  """Replace parameters by others of the same types.

  Args:
    eqn: the equation.
    hi_prim: the hijax primitive that has the parameters; None if the equation
      has them.
    new_params: the parameters to replace.
  """
  if hi_prim is None:
    return eqn.replace(params={**eqn.params, **new_params})
  # Each parameter is there twice: in `params`, and as an attribute.
  new_prim = copy.copy(hi_prim)
  new_prim.params = {**hi_prim.params, **new_params}
  vars(new_prim).update(new_params)
  params = {k: new_prim if v is hi_prim else v for k, v in eqn.params.items()}
  return eqn.replace(params=params)


def _map_param(param: Any, map_fn: Callable[[AnyJaxpr], AnyJaxpr]) -> Any:
  if isinstance(param, (core.Jaxpr, ClosedJaxpr)):
    return map_fn(param)
  if type(param) is tuple:
    return tuple(_map_param(x, map_fn) for x in param)
  return param


def replace_jaxpr_fields(jaxpr: AnyJaxpr, **fields: Any) -> AnyJaxpr:
  """Replace fields of a jaxpr, and keep its constants."""
  if "outvars" in fields:
    # The debug info has a path for each old output.
    debug_info: Any = close_jaxpr(jaxpr).jaxpr.debug_info
    fields["debug_info"] = debug_info._replace(result_paths=None)
  # Since JAX 0.11 a Jaxpr is closed, and `replace` keeps its constants.
  if isinstance(jaxpr, core.Jaxpr):
    return jaxpr.replace(**fields)
  return ClosedJaxpr(jaxpr.jaxpr.replace(**fields), jaxpr.consts)


def is_var_in(atom: Any, variables: Container[Any]) -> bool:
  """Return whether an input or output is one of these variables."""
  # A literal has no hash.
  return not isinstance(atom, core.Literal) and atom in variables


def is_ref(aval: Any) -> bool:
  """Return whether a type is that of a Ref instead of an array."""
  return hasattr(aval, "inner_aval")


def is_ref_object(x: Any) -> bool:
  """Return whether an object is a Ref of JAX."""
  return hasattr(x, "dtype") and is_ref(getattr(x, "aval", None))


def read_ref(x: Any) -> Any:
  """Return the contents of a Ref; any other object itself."""
  return x[...] if is_ref_object(x) else x


def has_ref_operand(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation could write to a Ref, even without an effect."""
  return any(is_ref(atom.aval) for atom in eqn.invars)


def live_eqns(
  jaxpr: core.Jaxpr, used_outputs: Sequence[bool] | None = None
) -> list[tuple[int, core.JaxprEqn, list[bool]]]:
  """Eliminate dead code.

  Args:
    jaxpr: the jaxpr.
    used_outputs: a mask of its outputs; by default all of them are used.

  Returns:
    The equations that have an effect or whose outputs are read, in program
    order, each with its index and the mask of its outputs that are read.
  """
  outvars = itertools.compress(
    jaxpr.outvars, used_outputs or itertools.repeat(True)
  )
  live_vars = set(drop_literals(outvars))
  live = []
  for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
    mask = [v in live_vars for v in eqn.outvars]
    if any(mask) or eqn.effects or has_ref_operand(eqn):
      live.append((i, eqn, mask))
      live_vars.update(drop_literals(eqn.invars))
  return live[::-1]


def drop_literals(atoms: Iterable[Any]) -> Iterator[Any]:
  """Yield only the variables."""
  return (atom for atom in atoms if not isinstance(atom, core.Literal))


@functools.cache
def _make_template_jaxpr() -> Any:
  """Return an empty jaxpr, since its constructor differs between versions."""
  return jax.make_jaxpr(lambda: ())().jaxpr
