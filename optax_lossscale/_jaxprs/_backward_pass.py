"""Tag what leaves the backward pass of a program: the gradients.

A value that the backward pass computes, and that something outside of it reads,
is a gradient, whatever differentiates the loss, and whatever receives the
gradient.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from optax_lossscale._jaxprs import (
  _custom_derivatives,
  _eqns,
  _higher_order,
  _provenance,
  _regions,
)


def tag_gradients(
  closed_jaxpr: _eqns.ClosedJaxpr, make_tag: Callable[[int, int], str]
) -> _eqns.ClosedJaxpr:
  """Tag each gradient of a program where it leaves the backward pass.

  Loops, branches and calls are entered, but no custom rules.

  Args:
    closed_jaxpr: the program.
    make_tag: takes the number of the backward pass, and that of the gradient
      in it, and returns the tag.
  """
  return _Tagger(make_tag).tag_jaxpr(closed_jaxpr, _provenance.EqnLocation())


class _Tagger:
  """A rewriter that counts gradients. A forward pass begins a new count.

  What contains no gradient, such as a kernel, remains the same object.
  """

  def __init__(self, make_tag: Callable[[int, int], str]) -> None:
    self._make_tag = make_tag
    self._num_passes = self._num_grads = self._num_tags = 0

  def tag_jaxpr(
    self, jaxpr: _eqns.AnyJaxpr, location: _provenance.EqnLocation
  ) -> Any:
    """Tag the gradients of a jaxpr that is called from this location."""
    old_num_tags = self._num_tags
    plain_jaxpr = _eqns.close_jaxpr(jaxpr).jaxpr
    pairs = [(eqn, location.push_scope(eqn)) for eqn in plain_jaxpr.eqns]
    read_vars = set(_eqns.drop_literals(plain_jaxpr.outvars)).union(
      *(
        _eqns.drop_literals(eqn.invars)
        for eqn, eqn_location in pairs
        if not eqn_location.is_backward
      )
    )
    tagged_vars: dict[Any, Any] = {}
    substitute = lambda atoms: [
      tagged_vars[x] if _eqns.is_var_in(x, tagged_vars) else x for x in atoms
    ]
    new_eqns: list[core.JaxprEqn] = []
    for eqn, eqn_location in pairs:
      if eqn_location.is_backward:
        tag_eqns = list(self._tag_outputs(eqn, read_vars))
        tagged_vars |= {x.invars[0]: x.outvars[0] for x in tag_eqns}
        new_eqns += [eqn, *tag_eqns]
        continue
      if eqn_location.is_differentiated and self._num_grads:
        self._num_passes, self._num_grads = self._num_passes + 1, 0
      eqn = eqn.replace(invars=substitute(eqn.invars))
      new_eqns.append(self._tag_inside(eqn, eqn_location))
    if self._num_tags == old_num_tags:
      return jaxpr
    outvars = substitute(plain_jaxpr.outvars)
    return _eqns.replace_jaxpr_fields(jaxpr, eqns=new_eqns, outvars=outvars)

  def _tag_outputs(
    self, eqn: core.JaxprEqn, read_vars: set[Any]
  ) -> Iterator[core.JaxprEqn]:
    """Yield an equation that tags each output of an equation that is read."""
    for var in eqn.outvars:
      if var in read_vars and _regions.is_inexact(var):
        name = self._make_tag(self._num_passes, self._num_grads)
        self._num_grads += 1
        self._num_tags += 1
        with _eqns.get_eqn_ctx_manager(eqn):
          (tag_eqn,) = jax.make_jaxpr(checkpoint_name, static_argnums=1)(
            var.aval, name
          ).jaxpr.eqns
        yield tag_eqn.replace(invars=[var], source_info=eqn.source_info)

  def _tag_inside(
    self, eqn: core.JaxprEqn, location: _provenance.EqnLocation
  ) -> core.JaxprEqn:
    """Tag the gradients inside of an equation."""
    if _eqns.get_hi_primitive(eqn) is not None or (
      _custom_derivatives.get_custom_rule(eqn) is not None
    ):
      return eqn
    # The mesh axes of a `shard_map` are bound to trace a tag.
    tagged: core.JaxprEqn = _higher_order.call_in_eqn_context(
      eqn,
      lambda: _eqns.map_subjaxprs(
        eqn, lambda jaxpr: self.tag_jaxpr(jaxpr, location)
      ),
    )
    return tagged
