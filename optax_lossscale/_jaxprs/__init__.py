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
  conversion,
  equations_of,
  exported_text,
  function,
  has_effect,
  has_effects,
  held_jaxprs,
  hi_primitive,
  is_one_of,
  lowered,
  needed_equations,
  with_fields,
  with_jaxprs,
)
from optax_lossscale._jaxprs._higher_order import (
  bodies_of,
  Call,
  Cond,
  given_to_bodies,
  higher_order_of,
  HigherOrder,
  runs_its_jaxprs,
  Scan,
  ShardMap,
  where_it_runs,
  While,
)
from optax_lossscale._jaxprs._interpret import (
  as_array,
  context_here,
  interpret,
  may_change_result,
  without_donation,
)
from optax_lossscale._jaxprs._lines import (
  call_name,
  differentiates,
  function_name,
  is_rule_of_library,
  is_users,
  Line,
  name_of,
  without_source,
)
from optax_lossscale._jaxprs._operations import (
  accumulation_of,
  flops_of,
  in_dtype,
  in_float32,
  is_matrix_product,
  may_change_dtype,
  moves,
  rounds_to_own_precision,
  SPREAD,
  terms_in_sum,
)
from optax_lossscale._jaxprs._outputs import given_name, with_named_outputs
from optax_lossscale._jaxprs._places import (
  has_scope,
  marked,
  Names,
  Place,
  place_name,
  telling_names,
  with_weights,
)
from optax_lossscale._jaxprs._powers import Power, powers_of
from optax_lossscale._jaxprs._rules import (
  Change,
  is_zero,
  leaves,
  Rule,
  rule_of,
  with_rule,
)
from optax_lossscale._jaxprs._types import (
  as_varying,
  is_known,
  is_ref,
  varying,
  varying_of,
)
from optax_lossscale._jaxprs._walk import Search, Step, walk
from optax_lossscale._jaxprs._weights import (
  Known,
  NO_PATHS,
  Path,
  Paths,
  Weights,
)
