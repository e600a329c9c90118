"""Scopes, paths of weights and lines are three kinds of names, kept apart."""

import functools

import equinox as eqx
from helpers.planted_layers import normal
import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import compare_precision, precision_report

X = normal(4, 8, seed=1)
COUNT = 3


def product(x, w):
  return x @ w  # product


def layers(*names):
  draw = lambda i, name: normal(8, 8, seed=10 * i + ord(name[-1]))
  return [{n: draw(i, n) for n in names} for i in range(COUNT)]


def trained(net, **kwargs):
  loss = lambda params, x: jnp.mean(net(params, x) ** 2)
  return jax.grad(ols.autocast(loss, **kwargs))


def rows_of(net, params, **kwargs):
  """All products: what is float16 is wider than float8."""
  fun = trained(net, **kwargs)
  return precision_report(fun, params, X, dtype=jnp.float8_e4m3fn).wider


def kept_by(names, net, params):
  """What is in float32: the paths of products, and whether each is backward."""
  rows = precision_report(trained(net, keep_float32=names), params, X).wider
  return {(row.weights, row.backward) for row in rows}


def both_of(*paths):
  return {(path, backward) for path in paths for backward in (False, True)}


def assert_names(net, params, expected):
  """These are the names, and each keeps what it names and nothing else."""
  rows = rows_of(net, params)
  assert {row.name for row in rows} == set(expected)
  for name in expected:
    paths = {row.weights for row in rows if row.name == name}
    assert kept_by(name, net, params) == both_of(*paths)


def with_einsum(params, x):
  for layer in params["blocks"]:
    x = jnp.tanh(jnp.einsum("bi,ij->bj", x, layer["q"]))
  return x


def in_a_scope(params, x):
  for layer in params["blocks"]:
    with jax.named_scope("block"):
      x = jnp.tanh(product(x, layer["q"]))
  return x


Q = [f"blocks/{i}/q" for i in range(COUNT)]


@pytest.mark.parametrize("net", [with_einsum, in_a_scope])
def test_a_path_is_a_name_by_itself_within_any_scope(net):
  params = {"blocks": layers("q")}
  assert_names(net, params, Q)
  for name, paths in ("blocks/1", Q[1:2]), ("blocks", Q), ("*/1/*", Q[1:2]):
    assert kept_by(name, net, params) == both_of(*paths)


def test_a_path_is_a_name_in_equinox():
  model = eqx.nn.MLP(8, 8, 8, COUNT - 1, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_array)
  net = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
  assert_names(net, params, [f"layers/{i}/weight" for i in range(COUNT)])


def test_what_was_printed_before_is_taken_and_so_is_each_pair():
  line = "test_names.py (product)"
  for name, paths in {
    "block/blocks/1/q": Q[1:2],
    "block/blocks/1": Q[1:2],
    f"block/blocks/1/q at {line}": Q[1:2],
    f"blocks/1/q at {line}": Q[1:2],
    f"blocks/1 at {line}": Q[1:2],
    "block": Q,
    f"block at {line}": Q,
    line: Q,
  }.items():
    kept = kept_by(name, in_a_scope, {"blocks": layers("q")})
    assert {path for path, _ in kept} == set(paths)


def test_a_plain_list_of_weights_is_told_apart_in_a_scope():
  def net(weights, x):
    with jax.named_scope("net"):
      return functools.reduce(lambda x, w: jnp.tanh(product(x, w)), weights, x)

  weights = [x["q"] for x in layers("q")]
  assert_names(net, weights, ["0", "1", "2"])


KEYS = (
  "a(b", "layers[0]", "vmap(a)", "jvp()", "transpose(jvp(x))", "checkpoint",
  "rematted_computation", "autocast-float16", "keep_float32", "w*", "w?",
  "[w]", "*", "a at b", "",
)  # fmt: skip


def test_a_key_may_be_written_in_any_way():
  params = {key: normal(8, 8, seed=i) for i, key in enumerate(KEYS)}

  def net(params, x):
    block = jax.checkpoint(lambda w, x: jnp.tanh(product(x, w)))
    for i, key in enumerate(KEYS):
      x = jnp.tanh(product(x, params[key])) if i % 2 else block(params[key], x)
    return x

  # No pattern among half of them selects another one.
  for i in 0, 1:
    names = list(filter(None, KEYS[i::2]))
    rows = precision_report(trained(net, keep_float32=names), params, X).wider
    assert {row.name for row in rows} == set(names)
    assert {(row.weights, row.backward) for row in rows} == both_of(*names)


def test_a_pattern_is_one_only_if_no_name_is_equal_to_it():
  params = {"w*": normal(8, 8), "w1": normal(8, 8), "v1": normal(8, 8)}
  net = lambda p, x: x @ p["w*"] @ p["w1"] @ p["v1"]
  kept = lambda *names: kept_by(names, net, params)
  assert kept("w*") == both_of("w*")
  assert kept("w?") == both_of("w*", "w1")
  assert kept("w*", "*1") == both_of("w*", "w1", "v1")
  assert kept("w*", "w1") == both_of("w*", "w1")


def test_weights_that_are_used_twice_are_told_apart():
  """By what encloses them, or by the lines."""

  def net(params, x):
    with jax.named_scope("encoder"):
      x = jnp.tanh(product(x, params["embed"]))
    with jax.named_scope("decoder"):
      x = jnp.tanh(product(x, params["embed"]))
    x = x @ params["tied"]  # first
    return x @ params["tied"]  # second

  params = {"embed": normal(8, 8), "tied": normal(8, 8)}
  names = {row.name for row in rows_of(net, params)}
  scopes = {"encoder/embed", "decoder/embed"}
  lines = {name for name in names if name.startswith("tied at test_names.py:")}
  assert names == scopes | lines and len(lines) == 2
  for name in names:
    kept = precision_report(trained(net, keep_float32=name), params, X).wider
    assert {row.backward for row in kept} == {False, True}
    assert sum(row.times for row in kept) <= 3


def test_rows_are_short():
  with_scopes = jax.named_scope("attention")(
    jax.named_scope("einsum")(with_einsum)
  )
  params = {"blocks": layers("q")}
  fun = trained(with_scopes)
  report = compare_precision(fun, params, X, progress=False)
  assert "bi,ij->bj" not in str(report)
  scopes = {row.scope for row in report.products}
  assert scopes == {"attention/einsum/bi,ij->bj"}


def test_scopes_alone_and_lines_alone_name_what_has_no_weights():
  def net(params, x):
    with jax.named_scope("scores"):
      scores = product(x, x.T)
    return scores @ product(x, params["v"])

  report = compare_precision(
    trained(net), {"v": normal(8, 8)}, X, progress=False
  )
  rows = report.products
  names = {row.name for row in rows if not row.weights}
  assert "scores" in names and len(names) == 2
  (line,) = names - {"scores"}
  assert line.startswith("test_names.py:")


def test_scopes_of_another_jax_are_none():
  (eqn,) = jax.make_jaxpr(lambda x: x @ x)(jnp.eye(2)).eqns
  info = eqn.source_info
  other = eqn.replace(source_info=type(info)(info.traceback, "scope"))
  assert _jaxprs.with_weights(other, ("w",)) is other
  assert _jaxprs.Place().within(other).names[:3] == ("", "", "")
  assert _jaxprs.with_weights(eqn, ()) is eqn


def test_a_product_of_a_backward_pass_alone_needs_no_line():
  """The loss is linear in it, so that nothing of it runs forward."""
  net = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]) @ params["head"])
  fun = jax.grad(ols.autocast(net))
  params = {"w": normal(8, 8), "head": normal(8, 8)}
  rows = compare_precision(fun, params, X, progress=False).products
  found = {(row.name, row.backward) for row in rows}
  assert found == {*both_of("w"), ("head", True)}
