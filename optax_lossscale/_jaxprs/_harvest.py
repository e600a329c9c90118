"""Makes outputs of the values in a jaxpr that have a name.

A name is one of ``jax.ad_checkpoint.checkpoint_name``. What calls, repeats or
chooses a jaxpr with such values returns them as well: a ``scan`` stacks them, a
branch without them returns zeros, a ``shard_map`` returns what each device has.
Of an integer, which zero could be, a branch without it returns -1. All other
equations stay the same objects, and keep their lines.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _avals,
  _custom_derivatives,
  _eqns,
  _higher_order,
  _provenance,
  _source_info,
  _walk,
)

# What is returned of a value with this name: what a function makes of it; None
# if nothing is.
SelectCaptureFn = Callable[[str], Callable[[Any], Any] | None]


class TaggedValue(NamedTuple):
  """A value that became an output.

  Attributes:
    tag: its name.
    cond_branches: for each ``cond`` around it, the outermost first, an
      identifier of the ``cond`` and the number of the branch.
  """

  tag: str
  cond_branches: tuple[tuple[int, int], ...] = ()


class HarvestedJaxpr(NamedTuple):
  """A jaxpr that returns its named values, too.

  Attributes:
    closed_jaxpr: the jaxpr. The values follow its other outputs.
    tagged_values: what they are, in the order of the program.
    unreached_labels: where such values stand that cannot be returned, as in a
      ``while``.
    cond_labels: where branches stand that hold them, and may not be taken.
  """

  closed_jaxpr: _eqns.ClosedJaxpr
  tagged_values: list[TaggedValue]
  unreached_labels: list[str]
  cond_labels: list[str]


class _HarvestedEqn(NamedTuple):
  """What stands in the place of an equation, and what it returns beside."""

  eqns: list[core.JaxprEqn]
  captured_vars: Sequence[Any] = ()
  tagged_values: Sequence[TaggedValue] = ()
  unreached_labels: Sequence[str] = ()
  cond_labels: Sequence[str] = ()


def harvest_tagged_values(
  closed_jaxpr: _eqns.ClosedJaxpr,
  select_capture: SelectCaptureFn,
  is_optional: Callable[[str], bool] = lambda tag: False,
) -> HarvestedJaxpr:
  """Makes outputs of all values with a name that is looked at.

  Args:
    closed_jaxpr: the jaxpr.
    select_capture: what to return of a value with a name.
    is_optional: whether a value with a name may be missed in silence.

  Returns:
    An :class:`HarvestedJaxpr`.
  """
  return _Harvester(select_capture, is_optional).harvest_jaxpr(
    closed_jaxpr, _provenance.EqnLocation()
  )


class _Harvester:
  """Knows which jaxprs hold values with a name that is looked at."""

  def __init__(
    self, select_capture: SelectCaptureFn, is_optional: Callable[[str], bool]
  ) -> None:
    self._select_capture = select_capture
    is_captured = lambda eqn: self._get_capture(eqn) is not None
    self._captured_search = _walk.EqnSearch(is_captured, _eqns.subjaxprs)
    is_required = lambda eqn: (
      is_captured(eqn) and not is_optional(str(get_tag(eqn)))
    )
    self._required_search = _walk.EqnSearch(is_required, _eqns.subjaxprs)

  def harvest_jaxpr(
    self, closed_jaxpr: _eqns.ClosedJaxpr, location: _provenance.EqnLocation
  ) -> HarvestedJaxpr:
    """The jaxpr, which stands at this place, with its values returned."""
    jaxpr = closed_jaxpr.jaxpr
    harvested_eqns = [
      self._harvest_eqn(eqn, jaxpr, location) for eqn in jaxpr.eqns
    ]
    captured_vars = [
      value for harvested in harvested_eqns for value in harvested.captured_vars
    ]
    new_jaxpr: Any = _eqns.replace_jaxpr_fields(
      closed_jaxpr,
      eqns=[eqn for harvested in harvested_eqns for eqn in harvested.eqns],
      outvars=[*jaxpr.outvars, *captured_vars],
      # It names each result, and further ones have no names.
      debug_info=jaxpr.debug_info._replace(result_paths=None),
    )
    return HarvestedJaxpr(
      new_jaxpr,
      [
        value
        for harvested in harvested_eqns
        for value in harvested.tagged_values
      ],
      [
        label
        for harvested in harvested_eqns
        for label in harvested.unreached_labels
      ],
      [
        label for harvested in harvested_eqns for label in harvested.cond_labels
      ],
    )

  def _harvest_eqn(
    self,
    eqn: core.JaxprEqn,
    jaxpr: core.Jaxpr,
    location: _provenance.EqnLocation,
  ) -> _HarvestedEqn:
    capture = self._get_capture(eqn)
    if capture is not None:
      return _capture_eqn(eqn, capture)
    if not self._captured_search.any_inside(eqn):
      return _HarvestedEqn([eqn])
    eqn_location = location.locate(eqn, jaxpr)
    label = _provenance.format_location(
      _source_info.get_op_name(eqn), eqn_location.label
    )
    harvest_body = functools.partial(self.harvest_jaxpr, location=eqn_location)
    match _higher_order.parse_higher_order(eqn):
      case _higher_order.Call(body) if _can_add_outputs(eqn):
        return _add_outputs_to_call(eqn, harvest_body(body))
      case _higher_order.Cond(branches):
        bodies = [
          _add_cond_branch(harvest_body(branch), id(eqn), i)
          for i, branch in enumerate(branches)
        ]
        harvested_eqn = _rebuild_eqn(
          eqn, _make_cond_with_outputs(bodies), bodies
        )
        harvested_eqn = harvested_eqn and harvested_eqn._replace(
          cond_labels=[label, *harvested_eqn.cond_labels]
        )
      case _higher_order.Scan() as scan:
        bodies = [harvest_body(scan.body)]
        harvested_eqn = _rebuild_eqn(
          eqn, _make_scan_with_outputs(scan, bodies[0].closed_jaxpr), bodies
        )
      case _higher_order.ShardMap() as mapped:
        bodies = [
          _higher_order.call_in_eqn_context(
            eqn, lambda: harvest_body(mapped.body)
          )
        ]
        harvested_eqn = _rebuild_eqn(
          eqn,
          _make_shard_map_with_outputs(mapped, bodies[0].closed_jaxpr),
          bodies,
        )
      case _:
        harvested_eqn = None
    is_unreached = harvested_eqn is None and self._required_search.any_inside(
      eqn
    )
    return harvested_eqn or _HarvestedEqn(
      [eqn], unreached_labels=[label] if is_unreached else []
    )

  def _get_capture(self, eqn: core.JaxprEqn) -> Callable[[Any], Any] | None:
    tag = get_tag(eqn)
    return None if tag is None else self._select_capture(tag)


def get_tag(eqn: core.JaxprEqn) -> str | None:
  """The name that ``checkpoint_name`` gives to a value; None of all else."""
  if _source_info.get_op_name(eqn) != "name":
    return None
  params: Any = getattr(_eqns.get_hi_primitive(eqn), "params", eqn.params)
  return params["name"]


def _capture_eqn(
  eqn: core.JaxprEqn, capture: Callable[[Any], Any]
) -> _HarvestedEqn:
  def fun(x: Any) -> list[Any]:
    (out,) = _eqns.eqn_as_fun(eqn)(x)
    return [out, capture(out)]

  replacement = _eqns.trace_replacement_eqns(fun, eqn)
  # There is none if the look returns what it is given.
  eqns, captured_vars = replacement or ([eqn], eqn.outvars)
  return _HarvestedEqn(eqns, captured_vars, [TaggedValue(str(get_tag(eqn)))])


def _add_cond_branch(
  body: HarvestedJaxpr, cond_id: int, branch_index: int
) -> HarvestedJaxpr:
  """Record in which branch of a ``cond`` the tagged values are."""
  tagged_values = [
    value._replace(
      cond_branches=((cond_id, branch_index), *value.cond_branches)
    )
    for value in body.tagged_values
  ]
  return body._replace(tagged_values=tagged_values)


def _can_add_outputs(eqn: core.JaxprEqn) -> bool:
  """Whether a call returns what its jaxpr does, however much that is.

  A rule returns as much as its function, and an object of hijax what it says.
  """
  is_plain_call = _eqns.get_hi_primitive(eqn) is None
  is_plain_call = is_plain_call and _eqns.get_call_jaxpr(eqn) is not None
  return is_plain_call and _custom_derivatives.get_custom_rule(eqn) is None


def _add_outputs_to_call(
  eqn: core.JaxprEqn, body: HarvestedJaxpr
) -> _HarvestedEqn:
  """The same call, of a jaxpr with more outputs."""
  num_outs = len(eqn.outvars)
  captured_vars = [
    core.Var(v.aval) for v in body.closed_jaxpr.jaxpr.outvars[num_outs:]
  ]
  out_params = {
    k: (*v, *_make_extra_out_params(k, captured_vars))
    for k, v in eqn.params.items()
    if k.startswith("out_")
  }
  replace_jaxpr = lambda old_jaxpr: (
    body.closed_jaxpr
    if isinstance(old_jaxpr, _eqns.ClosedJaxpr)
    else body.closed_jaxpr.jaxpr
  )
  eqn = _eqns.map_subjaxprs(eqn, replace_jaxpr).replace(
    outvars=[*eqn.outvars, *captured_vars]
  )
  eqn = eqn.replace(params={**eqn.params, **out_params})
  return _HarvestedEqn(
    [eqn],
    captured_vars,
    body.tagged_values,
    body.unreached_labels,
    body.cond_labels,
  )


def _make_extra_out_params(param_name: str, captured_vars: list[Any]) -> Any:
  """What a call says of further outputs: where they are, or nothing."""
  if param_name == "out_memory_spaces":
    return [v.aval.memory_space for v in captured_vars]
  return _get_default_jit_params()[param_name] * len(captured_vars)


@functools.cache
def _get_default_jit_params() -> dict[str, Any]:
  """The parameters of a ``jit`` with one output, of which it says nothing."""
  (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(0.0).jaxpr.eqns
  return eqn.params


def _make_cond_with_outputs(
  bodies: list[HarvestedJaxpr],
) -> Callable[..., list[Any]]:
  """A ``cond`` in which each branch also returns the values of all others."""

  def fun(index: Any, *operands: Any) -> list[Any]:
    num_outs = len(bodies[0].closed_jaxpr.jaxpr.outvars) - len(
      bodies[0].tagged_values
    )
    captured_vars = [
      body.closed_jaxpr.jaxpr.outvars[num_outs:] for body in bodies
    ]

    def branch(i: int, *args: Any) -> list[Any]:
      outs = core.jaxpr_as_fun(bodies[i].closed_jaxpr)(*args)
      values = [
        [_make_placeholder(v.aval) for v in branch_vars]
        for branch_vars in captured_vars
      ]
      values[i] = outs[num_outs:]
      return [
        *outs[:num_outs],
        *(v for branch_vars in values for v in branch_vars),
      ]

    branches = [functools.partial(branch, i) for i in range(len(bodies))]
    return lax.switch(index, branches, *operands)

  return fun


def _make_placeholder(aval: Any) -> jax.Array:
  """What stands for a value that was not computed."""
  fill_value = -1 if jnp.issubdtype(aval.dtype, jnp.integer) else 0
  axes = tuple(_avals.get_aval_varying_axes(aval))
  placeholder = jnp.full(aval.shape, fill_value, aval.dtype)
  return _avals.as_varying(placeholder, axes) if axes else placeholder


def _make_scan_with_outputs(
  scan: _higher_order.Scan, body: _eqns.ClosedJaxpr
) -> Callable[..., list[Any]]:
  """A ``scan`` of another body, which returns more."""

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
  """A ``shard_map`` that also returns an array with an entry of each device."""
  num_outs = len(shard_map.out_specs)
  avals = [v.aval for v in body.jaxpr.outvars[num_outs:]]
  captured_specs = [
    jax.sharding.PartitionSpec(shard_map.list_varying_axes(aval))
    for aval in avals
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
  """The equations of a function that returns more than an equation."""
  replacement = _eqns.trace_replacement_eqns(fun, eqn)
  if replacement is None:
    return None
  eqns, captured_vars = replacement
  debug_infos = iter(body.closed_jaxpr.jaxpr.debug_info for body in bodies)

  def restore_debug_info(subjaxpr: _eqns.AnyJaxpr) -> _eqns.AnyJaxpr:
    # It says which function it was, up to which a traceback leads.
    return _eqns.replace_jaxpr_fields(subjaxpr, debug_info=next(debug_infos))

  return _HarvestedEqn(
    [
      _eqns.map_subjaxprs(new_eqn, restore_debug_info)
      if new_eqn.primitive is eqn.primitive
      else new_eqn
      for new_eqn in eqns
    ],
    captured_vars,
    [value for body in bodies for value in body.tagged_values],
    [label for body in bodies for label in body.unreached_labels],
    [label for body in bodies for label in body.cond_labels],
  )
