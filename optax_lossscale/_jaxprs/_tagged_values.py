"""Harvest: rewrite a jaxpr so that it also returns its tagged intermediates.

A tag is a name that ``jax.ad_checkpoint.checkpoint_name`` gives to a value.
Higher-order equations around a tag return the value, too: a ``scan`` stacks
the values of its iterations, and a ``shard_map`` the values of its devices. A
branch of a ``cond`` returns placeholders for the tags of the other branches:
zeros for floats, and -1 for integers, among which 0 could be a real value. All
other equations remain the same objects, and keep their source info.

Oryx calls this transformation *harvest*; Flax's ``sow`` does the same for
modules.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _custom_derivatives,
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _walk,
)

# Takes a tag, and returns a function whose result for the tagged value becomes
# an output; None if the tag is not harvested.
SelectCaptureFn = Callable[[str], Callable[[Any], Any] | None]
# The identity function, for tagged values that become outputs themselves.
UNCHANGED: Callable[[Any], Any] = lambda x: x


class HarvestedJaxpr(NamedTuple):
  """A jaxpr that also returns its tagged values.

  Attributes:
    closed_jaxpr: the jaxpr. The tagged values follow the original outputs.
    tags: the tag of each tagged value, in program order.
    unreached_labels: the labels of equations of the whole program whose tagged
      values can't be returned, such as a ``while``.
    cond_labels: the labels of ``cond`` equations of the whole program with
      tagged values, which are placeholders if the branch isn't taken.
  """

  closed_jaxpr: _eqns.ClosedJaxpr
  tags: list[str]
  unreached_labels: list[str]
  cond_labels: list[str]


class _HarvestedEqn(NamedTuple):
  """The replacement of an equation, with the variables of its tagged values."""

  eqns: list[core.JaxprEqn]
  captured_vars: Sequence[Any] = ()
  tags: Sequence[str] = ()


def harvest_tagged_values(
  closed_jaxpr: _eqns.ClosedJaxpr,
  select_capture: SelectCaptureFn,
  is_optional: Callable[[str], bool] = lambda tag: False,
) -> HarvestedJaxpr:
  """Rewrite a jaxpr so that it also returns its tagged values.

  Args:
    closed_jaxpr: the jaxpr.
    select_capture: takes a tag, and returns the function of the tagged value
      whose result becomes an output; None if the tag is not harvested. If
      another tag returns the value itself, no function of it is returned.
    is_optional: whether values with a tag may be left out silently, if they
      can't be returned.

  Returns:
    A :class:`HarvestedJaxpr`.
  """
  return _Harvester(select_capture, is_optional).harvest_jaxpr(
    closed_jaxpr, _provenance.EqnLocation()
  )


class _Harvester:
  """A rewriter, with a cache of which jaxprs contain selected tags."""

  def __init__(
    self, select_capture: SelectCaptureFn, is_optional: Callable[[str], bool]
  ) -> None:
    self._select_capture = select_capture
    self._is_optional = is_optional
    self._unreached_labels: list[str] = []
    self._cond_labels: list[str] = []
    # Equations with any captured tag are rewritten; if that fails, only those
    # with a required tag are reported.
    is_captured = lambda eqn: self._get_capture(eqn) is not None
    self._captured_search = _walk.EqnSearch(is_captured, _eqns.subjaxprs)
    is_required = lambda eqn: (
      is_captured(eqn) and not is_optional(str(get_tag(eqn)))
    )
    self._required_search = _walk.EqnSearch(is_required, _eqns.subjaxprs)

  def harvest_jaxpr(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    location: _provenance.EqnLocation,
  ) -> HarvestedJaxpr:
    """Rewrite a jaxpr that is called from this location."""
    jaxpr = closed_jaxpr.jaxpr
    # The variables that tags return unchanged.
    returned_vars = {
      v
      for eqn in jaxpr.eqns
      if self._get_capture(eqn) is UNCHANGED
      for v in _eqns.drop_literals(eqn.invars)
    }
    harvested_eqns = [
      _HarvestedEqn([eqn])
      if returned_vars.intersection(eqn.outvars)
      and self._get_capture(eqn) not in (None, UNCHANGED)
      else self._harvest_eqn(eqn, jaxpr, location)
      for eqn in jaxpr.eqns
    ]
    join = lambda field: [
      x for harvested in harvested_eqns for x in getattr(harvested, field)
    ]
    new_jaxpr: Any = _eqns.replace_jaxpr_fields(
      closed_jaxpr,
      eqns=join("eqns"),
      outvars=[*jaxpr.outvars, *join("captured_vars")],
    )
    return HarvestedJaxpr(
      new_jaxpr,
      join("tags"),
      self._unreached_labels,
      self._cond_labels,
    )

  def _harvest_eqn(
    self,
    eqn: core.JaxprEqn,
    jaxpr: core.Jaxpr,
    location: _provenance.EqnLocation,
  ) -> _HarvestedEqn:
    """Rewrite one equation, or return it unchanged if it contains no tag."""
    capture = self._get_capture(eqn)
    if capture is not None:
      return _capture_eqn(eqn, capture)
    if not self._captured_search.any_inside(eqn):
      return _HarvestedEqn([eqn])
    location = location.locate(eqn, jaxpr)
    hop = _higher_order.parse_higher_order(eqn)
    harvested_eqn = self._harvest_bodies(eqn, hop, location)
    if self._required_search.any_inside(eqn):
      label = _provenance.format_location(
        _eqns.get_primitive_name(eqn), location.label
      )
      if harvested_eqn is None:
        self._unreached_labels.append(label)
      elif isinstance(hop, _higher_order.Cond):
        self._cond_labels.append(label)
    return harvested_eqn or _HarvestedEqn([eqn])

  def _harvest_bodies(
    self,
    eqn: core.JaxprEqn,
    hop: _higher_order.HigherOrderOp | None,
    location: _provenance.EqnLocation,
  ) -> _HarvestedEqn | None:
    """Rewrite the bodies of an equation; None if they can't return more.

    The number of iterations of a ``while`` is unknown, so its values can't be
    stacked. A custom rule must return as many outputs as its function, and a
    hijax primitive declares its outputs.
    """
    if (
      hop is None
      or isinstance(hop, _higher_order.While)
      or _eqns.get_hi_primitive(eqn) is not None
      or _custom_derivatives.get_custom_rule(eqn) is not None
    ):
      return None
    # Captures are traced while the bodies are rewritten, so the mesh axes of a
    # `shard_map` must be bound.
    bodies = _higher_order.call_in_eqn_context(
      eqn,
      lambda: [
        self.harvest_jaxpr(body, location)
        for body in _higher_order.get_bodies(hop)
      ],
    )
    closed_jaxprs = [body.closed_jaxpr for body in bodies]
    match hop:
      case _higher_order.Call():
        return _add_outputs_to_call(eqn, *bodies)
      case _higher_order.Cond():
        fun = _make_cond_with_outputs(closed_jaxprs, len(eqn.outvars))
      case _higher_order.Scan():
        fun = _make_scan_with_outputs(hop, *closed_jaxprs)
      case _:
        fun = _make_shard_map_with_outputs(hop, *closed_jaxprs)
    return _rebuild_eqn(eqn, fun, bodies)

  def _get_capture(self, eqn: core.JaxprEqn) -> Callable[[Any], Any] | None:
    """Return the capture of a tag equation; None if it isn't harvested."""
    tag = get_tag(eqn)
    return None if tag is None else self._select_capture(tag)


def rename_tags(
  closed_jaxpr: _eqns.ClosedJaxpr, rename: Callable[[str], str]
) -> _eqns.ClosedJaxpr:
  """Rename the tags of a program, in program order.

  A jaxpr that is called twice becomes two jaxprs, whose tags may differ.

  Args:
    closed_jaxpr: the program.
    rename: takes a tag, and returns its new name.
  """
  search = _walk.EqnSearch(
    lambda eqn: get_tag(eqn) is not None, _eqns.subjaxprs
  )

  def rename_in_eqn(eqn: core.JaxprEqn) -> core.JaxprEqn:
    tag = get_tag(eqn)
    if tag is not None:
      new_params = {"name": rename(tag)}
      return _eqns.replace_params(eqn, _eqns.get_hi_primitive(eqn), new_params)
    if not search.any_inside(eqn):
      return eqn
    return _eqns.map_subjaxprs(eqn, rename_in_jaxpr)

  def rename_in_jaxpr(jaxpr: _eqns.AnyJaxpr) -> _eqns.AnyJaxpr:
    eqns = _eqns.close_jaxpr(jaxpr).jaxpr.eqns
    return _eqns.replace_jaxpr_fields(
      jaxpr, eqns=list(map(rename_in_eqn, eqns))
    )

  renamed: Any = rename_in_jaxpr(closed_jaxpr)
  return renamed


def get_tag(eqn: core.JaxprEqn) -> str | None:
  """Return the name of a ``checkpoint_name`` equation; None for all others."""
  if _eqns.get_primitive_name(eqn) != "name":
    return None
  params: Any = getattr(_eqns.get_hi_primitive(eqn), "params", eqn.params)
  return params["name"]


def _capture_eqn(
  eqn: core.JaxprEqn, capture: Callable[[Any], Any]
) -> _HarvestedEqn:
  """Append the equations of its capture to a tag equation."""
  # JAX has a subclass for results that nobody reads, and a jaxpr cannot return
  # them.
  outvars = [
    v if type(v) is core.Var else core.Var(v.aval) for v in eqn.outvars
  ]
  eqn = eqn.replace(outvars=outvars)

  def fun(x: Any) -> list[Any]:
    (out,) = _eqns.eqn_as_fun(eqn)(x)
    return [out, capture(out)]

  # A capture that returns its input has no equations, hence no replacement.
  replacement = (
    None if capture is UNCHANGED else _eqns.trace_replacement_eqns(fun, eqn)
  )
  eqns, captured_vars = replacement or ([eqn], eqn.outvars)
  return _HarvestedEqn(eqns, captured_vars, [str(get_tag(eqn))])


def _add_outputs_to_call(
  eqn: core.JaxprEqn, body: HarvestedJaxpr
) -> _HarvestedEqn:
  """Let a call run a jaxpr with more outputs."""
  num_outs = len(eqn.outvars)
  captured_vars = [
    core.Var(v.aval) for v in body.closed_jaxpr.jaxpr.outvars[num_outs:]
  ]
  # Parameters such as `out_shardings` have an entry for each output.
  out_params = {
    k: (*v, *_make_extra_out_params(k, captured_vars))
    for k, v in eqn.params.items()
    if k.startswith("out_")
  }
  new_jaxpr = body.closed_jaxpr.jaxpr
  eqn = _eqns.map_subjaxprs(
    eqn,
    lambda old_jaxpr: _eqns.replace_jaxpr_fields(
      old_jaxpr, eqns=new_jaxpr.eqns, outvars=new_jaxpr.outvars
    ),
  )
  eqn = eqn.replace(
    outvars=[*eqn.outvars, *captured_vars],
    params={**eqn.params, **out_params},
  )
  return _HarvestedEqn([eqn], captured_vars, body.tags)


def _make_extra_out_params(param_name: str, captured_vars: list[Any]) -> Any:
  """Return the entries of an ``out_...`` parameter for the new outputs."""
  if param_name == "out_memory_spaces":
    return [v.aval.memory_space for v in captured_vars]
  return _get_default_jit_params()[param_name] * len(captured_vars)


@functools.cache
def _get_default_jit_params() -> dict[str, Any]:
  """Return the parameters of a ``jit`` whose only output is unconstrained."""
  (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(0.0).jaxpr.eqns
  return eqn.params


def _make_cond_with_outputs(
  bodies: Sequence[_eqns.ClosedJaxpr], num_outs: int
) -> Callable[..., list[Any]]:
  """Make a ``cond`` whose branches return the tagged values of all branches.

  A branch returns placeholders for the tagged values of the others, since all
  branches must have outputs of the same types.
  """
  captured_vars = [body.jaxpr.outvars[num_outs:] for body in bodies]

  def branch(i: int, *args: Any) -> list[Any]:
    outs = core.jaxpr_as_fun(bodies[i])(*args)
    # The captured outputs are in the order of the branches, then of the
    # program, as `_rebuild_eqn` lists the tagged values.
    values = [list(map(_make_placeholder, group)) for group in captured_vars]
    values[i] = outs[num_outs:]
    return [*outs[:num_outs], *itertools.chain(*values)]

  branches = [functools.partial(branch, i) for i in range(len(bodies))]
  return lambda index, *operands: lax.switch(index, branches, *operands)


def _make_placeholder(var: Any) -> jax.Array:
  """Make an array in place of a value that was not computed."""
  aval = var.aval
  fill_value = -1 if jnp.issubdtype(aval.dtype, jnp.integer) else 0
  axes = tuple(_primitives.get_aval_varying_axes(aval))
  # Within a `shard_map` the outputs of branches must vary over the same axes.
  placeholder = jnp.full(aval.shape, fill_value, aval.dtype)
  return _primitives.cast_to_varying(placeholder, axes) if axes else placeholder


def _make_scan_with_outputs(
  scan: _higher_order.Scan, body: _eqns.ClosedJaxpr
) -> Callable[..., list[Any]]:
  """Make a ``scan`` of another body, whose new outputs it stacks."""

  def fun(*inputs: Any) -> list[Any]:
    consts, init, slices = scan.split(inputs)

    def scan_body(carry: Any, body_slices: Any) -> Any:
      outs = core.jaxpr_as_fun(body)(*consts, *carry, *body_slices)
      return outs[: scan.num_carry], outs[scan.num_carry :]

    final_carry, ys = lax.scan(
      scan_body, list(init), list(slices), scan.length, scan.reverse
    )
    return [*final_carry, *ys]

  return fun


def _make_shard_map_with_outputs(
  shard_map: _higher_order.ShardMap, body: _eqns.ClosedJaxpr
) -> Callable[..., list[Any]]:
  """Make a ``shard_map`` of another body, and stack its new outputs.

  The first axis of each new output has an entry for each device.
  """
  num_outs = len(shard_map.out_specs)
  # The new axis is sharded over all axes along which the value varies.
  captured_specs = [
    jax.sharding.PartitionSpec(shard_map.list_varying_axes(v.aval))
    for v in body.jaxpr.outvars[num_outs:]
  ]

  def fun(*inputs: Any) -> list[Any]:
    outs = core.jaxpr_as_fun(body)(*inputs)
    return [*outs[:num_outs], *(x[None] for x in outs[num_outs:])]

  out_specs = [*shard_map.out_specs, *captured_specs]
  return shard_map.wrap_fun(fun, shard_map.in_specs, out_specs)


def _rebuild_eqn(
  eqn: core.JaxprEqn,
  fun: Callable[..., list[Any]],
  bodies: list[HarvestedJaxpr],
) -> _HarvestedEqn | None:
  """Replace a higher-order equation by the equations of a function.

  Args:
    eqn: the equation.
    fun: the function. It takes the inputs of the equation, and returns its
      outputs, then the tagged values.
    bodies: the rewritten jaxprs of the equation, in its order.

  Returns:
    The replacement; None if there is none.
  """
  replacement = _eqns.trace_replacement_eqns(fun, eqn)
  if replacement is None:
    return None
  eqns, captured_vars = replacement
  debug_infos = iter(body.closed_jaxpr.jaxpr.debug_info for body in bodies)

  def restore_debug_info(subjaxpr: _eqns.AnyJaxpr) -> _eqns.AnyJaxpr:
    # Source lines are found by it: `_source_info.get_user_lines` reads a
    # traceback up to the function of the jaxpr.
    return _eqns.replace_jaxpr_fields(subjaxpr, debug_info=next(debug_infos))

  new_eqns = [
    _eqns.map_subjaxprs(new_eqn, restore_debug_info)
    if new_eqn.primitive is eqn.primitive
    else new_eqn
    for new_eqn in eqns
  ]
  tags = [tag for body in bodies for tag in body.tags]
  return _HarvestedEqn(new_eqns, captured_vars, tags)
