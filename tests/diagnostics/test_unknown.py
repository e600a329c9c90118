"""What a diagnosis does not know it takes as a whole, and says so.

JAX renames the parameters of its primitives, and has new ones. The equations
here are made by hand, as another JAX might make them.
"""

import types

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import find_overflow, precision_report
from optax_lossscale.diagnostics._overflow import (
  _entering,
  _marks,
  _runners,
  _stepper,
)
from optax_lossscale.diagnostics._precision import _flops, _risks, _walk

X = jnp.full((4, 4), 2, jnp.float16)


def scan(x):
  body = lambda c, y: (c @ c, y * c.sum())
  return lax.scan(body, x, jnp.arange(3, dtype=x.dtype))


def while_loop(x):
  limit = x[0, 0] + 3
  body = lambda s: (s[0] + 1, s[1] @ x)
  return lax.while_loop(lambda s: s[0] < limit, body, (x.dtype.type(0), x))


def cond(x):
  return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)


def call(x):
  return jax.jit(lambda x: x @ x)(x)


PROGRAMS = {fun.__name__: fun for fun in (scan, while_loop, cond, call)}
# What tells a loop from another. All else may have any name.
TOLD = ("body_jaxpr", "branches", "cond_jaxpr", "jaxpr", "length", "reverse")


def traced(fun):
  closed = jax.make_jaxpr(fun)(X)
  holders = [e for e in closed.jaxpr.eqns if list(_jaxprs.held_jaxprs(e))]
  if not holders:
    pytest.skip("with a flag of hijax, this JAX has no such equation")
  return closed, holders[0]


def with_equation(closed, old, new):
  """The jaxpr, with another equation in the place of one."""
  eqns = [new if eqn is old else eqn for eqn in closed.jaxpr.eqns]
  return core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


def renamed(eqn, kept=TOLD):
  params = {k if k in kept else f"odd_{k}": v for k, v in eqn.params.items()}
  return eqn.replace(params=params)


def step_in(closed, eqn, x):
  """Runs all before an equation as it is, and walks into the equation."""
  origins = _marks.Origins()
  stepper = _stepper.Stepper(origins, _runners.Runner(), _entering.how_to_enter)
  i = [e is eqn for e in closed.jaxpr.eqns].index(True)
  read = [v for v in eqn.invars if not isinstance(v, core.Literal)]
  before = closed.jaxpr.replace(eqns=closed.jaxpr.eqns[:i], outvars=read)
  known = core.jaxpr_as_fun(core.ClosedJaxpr(before, closed.consts))(x)
  found = dict(zip(read, known, strict=True))
  values = [
    _marks.Value(jnp.asarray(v.val, v.aval.dtype))
    if isinstance(v, core.Literal)
    else _marks.Value(found[v])
    for v in eqn.invars
  ]
  return stepper, values


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_is_entered_whatever_its_parameters_are_called(name):
  closed, eqn = traced(PROGRAMS[name])
  odd = renamed(eqn)
  new = with_equation(closed, eqn, odd)

  stepper, values = step_in(new, odd, X / 8)
  enter = _entering.how_to_enter(odd)
  place = _jaxprs.Place()
  outs = enter(_stepper.Entry(stepper, odd, values, place, arrays_too=True))
  expected = jax.tree.leaves(PROGRAMS[name](X / 8))
  for out, leaf in zip(outs, expected, strict=True):
    np.testing.assert_array_equal(out.array, leaf)
  steps = _walk.Walk(new).steps
  as_it_was = _walk.Walk(closed).steps
  assert _flops.products_in(steps) == _flops.products_in(as_it_was)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_is_not_understood_is_noted_and_not_entered(name):
  closed, eqn = traced(PROGRAMS[name])
  # One input is missing, so that nothing adds up.
  odd = eqn.replace(invars=eqn.invars[:-1])
  assert _entering.how_to_enter(odd) is None
  nameless = renamed(eqn, kept=())
  for other in (odd, nameless):
    steps = _walk.Walk(with_equation(closed, eqn, other)).steps
    (product,) = _flops.products_in(steps)
    assert product.times in (1, 3)
  notes = [
    step.note for step in _walk.Walk(with_equation(closed, eqn, odd)).steps
  ]
  told = f"{eqn.primitive.name}, of which what is inside is counted once"
  assert told in notes


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_is_not_understood_is_named_as_a_whole(name, monkeypatch):
  _, eqn = traced(PROGRAMS[name])
  monkeypatch.setattr(_entering, "_ENTER", ())
  hit = find_overflow(lambda x: jax.tree.leaves(PROGRAMS[name](x))[-1], X * 300)
  assert hit.path == eqn.primitive.name


def test_what_is_called_shard_map_and_has_other_parameters_is_not_entered():
  mesh = jax.make_mesh(
    (1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1]
  )
  spec = PartitionSpec("data")
  mapped = jax.shard_map(jnp.square, mesh=mesh, in_specs=spec, out_specs=spec)
  _, eqn = traced(mapped)
  assert _entering.how_to_enter(eqn) is not None
  assert _entering.how_to_enter(renamed(eqn)) is None


def unknown_primitive(name, fun, **params):
  """A primitive that only we know, which computes a function."""
  primitive = core.Primitive(name)
  primitive.def_impl(lambda *xs, **_: fun(*xs))
  primitive.def_abstract_eval(
    lambda *avals, **_: jax.core.ShapedArray(avals[0].shape, avals[0].dtype)
  )
  lower = mlir.lower_fun(lambda *xs, **_: fun(*xs), multiple_results=False)
  mlir.register_lowering(primitive, lower)
  return lambda *xs: primitive.bind(*xs, **params)


def test_an_unknown_primitive_that_holds_a_jaxpr_is_told():
  square = lambda x: x @ x
  inside = jax.make_jaxpr(square)(X)
  fun = unknown_primitive("mystery", square, inside=inside, other=object())
  hit = find_overflow(lambda x: fun(x) + 1, X * 300)
  assert hit.path == "mystery"
  assert find_overflow(lambda x: fun(x) + 1, X) is None
  report = precision_report(fun, X)
  assert report.total_flops == 128
  (note,) = report.notes
  assert note.startswith("mystery, of which what is inside is counted once")


def test_a_jaxpr_whose_constants_are_not_known_is_walked_through():
  """A solver closes over what was traced around it."""
  square = lambda x: x @ x
  found = []

  def fun(x):
    factor = x[0, 0]
    closed = jax.make_jaxpr(lambda y: y @ y * factor)(x)
    found.append(closed)
    params = {"closed": closed, "open": closed.jaxpr}
    return unknown_primitive("solve", square, **params)(x)

  report = precision_report(fun, X)
  (closed,) = found[:1]
  assert any(isinstance(c, jax.core.Tracer) for c in closed.consts)
  assert report.total_flops == 2 * 128
  assert find_overflow(fun, X) is None
  assert find_overflow(fun, X * 300).path == "solve"


class Odd:
  """A primitive of hijax that nobody knows: it holds no jaxpr."""


class Scan3:
  """One that has the name of one that is known, and nothing else of it."""


def another_scan3():
  """One whose results are no stacks of what its jaxpr returns."""
  kind = type("Scan3", (), {})()
  kind.length = 3
  kind.jaxpr = jax.make_jaxpr(lambda x: (x @ x).sum())(X)
  return kind


class RematTraced:
  """One whose jaxpr is that of another function."""

  def __init__(self):
    self.jaxpr = jax.make_jaxpr(lambda x, y: x @ y)(X, X)


@pytest.mark.parametrize(
  "kind, name, flops, note",
  [
    (Odd, "Odd", 0, "Odd, of which nothing is known"),
    (Scan3, "scan", 0, "scan, of which nothing is known"),
    (another_scan3, "scan", 128, "what is inside is counted once"),
    (RematTraced, "checkpoint", 128, "what is inside is counted once"),
  ],
)
def test_an_unknown_primitive_of_hijax_is_told(kind, name, flops, note):
  square = lambda x: x @ x
  fun = unknown_primitive("call_hi_primitive", square, _prim=kind())
  assert find_overflow(fun, X * 300).path == name
  assert find_overflow(fun, X) is None
  report = precision_report(fun, X)
  assert report.total_flops == flops
  assert note in report.notes[0]


def test_a_primitive_of_hijax_that_cannot_be_traced_is_told():
  def fails(x):
    raise ValueError("not traced")

  eqn = jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns[0]
  primitive = core.Primitive("call_hi_primitive")
  primitive.def_abstract_eval(fails)
  odd = eqn.replace(primitive=primitive, params={"_prim": Odd()})
  assert _jaxprs.lowered(odd) is None


def hijax_is_there():
  fun = lambda x: jnp.ldexp(x, 3)
  return "Ldexp" in str(jax.make_jaxpr(fun)(jnp.ones(2)))


@pytest.mark.skipif(not hijax_is_there(), reason="this JAX has no hijax yet")
def test_a_primitive_of_hijax_is_entered_and_has_its_own_name():
  x = jnp.full(2, 1e38)
  hit = find_overflow(lambda x: jnp.ldexp(x, 10), x)
  assert hit.path.startswith("jit(ldexp)/Ldexp/")

  def root(a):
    solve = lambda f, x: jnp.exp(a @ x * 100)
    tangent_solve = lambda g, y: y / g(jnp.ones_like(y))
    f = lambda x: a @ x - 1
    return lax.custom_root(f, jnp.ones(4), solve, tangent_solve)

  a = jnp.eye(4)
  report = precision_report(root, a)
  assert (report.total_flops, report.notes) == (32, ())
  assert "CustomRoot/" in find_overflow(root, a).path


def test_a_product_that_nobody_can_count_is_noted():
  fun = lambda x: x @ x
  closed = jax.make_jaxpr(fun)(X)
  (eqn,) = closed.jaxpr.eqns
  odd = eqn.replace(params={"numbers": None})
  (step,) = _walk.Walk(with_equation(closed, eqn, odd)).steps
  assert step.note == "dot_general, which is not counted"
  only = {"dimension_numbers": eqn.params["dimension_numbers"]}
  odd = eqn.replace(params=only)
  steps = _walk.Walk(with_equation(closed, eqn, odd)).steps
  (product,) = _flops.products_in(steps)
  assert (product.flops, product.accumulation) == (128, "float16")


@pytest.mark.parametrize("name", ["reduce_sum", "cumsum", "reduce_window_sum"])
def test_a_sum_whose_axes_are_not_known_is_no_risk(name):
  aval = types.SimpleNamespace(shape=(1000,), dtype=np.dtype(np.float16))
  var = types.SimpleNamespace(aval=aval)
  primitive = types.SimpleNamespace(name=name)
  eqn = types.SimpleNamespace(
    primitive=primitive, params={}, invars=[var], outvars=[var]
  )
  nothing = types.SimpleNamespace(number=lambda x: None, terms=lambda x: 1)
  step = _walk.Step(eqn, _jaxprs.Place(), nothing, 1, ())
  assert _risks.risks_of(step, aval.dtype) == []
