"""Equations that call, repeat or choose jaxprs, and unknown equations.

JAX renames the parameters of its primitives, and has new ones. The equations
here are made by hand, as another JAX might make them. One that is not
understood has no part, and is taken as a whole, and reports say so.
"""

from helpers import parametrize_slow
import jax
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from optax_lossscale._jaxprs import _eqns, _higher_order, _primitives
from optax_lossscale.diagnostics import (
  compare_precision,
  count_flops,
  find_overflow,
)

X = np.full((4, 4), 2, np.float16)


def scan(x):
  body = lambda c, y: (c @ x, y * c.sum())
  return lax.scan(body, x, jnp.arange(3, dtype=x.dtype), reverse=True)


def while_loop(x):
  limit = x[0, 0] + 3
  body = lambda s: (s[0] + 1, s[1] @ x, s[0])
  return lax.while_loop(lambda s: s[0] < limit, body, (limit - 3, x, limit))


def cond(x):
  return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)


def call(x):
  return jax.jit(lambda x: x @ x)(x)


def shard_map(x):
  mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1])
  return jax.shard_map(jnp.square, mesh=mesh, in_specs=P(), out_specs=P())(x)


# The kind of an equation, and its other properties than the jaxprs it runs.
PARTS = {
  scan: (
    _higher_order.Scan,
    {"num_consts": 1, "num_carry": 1, "length": 3, "reverse": True},
  ),
  while_loop: (_higher_order.While, {"cond_nconsts": 1, "body_nconsts": 1}),
  cond: (_higher_order.Cond, {}),
  call: (_higher_order.Call, {}),
  shard_map: (
    _higher_order.ShardMap,
    {"in_specs": (P(),), "out_specs": (P(),)},
  ),
}
# The params that distinguish loops. All others may have any name.
TOLD = ("body_jaxpr", "branches", "cond_jaxpr", "jaxpr", "length", "reverse")


def get_eqn(fun):
  eqns = jax.make_jaxpr(fun)(X).jaxpr.eqns
  for eqn in eqns:
    if list(_eqns.subjaxprs(eqn)):
      return eqn
  pytest.skip("with a flag of hijax, this JAX has no such equation")


def rename_params(eqn, kept=TOLD):
  params = {k if k in kept else f"odd_{k}": v for k, v in eqn.params.items()}
  return eqn.replace(params=params)


def with_params(eqn, **params):
  return eqn.replace(params={**eqn.params, **params})


@pytest.mark.parametrize("fun", PARTS, ids=lambda fun: fun.__name__)
def test_a_higher_order_equation_is_parsed(fun):
  kind, known = PARTS[fun]
  eqn = get_eqn(fun)
  part = _higher_order.parse_higher_order(eqn)
  assert type(part) is kind
  assert {name: getattr(part, name) for name in known} == known
  held = [closed.jaxpr for closed in _eqns.subjaxprs(eqn)]
  bodies = [closed.jaxpr for closed in _higher_order.get_bodies(part)]
  assert sorted(map(id, bodies)) == sorted(map(id, held))
  if fun is not shard_map:
    assert _higher_order.parse_higher_order(rename_params(eqn)) == part


def drop_input(eqn):
  return eqn.replace(invars=eqn.invars[:-1])


def add_jaxpr(eqn):
  return with_params(eqn, other=jax.make_jaxpr(jnp.sin)(X))


def replace_condition(eqn):
  condition = eqn.params["cond_jaxpr"]
  jaxpr = condition.jaxpr.replace(outvars=2 * condition.jaxpr.outvars)
  return with_params(eqn, cond_jaxpr=core.ClosedJaxpr(jaxpr, condition.consts))


def replace_body(eqn):
  body = eqn.params["body_jaxpr"]
  jaxpr = body.jaxpr.replace(invars=body.jaxpr.invars[:2])
  return with_params(eqn, body_jaxpr=core.ClosedJaxpr(jaxpr, body.consts))


def set_negative_consts(eqn):
  condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
  first, second, *rest = condition.jaxpr.invars
  invars = [first, second, *body.jaxpr.invars]
  return with_params(
    eqn,
    cond_jaxpr=condition.jaxpr.replace(invars=rest),
    body_jaxpr=body.jaxpr.replace(invars=invars),
  )


def stacks(x):
  return lax.scan(lambda c, row: (c + 1, row + 1), x, x)


def returns_a_row(eqn):
  """Its second output has the shape of a carry, of which it has no input."""
  (body,) = _eqns.subjaxprs(eqn)
  return eqn.replace(outvars=[eqn.outvars[0], body.jaxpr.outvars[1]])


ODD = [
  (scan, drop_input),
  (scan, add_jaxpr),
  (scan, lambda eqn: rename_params(eqn, kept=())),
  (scan, lambda eqn: with_params(eqn, length=4)),
  (scan, lambda eqn: with_params(eqn, reverse="no")),
  (scan, lambda eqn: eqn.replace(outvars=eqn.outvars[1:])),
  (scan, lambda eqn: eqn.replace(outvars=[eqn.outvars[0]] * 2)),
  (stacks, returns_a_row),
  (while_loop, drop_input),
  (while_loop, set_negative_consts),
  (while_loop, replace_condition),
  (while_loop, replace_body),
  (while_loop, lambda eqn: rename_params(eqn, kept=("body_jaxpr",))),
  (while_loop, lambda eqn: rename_params(eqn, kept=("cond_jaxpr",))),
  (cond, drop_input),
  (cond, lambda eqn: eqn.replace(outvars=2 * eqn.outvars)),
  (cond, lambda eqn: with_params(eqn, branches=())),
  (call, drop_input),
  (call, add_jaxpr),
  (call, lambda eqn: eqn.replace(params={})),
  (shard_map, drop_input),
  (shard_map, add_jaxpr),
  (shard_map, rename_params),
  (call, lambda eqn: eqn.replace(primitive=core.Primitive("mystery"))),
]


@pytest.mark.parametrize(("fun", "change"), ODD)
def test_an_inconsistent_equation_is_not_parsed(fun, change):
  assert _higher_order.parse_higher_order(change(get_eqn(fun))) is None


def make_hidden_call(name, jaxpr=None):
  """An object that an equation of hijax calls, which may hold a jaxpr."""
  thing = type(name, (), {"params": {}})()
  if jaxpr is not None:
    closed = jax.make_jaxpr(jaxpr)(*[X] * jaxpr.__code__.co_argcount)
    thing.params = {"jaxpr": closed}
  return thing


def test_a_hijax_primitive_that_cannot_be_traced_is_not_parsed():
  def fails(x):
    raise ValueError("not traced")

  primitive = core.Primitive("call_hi_primitive")
  primitive.def_abstract_eval(fails)
  (eqn,) = jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns
  odd = eqn.replace(
    primitive=primitive, params={"_prim": make_hidden_call("Odd")}
  )
  assert _higher_order.parse_higher_order(odd) is None


@parametrize_slow("fun", [cond, call], [scan, while_loop, cond, call])
def test_an_unknown_equation_is_treated_as_a_whole(fun, monkeypatch):
  held = [e for e in jax.make_jaxpr(fun)(X).eqns if [*_eqns.subjaxprs(e)]]
  if not held:
    pytest.skip("with a flag of hijax, this JAX has no such equation")
  name = held[0].primitive.name
  monkeypatch.setattr(_higher_order, "parse_higher_order", lambda eqn: None)
  matrices = lambda x: [y for y in jax.tree.leaves(fun(x)) if y.ndim == 2]
  hit = find_overflow(matrices, X * 300)
  assert hit.eqn_path == name
  report = count_flops(fun, X)
  assert report.total_flops == 128
  assert f"{name} at test_higher_order.py:" in " ".join(report.limitations)
  known = lambda x: (fun(x), x @ x)
  report = compare_precision(known, X / 3, progress=False)
  (note,) = report.limitations
  assert note.startswith(f"Not analyzed: {name} at test_higher_order.py:")


def make_unknown_primitive(name, fun, **params):
  """A primitive that only we know, which computes a function."""
  primitive = core.Primitive(name)
  primitive.def_impl(lambda *xs, **_: fun(*xs))
  primitive.def_abstract_eval(
    lambda *avals, **_: jax.core.ShapedArray(avals[0].shape, avals[0].dtype)
  )
  lower = mlir.lower_fun(lambda *xs, **_: fun(*xs), multiple_results=False)
  mlir.register_lowering(primitive, lower)
  return lambda *xs: primitive.bind(*xs, **params)


def test_a_jaxpr_with_unknown_constants_is_walked_through():
  """A solver closes over what was traced around it."""
  square = lambda x: x @ x
  found = []

  def fun(x):
    factor = x[0, 0]
    closed = jax.make_jaxpr(lambda y: y @ y * factor)(x)
    found.append(closed)
    params = {"closed": closed, "open": closed.jaxpr}
    return make_unknown_primitive("solve", square, **params)(x)

  report = count_flops(fun, X)
  (closed,) = found[:1]
  assert any(isinstance(c, jax.core.Tracer) for c in closed.consts)
  assert report.total_flops == 2 * 128
  assert find_overflow(fun, X) is None
  assert find_overflow(fun, X * 300).eqn_path == "solve"


COUNTED = "its body is counted once"


@pytest.mark.parametrize(
  "kind, jaxpr, name, note",
  [
    ("Odd", None, "Odd", "its FLOPs are not counted"),
    ("Odd", lambda x: x @ x, "Odd", COUNTED),
    # Its jaxpr is that of another function, or of another type.
    ("RematTraced", lambda x, y: x @ y, "checkpoint", COUNTED),
    (
      "CustomVJPTraced",
      lambda x: jnp.float32(x) @ x,
      "custom_vjp_call",
      COUNTED,
    ),
  ],
)
def test_an_inconsistent_hijax_primitive_is_reported(kind, jaxpr, name, note):
  thing = make_hidden_call(kind, jaxpr)
  fun = make_unknown_primitive(
    "call_hi_primitive", lambda x: x @ x, _prim=thing
  )
  assert find_overflow(fun, X * 300).eqn_path == name
  assert find_overflow(fun, X) is None
  report = count_flops(fun, X)
  assert report.total_flops == (128 if jaxpr else 0)
  assert report.limitations[0].startswith(f"{name} at test_higher_order.py:")
  assert report.limitations[0].endswith(f": {note}")


def is_hijax_available():
  fun = lambda x: jnp.ldexp(x, 3)
  return "Ldexp" in str(jax.make_jaxpr(fun)(jnp.ones(2)))


needs_hijax = pytest.mark.skipif(
  not is_hijax_available(), reason="this JAX has no hijax yet"
)


@needs_hijax
def test_a_primitive_of_hijax_is_entered_and_has_its_own_name():
  hit = find_overflow(lambda x: jnp.ldexp(x, 10), np.float32([1e38]))
  assert hit.eqn_path.startswith("jit(ldexp)/Ldexp/")


@needs_hijax
@pytest.mark.slow
def test_a_solver_of_hijax_is_entered():
  def root(a):
    solve = lambda f, x: jnp.exp(a @ x * 100)
    tangent_solve = lambda g, y: y / g(jnp.ones_like(y))
    f = lambda x: a @ x - 1
    return lax.custom_root(f, jnp.ones(4), solve, tangent_solve)

  a = jnp.eye(4)
  report = count_flops(root, a)
  assert (report.total_flops, report.limitations) == (32, ())
  assert "CustomRoot/" in find_overflow(root, a).eqn_path


def test_a_matmul_whose_flops_are_unknown_is_reported(monkeypatch):
  fun = lambda x: x @ x
  (eqn,) = jax.make_jaxpr(fun)(X).eqns
  assert (
    _primitives.count_eqn_flops(eqn.replace(params={"numbers": None})) is None
  )
  only = {"dimension_numbers": eqn.params["dimension_numbers"]}
  eqn = eqn.replace(params=only)
  assert _primitives.count_eqn_flops(eqn) == 128
  monkeypatch.setattr(_primitives, "count_eqn_flops", lambda eqn: None)
  report = count_flops(fun, X)
  assert report.total_flops == 0
  (note,) = report.limitations
  assert note.startswith("dot_general at test_higher_order.py:")
  assert note.endswith(": its FLOPs are not counted")
