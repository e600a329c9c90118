"""The internals of JAX that the package relies on, release by release.

This fails first, and in a second, if a new JAX describes a program in another
way. `python tests/package/test_jax.py` records what the JAX of its environment
does, in `jax_insides.json` in this folder. Look at the difference, mend
`optax_lossscale/_jaxprs`, and commit both.
"""

import functools
import gc
import json
import pathlib
import re
import types

from helpers import hijax, sharding
import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from optax_lossscale._jaxprs import (
  _custom_derivatives,
  _eqns,
  _higher_order,
  _primitives,
  _weights,
)
from optax_lossscale.diagnostics import _dtype_limits
from optax_lossscale.diagnostics._precision import (
  _layers,
  _reference_program,
)

RECORD = pathlib.Path(__file__).with_name("jax_insides.json")
X = jnp.ones((2, 2))


def make_rule(make):
  fun = make(lambda x: x @ X)
  if make is jax.custom_jvp:
    fun.defjvp(lambda x, t: (x[0] @ X, t[0] @ X))
  else:
    fun.defvjp(lambda x: (x @ X, None), lambda kept, g: (g,))
  return fun


def shard_map_fun(fun):
  mesh = jax.make_mesh((1,), ("i",))
  return jax.shard_map(fun, mesh=mesh, in_specs=P(), out_specs=P("i"))


# A program for each primitive of which a parameter is read, or replaced.
PROGRAMS = {
  "all_to_all": shard_map_fun(lambda x: lax.all_to_all(x[:1], "i", 0, 0)),
  "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
  "conv_general_dilated": lambda x: lax.conv(
    x[None, None], x[None, None], (1, 1), "SAME"
  ),
  "convert_element_type": jnp.int32,
  "cumsum": lambda x: lax.cumsum(x),
  "custom_jvp_call": make_rule(jax.custom_jvp),
  "custom_lin": lambda x: jax.jvp(make_rule(jax.custom_vjp), (x,), (x,))[1],
  "custom_vjp_call": make_rule(jax.custom_vjp),
  "dot_general": lambda x: x @ x,
  "jit": jax.jit(jnp.sin),
  "ppermute": shard_map_fun(lambda x: lax.ppermute(x, "i", [(0, 0)])),
  "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.array([2])),
  "reduce_sum": lambda x: jnp.sum(x),
  "reduce_window_sum": lambda x: lax.reduce_window(
    x, 0.0, lax.add, (1, 1), (1, 1), "SAME"
  ),
  "remat2": jax.checkpoint(lambda x: jnp.sin(x)),
  "scan": lambda x: lax.scan(lambda c, s: (c @ x, s), x, x),
  "shard_map": shard_map_fun(jnp.sin),
  "slice": lambda x: x[:1],
  "while": lambda x: lax.while_loop(lambda c: c[0, 0] < 0, lambda c: c @ x, x),
}

# What flags make objects of hijax of, where there are such flags: what is read
# are attributes of the object. Created for each, since what was traced before
# has the old form.
FLAGS = {
  "jax_custom_jvp3": ("CustomJVPTraced", lambda: make_rule(jax.custom_jvp)),
  "jax_custom_vjp3": ("CustomVJPTraced", lambda: make_rule(jax.custom_vjp)),
  "jax_remat3": ("RematTraced", lambda: jax.checkpoint(lambda x: jnp.sin(x))),
  "jax_scan3": (
    "Scan3",
    lambda: lambda x: lax.scan(lambda c, s: (c @ x, s), x, x),
  ),
}


def list_eqns(fun):
  def within(jaxpr):
    for eqn in jaxpr.eqns:
      yield eqn
      for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if isinstance(inner, core.Jaxpr):
          yield from within(inner)

  return list(within(jax.make_jaxpr(fun)(X).jaxpr))


def read_internals():
  """The parameters of primitives, and the attributes of objects of hijax."""
  found = {}
  for name, fun in PROGRAMS.items():
    eqns = [e for e in list_eqns(fun) if e.primitive.name == name]
    (params,) = {tuple(sorted(e.params)) for e in eqns}
    found[name] = list(params)
  for flag, (kind, make) in FLAGS.items():
    if hasattr(jax.config, flag):
      with hijax.enable_flags(flag):
        objects = [e.params.get("_prim") for e in list_eqns(make())]
      (hi_object,) = [x for x in objects if type(x).__name__ == kind]
      found[kind] = sorted(hi_object.params)
  return found


@functools.cache
def load_recorded():
  """The last release that was recorded, up to this one, and what it had."""
  releases = json.loads(RECORD.read_text())
  this = parse_version(jax.__version__)
  known = [r for r in releases if parse_version(r) <= this]
  last = max(known, key=parse_version)
  return last, releases[last]


def parse_version(version):
  return [int(n) for n in re.findall(r"\d+", version)[:3]]


def test_the_parameters_of_primitives_are_those_that_were_recorded():
  release, before = load_recorded()
  after = read_internals()
  changes = {}
  for name in {*before, *after}:
    old, new = ({*found.get(name, ())} for found in (before, after))
    if old != new:
      changes[name] = {"gone": sorted(old - new), "new": sorted(new - old)}
  assert not changes, f"JAX {jax.__version__} after {release}"


def test_equations_jaxprs_and_types_have_the_attributes_that_are_read():
  closed = jax.make_jaxpr(jax.jit(lambda x: x @ x))(X)
  (eqn,) = closed.jaxpr.eqns
  (inner,) = eqn.params["jaxpr"].jaxpr.eqns
  names = "invars outvars primitive params effects source_info ctx replace"
  check(inner, names)
  check(closed.jaxpr, "invars outvars constvars eqns debug_info replace")
  check(inner.ctx, "manager")
  check(inner.source_info.name_stack, "extend")
  frame = inner.source_info.traceback.frames[0]
  check(frame, "file_name function_name line_num function_start_line")
  check(closed.jaxpr.debug_info, "func_filename func_lineno")
  check(inner.invars[0].aval, "shape dtype weak_type size update")


def test_rules_are_stored_in_objects_that_can_be_wrapped():
  for kind in ("custom_jvp_call", "custom_vjp_call", "custom_lin"):
    (eqn,) = [e for e in list_eqns(PROGRAMS[kind]) if e.primitive.name == kind]
    for name in {"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"} & {*eqn.params}:
      check(eqn.params[name], "call_wrapped debug_info")
  traced = jax.jit(lambda x: x).trace(X)
  # In JAX 0.8.0, which has no such objects, one of these has another name.
  names = "jaxpr fun_name in_tree"
  names += " out_tree" * (parse_version(jax.__version__) > [0, 8, 0])
  check(traced, names)


def check(thing, names):
  missing = [name for name in names.split() if not hasattr(thing, name)]
  assert not missing


def test_types_contain_the_varying_axes():
  seen = []

  def local(x):
    both = x, lax.psum(x, "i")
    seen.extend(map(_primitives.get_varying_axes, both))
    return both[1]

  mesh = sharding.make_mesh((2,), ("i",))
  fun = jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P())
  jax.make_jaxpr(fun)(jnp.ones(2))
  assert seen == [frozenset({"i"}), frozenset()]


def test_a_type_of_another_jax_raises_an_error_that_requests_a_report():
  message = f"{re.escape(jax.__version__)}.*Please report it"
  for kind in (types.SimpleNamespace(), types.SimpleNamespace(vma=None)):
    with pytest.raises(RuntimeError, match=message):
      _primitives.get_aval_varying_axes(kind)


# Names in our tables that not all supported versions have: the first and the
# last minor version of JAX with them.
NOT_EVERYWHERE = {
  "call": ((0, 8), (0, 10)),
  "call_hi_primitive": ((0, 8), None),
  "closed_call": ((0, 8), (0, 10)),
  "eval_jaxpr": ((0, 8), None),
  "log2": ((0, 11), None),
  "stack": ((0, 10), None),
  "unstack": ((0, 10), None),
  "xla_metadata_call": ((0, 11), None),
}


def names_in_tables():
  return {
    *_primitives.PERMUTING_COLLECTIVES,
    *_primitives.WEIGHT_PRESERVING,
    *_higher_order._PARSERS,
    *_custom_derivatives._RULE_TRANSFORMS,
    *_weights._LINEAR_SUMS,
    *_weights._CONCATENATIONS,
    *_eqns._CALL_PRIMITIVES,
    *_eqns._CANONICAL_NAMES.values(),
    *_primitives._FLOP_COUNTERS,
    *_dtype_limits.OVERFLOW_THRESHOLDS,
    *_layers._EXACT,
    *_reference_program._OPAQUE,
    *_reference_program._REDUCERS,
    *_reference_program._ACCUMULATING,
    "remat2",
  } - {"checkpoint"}  # Reports call the primitive so.


def test_every_primitive_in_a_table_exists():
  import jax.experimental.compute_on
  import jax.experimental.xla_metadata

  existing = {x.name for x in gc.get_objects() if isinstance(x, core.Primitive)}
  this = tuple(parse_version(jax.__version__)[:2])
  for name in names_in_tables():
    first, last = NOT_EVERYWHERE.get(name, ((0, 8), None))
    is_there = first <= this and (last is None or this <= last)
    assert (name in existing) >= is_there, name


def test_the_classes_of_hijax_are_known():
  kinds = {kind for kind, _ in FLAGS.values()}
  assert set(_eqns._CANONICAL_NAMES) == {*kinds, "CheckpointName", "remat2"}
  # A scan is taken as a whole, and a name holds nothing.
  known = {*_custom_derivatives._RULE_TRANSFORMS, "checkpoint", "name", "scan"}
  assert set(_eqns._CANONICAL_NAMES.values()) <= known


def record():
  releases = json.loads(RECORD.read_text())
  version = ".".join(map(str, parse_version(jax.__version__)))
  releases[version] = read_internals()
  releases = dict(sorted(releases.items(), key=lambda r: parse_version(r[0])))
  RECORD.write_text(json.dumps(releases, indent=1) + "\n")


if __name__ == "__main__":
  record()
