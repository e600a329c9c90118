"""Products that stay in float32 because their scope or line is named."""

import itertools
import random
from typing import NamedTuple
import warnings

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import _jaxprs
from optax_lossscale._jaxprs import _names, _places

W, X = jnp.eye(4), jnp.ones((3, 4))
HERE = "test_kept.py"


def line_of(mark):
  """The number of the line in this file that ends with a comment."""
  with open(__file__) as lines:
    marked = [i for i, x in enumerate(lines, 1) if x.endswith(f"# {mark}\n")]
  (number,) = marked
  return number


def named(name, fun):
  return lambda *args: jax.named_scope(name)(fun)(*args)


def kept(x, w):
  return jnp.sin(x @ w)  # kept


def other(x, w):
  return jnp.cos(x @ w)


def plain(w, x):
  return named("net", lambda: named("b", other)(named("a", kept)(x, w), w))()


def called(w, x):
  """One jaxpr, called from two scopes."""
  block = jax.jit(kept)
  return named("net", lambda: named("b", block)(named("a", block)(x, w), w))()


def scanned(w, x):
  step = lambda x, _: (named("a", kept)(x, w), None)
  scan = lambda: lax.scan(step, x, None, length=1)[0]
  return named("net", lambda: named("b", other)(scan(), w))()


def checkpointed(w, x):
  block = jax.checkpoint(named("a", kept))
  return named("net", lambda: named("b", other)(block(x, w), w))()


def branched(w, x):
  block = lambda x, w: lax.cond(
    x[0, 0] > 0, named("a", kept), named("a", kept), x, w
  )
  return named("net", lambda: named("b", other)(block(x, w), w))()


@jax.custom_vjp
def ruled(x, w):
  return kept(x, w)


def forward(x, w):
  y = x @ w  # forward
  return jnp.sin(y), (x, w)


def backward(residuals, g):
  x, w = residuals
  g = g * jnp.cos(x @ w)
  return g @ w.T, x.T @ g


ruled.defvjp(forward, backward)


def with_a_rule(w, x):
  def block(x, w):
    return ruled(x, w)  # called

  return named("net", lambda: named("b", other)(named("a", block)(x, w), w))()


PROGRAMS = plain, called, scanned, checkpointed, branched, with_a_rule
BY_SCOPE = "net/a", "*/a", f"net/a at {HERE}*", "net/[a]"


def products(jaxpr):
  """How many products a jaxpr has in each dtype, by the scope they stand in."""
  counts = {}

  def walk(jaxpr, place):
    for eqn in jaxpr.eqns:
      its_place = place.at(eqn, jaxpr)
      if eqn.primitive.name == "dot_general":
        key = its_place.scope, str(eqn.outvars[0].aval.dtype)
        counts[key] = counts.get(key, 0) + 1
      held = list(_jaxprs.held_jaxprs(eqn))
      for closed in held:
        walk(closed.jaxpr, its_place)

  walk(jaxpr.jaxpr, _jaxprs.Place())
  return counts


def loss(program):
  return lambda w, x: jnp.sum(program(w, x))


@pytest.mark.parametrize("name", BY_SCOPE)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_name_keeps_a_product_and_its_derivatives(program, name):
  fun = loss(program)
  in_half = jax.make_jaxpr(jax.grad(ols.autocast(fun)))(W, X)
  count = sum(products(in_half).values())
  for cast in (
    jax.grad(ols.autocast(fun, keep_float32=name)),
    ols.autocast(jax.grad(fun), keep_float32=name),
    jax.jit(ols.autocast(jax.jit(jax.grad(fun)), keep_float32=[name])),
  ):
    found = products(jax.make_jaxpr(cast)(W, X))
    assert sum(found.values()) == count
    of_a = {dtype for scope, dtype in found if scope.startswith("net/a")}
    of_b = {dtype for scope, dtype in found if scope.startswith("net/b")}
    assert (of_a, of_b) == ({"float32"}, {"float16"}), found


@pytest.mark.parametrize(
  "name",
  [
    "{file}:{number} (kept)",
    "{file} (kept)",
    "{file}:{number}",
    "{file}:*(kept)",
    "net at {file}:{number} (kept)",
  ],
)
@pytest.mark.parametrize("program", [plain, scanned, checkpointed])
def test_a_line_keeps_what_stands_there(program, name):
  name = name.format(file=HERE, number=line_of("kept"))
  fun = loss(program)
  many = lambda f: jax.vmap(f, (None, 0))
  for cast, x in (
    (jax.grad(ols.autocast(fun, keep_float32=name)), X),
    (ols.autocast(jax.grad(fun), keep_float32=name), X),
    (many(ols.autocast(jax.grad(fun), keep_float32=name)), X[None]),
    (ols.autocast(many(jax.grad(fun)), keep_float32=name), X[None]),
  ):
    found = products(jax.make_jaxpr(cast)(W, x))
    of_a = {dtype for scope, dtype in found if scope.startswith("net/a")}
    of_b = {dtype for scope, dtype in found if scope.startswith("net/b")}
    assert (of_a, of_b) == ({"float32"}, {"float16"}), found


def test_a_scope_of_a_library_keeps_a_layer_that_nobody_edits():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(4, name="head")(nn.Dense(4, name="body")(x))

  model = Net()
  params = model.init(jax.random.key(0), X)
  fun = ols.autocast(lambda p, x: model.apply(p, x), keep_float32="Net/head")
  found = products(jax.make_jaxpr(fun)(params, X))
  assert found == {("Net/body", "float16"): 1, ("Net/head", "float32"): 1}


def test_what_no_name_tells_apart_is_compiled_once():
  block = jax.jit(lambda x, w: kept(kept(x, w), w))

  def fun(w, x):
    for name in "abcd":
      x = named(name, block)(x, w)
    return x

  def jaxprs(names):
    cast = ols.autocast(fun, keep_float32=names)
    calls = [e for e in jax.make_jaxpr(cast)(W, X).eqns if "jit" in str(e)]
    return [id(next(_jaxprs.held_jaxprs(eqn)).jaxpr) for eqn in calls]

  assert len(set(jaxprs(()))) == 1
  a, b, c, d = jaxprs(["a", "d"])
  assert a == d != b == c


def nest(draw, jit):
  """A function of random calls, which share functions, in random scopes."""
  layers = [jit(lambda x, w: kept(x, w)), jit(lambda x, w: other(x, w))]
  for _ in range(draw.randint(1, 4)):
    calls = draw.choices(range(len(layers)), k=draw.randint(1, 3))
    scopes = draw.choices(["", "a", "b"], k=len(calls))

    def layer(x, w, calls=calls, scopes=scopes):
      for i, scope in zip(calls, scopes, strict=True):
        call = named(scope, layers[i]) if scope else layers[i]
        x = call(jnp.sin(x), w)
      return x

    layers.append(jit(layer) if draw.random() < 0.8 else layer)
  return lambda w, x: named("c", layers[-1])(layers[-1](x, w), w)


@pytest.mark.parametrize(
  "seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.slow)]
)
def test_a_shared_function_keeps_in_each_place_what_is_named_there(seeds):
  names = ["a", "b", "a/b", "c/*", "c/a", "*/a", f"{HERE} (other)"]
  for seed in seeds:
    name = random.Random(seed).choice(names)
    found = []
    for jit in jax.jit, lambda fun: fun:
      cast = ols.autocast(nest(random.Random(seed), jit), keep_float32=name)
      try:
        found.append(products(jax.make_jaxpr(cast)(W, X)))
      except ValueError as error:
        found.append(str(error).partition("which selects")[0])
    assert found[0] == found[1], (seed, name)


def test_a_function_that_was_met_is_told_apart_by_its_callers():
  dense = jax.jit(kept)
  layer = jax.jit(lambda x, w: dense(jnp.tanh(x), w))

  def fun(w, x):
    both = [x, x @ w]
    calls = itertools.product(["one", "two"], both)
    return sum(named(name, layer)(y, w) for name, y in calls)

  cast = ols.autocast(fun, keep_float32="two")
  assert products(jax.make_jaxpr(cast)(W, X)) == {
    ("", "float16"): 1,
    ("one", "float16"): 2,
    ("two", "float32"): 2,
  }


@pytest.mark.parametrize("line", ["forward", "called"])
def test_a_line_of_a_rule_keeps_the_rule_as_a_whole(line):
  # JAX gives the backward pass of a rule the line that calls it.
  name = f"{HERE}:{line_of(line)}"
  fun = loss(with_a_rule)
  cast = jax.grad(ols.autocast(fun, keep_float32=name))
  found = products(jax.make_jaxpr(cast)(W, X))
  assert found == {("net/a", "float32"): 4, ("net/b", "float16"): 3}
  with pytest.raises(ValueError, match="selects none"):
    ols.autocast(fun, keep_float32=f"{HERE} (backwards)")(W, X)


def test_what_a_rule_that_cannot_be_differentiated_holds_may_be_meant():
  """So a name that selects nothing is no error there, but is told."""

  @jax.custom_vjp
  def refuses(x, w):
    return x @ w

  def rule(x, w):
    raise TypeError("no derivative")

  refuses.defvjp(rule, rule)
  fun = lambda w, x: refuses(x, w) + x @ w
  told = "got 'unknown', which selects none. The nearest .* could not be looked"
  cast = ols.autocast(fun, keep_float32="unknown")
  with pytest.warns(UserWarning, match=told):
    cast(W, X)
  cast(W, X)  # told once


def test_a_name_that_selects_nothing_is_an_error_that_names_the_nearest():
  message = "got 'net/c', which selects none. The nearest names are .*'net/a'"
  with pytest.raises(ValueError, match=message):
    ols.autocast(loss(plain), keep_float32=("net/a", "net/c"))(W, X)
  with pytest.raises(ValueError) as caught:
    ols.autocast(loss(plain), keep_float32="net/c")(W, X)
  assert str(caught.value).partition("names are")[2].count(", ") == 4
  with pytest.raises(ValueError, match="There are no products"):
    ols.autocast(jnp.sin, keep_float32="net")(X)


@pytest.mark.parametrize("names", [1, None, ["net", 1], jnp.ones(2)])
def test_a_name_is_a_string(names):
  with pytest.raises(TypeError, match="keep_float32 must be a name or several"):
    ols.autocast(loss(plain), keep_float32=names)


def test_names_change_nothing_if_all_is_in_float32():
  assert ols.autocast(plain, jnp.float32, keep_float32="net") is plain


def test_brackets_in_the_name_of_a_scope_are_brackets():
  fun = named("layers[0]", kept)
  found = products(
    jax.make_jaxpr(ols.autocast(fun, keep_float32="layers[0]"))(X, W)
  )
  assert found == {("layers[0]", "float32"): 1}


def test_no_warning_says_that_there_is_nothing_where_all_is_kept():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    ols.autocast(loss(plain), keep_float32="*")(W, X)


def test_what_cannot_be_entered_and_is_kept_earns_no_warning():
  def solve(w, x):
    matvec = lambda y: y + y @ w
    y = lax.custom_linear_solve(matvec, x, lambda _, b: b @ w)
    return y + named("b", other)(x, w)

  with pytest.warns(UserWarning, match="cannot enter"):
    ols.autocast(solve)(W, X)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    ols.autocast(solve, keep_float32=f"{HERE} (*solve)")(W, X)


def helper(x, w):
  return x @ w  # helper


def mlp(x, w):
  return jnp.tanh(helper(x, w))  # mlp


def head(x, w):
  return jnp.cos(helper(x, w))  # head


def with_a_helper(wrap):
  one, other = wrap(mlp), wrap(head)

  def net(w, x):
    return other(one(x, w), w)  # net

  return net


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", ["{file} (mlp)", "{file}:{mlp}"])
def test_any_line_that_leads_to_a_product_is_its_name(name, wrap):
  name = name.format(file=HERE, mlp=line_of("mlp"))
  fun = loss(with_a_helper(wrap))
  for cast in (
    jax.grad(ols.autocast(fun, keep_float32=name)),
    ols.autocast(jax.grad(fun), keep_float32=name),
  ):
    counts = products(jax.make_jaxpr(cast)(W, X))
    again = wrap is jax.checkpoint
    assert counts == {("", "float32"): 2 + again, ("", "float16"): 3 + again}


def test_a_line_outside_of_the_function_is_no_name():
  def step(w, x, name):
    return ols.autocast(plain, keep_float32=name)(w, x)  # outside

  assert step(W, X, "net") is not None
  with pytest.raises(ValueError, match="which selects none"):
    jax.jit(step, static_argnums=2)(W, X, f"{HERE}:{line_of('outside')}")


def test_the_error_names_lines_of_all_callers():
  with pytest.raises(ValueError, match=r"\(net\)"):
    name = f"{HERE}:{line_of('net')} (ne)"
    ols.autocast(with_a_helper(jax.jit), keep_float32=name)(W, X)


def test_a_place_is_told_by_the_nearest_line_that_others_do_not_share():
  line = lambda name: _jaxprs.Line("m.py", len(name), name)
  h, a, b, main = map(line, ("h", "a", "b", "main"))
  places = [
    ("", (h, a, main)),
    ("", (h, b, main)),
    ("other", (h, main)),
    ("other", (h, main)),
    ("cut", (h,)),
    ("cut", (h, a, main)),
    ("cut", (h, main)),
    ("none", ()),
    ("all", (h, main, h, main)),
  ]
  found = _names._telling_lines(places)
  last = lambda text: text.partition("(")[2].removesuffix(")")
  assert list(map(last, found)) == [
    "a", "b", "h", "h", "h", "h", "h", "", "h",
  ]  # fmt: skip


class Scope(NamedTuple):
  name: str


class Transform(NamedTuple):
  name: str


J, T, V = map(Transform, ("jvp", "transpose", "vmap"))


@pytest.mark.parametrize(
  ("stack", "scope"),
  [
    ([], ""),
    (["Net", "a", "d"], "Net/a/d"),
    ([J, "Net", "a"], "Net/a"),
    ([T, J, "Net", "a"], "Net/a"),
    ([V, T, J, "Net", "a"], "Net/a"),
    ([J], ""),
    ([T, J, "", "a"], "a"),
    ([T, J, "Net", J, "Net", "rematted_computation", "b", "d"], "Net/b/d"),
    ([T, J, "Net", "x", J, "Net", "x", "checkpoint", "b"], "Net/x/b"),
    (["outer", T, J, "inner", "x"], "outer/inner/x"),
    (["step", J, "Net", "a"], "step/Net/a"),
    ([J, "net/a", "b"], "net/a/b"),
    (["Net", "f(x)", "jvpx"], "Net/f(x)/jvpx"),
    (["vmap(Net)", J, "jvp(", "a"], "vmap(Net)/jvp(/a"),
    (["a", "a", "b"], "a/a/b"),
    ([J, V, "Net"], "Net"),
    ([T, J, "layer(0)", V, "f(x(y))"], "layer(0)/f(x(y))"),
    ([J, "Net", "a", _places._Mark("autocast-float16")], "Net/a"),
    ([T, J, _places._Mark("autocast-bfloat16")], ""),
    (["a", "autocast-float16"], "a/autocast-float16"),
  ],
)
def test_a_scope_is_the_same_whatever_transforms_the_function(stack, scope):
  stack = [Scope(x) if isinstance(x, str) else x for x in stack]
  assert _jaxprs.Place(tuple(stack)).scope == scope
