"""What an equation calls, repeats or chooses, and what nobody understands.

JAX renames the parameters of its primitives, and has new ones. The equations
here are made by hand, as another JAX might make them. One that is not
understood has no part, and is taken as a whole.
"""

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import find_overflow, precision_report

X = jnp.full((4, 4), 2, jnp.float16)


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


# What an equation is, and what is known beside the jaxprs that it runs.
PARTS = {
  scan: (_jaxprs.Scan, {"consts": 1, "carry": 1, "length": 3, "reverse": True}),
  while_loop: (_jaxprs.While, {"condition_consts": 1, "body_consts": 1}),
  cond: (_jaxprs.Cond, {}),
  call: (_jaxprs.Call, {}),
  shard_map: (_jaxprs.ShardMap, {"in_specs": (P(),), "out_specs": (P(),)}),
}
# What tells a loop from another. All else may have any name.
TOLD = ("body_jaxpr", "branches", "cond_jaxpr", "jaxpr", "length", "reverse")


def equation_of(fun):
  eqns = jax.make_jaxpr(fun)(X).jaxpr.eqns
  for eqn in eqns:
    if list(_jaxprs.held_jaxprs(eqn)):
      return eqn
  pytest.skip("with a flag of hijax, this JAX has no such equation")


def renamed(eqn, kept=TOLD):
  params = {k if k in kept else f"odd_{k}": v for k, v in eqn.params.items()}
  return eqn.replace(params=params)


def with_params(eqn, **params):
  return eqn.replace(params={**eqn.params, **params})


@pytest.mark.parametrize("fun", PARTS, ids=lambda fun: fun.__name__)
def test_an_equation_is_taken_apart(fun):
  kind, known = PARTS[fun]
  eqn = equation_of(fun)
  part = _jaxprs.higher_order_of(eqn)
  assert type(part) is kind
  assert {name: getattr(part, name) for name in known} == known
  held = [closed.jaxpr for closed in _jaxprs.held_jaxprs(eqn)]
  bodies = [closed.jaxpr for closed in _jaxprs.bodies_of(part)]
  assert sorted(map(id, bodies)) == sorted(map(id, held))
  if fun is not shard_map:
    assert _jaxprs.higher_order_of(renamed(eqn)) == part


def test_the_inputs_of_loops_have_parts():
  part = _jaxprs.higher_order_of(equation_of(scan))
  assert part.split("wcs") == ("w", "c", "s")
  part = _jaxprs.higher_order_of(equation_of(while_loop))
  assert part.split("lwabc") == ("l", "w", "abc")


def fewer_inputs(eqn):
  return eqn.replace(invars=eqn.invars[:-1])


def two_jaxprs(eqn):
  return with_params(eqn, other=jax.make_jaxpr(jnp.sin)(X))


def another_condition(eqn):
  condition = eqn.params["cond_jaxpr"]
  jaxpr = condition.jaxpr.replace(outvars=2 * condition.jaxpr.outvars)
  return with_params(eqn, cond_jaxpr=core.ClosedJaxpr(jaxpr, condition.consts))


def another_body(eqn):
  body = eqn.params["body_jaxpr"]
  jaxpr = body.jaxpr.replace(invars=body.jaxpr.invars[:2])
  return with_params(eqn, body_jaxpr=core.ClosedJaxpr(jaxpr, body.consts))


def fewer_constants_than_none(eqn):
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
  (body,) = _jaxprs.held_jaxprs(eqn)
  return eqn.replace(outvars=[eqn.outvars[0], body.jaxpr.outvars[1]])


ODD = [
  (scan, fewer_inputs),
  (scan, two_jaxprs),
  (scan, lambda eqn: renamed(eqn, kept=())),
  (scan, lambda eqn: with_params(eqn, length=4)),
  (scan, lambda eqn: with_params(eqn, reverse="no")),
  (scan, lambda eqn: eqn.replace(outvars=eqn.outvars[1:])),
  (scan, lambda eqn: eqn.replace(outvars=[eqn.outvars[0]] * 2)),
  (stacks, returns_a_row),
  (while_loop, fewer_inputs),
  (while_loop, fewer_constants_than_none),
  (while_loop, another_condition),
  (while_loop, another_body),
  (while_loop, lambda eqn: renamed(eqn, kept=("body_jaxpr",))),
  (while_loop, lambda eqn: renamed(eqn, kept=("cond_jaxpr",))),
  (cond, fewer_inputs),
  (cond, lambda eqn: eqn.replace(outvars=2 * eqn.outvars)),
  (cond, lambda eqn: with_params(eqn, branches=())),
  (call, fewer_inputs),
  (call, two_jaxprs),
  (call, lambda eqn: eqn.replace(params={})),
  (shard_map, fewer_inputs),
  (shard_map, two_jaxprs),
  (shard_map, renamed),
  (call, lambda eqn: eqn.replace(primitive=core.Primitive("mystery"))),
]


@pytest.mark.parametrize(("fun", "change"), ODD)
def test_an_equation_that_does_not_add_up_has_no_part(fun, change):
  assert _jaxprs.higher_order_of(change(equation_of(fun))) is None


def hidden(name, jaxpr=None):
  """An equation of hijax: the object that it calls holds this."""
  kind = type(name, (), {})()
  if jaxpr is not None:
    kind.jaxpr = jax.make_jaxpr(jaxpr)(*[X] * jaxpr.__code__.co_argcount)
  primitive = core.Primitive("call_hi_primitive")
  primitive.def_abstract_eval(lambda *avals, **_: avals[0])
  eqn = jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns[0]
  return eqn.replace(primitive=primitive, params={"_prim": kind})


@pytest.mark.parametrize(
  "odd",
  [
    lambda: hidden("Odd"),
    lambda: hidden("Odd", lambda x: x @ x),
    # Its jaxpr is that of another function, or of another type.
    lambda: hidden("RematTraced", lambda x, y: x @ y),
    lambda: hidden("CustomVJPTraced", lambda x: jnp.float32(x) @ x),
  ],
)
def test_an_object_of_hijax_that_does_not_add_up_has_no_part(odd):
  assert _jaxprs.higher_order_of(odd()) is None


def test_an_object_of_hijax_is_taken_apart():
  for name in "RematTraced", "CustomVJPTraced", "CustomJVPTraced":
    eqn = hidden(name, lambda x: x @ x)
    (body,) = _jaxprs.held_jaxprs(eqn)
    called = _jaxprs.higher_order_of(eqn)
    assert isinstance(called, _jaxprs.Call)
    assert called.body.jaxpr is body.jaxpr


def test_an_object_of_hijax_that_nobody_knows_is_what_it_lowers_to():
  solve = lambda f, x: x - f(x)
  tangent_solve = lambda g, y: y / g(jnp.ones_like(y))
  root = lambda x: lax.custom_root(lambda y: y - x, x, solve, tangent_solve)
  eqns = [
    eqn
    for eqn in jax.make_jaxpr(root)(X).jaxpr.eqns
    if _jaxprs.hi_primitive(eqn) is not None
  ]
  if not eqns:
    pytest.skip("this JAX has no hijax yet")
  (called,) = map(_jaxprs.higher_order_of, eqns)
  assert isinstance(called, _jaxprs.Call)
  assert not any(map(_jaxprs.hi_primitive, called.body.jaxpr.eqns))


@pytest.mark.parametrize("fun", [scan, while_loop, cond, call])
def test_what_is_not_understood_is_taken_as_a_whole(fun, monkeypatch):
  held = [e for e in jax.make_jaxpr(fun)(X).eqns if [*_jaxprs.held_jaxprs(e)]]
  if not held:
    pytest.skip("with a flag of hijax, this JAX has no such equation")
  name = held[0].primitive.name
  monkeypatch.setattr(_jaxprs, "higher_order_of", lambda eqn: None)
  matrices = lambda x: [y for y in jax.tree.leaves(fun(x)) if y.ndim == 2]
  hit = find_overflow(matrices, X * 300)
  assert hit.path == name
  report = precision_report(fun, X)
  assert report.total_flops == 128
  told = f"{name}, of which what is inside is counted once"
  assert any(note.startswith(told) for note in report.notes)


def test_what_leads_to_no_output_that_is_used_is_not_interpreted():
  closed = jax.make_jaxpr(lambda x: (x + 1, 2 * x, 3.0))(X)
  seen, numbers = [], []

  def step(eqn, inputs):
    seen.append(eqn.primitive.name)
    return _jaxprs.function(eqn)(*inputs)

  def written(value, atom, eqn):
    numbers.append((float(value), eqn and eqn.primitive.name))
    return value

  used = [False, True, True]
  outs = _jaxprs.interpret(closed, [X], step, written=written, used=used)
  assert seen == ["mul"]
  assert outs[0] is None and (outs[1] == 2 * X).all() and outs[2] == 3
  assert numbers == [(2, "mul"), (3, None)]
