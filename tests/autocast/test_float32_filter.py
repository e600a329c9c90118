"""Matmuls that stay in float32 because their scope or line is named."""

import collections
import re
from typing import NamedTuple

from flax import nnx
from helpers import find_line_number, jaxprs, parametrize_slow
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _provenance, _source_info

W, X = jnp.asarray(np.eye(4, dtype=np.float32)), normal(3, 4)
HERE = "test_float32_filter.py"


def with_scope(name, fun):
  return lambda *args: jax.named_scope(name)(fun)(*args)


def kept(x, w):
  return jnp.sin(x @ w)  # kept


def other(x, w):
  return jnp.cos(x @ w)


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


def net(first, second=other):
  both = lambda w, x: with_scope("b", second)(first(x, w), w)
  return with_scope("net", both)


BLOCK = jax.jit(kept)  # One jaxpr, called from two scopes.


def scan_once(fun):
  step = lambda w: lambda x, _: (fun(x, w), None)
  return lambda x, w: lax.scan(step(w), x, None, length=1)[0]


def branch(fun):
  return lambda x, w: lax.cond(x[0, 0] > 0, fun, fun, x, w)


in_a = lambda fun: with_scope("a", fun)
# From a function that may mark another one, to a program.
PROGRAMS = {
  "plain": lambda mark: net(in_a(mark(kept))),
  "called": lambda mark: net(in_a(mark(BLOCK)), BLOCK),
  "calling": lambda mark: net(jax.jit(in_a(mark(kept)))),
  "scanned": lambda mark: net(scan_once(in_a(mark(kept)))),
  "scanning": lambda mark: net(in_a(mark(scan_once(kept)))),
  "mapped": lambda mark: net(jax.vmap(in_a(mark(kept)), in_axes=(0, None))),
  "checkpointed": lambda mark: net(jax.checkpoint(in_a(mark(kept)))),
  "branched": lambda mark: net(branch(in_a(mark(kept)))),
  "with a rule": lambda mark: net(
    in_a(mark(lambda x, w: ruled(x, w)))  # called
  ),
}
unmarked = lambda fun: fun
plain = PROGRAMS["plain"](unmarked)
BY_SCOPE = [
  *((name, "net/a") for name in PROGRAMS),
  *(("plain", name) for name in ("*/a", f"net/a at {HERE}*", "net/[a]")),
]


def count_matmuls_by_scope(fun, *args):
  found = jaxprs.list_named_matmuls(fun, *args)
  return collections.Counter((x.scope, x.dtype) for x in found)


def get_a_and_b_dtypes(fun, *args):
  found = count_matmuls_by_scope(fun, *args)
  return tuple(
    {dtype for scope, dtype in found if scope.startswith(name)}
    for name in ("net/a", "net/b")
  )


def loss(program):
  return lambda w, x: jnp.sum(program(w, x))


@pytest.mark.parametrize(("program", "name"), BY_SCOPE)
def test_a_name_keeps_a_matmul_and_its_derivatives_in_float32(program, name):
  fun = loss(PROGRAMS[program](unmarked))
  count = count_matmuls_by_scope(jax.grad(ols.autocast(fun)), W, X).total()
  for cast in (
    jax.grad(ols.autocast(fun, keep_float32=name)),
    jax.jit(ols.autocast(jax.jit(jax.grad(fun)), keep_float32=[name])),
  ):
    assert count_matmuls_by_scope(cast, W, X).total() == count
    assert get_a_and_b_dtypes(cast, W, X) == ({"float32"}, {"float16"})


NAMES_OF_A_LINE = (
  "{file}:{number} (kept)",
  "{file} (kept)",
  "{file}:{number}",
  "{file}:*(kept)",
  "net at {file}:{number} (kept)",
)
BY_LINE = [
  ("checkpointed", NAMES_OF_A_LINE[0]),
  *(("scanned", name) for name in NAMES_OF_A_LINE),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_marked_function_and_its_derivatives_run_in_float32(program):
  fun = loss(PROGRAMS[program](ols.keep_float32))
  count = count_matmuls_by_scope(jax.grad(fun), W, X).total()
  for cast in jax.grad(ols.autocast(fun)), ols.autocast(jax.grad(fun)):
    assert count_matmuls_by_scope(cast, W, X).total() == count
    assert get_a_and_b_dtypes(cast, W, X) == ({"float32"}, {"float16"})


def test_only_keep_float32_keeps_a_function_in_float32():
  inner = with_scope("do_keep_float32", kept)
  cast = ols.autocast(with_scope("keep_float32_not", inner))
  assert jaxprs.count_matmuls_by_dtype(cast, X, W) == {"float16": 1}


def test_a_kept_function_retains_its_name_attributes_and_arguments():
  def block(x, *, n):
    """A docstring."""
    return x + n

  block.version = 3
  marked = ols.keep_float32(block)
  assert (marked.__name__, marked.__doc__) == ("block", "A docstring.")
  assert marked.version == 3 and marked(1, n=2) == 3
  # The attributes of a layer are not copied.
  layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  assert not hasattr(ols.keep_float32(layer), "kernel")


@pytest.mark.parametrize(("program", "name"), BY_LINE)
def test_a_source_line_keeps_its_matmuls_in_float32(program, name):
  name = name.format(file=HERE, number=find_line_number("kept", __file__))
  fun = loss(PROGRAMS[program](unmarked))
  many = lambda f: jax.vmap(f, (None, 0))
  for cast, x in (
    (jax.grad(ols.autocast(fun, keep_float32=name)), X),
    (many(ols.autocast(jax.grad(fun), keep_float32=name)), X[None]),
    (ols.autocast(many(jax.grad(fun)), keep_float32=name), X[None]),
  ):
    assert get_a_and_b_dtypes(cast, W, x) == ({"float32"}, {"float16"})


@pytest.mark.parametrize("line", ["forward", "called"])
def test_a_line_of_a_rule_keeps_the_rule_as_a_whole(line):
  # JAX gives the backward pass of a rule the line that calls it.
  name = f"{HERE}:{find_line_number(line, __file__)}"
  fun = loss(PROGRAMS["with a rule"](unmarked))
  cast = jax.grad(ols.autocast(fun, keep_float32=name))
  found = count_matmuls_by_scope(cast, W, X)
  assert found == {("net/a", "float32"): 4, ("net/b", "float16"): 3}
  with pytest.raises(ValueError, match="selects no matmul"):
    ols.autocast(fun, keep_float32=f"{HERE} (backwards)")(W, X)


def test_a_name_may_select_matmuls_of_a_nondifferentiable_rule():
  """So a name that selects nothing causes a warning there, not an error."""

  @jax.custom_vjp
  def refuses(x, w):
    return x @ w

  def rule(x, w):
    raise TypeError("no derivative")

  refuses.defvjp(rule, rule)
  fun = lambda w, x: refuses(x, w) + x @ w
  message = "'unknown' selects no matmul .* The nearest .* can't inspect"
  cast = ols.autocast(fun, keep_float32="unknown")
  with pytest.warns(UserWarning, match=message):
    cast(W, X)
  cast(W, X)  # The warning is given once.


def test_a_name_that_selects_nothing_is_an_error_that_names_the_nearest():
  message = "'net/c' selects no matmul .* The nearest names are .*'net/a'"
  with pytest.raises(ValueError, match=message):
    ols.autocast(loss(plain), keep_float32=("net/a", "net/c", "z"))(W, X)
  with pytest.raises(ValueError) as caught:
    ols.autocast(loss(plain), keep_float32="net/c")(W, X)
  assert str(caught.value).partition("names are")[2].count(", ") == 4
  with pytest.raises(ValueError, match="the function contains none"):
    ols.autocast(jnp.sin, keep_float32="net")(X)


def test_the_error_names_the_nearest_paths_of_weights_first():
  def model(params, x):
    with jax.named_scope("net"):
      for w in params["layers"]:
        x = with_scope("encoder", other)(x, w)
      return x @ params["head"]

  args = {"layers": [W, 2 * W, 3 * W], "head": normal(4, 4)}, X
  with pytest.raises(ValueError) as caught:
    ols.autocast(model, keep_float32="net/encodr")(*args)
  names = str(caught.value).partition("names are ")[2].rstrip(".").split(", ")
  assert len(names) == 5
  paths, others = names[:3], names[3:]
  assert not any("net" in name for name in paths)
  assert "'net/encoder'" in others


@pytest.mark.parametrize("names", [1, None, ["net", 1], jnp.ones(2)])
def test_a_name_is_a_string(names):
  with pytest.raises(TypeError, match="keep_float32 must be a name or a list"):
    ols.autocast(loss(plain), keep_float32=names)


def test_keeping_all_matmuls_in_float32_causes_no_warning():
  ols.autocast(loss(plain), keep_float32="*")(W, X)


def test_an_opaque_primitive_that_is_kept_causes_no_warning():
  def solve(w, x):
    matvec = lambda y: y + y @ w
    y = lax.custom_linear_solve(matvec, x, lambda _, b: b @ w)
    return y + with_scope("b", other)(x, w)

  with pytest.warns(UserWarning, match="unchanged"):
    ols.autocast(solve)(W, X)
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


@pytest.mark.parametrize(
  "wrap",
  [lambda f: f, jax.jit, jax.checkpoint],
  ids=["plain", "jit", "checkpoint"],
)
@pytest.mark.parametrize("name", ["{file} (mlp)", "{file}:{mlp}"])
def test_any_line_of_the_call_stack_of_a_matmul_selects_it(name, wrap):
  name = name.format(file=HERE, mlp=find_line_number("mlp", __file__))
  fun = loss(with_a_helper(wrap))
  for cast in (
    jax.grad(ols.autocast(fun, keep_float32=name)),
    ols.autocast(jax.grad(fun), keep_float32=name),
  ):
    counts = count_matmuls_by_scope(cast, W, X)
    again = wrap is jax.checkpoint
    assert counts == {("", "float32"): 2 + again, ("", "float16"): 3 + again}


def test_a_line_outside_of_the_function_selects_nothing():
  def step(w, x):
    name = f"{HERE}:{find_line_number('outside', __file__)}"
    return ols.autocast(plain, keep_float32=name)(w, x)  # outside

  with pytest.raises(ValueError, match="selects no matmul"):
    jax.jit(step)(W, X)


def test_the_error_names_lines_of_all_callers():
  name = f"{HERE}:{find_line_number('net', __file__)} (ne)"
  with pytest.raises(ValueError, match=r"\(net\)"):
    ols.autocast(with_a_helper(jax.jit), keep_float32=name)(W, X)


def test_a_location_has_the_nearest_line_that_others_do_not_share():
  cast = jax.grad(ols.autocast(loss(with_a_helper(jax.jit))))
  number_of = lambda x: find_line_number(x, __file__)
  lines = {f"{HERE}:{number_of(x)} ({x})" for x in ("mlp", "head")}
  assert {x.name for x in jaxprs.list_layers(cast, W, X)} == lines


def test_call_stacks_that_differ_only_in_missing_lines_are_one_location():
  """JAX forgets lines of some equations."""
  h, a, main = (_source_info.SourceLine("m.py", i, "f") for i in range(3))
  ways = (h,), (h, a, main), (h, main)
  names = [_provenance.EqnNames("net", "", "net", lines) for lines in ways]
  found = _provenance.make_unique_labels([(x, False) for x in names])
  assert {line for _, line in found} == {str(h)}


class Scope(NamedTuple):
  name: str


class Transform(NamedTuple):
  name: str


J, T, V = map(Transform, ("jvp", "transpose", "vmap"))


@pytest.mark.parametrize(
  ("stack", "scope"),
  [
    ([], ""),
    ([V, T, J, "Net", "a"], "Net/a"),
    ([T, J, "Net", J, "Net", "rematted_computation", "b", "d"], "Net/b/d"),
    ([T, J, "Net", "x", J, "Net", "x", "checkpoint", "b"], "Net/x/b"),
    (["outer", T, J, "inner", "x"], "outer/inner/x"),
    ([J, "net/a", "b"], "net/a/b"),
    (["vmap(Net)", J, "jvp(", "a"], "vmap(Net)/jvp(/a"),
    (["a", "a", "b"], "a/a/b"),
    ([T, J, "layer(0)", V, "f(x(y))"], "layer(0)/f(x(y))"),
  ],
)
def test_a_scope_is_the_same_whatever_transforms_the_function(stack, scope):
  stack = [Scope(x) if isinstance(x, str) else x for x in stack]
  assert _provenance.EqnLocation(tuple(stack)).names.name_scope == scope


@parametrize_slow("wrap", [jax.jit], [jax.jit, jax.checkpoint])
def test_a_name_of_an_inner_autocast_applies_to_it_alone(wrap):
  """Its matmuls are float16 before the outer one analyzes them."""

  def loss_fn(params, x, kept=()):
    part = lambda params, x: jnp.tanh(x @ params["up"])
    part = ols.autocast(part, jnp.bfloat16, keep_float32=kept)
    hidden = wrap(part)(params, x)
    return jnp.mean((hidden @ params["down"]) ** 2)

  args = {"up": W, "down": normal(4, 4)}, X
  layers = jaxprs.list_layers(jax.grad(ols.autocast(loss_fn)), *args)
  assert {x.name for x in layers} == {"up", "down"}
  for name in "up", "u*":
    message = f"{re.escape(repr(name))} selects matmuls of an inner autocast"
    with pytest.raises(ValueError, match=message):
      ols.autocast(loss_fn, keep_float32=["down", name])(*args)
  with pytest.raises(ValueError, match="'other' selects no matmul"):
    ols.autocast(loss_fn, keep_float32=["down", "other"])(*args)
  kept = lambda *args: loss_fn(*args, kept="up")
  dtypes = jaxprs.count_matmuls_by_dtype(kept, *args)
  assert dtypes == {"float32": 2}
