"""Evaluates a function with its products in half precision, else as written.

Each value keeps the dtype that it was traced with. What a product returns is
widened at once, and narrowed again by the next product: XLA drops such pairs of
conversions, and the cotangents of several uses are added in float32.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _control_flow, _products


class _Value(NamedTuple):
  """A value, and whether it came out of a product, and was only moved since."""

  value: Any
  is_half: bool = False


class Rewriter:
  """What evaluates one call of a function.

  Attributes:
    dtype: the dtype of the products.
    products: the products in this dtype that were found.
  """

  def __init__(self, dtype: Any) -> None:
    self.dtype = dtype
    self.products: list[core.JaxprEqn] = []
    self._searched: dict[core.Jaxpr, bool] = {}
    self._replaced: dict[Any, tuple[core.ClosedJaxpr, list[bool]]] = {}

  def call(self, fun: Callable[[], Any]) -> Any:
    """What a function without arguments returns, with its products in half.

    The function closes over its arguments. So it is given the very same ones:
    traced values keep their types, and other objects need no care.
    """
    returned: list[Any] = []

    def traced() -> list[Any]:
      leaves, structure = jax.tree.flatten(fun())
      is_traced = [isinstance(x, jax.core.Tracer) for x in leaves]
      pairs = list(zip(leaves, is_traced, strict=True))
      others = [None if traced else x for x, traced in pairs]
      returned.append((structure, is_traced, others))
      return [x for x, traced in pairs if traced]

    closed = jax.make_jaxpr(traced)()
    outs = iter(self.function(closed)())
    ((structure, is_traced, others),) = returned
    leaves = [
      next(outs) if traced else x
      for x, traced in zip(others, is_traced, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)

  def function(self, jaxpr: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The function of a jaxpr, with its products in half."""

    def run(*args: Any) -> list[Any]:
      values = [_Value(x) for x in (*jaxpr.consts, *args)]
      return [x.value for x in self._evaluate(jaxpr.jaxpr, values)]

    return run

  def _evaluate(
    self, jaxpr: core.Jaxpr, args: Sequence[_Value]
  ) -> list[_Value]:
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env: dict[Any, _Value] = dict(zip(variables, args, strict=True))

    def read(var: Any) -> _Value:
      return _Value(var.val) if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.eqns:
      outs = self._evaluate_equation(eqn, list(map(read, eqn.invars)))
      env.update(zip(eqn.outvars, outs, strict=True))
    return [read(var) for var in jaxpr.outvars]

  def _evaluate_equation(
    self, eqn: core.JaxprEqn, args: list[_Value]
  ) -> list[_Value]:
    values = [arg.value for arg in args]
    if _products.is_product(eqn):
      self.products.append(eqn)
      params = {**eqn.params, "preferred_element_type": self.dtype}
      return self._in_half(eqn.replace(params=params), values)
    if _products.moves(eqn) and _are_half(eqn, args):
      return self._in_half(eqn, values)
    if not self._holds_products(eqn):
      return [_Value(x) for x in _jaxprs.function(eqn)(*values)]
    if eqn.primitive.name not in _control_flow.PRIMITIVES:
      return self._call_replaced(eqn, args)
    # Profiles go on to show the scopes around the equation.
    scope = jax.named_scope(str(eqn.source_info.name_stack))
    with eqn.ctx.manager, scope:
      return [_Value(x) for x in _control_flow.evaluate(eqn, values, self)]

  def _in_half(self, eqn: core.JaxprEqn, args: list[Any]) -> list[_Value]:
    # Values are narrowed for each use, even where one equation uses a value
    # twice: the cotangents of a shared copy would be added in half.
    narrow = [_cast(x, jnp.float32, self.dtype, eqn) for x in args]
    outvars = [core.Var(v.aval.update(dtype=self.dtype)) for v in eqn.outvars]
    outs = _jaxprs.function(eqn.replace(outvars=outvars))(*narrow)
    return [_Value(_cast(x, self.dtype, jnp.float32, eqn), True) for x in outs]

  def _call_replaced(
    self, eqn: core.JaxprEqn, args: list[_Value]
  ) -> list[_Value]:
    """Calls another function, with all the options that the call has."""
    name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    old = eqn.params[name]
    values = [arg.value for arg in args]
    # A function that is called twice is rewritten once.
    is_half = tuple(arg.is_half for arg in args)
    key = old, is_half, tuple(map(jax.typeof, values))
    if key not in self._replaced:
      with eqn.ctx.manager:
        self._replaced[key] = self._replace(old, is_half, values)
    closed, outs_are_half = self._replaced[key]
    new = closed if isinstance(old, core.ClosedJaxpr) else closed.jaxpr
    eqn = eqn.replace(params={**eqn.params, name: new})
    outs = _jaxprs.function(eqn)(*values)
    return list(map(_Value, outs, outs_are_half))

  def _replace(
    self, old: Any, is_half: Sequence[bool], values: list[Any]
  ) -> tuple[core.ClosedJaxpr, list[bool]]:
    """A jaxpr with its products in half, and which of its outputs are."""
    outs_are_half: list[bool] = []

    def run(*args: Any) -> list[Any]:
      closed = _jaxprs.closed(old)
      inputs = [*map(_Value, closed.consts), *map(_Value, args, is_half)]
      outs = self._evaluate(closed.jaxpr, inputs)
      outs_are_half.extend(x.is_half for x in outs)
      return [x.value for x in outs]

    return jax.make_jaxpr(run)(*values), outs_are_half

  def _holds_products(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are products to be found in what the equation calls."""
    is_entered = (
      _jaxprs.called_jaxpr(eqn) is not None
      or eqn.primitive.name in _control_flow.PRIMITIVES
    )
    if not is_entered or _products.is_kept(eqn):
      return False
    return any(self._has_products(x.jaxpr) for x in _jaxprs.held_jaxprs(eqn))

  def _has_products(self, jaxpr: core.Jaxpr) -> bool:
    if jaxpr not in self._searched:
      self._searched[jaxpr] = any(
        _products.is_product(eqn) or self._holds_products(eqn)
        for eqn in jaxpr.eqns
      )
    return self._searched[jaxpr]


def _cast(x: Any, old: Any, new: Any, eqn: core.JaxprEqn) -> Any:
  """Casts x if its dtype is the old one, at the line of an equation."""
  if getattr(x, "dtype", None) != old:
    return x
  outvar = core.Var(jax.typeof(x).update(dtype=jnp.dtype(new)))
  cast = _cast_to(jnp.dtype(new)).replace(
    outvars=[outvar], source_info=eqn.source_info, ctx=eqn.ctx
  )
  return _jaxprs.function(cast)(x)[0]


@functools.cache
def _cast_to(dtype: Any) -> core.JaxprEqn:
  cast = jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))
  (eqn,) = cast(jax.ShapeDtypeStruct((), jnp.int8)).eqns
  return eqn


def _are_half(eqn: core.JaxprEqn, args: list[_Value]) -> bool:
  """Whether there are float32 inputs, all of which came out of products."""
  floats = [
    arg.is_half
    for var, arg in zip(eqn.invars, args, strict=True)
    if getattr(var.aval, "dtype", None) == jnp.float32
  ]
  return bool(floats) and all(floats)
