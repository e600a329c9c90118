"""Rewrites a jaxpr so that its products run in half precision.

Nothing is evaluated, and every variable keeps its type. A product becomes three
kinds of equations: its operands are narrowed, the product runs in half, and its
result is widened to the very variable that it had. So all other equations stay
the same objects, and an equation that holds jaxprs (a loop, a branch, a call)
stays the same but for these jaxprs: nothing else need be known of it. XLA drops
a result that is widened and narrowed again, and the cotangents of several uses
of one value are added in float32.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs, _warnings
from optax_lossscale._autocast import _kept, _products, _rules, _told

# Equations that run the jaxprs that they hold, and need nothing else of them.
_RUN_THEIR_JAXPRS = {"cond", "scan", "shard_map", "while"}


class Settings(NamedTuple):
  """What is asked of one function.

  Attributes:
    dtype: the dtype of the products.
    kept: the products that stay in float32.
  """

  dtype: Any
  kept: _kept.Kept


def call(fun: Callable[[], Any], settings: Settings, told: _told.Told) -> Any:
  """What a function without arguments returns, with its products in half.

  The function closes over its arguments. So it is given the very same ones:
  traced values keep their types, and other objects need no care.

  Args:
    fun: the function.
    settings: the dtype of the products, and which ones stay.
    told: where to note what was found, and what was not reached.

  Returns:
    What ``fun`` returned. What it did not compute are the same objects.
  """
  returned: list[Any] = []

  # JAX names the user's function, and not this one, if a tracer leaks from it.
  @functools.wraps(fun, updated=())
  def traced() -> list[Any]:
    leaves, structure = jax.tree.flatten(fun())
    is_traced = [isinstance(x, jax.core.Tracer) for x in leaves]
    pairs = list(zip(leaves, is_traced, strict=True))
    others = [None if traced else x for x, traced in pairs]
    returned.append((structure, is_traced, others))
    return [x for x, traced in pairs if traced]

  closed = jax.make_jaxpr(traced)()
  rewriter = Rewriter(settings, told)
  new, _ = rewriter.rewrite(closed, _jaxprs.Place())
  told.measure(closed.jaxpr)
  outs = iter(core.jaxpr_as_fun(new)())
  ((structure, is_traced, others),) = returned
  leaves = [
    next(outs) if traced else x
    for x, traced in zip(others, is_traced, strict=True)
  ]
  return jax.tree.unflatten(structure, leaves)


def _call_in_rule(fun: Callable[[], Any], dtype: Any) -> Any:
  """The same in a rule, where there is nobody else to tell what was missed."""
  told = _told.Told()
  out = call(fun, Settings(dtype, _kept.Kept()), told)
  message = told.message(dtype)
  if message:
    _warnings.warn(message)
  return out


class Rewriter:
  """What rewrites the jaxprs of one call of a function.

  Attributes:
    dtype: the dtype of the products.
    kept: the products that stay in float32.
    told: where to note what was found, and what was not reached.
  """

  def __init__(self, settings: Settings, told: _told.Told) -> None:
    self.dtype = jnp.dtype(settings.dtype)
    self.kept = settings.kept
    self.told = told
    # A jaxpr that is called twice is searched and rewritten once.
    self._search = _products.Search(_rules.hidden_derivative_of)
    self._rewritten: dict[Any, tuple[Any, list[bool]]] = {}
    self._distinct: dict[Any, tuple[Any, list[bool]]] = {}
    # Of each product that was met, whether it is kept.
    self._decisions: list[bool] = []
    self._guarded: set[Any] = set()

  def rewrite(
    self,
    jaxpr: _jaxprs.AnyJaxpr,
    place: _jaxprs.Place,
    are_half: Sequence[bool] = (),
  ) -> tuple[Any, list[bool]]:
    """Rewrites a jaxpr.

    Args:
      jaxpr: the jaxpr.
      place: where it is called.
      are_half: of its inputs, whether they came out of products, and were only
        moved since; none did, if this is empty.

    Returns:
      A jaxpr of the same inputs and outputs, and the same of its outputs.
    """
    # Names may tell its callers apart.
    where = place if self.kept.patterns else None
    key = jaxpr, tuple(are_half), where
    if key not in self._rewritten:
      count = len(self._decisions)
      old = _jaxprs.closed(jaxpr).jaxpr
      half = set(itertools.compress(old.invars, are_half))
      rewrite = functools.partial(self._rewrite, old, place, half)
      eqns = [e for eqn in old.eqns for e in rewrite(eqn)]
      outs = [_jaxprs.is_one_of(v, half) for v in old.outvars]
      # Callers that no name tells apart share one, which is compiled once.
      like = jaxpr, tuple(are_half), tuple(self._decisions[count:])
      new = _jaxprs.with_equations(jaxpr, eqns), outs
      self._rewritten[key] = self._distinct.setdefault(like, new)
    return self._rewritten[key]

  def _rewrite(
    self,
    jaxpr: core.Jaxpr,
    place: _jaxprs.Place,
    half: set[Any],
    eqn: core.JaxprEqn,
  ) -> list[core.JaxprEqn]:
    """The equations in place of one; adds what they make in half to the set."""
    if _products.is_product(eqn):
      self.told.products += 1
      if self.kept.patterns:
        self._decisions.append(self.kept.holds(place.at(eqn, jaxpr)))
        if self._decisions[-1]:
          return [eqn]
      half.update(eqn.outvars)
      params = {**eqn.params, "preferred_element_type": self.dtype}
      return self._in_half(eqn.replace(params=params))
    if _products.moves(eqn) and _come_from(eqn, half):
      half.update(eqn.outvars)
      return self._in_half(eqn)
    if _rules.is_guard(eqn):
      self._guarded.update(eqn.outvars)
    if not self._search.finds_in(eqn):
      return [eqn]
    # What nobody asks for need not be found: it takes a look at a traceback.
    inside = place.at(eqn, jaxpr) if self.kept.patterns else place
    enter = functools.partial(self._enter, inside, half, eqn)
    # Rules are traced where the axes of the mesh are known.
    is_mapped = _jaxprs.shard_map_of(eqn) is not None
    entered = _jaxprs.among_devices(eqn, enter) if is_mapped else enter()
    if entered is None and not self.kept.holds(inside):
      self.told.miss(eqn, jaxpr)
    return [eqn] if entered is None else entered

  def _in_half(self, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """An equation between conversions, which leaves its variables as they are.

    Values are narrowed for each use, even where one equation uses a value
    twice: the cotangents of a shared copy would be added in half.
    """
    before, after, inputs, outputs = [], [], [], []
    for atom in eqn.invars:
      inputs.append(atom)
      if _is_float32(atom):
        inputs[-1] = self._half_of(atom)
        before.append(_cast(atom, inputs[-1], eqn))
    for var in eqn.outvars:
      outputs.append(self._half_of(var))
      after.append(_cast(outputs[-1], var, eqn))
    return [*before, eqn.replace(invars=inputs, outvars=outputs), *after]

  def _half_of(self, atom: Any) -> Any:
    return core.Var(atom.aval.update(dtype=self.dtype, weak_type=False))

  def _enter(
    self,
    place: _jaxprs.Place,
    half: set[Any],
    eqn: core.JaxprEqn,
  ) -> list[core.JaxprEqn] | None:
    """The equation with what it holds rewritten; None if that cannot be."""
    make = _rules.how_to_make(eqn)
    if make is not None:
      if self._keeps_rule(eqn, place):
        self.told.products += 1
        return [eqn]
      in_half = functools.partial(_call_in_rule, dtype=self.dtype)
      function = functools.partial(self._function, place)
      fun = make(eqn, _rules.Tools(function, in_half, self._guarded))
      entered = fun and _jaxprs.equations_of(fun, eqn)
      # They may all be in its derivative, which nobody has rewritten yet.
      self.told.products += bool(entered)
      return entered
    are_half: list[bool] = []
    if _jaxprs.called_jaxpr(eqn) is not None:
      are_half = [_jaxprs.is_one_of(atom, half) for atom in eqn.invars]
    elif eqn.primitive.name not in _RUN_THEIR_JAXPRS:
      return None

    def replace(jaxpr: _jaxprs.AnyJaxpr) -> Any:
      new, outs = self.rewrite(jaxpr, place, are_half)
      if are_half:  # The call returns what its function returns.
        half.update(itertools.compress(eqn.outvars, outs))
      return new

    return [_jaxprs.with_jaxprs(eqn, replace)]

  def _keeps_rule(self, eqn: core.JaxprEqn, place: _jaxprs.Place) -> bool:
    """Whether a rule stays as it is since one of its products is named.

    It stays as a whole: nothing tells which of its products is the derivative
    of which.
    """
    if not self.kept.patterns:
      return False
    seen = _rules.derivative_of(eqn)
    self.kept.has_unseen |= seen is None
    jaxprs = [*_products.jaxprs_to_search(eqn), *([seen] if seen else [])]
    is_named = self.kept.holds(place)
    are_named = [is_named, *(self._keeps_any(x, place) for x in jaxprs)]
    self._decisions.append(any(are_named))
    return self._decisions[-1]

  def _keeps_any(self, jaxpr: core.Jaxpr, place: _jaxprs.Place) -> bool:
    """Whether a product in a jaxpr is named. It looks at all of them."""
    found = []
    for eqn in jaxpr.eqns:
      its_place = place.at(eqn, jaxpr)
      if _products.is_product(eqn):
        found.append(self.kept.holds(its_place))
      inner = _products.jaxprs_to_search(eqn)
      found += [self._keeps_any(x, its_place) for x in inner]
    return any(found)

  def _function(
    self, place: _jaxprs.Place, closed: _jaxprs.ClosedJaxpr
  ) -> _rules.Function:
    return core.jaxpr_as_fun(self.rewrite(closed, place)[0])


def _is_float32(atom: Any) -> bool:
  return getattr(atom.aval, "dtype", None) == jnp.float32


def _come_from(eqn: core.JaxprEqn, half: set[Any]) -> bool:
  """Whether there are float32 inputs, all of which are in the set."""
  floats = [atom for atom in eqn.invars if _is_float32(atom)]
  return bool(floats) and all(_jaxprs.is_one_of(atom, half) for atom in floats)


def _cast(old: Any, new: Any, eqn: core.JaxprEqn) -> core.JaxprEqn:
  """A conversion of a variable to another one, at the line of an equation."""
  cast = _cast_to(new.aval.dtype)
  # The product of two Python numbers' arrays is weakly typed, and stays so.
  params = {**cast.params, "weak_type": new.aval.weak_type}
  return eqn.replace(
    invars=[old],
    outvars=[new],
    primitive=cast.primitive,
    params={name: params[name] for name in cast.params},
    effects=cast.effects,
  )


@functools.cache
def _cast_to(dtype: Any) -> core.JaxprEqn:
  cast = jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))
  (eqn,) = cast(jax.ShapeDtypeStruct((), jnp.int8)).eqns
  return eqn
