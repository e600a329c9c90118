"""The matmuls that `autocast` casts in a program, by location."""

import functools
from typing import NamedTuple

from jax.extend import core
import numpy as np

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
  _source_info,
  _walk,
)


class MatmulSite(NamedTuple):
  """Matmuls of one primitive at one location, reported as one row.

  Attributes:
    primitive: JAX's name of the operation.
    names: the names of the location.
    backward: whether it belongs to a backward pass.
    dtypes: the dtypes that `autocast` chose.
  """

  primitive: str
  names: _provenance.EqnNames
  backward: bool
  dtypes: _provenance.MatmulDtypes


class MatmulTable:
  """The matmuls that `autocast` casts in a program, by location.

  They have the tag of `autocast` in their name stack, which every
  transformation of JAX keeps. So `autocast` alone decides which matmuls are
  cast.

  Attributes:
    sites: all sites, in the order of the program.
    names: the shortest unique label of each site.
    source_lines: a source line for each site, which distinguishes sites with
      similar names.
    dtypes: the half-precision dtypes of all sites: usually one.
    unanalyzed_names: the names of eqns with tagged matmuls inside that cannot
      be entered.
    get_higher_order: parses an eqn that calls, repeats or selects jaxprs;
      returns None for others and unknown ones.
    has_tagged_eqn: returns whether the jaxprs inside an eqn have tagged eqns.
  """

  def __init__(self, closed_jaxpr: _eqns.ClosedJaxpr) -> None:
    is_tagged = functools.partial(
      is_autocast_eqn, parent_location=_provenance.EqnLocation()
    )
    self.has_tagged_eqn = _walk.EqnSearch(is_tagged, _eqns.subjaxprs).any_inside
    self.get_higher_order = functools.cache(_higher_order.parse_higher_order)
    self.unanalyzed_names: list[str] = []
    self._index_by_site: dict[MatmulSite, int] = {}
    # Only live eqns: a dead matmul would have an effect of zero, and cost a
    # run.
    for visit in _walk.walk(closed_jaxpr, self._get_subjaxprs, only_live=True):
      parent_location = (
        visit.parent.location if visit.parent else _provenance.EqnLocation()
      )
      if is_autocast_matmul(visit.eqn, parent_location):
        self._index_by_site.setdefault(
          _as_site(visit.eqn, visit.location), len(self._index_by_site)
        )
      elif (
        self.has_tagged_eqn(visit.eqn)
        and self.get_higher_order(visit.eqn) is None
      ):
        name = _source_info.get_primitive_name(visit.eqn)
        self.unanalyzed_names.append(
          _provenance.format_location(name, visit.location.label)
        )
    self.sites = list(self._index_by_site)
    names_and_lines = _provenance.make_unique_labels(
      [(x.names, x.backward) for x in self.sites]
    )
    self.names = [name for name, _ in names_and_lines]
    self.source_lines = [source_line for _, source_line in names_and_lines]
    self.dtypes = {
      dtype
      for site in self.sites
      for dtype in site.dtypes
      if dtype != np.float32
    }

  def get_site_index(
    self, eqn: core.JaxprEqn, location: _provenance.EqnLocation
  ) -> int | None:
    """Return the index of a matmul's site; None if no output depends on it."""
    return self._index_by_site.get(_as_site(eqn, location))

  def group_by_name(self) -> list[list[int]]:
    """Return the indices of the sites of each layer, which share a name."""
    indices_by_name: dict[str, list[int]] = {}
    for i, name in enumerate(self.names):
      indices_by_name.setdefault(name, []).append(i)
    return list(indices_by_name.values())

  def _get_subjaxprs(self, eqn: core.JaxprEqn) -> list[_eqns.ClosedJaxpr]:
    call = self.get_higher_order(eqn) if self.has_tagged_eqn(eqn) else None
    return _higher_order.get_bodies(call) if call else []


def is_autocast_matmul(
  eqn: core.JaxprEqn, parent_location: _provenance.EqnLocation
) -> bool:
  """Return whether this is a matmul that `autocast` casts."""
  return _primitives.is_matmul(eqn) and is_autocast_eqn(eqn, parent_location)


def is_autocast_eqn(
  eqn: core.JaxprEqn, parent_location: _provenance.EqnLocation
) -> bool:
  """Return whether the eqn, or a call around it, has the tag of `autocast`."""
  return parent_location.push_scope(eqn).matmul_dtypes is not None


def _as_site(
  eqn: core.JaxprEqn, location: _provenance.EqnLocation
) -> MatmulSite:
  name, dtypes = _source_info.get_primitive_name(eqn), location.matmul_dtypes
  assert dtypes is not None  # Only matmuls with a tag have a site.
  return MatmulSite(name, location.names, location.is_backward, dtypes)
