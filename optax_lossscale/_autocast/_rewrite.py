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

from optax_lossscale._autocast import _kept, _products
from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _operations,
  _places,
  _rules,
  _weights,
)


class Found(NamedTuple):
  """What was found on the way, in the order of the program.

  Attributes:
    has_products: whether there are products that run in half, or are kept. Of
      those that a rule alone has it is not known.
    decisions: which of them are kept; none, if the user named none.
    missed: the equations that hold products and could not be entered.
    has_unseen: whether there are products whose names cannot be known.
  """

  has_products: bool = False
  decisions: tuple[_kept.Match, ...] = ()
  missed: tuple[core.JaxprEqn, ...] = ()
  has_unseen: bool = False


class Rewritten(NamedTuple):
  """A rewritten jaxpr.

  Attributes:
    jaxpr: the jaxpr, of the same inputs and outputs.
    are_half: which of its outputs came out of products, and were only moved.
    found: what was found in it.
  """

  jaxpr: Any
  are_half: list[bool]
  found: Found


class _Replacement(NamedTuple):
  """What stands in the place of an equation, and which outputs are half."""

  eqns: list[core.JaxprEqn]
  half: Iterable[Any] = ()
  found: Found = Found()


class _Here(NamedTuple):
  """Where an equation stands.

  Attributes:
    jaxpr: the jaxpr that is being rewritten.
    place: where that is called.
    weights: its variables that are weights.
    half: its variables that came out of products, and were only moved since.
  """

  jaxpr: core.Jaxpr
  place: _places.EqnLocation
  weights: _weights.JaxprWeights
  half: Set[Any]


class Rewriter:
  """What rewrites the jaxprs of one call of a function.

  Args:
    dtype: the dtype of the products.
    kept: the products that stay in float32.
    known: the weights of the function.
    in_rule: what changes what rules compute, but for its ``body``.
  """

  def __init__(
    self,
    dtype: Any,
    kept: _kept.Float32Filter,
    known: _weights.ProgramWeights,
    in_rule: _rules.RuleTransform,
  ) -> None:
    self._dtype = dtype
    self._kept = kept
    self._known = known
    self._in_rule = in_rule
    # A jaxpr that is called twice is searched and rewritten once.
    self._search = _products.MatmulSearch(include_rule_matmuls=True)
    self._rewritten: dict[Any, Rewritten] = {}
    self._distinct: dict[Any, Rewritten] = {}

  def rewrite(
    self,
    jaxpr: _equations.AnyJaxpr,
    place: _places.EqnLocation,
    are_half: Sequence[bool] = (),
    paths: _weights.WeightPaths = _weights.NO_PATHS,
  ) -> Rewritten:
    """Rewrites a jaxpr.

    Args:
      jaxpr: the jaxpr.
      place: where it is called.
      are_half: of its inputs, whether they came out of products, and were only
        moved since; none did, if this is empty.
      paths: the names of those inputs and outputs that are weights.

    Returns:
      A :class:`Rewritten`.
    """
    of_inputs = jaxpr, tuple(are_half), paths
    # Names may tell its callers apart.
    key = of_inputs, place if self._kept.patterns else None
    if key not in self._rewritten:
      made = self._rewrite_once(jaxpr, place, are_half, paths)
      are_kept = tuple(x.is_kept for x in made.found.decisions)
      # Callers that no name tells apart share one, which is compiled once.
      first = self._distinct.setdefault((of_inputs, are_kept), made)
      self._rewritten[key] = first._replace(found=made.found)
    return self._rewritten[key]

  def _rewrite_once(
    self,
    jaxpr: _equations.AnyJaxpr,
    place: _places.EqnLocation,
    are_half: Sequence[bool],
    paths: _weights.WeightPaths,
  ) -> Rewritten:
    closed = _equations.close_jaxpr(jaxpr)
    half = set(itertools.compress(closed.jaxpr.invars, are_half))
    weights = self._known.get_jaxpr_weights(closed, paths)
    here = _Here(closed.jaxpr, place, weights, half)
    made = []
    for eqn in closed.jaxpr.eqns:
      made.append(self._in_place_of(eqn, here))
      half.update(made[-1].half)
    eqns = [eqn for new in made for eqn in new.eqns]
    outs = [_equations.is_var_in(v, half) for v in closed.jaxpr.outvars]
    found = together(new.found for new in made)
    return Rewritten(
      _equations.replace_jaxpr_fields(jaxpr, eqns=eqns), outs, found
    )

  def _in_place_of(self, eqn: core.JaxprEqn, here: _Here) -> _Replacement:
    """What stands in the place of an equation."""
    if _products.is_castable_matmul(eqn):
      named = here.weights.tag_with_weight(eqn)
      decisions = self._decide(lambda: [here.place.locate(named, here.jaxpr)])
      found = Found(has_products=True, decisions=decisions)
      if any(x.is_kept for x in decisions):
        return _Replacement([named], found=found)
      product = _operations.replace_result_dtype(named, self._dtype)
      return _Replacement(in_half(product, self._dtype), eqn.outvars, found)
    if _operations.is_data_movement(eqn) and come_from(eqn, here.half):
      return _Replacement(in_half(eqn, self._dtype), eqn.outvars)
    if _products.has_exported_matmul(eqn):
      return _Replacement([eqn], found=Found(missed=(eqn,)))
    if not self._search.any_inside(eqn) and not _products.can_have_rule_matmuls(
      eqn
    ):
      return _Replacement([eqn])
    # Rules are traced where the axes of the mesh are known.
    entered = functools.partial(self._enter, eqn, here)
    new: _Replacement = _higher_order.call_in_eqn_context(eqn, entered)
    return new

  def _enter(self, eqn: core.JaxprEqn, here: _Here) -> _Replacement:
    """An equation with what it holds rewritten."""
    named = here.weights.tag_with_weight(eqn)
    # What nobody asks for need not be found: it takes a look at a traceback.
    place = here.place
    if self._kept.patterns:
      place = place.locate(named, here.jaxpr)
    rule = _rules.get_custom_rule(eqn)
    if rule is not None:
      return self._with_rule(eqn, named, rule, place, here)
    if _equations.get_call_jaxpr(eqn) is not None:
      are_half = [_equations.is_var_in(atom, here.half) for atom in eqn.invars]
      return self._with_jaxprs(eqn, named, place, here, are_half)
    if _higher_order.is_control_flow(eqn):
      return self._with_jaxprs(eqn, named, place, here)
    decisions = self._decide(lambda: [place])
    are_kept = any(x.is_kept for x in decisions)
    missed = () if are_kept else (eqn,)
    return _Replacement(
      [named], found=Found(decisions=decisions, missed=missed)
    )

  def _with_rule(
    self,
    eqn: core.JaxprEqn,
    named: core.JaxprEqn,
    rule: _rules.CustomRule,
    place: _places.EqnLocation,
    here: _Here,
  ) -> _Replacement:
    """An equation whose rule computes in half, if it is understood."""
    paths = here.weights.get_call_suffixes(eqn)
    own = Found()
    if self._kept.patterns:
      has_inside = self._search.any_inside(eqn)
      # One that sees which inputs are perturbed may refuse, and an older JAX
      # then forgets what it has traced of it.
      may_ask = has_inside or not rule.symbolic_zeros
      places, is_all = _products.find_rule_matmuls(named, place, paths, may_ask)
      if not has_inside and len(places) == 1:
        return _Replacement([eqn])  # Nothing in it has a name to select.
      decisions = self._decide(lambda: places)
      own = Found(decisions=decisions, has_unseen=not is_all)
      # It stays as a whole: nothing tells which of its products is the
      # derivative of which.
      if any(x.is_kept for x in decisions):
        return _Replacement([named], found=own)
    founds = [own]

    def body(
      closed: _equations.ClosedJaxpr, its_paths: _weights.WeightPaths
    ) -> Any:
      inner = self.rewrite(closed, place, (), its_paths)
      founds.append(inner.found)
      return inner.jaxpr

    new = _rules.transform_custom_rule(
      named, self._in_rule._replace(body=body), paths
    )
    if new is None:
      own = own._replace(missed=(eqn,))
      return _Replacement([named], found=own)
    return _Replacement([new], found=together(founds))

  def _with_jaxprs(
    self,
    eqn: core.JaxprEqn,
    named: core.JaxprEqn,
    place: _places.EqnLocation,
    here: _Here,
    are_half: Sequence[bool] = (),
  ) -> _Replacement:
    """The same equation, with each jaxpr that it holds rewritten."""
    inside: list[Rewritten] = []

    def replace(jaxpr: _equations.AnyJaxpr) -> Any:
      called = _equations.close_jaxpr(jaxpr).jaxpr
      paths = here.weights.get_body_suffixes(eqn, called)
      inside.append(self.rewrite(jaxpr, place, are_half, paths))
      return inside[-1].jaxpr

    new = _equations.map_subjaxprs(named, replace)
    # A call returns what its function returns.
    outs = inside[0].are_half if are_half else ()
    half = list(itertools.compress(eqn.outvars, outs))
    return _Replacement([new], half, together(x.found for x in inside))

  def _decide(
    self, places: Callable[[], list[_places.EqnLocation]]
  ) -> tuple[_kept.Match, ...]:
    """What is decided of what stands at some places, which may be to find."""
    return (self._kept.match(*places()),) if self._kept.patterns else ()


def together(founds: Iterable[Found]) -> Found:
  """What was found at several places."""
  all_founds = list(founds)
  chained = itertools.chain.from_iterable
  return Found(
    any(x.has_products for x in all_founds),
    tuple(chained(x.decisions for x in all_founds)),
    tuple(chained(x.missed for x in all_founds)),
    any(x.has_unseen for x in all_founds),
  )


def in_half(eqn: core.JaxprEqn, dtype: Any) -> list[core.JaxprEqn]:
  """An equation between conversions, which leaves its variables as they are.

  Values are narrowed for each use, even where one equation uses a value twice:
  the cotangents of a shared copy would be added in half.
  """
  eqn = _places.tag_autocast(eqn, dtype)
  half = lambda atom: _half_of(atom, dtype) if _is_float32(atom) else atom
  inputs, outputs = list(map(half, eqn.invars)), list(map(half, eqn.outvars))
  before = [
    _equations.make_convert_eqn(*pair, eqn)
    for pair in _changed(eqn.invars, inputs)
  ]
  after = [
    _equations.make_convert_eqn(*pair, eqn)
    for pair in _changed(outputs, eqn.outvars)
  ]
  return [*before, eqn.replace(invars=inputs, outvars=outputs), *after]


def come_from(eqn: core.JaxprEqn, half: Set[Any]) -> bool:
  """Whether there are float32 inputs, all of which are in the set."""
  floats = [atom for atom in eqn.invars if _is_float32(atom)]
  return bool(floats) and all(
    _equations.is_var_in(atom, half) for atom in floats
  )


def _changed(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
  return [(a, b) for a, b in zip(old, new, strict=True) if a is not b]


def _is_float32(atom: Any) -> bool:
  return getattr(atom.aval, "dtype", None) == jnp.float32


def _half_of(atom: Any, dtype: Any) -> Any:
  return core.Var(atom.aval.update(dtype=dtype, weak_type=False))
