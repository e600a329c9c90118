"""The side effects of a program that a report runs several times.

* A *print* calls back to Python, and returns nothing. It must appear only once,
  so all runs but the first leave it out.
* A Ref belongs to the program, since the tracer copies the Refs among its
  arguments. So each run may read and write it.
* A pure callback has no effect, and may be called again.
* All other effects must happen only once, such as an ``io_callback`` whose
  result the program uses.
"""

import re
from typing import Any

from jax.extend import core

from optax_lossscale._jaxprs import _eqns, _higher_order, _walk

_PRINT_RE = re.compile("callback|print")
# A collective has the last of these effects only because it needs the axis of a
# mesh.
_REPEATABLE = {
  "AccumEffect", "InternalMutableArrayEffect", "ReadEffect", "WriteEffect",
  "NamedAxisEffect",
}  # fmt: skip


def is_print(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation calls back to Python and returns nothing."""
  return not eqn.outvars and bool(_PRINT_RE.search(eqn.primitive.name))


def make_print_search() -> _walk.EqnSearch:
  """Return a search for prints in equations and their sub-jaxprs."""
  return _walk.EqnSearch(is_print, _eqns.subjaxprs)


def must_run_once(jaxpr: Any) -> bool:
  """Return whether a jaxpr has an effect that must happen only once.

  A print in an equation that ``_state_threading`` doesn't enter is such an
  effect, too, since it can't be left out.
  """
  return any(map(_must_run_once, jaxpr.eqns))


def _must_run_once(eqn: core.JaxprEqn) -> bool:
  effects = {type(effect).__name__ for effect in eqn.effects}
  if is_print(eqn) or not effects - _REPEATABLE:
    return False
  hop = _higher_order.parse_higher_order(eqn)
  return hop is None or any(
    must_run_once(body.jaxpr) for body in _higher_order.get_bodies(hop)
  )
