"""The one room that knows what JAX's jaxprs look like, in any version.

A jaxpr is a list of equations; an equation is a primitive with parameters, and
some parameters hold further jaxprs. JAX changes the names of parameters without
notice. So what is needed is derived from types where that is possible, what is
read by name has a fallback, and what is not understood is ``None``: the caller
then takes the equation as a whole. Nothing here raises because of a new JAX.
``tests/package/test_jax.py`` holds what is relied on, and fails first.
"""

from optax_lossscale._jaxprs._equations import (
  AnyJaxpr,
  Atom,
  called_jaxpr,
  closed,
  ClosedJaxpr,
  context_of,
  equations_of,
  exported_text,
  function,
  has_effect,
  held_jaxprs,
  hi_primitive,
  hidden_jaxprs,
  is_one_of,
  needed_equations,
  runs_once,
  with_equations,
  with_jaxprs,
)
from optax_lossscale._jaxprs._hijax import hi_scan_of, HiScan, lowered
from optax_lossscale._jaxprs._lines import (
  call_name,
  function_name,
  is_rule_of_library,
  Line,
  name_of,
  without_source,
)
from optax_lossscale._jaxprs._loops import (
  among_devices,
  Cond,
  Scan,
  scan_of,
  shard_map_of,
  ShardMap,
  While,
)
from optax_lossscale._jaxprs._parts import bodies_of, Call, Part, part_of
from optax_lossscale._jaxprs._places import (
  marked,
  Place,
  place_name,
  scopes_of,
  telling_lines,
  with_scope,
)
from optax_lossscale._jaxprs._products import flops_of, is_matrix_product
from optax_lossscale._jaxprs._zeros import for_pull_back

__all__ = [
  "AnyJaxpr",
  "Atom",
  "Call",
  "ClosedJaxpr",
  "Cond",
  "HiScan",
  "Line",
  "Part",
  "Place",
  "Scan",
  "ShardMap",
  "While",
  "among_devices",
  "bodies_of",
  "call_name",
  "called_jaxpr",
  "closed",
  "context_of",
  "equations_of",
  "exported_text",
  "flops_of",
  "for_pull_back",
  "function",
  "function_name",
  "has_effect",
  "held_jaxprs",
  "hi_primitive",
  "hi_scan_of",
  "hidden_jaxprs",
  "is_matrix_product",
  "is_one_of",
  "is_rule_of_library",
  "lowered",
  "marked",
  "name_of",
  "needed_equations",
  "part_of",
  "place_name",
  "runs_once",
  "scan_of",
  "scopes_of",
  "shard_map_of",
  "telling_lines",
  "with_equations",
  "with_jaxprs",
  "with_scope",
  "without_source",
]
