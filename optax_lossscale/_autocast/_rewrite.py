"""Rewrites a jaxpr so that its products run in half precision.

Nothing is evaluated, and every variable keeps its type. A product becomes three
kinds of equations: its operands are narrowed, the product runs in half, and its
result is widened to the very variable that it had. So all other equations stay
the same objects, and an equation that holds jaxprs (a loop, a branch, a call)
stays the same but for these jaxprs: nothing else need be known of it. XLA drops
a result that is widened and narrowed again, and the cotangents of several uses
of one value are added in float32.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs, _warnings
from optax_lossscale._autocast import (
  _casts,
  _derivatives,
  _kept,
  _named,
  _products,
  _rules,
  _told,
)

# Equations that run the jaxprs that they hold, and need nothing else of them.
_RUN_THEIR_JAXPRS = {"cond", "scan", "shard_map", "while"}


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
  kept: _kept.Kept
  paths: Mapping[int, _jaxprs.Path] = types.MappingProxyType({})
  of_results: Sequence[_jaxprs.Path] = ()


def call(
  fun: Callable[[], Any], settings: Settings, told: _told.Told
) -> tuple[Any, list[_jaxprs.Path]]:
  """What a function without arguments returns, with its products in half.

  The function closes over its arguments. So it is given the very same ones:
  traced values keep their types, and other objects need no care.

  Args:
    fun: the function.
    settings: the dtype of the products, which ones stay, and their names.
    told: where to note what was found, and what was not reached.

  Returns:
    What ``fun`` returned, and the name of each array in it that is a weight.
    What it did not compute are the same objects.
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
  ((structure, is_traced, others),) = returned
  results = tuple(itertools.compress(settings.of_results, is_traced))
  paths = _jaxprs.Paths((), results)
  rewriter = Rewriter(settings, told)
  new, _ = rewriter.rewrite(closed, _jaxprs.Place(), (), paths)
  if settings.kept.learn():
    rewriter = Rewriter(settings, told)
    new, _ = rewriter.rewrite(closed, _jaxprs.Place(), (), paths)
  told.measure(closed)
  outs = iter(core.jaxpr_as_fun(new)())
  of_outs = iter(rewriter.known.of(closed, paths).of(closed.jaxpr.outvars))
  pairs = [
    (next(outs), next(of_outs)) if traced else (x, None)
    for x, traced in zip(others, is_traced, strict=True)
  ]
  out = jax.tree.unflatten(structure, [x for x, _ in pairs])
  return out, [path for _, path in pairs]


def _call_in_rule(
  fun: Callable[[], Any],
  inputs: Sequence[Any],
  paths: _jaxprs.Paths,
  *,
  dtype: Any,
) -> tuple[Any, list[_jaxprs.Path]]:
  """The same in a rule, where there is nobody else to tell what was missed."""
  told = _told.Told()
  by_id = {id(x): path for x, path in zip(inputs, paths.inputs, strict=False)}
  out = call(fun, Settings(dtype, _kept.Kept(), by_id, paths.outputs), told)
  message = told.message(dtype)
  if message:
    _warnings.warn(message)
  return out


class _Rewritten(NamedTuple):
  """A rewritten jaxpr, which of its outputs are half, and what was decided."""

  jaxpr: Any
  are_half: list[bool]
  decisions: tuple[bool, ...]


class _Body(NamedTuple):
  """A jaxpr that is being rewritten.

  Attributes:
    jaxpr: the jaxpr.
    place: where it is called.
    half: the variables that came out of products, and were only moved since.
    weights: the variables that are weights.
  """

  jaxpr: core.Jaxpr
  place: _jaxprs.Place
  half: set[Any]
  weights: _jaxprs.Weights


class Rewriter:
  """What rewrites the jaxprs of one call of a function.

  Attributes:
    dtype: the dtype of the products.
    kept: the products that stay in float32.
    known: the weights of the function.
    told: where to note what was found, and what was not reached.
  """

  def __init__(self, settings: Settings, told: _told.Told) -> None:
    self.dtype = jnp.dtype(settings.dtype)
    self.kept = settings.kept
    self.known = _jaxprs.Known(settings.paths)
    self.told = told
    # A jaxpr that is called twice is searched and rewritten once.
    self._search = _products.Search(_derivatives.hidden_derivative_of)
    self._rewritten: dict[Any, _Rewritten] = {}
    self._distinct: dict[Any, _Rewritten] = {}
    # Of each product that was met, whether it is kept.
    self._decisions: list[bool] = []
    self._guarded: set[Any] = set()

  def rewrite(
    self,
    jaxpr: _jaxprs.AnyJaxpr,
    place: _jaxprs.Place,
    are_half: Sequence[bool] = (),
    paths: _jaxprs.Paths = _jaxprs.NO_PATHS,
  ) -> tuple[Any, list[bool]]:
    """Rewrites a jaxpr.

    Args:
      jaxpr: the jaxpr.
      place: where it is called.
      are_half: of its inputs, whether they came out of products, and were only
        moved since; none did, if this is empty.
      paths: the names of those inputs and outputs that are weights.

    Returns:
      A jaxpr of the same inputs and outputs, and the same of its outputs.
    """
    of_inputs = jaxpr, tuple(are_half), paths
    # Names may tell its callers apart.
    key = of_inputs, place if self.kept.patterns else None
    if key in self._rewritten:
      # What was decided inside tells the caller from others, this time too.
      self._decisions += self._rewritten[key].decisions
    else:
      count = len(self._decisions)
      closed = _jaxprs.closed(jaxpr)
      half = set(itertools.compress(closed.jaxpr.invars, are_half))
      weights = self.known.of(closed, paths)
      body = _Body(closed.jaxpr, place, half, weights)
      eqns = [e for eqn in body.jaxpr.eqns for e in self._rewrite(body, eqn)]
      outs = [_jaxprs.is_one_of(v, body.half) for v in body.jaxpr.outvars]
      new = _jaxprs.with_equations(jaxpr, eqns)
      made = _Rewritten(new, outs, tuple(self._decisions[count:]))
      # Callers that no name tells apart share one, which is compiled once.
      like = of_inputs, made.decisions
      self._rewritten[key] = self._distinct.setdefault(like, made)
    return self._rewritten[key][:2]

  def _rewrite(self, body: _Body, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """The equations in place of one; notes what they make in half."""
    if _products.is_product(eqn):
      self.told.products += 1
      eqn = body.weights.named(eqn)
      if self.kept.patterns:
        place = body.place.at(eqn, body.jaxpr)
        self._decisions.append(self.kept.holds(place))
        if self._decisions[-1]:
          return [eqn]
      body.half.update(eqn.outvars)
      params = {**eqn.params, "preferred_element_type": self.dtype}
      return _casts.in_half(eqn.replace(params=params), self.dtype)
    if _products.moves(eqn) and _casts.come_from(eqn, body.half):
      body.half.update(eqn.outvars)
      return _casts.in_half(eqn, self.dtype)
    if _derivatives.is_guard(eqn):
      self._guarded.update(eqn.outvars)
    if not self._search.inside_of(eqn):
      return [eqn]
    named = body.weights.named(eqn)
    # What nobody asks for need not be found: it takes a look at a traceback.
    inside = body.place
    if self.kept.patterns:
      inside = inside.at(named, body.jaxpr)
    enter = functools.partial(self._enter, body, inside, eqn, named)
    # Rules are traced where the axes of the mesh are known.
    entered = _jaxprs.where_it_runs(eqn, enter)
    if entered is None and not self.kept.holds(inside):
      self.told.miss(eqn, body.jaxpr)
    return [named] if entered is None else entered

  def _enter(
    self,
    body: _Body,
    place: _jaxprs.Place,
    old: core.JaxprEqn,
    eqn: core.JaxprEqn,
  ) -> list[core.JaxprEqn] | None:
    """The equation with what it holds rewritten; None if that cannot be."""
    make = _rules.how_to_make(eqn)
    paths = body.weights.paths_in(old)
    if make is not None:
      if self.kept.patterns:
        is_kept = _named.is_any_in_rule(self.kept, eqn, place, paths)
        self._decisions.append(is_kept)
        # It stays as a whole: nothing tells which of its products is the
        # derivative of which.
        if is_kept:
          self.told.products += 1
          return [eqn]
      in_half = functools.partial(_call_in_rule, dtype=self.dtype)
      function = functools.partial(self._function, place, paths)
      fun = make(eqn, _rules.Tools(function, in_half, paths, self._guarded))
      entered = fun and _jaxprs.equations_of(fun, eqn)
      # They may all be in its derivative, which nobody has rewritten yet.
      self.told.products += bool(entered)
      return entered
    are_half: list[bool] = []
    if _jaxprs.called_jaxpr(eqn) is not None:
      are_half = [_jaxprs.is_one_of(atom, body.half) for atom in eqn.invars]
    elif eqn.primitive.name not in _RUN_THEIR_JAXPRS:
      return None

    def replace(jaxpr: _jaxprs.AnyJaxpr) -> Any:
      called = _jaxprs.closed(jaxpr).jaxpr
      its_paths = body.weights.paths_of_body(old, called)
      new, outs = self.rewrite(jaxpr, place, are_half, its_paths)
      if are_half:  # The call returns what its function returns.
        body.half.update(itertools.compress(eqn.outvars, outs))
      return new

    return [_jaxprs.with_jaxprs(eqn, replace)]

  def _function(
    self,
    place: _jaxprs.Place,
    paths: _jaxprs.Paths,
    closed: _jaxprs.ClosedJaxpr,
  ) -> _rules.Function:
    return core.jaxpr_as_fun(self.rewrite(closed, place, (), paths)[0])
