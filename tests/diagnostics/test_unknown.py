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
import numpy as np
import pytest

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import find_overflow, precision_report

X = jnp.full((4, 4), 2, jnp.float16)


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


class RematTraced:
  """One whose jaxpr is that of another function."""

  def __init__(self):
    self.jaxpr = jax.make_jaxpr(lambda x, y: x @ y)(X, X)


@pytest.mark.parametrize(
  "kind, name, flops, note",
  [
    (Odd, "Odd", 0, "Odd, of which nothing is known"),
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


def test_a_product_that_nobody_can_count_is_noted(monkeypatch):
  fun = lambda x: x @ x
  (eqn,) = jax.make_jaxpr(fun)(X).eqns
  assert _jaxprs.flops_of(eqn.replace(params={"numbers": None})) is None
  only = {"dimension_numbers": eqn.params["dimension_numbers"]}
  eqn = eqn.replace(params=only)
  assert _jaxprs.flops_of(eqn) == 128
  assert _jaxprs.accumulation_of(eqn) == np.float16
  monkeypatch.setattr(_jaxprs, "flops_of", lambda eqn: None)
  report = precision_report(fun, X)
  assert report.total_flops == 0
  (note,) = report.notes
  assert note.startswith("dot_general, which is not counted, test_unknown.py:")


@pytest.mark.parametrize("name", ["reduce_sum", "cumsum", "reduce_window_sum"])
def test_a_sum_whose_axes_are_not_known_has_one_term(name):
  aval = types.SimpleNamespace(shape=(1000,), dtype=np.dtype(np.float16))
  var = types.SimpleNamespace(aval=aval)
  primitive = types.SimpleNamespace(name=name)
  eqn = types.SimpleNamespace(
    primitive=primitive, params={}, invars=[var], outvars=[var]
  )
  assert _jaxprs.terms_in_sum(eqn) == 1
