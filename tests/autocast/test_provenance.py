"""Scopes, paths of weights and lines are three kinds of names, kept apart."""

from helpers import jaxprs, parametrize_slow
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _provenance
from optax_lossscale.diagnostics import count_flops

X = normal(4, 8, seed=1)
COUNT = 3


def multiply(x, w):
  return x @ w  # multiply


def layers(*names):
  draw = lambda i, name: normal(8, 8, seed=10 * i + ord(name[-1]))
  return [{n: draw(i, n) for n in names} for i in range(COUNT)]


def make_grad_fn(net, **kwargs):
  loss = lambda params, x: jnp.mean(net(params, x) ** 2)
  return jax.grad(ols.autocast(loss, **kwargs))


def make_report(net, params):
  """Return a report with all matmuls: float16 is wider than float8."""
  fun = make_grad_fn(net)
  return count_flops(fun, params, X, dtype=jnp.float8_e4m3fn)


def list_kept(names, net, params):
  """Return the paths of float32 matmuls, and whether each is backward."""
  grad_fn = make_grad_fn(net, keep_float32=names)
  rows = count_flops(grad_fn, params, X).unconverted
  return {(row.param_path, row.backward) for row in rows}


def expect_both_passes(*paths):
  return {(path, backward) for path in paths for backward in (False, True)}


def assert_names(net, params, expected):
  """These are the names, and each keeps what it names and nothing else."""
  rows = make_report(net, params).unconverted
  assert {row.name for row in rows} == set(expected)
  for name in expected:
    paths = {row.param_path for row in rows if row.name == name}
    assert list_kept(name, net, params) == expect_both_passes(*paths)


def with_einsum(params, x):
  for layer in params["blocks"]:
    x = jnp.tanh(jnp.einsum("bi,ij->bj", x, layer["q"]))
  return x


def in_a_scope(params, x):
  for layer in params["blocks"]:
    with jax.named_scope("block"):
      x = jnp.tanh(multiply(x, layer["q"]))
  return x


Q = [f"blocks/{i}/q" for i in range(COUNT)]


@pytest.mark.parametrize("net", [with_einsum, in_a_scope])
def test_a_path_alone_is_a_name_within_any_scope(net):
  params = {"blocks": layers("q")}
  assert_names(net, params, Q)
  for name, paths in ("blocks/1", Q[1:2]), ("blocks", Q), ("*/1/*", Q[1:2]):
    assert list_kept(name, net, params) == expect_both_passes(*paths)
  # A plain list of layers has indices as paths.
  net_of_list = lambda params, x: net({"blocks": params}, x)
  assert_names(net_of_list, layers("q"), ["0/q", "1/q", "2/q"])


def test_names_printed_before_and_their_parts_are_accepted():
  line = "test_provenance.py (multiply)"
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
    kept = list_kept(name, in_a_scope, {"blocks": layers("q")})
    assert kept == expect_both_passes(*paths)


@pytest.mark.parametrize(
  "scopes, names",
  [
    (["net", "net", "net"], ["0", "1", "2"]),
    (["a", "b", "c"], ["a", "b", "c"]),
  ],
)
def test_weights_of_a_plain_list_have_the_names_of_scopes_of_their_own(
  scopes, names
):
  def net(weights, x):
    for scope, weight in zip(scopes, weights, strict=True):
      with jax.named_scope(scope):
        x = jnp.tanh(multiply(x, weight))
    return x

  assert_names(net, [layer["q"] for layer in layers("q")], names)


KEYS = (
  "a(b", "layers[0]", "vmap(a)", "jvp()", "transpose(jvp(x))", "checkpoint",
  "rematted_computation", "autocast-float16", "keep_float32", "w*", "w?",
  "[w]", "*", "a at b", "",
)  # fmt: skip


def test_a_key_may_be_written_in_any_way():
  params = {key: normal(8, 8, seed=i) for i, key in enumerate(KEYS)}

  def net(params, x):
    block = jax.checkpoint(lambda w, x: jnp.tanh(multiply(x, w)))
    for i, key in enumerate(KEYS):
      x = jnp.tanh(multiply(x, params[key])) if i % 2 else block(params[key], x)
    return x

  # No pattern among half of them selects another one.
  for i in 0, 1:
    names = list(filter(None, KEYS[i::2]))
    assert list_kept(names, net, params) == expect_both_passes(*names)


def test_a_string_is_a_pattern_only_if_no_name_equals_it():
  params = {"w*": normal(8, 8), "w1": normal(8, 8), "v1": normal(8, 8)}
  net = lambda p, x: x @ p["w*"] @ p["w1"] @ p["v1"]
  kept = lambda *names: list_kept(names, net, params)
  assert kept("w*") == expect_both_passes("w*")
  assert kept("w?") == expect_both_passes("w*", "w1")
  assert kept("w*", "*1") == expect_both_passes("w*", "w1", "v1")
  assert kept("w*", "w1") == expect_both_passes("w*", "w1")


def test_two_uses_of_a_weight_are_distinguished():
  """By what encloses them, or by the lines."""

  def net(params, x):
    with jax.named_scope("encoder"):
      x = jnp.tanh(multiply(x, params["embed"]))
    with jax.named_scope("decoder"):
      x = jnp.tanh(multiply(x, params["embed"]))
    x = x @ params["tied"]  # first
    return x @ params["tied"]  # second

  params = {"embed": normal(8, 8), "tied": normal(8, 8)}
  names = {row.name for row in make_report(net, params).unconverted}
  lines = names - {"encoder/embed", "decoder/embed"}
  assert len(names) == 4 and len(lines) == 2
  assert all(x.startswith("tied at test_provenance.py:") for x in lines)
  for name in names:
    grad_fn = make_grad_fn(net, keep_float32=name)
    kept = count_flops(grad_fn, params, X).unconverted
    assert {row.backward for row in kept} == {False, True}
    assert sum(row.run_count for row in kept) <= 3


def test_rows_are_short():
  net = jax.named_scope("attention")(jax.named_scope("einsum")(with_einsum))
  report = make_report(net, {"blocks": layers("q")})
  assert "bi,ij->bj" not in str(report)
  scopes = {row.name_scope for row in report.unconverted}
  assert scopes == {"attention/einsum/bi,ij->bj"}


def test_matmuls_without_weights_are_named_by_scope_or_line():
  def net(params, x):
    with jax.named_scope("scores"):
      scores = multiply(x, x.T)
    return scores @ multiply(x, params["v"])

  layers = jaxprs.list_layers(make_grad_fn(net), {"v": normal(8, 8)}, X)
  names = {x.name for x in layers if not x.location.names.param_path}
  (line,) = names - {"scores"}
  assert len(names) == 2
  # The line of the call leads to the matmul with v, too.
  assert line.startswith("no weights at test_provenance.py:")


def two_layers(params, x):
  return jnp.tanh(x @ params["up"]) @ params["down"]  # two_layers


def inner_loss(params):
  return jnp.mean((two_layers(params, X) - 1) ** 2)


def update_params(params):
  grads = jax.grad(inner_loss)(params)
  params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
  return jnp.mean(two_layers(params, X) ** 2)


def hessian_vector_product(params):
  ones = jax.tree.map(jnp.ones_like, params)
  _, tangents = jax.jvp(jax.grad(inner_loss), (params,), (ones,))
  return optax.tree.norm(tangents, squared=True)


PLAIN = {"up": normal(8, 8, seed=1), "down": normal(8, 8, seed=2)}
HARD_TO_NAME = {
  "updated weights": (update_params, PLAIN),
  "a Hessian-vector product": (hessian_vector_product, PLAIN),
}


@pytest.mark.parametrize("name", HARD_TO_NAME)
def test_a_name_keeps_only_the_matmuls_of_its_rows(name):
  jaxprs.assert_each_name_keeps_its_rows(*HARD_TO_NAME[name])


def test_unknown_name_stacks_of_another_jax_have_no_scope():
  (eqn,) = jax.make_jaxpr(lambda x: x @ x)(jnp.eye(2)).eqns
  info = eqn.source_info
  other = eqn.replace(source_info=type(info)(info.traceback, "scope"))
  assert _provenance.tag_param_path(other, ("w",)) is other
  assert _provenance.EqnLocation().push_scope(other).names[:3] == ("", "", "")
  assert _provenance.tag_param_path(eqn, ()) is eqn


def test_a_matmul_only_in_the_backward_pass_needs_no_line():
  """The loss is linear in it, so that nothing of it runs forward."""
  net = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]) @ params["head"])
  params = {"w": normal(8, 8), "head": normal(8, 8)}
  layers = jaxprs.list_layers(jax.grad(ols.autocast(net)), params, X)
  found = {(x.name, x.location.is_backward) for x in layers}
  assert found == {*expect_both_passes("w"), ("head", True)}


# The matmuls of a rule have the names of its weights.
WEIGHTS = normal(8, 8)


def layer(params, x):
  return jnp.tanh(x @ params["up"]) @ params["down"]


by_hand = jax.custom_vjp(layer)


def forward(params, x):
  hidden = jnp.tanh(x @ params["up"])
  return hidden @ params["down"], (params, x, hidden)


def backward(residuals, ct):
  params, x, hidden = residuals
  before = (ct @ params["down"].T) * (1 - hidden**2)
  by_batch = jnp.einsum("bi,bj->ij", x, before)
  down = jax.jit(lambda h, ct: (ct.T @ h).T)(hidden, ct)
  weights = lax.optimization_barrier({"up": by_batch + 0, "down": down})
  return weights, before @ params["up"].T


by_hand.defvjp(forward, backward)


@parametrize_slow("wrap", [jax.jit], [jax.jit, jax.checkpoint])
def test_the_backward_pass_of_a_rule_has_the_names_of_its_weights(wrap):
  layer = wrap(by_hand)

  def loss(params, x):
    for its_params in params["blocks"]:
      x = layer(its_params, x)
    return jnp.mean((x @ params["head"]) ** 2)

  draw = lambda i: {
    "up": normal(8, 8, seed=i),
    "down": normal(8, 8, seed=9 + i),
  }
  params = {"blocks": [draw(i) for i in range(3)], "head": WEIGHTS}
  cast = jax.grad(ols.autocast(loss))
  found = jaxprs.list_named_matmuls(cast, params, X)
  names = {f"blocks/{i}/{name}" for i in range(3) for name in ("up", "down")}
  assert {x.weights for x in found} == {*names, "head"}
  of_each = [[x for x in found if x.weights == name] for name in names]
  assert min(map(len, of_each)) == 3
  assert {x.dtype for x in found} == {"float16"}


def test_parts_of_a_concatenated_gradient_have_their_numbers():
  @jax.custom_vjp
  def two_layers(w, x):
    return jnp.tanh(x @ w[0]) @ w[1]

  def forward(w, x):
    hidden = jnp.tanh(x @ w[0])
    return hidden @ w[1], (w, x, hidden)

  def backward(residuals, ct):
    w, x, hidden = residuals
    before = (ct @ w[1].T) * (1 - hidden**2)
    return jnp.stack([x.T @ before, hidden.T @ ct]), before @ w[0].T

  two_layers.defvjp(forward, backward)
  net = lambda params, x: two_layers(params["w"], x)
  params = {"w": normal(2, 8, 8, seed=0)}
  found = jaxprs.list_named_matmuls(make_grad_fn(net), params, X)
  assert sorted(x.weights for x in found) == ["w/0"] * 3 + ["w/1"] * 3


def test_a_gradient_that_is_part_of_another_one_has_its_own_name():
  @jax.custom_vjp
  def layer(w, x):
    return x @ w["up"] + x @ w["down"]

  def backward(residuals, ct):
    w, x = residuals
    up = x.T @ ct
    return {"up": up, "down": up + x.T @ jnp.sin(ct)}, ct @ w["up"].T

  layer.defvjp(lambda w, x: (layer(w, x), (w, x)), backward)
  params = {"up": WEIGHTS, "down": WEIGHTS + 1}
  found = jaxprs.list_named_matmuls(make_grad_fn(layer), params, X)
  backward_names = sorted(x.weights for x in found if x.backward)
  assert backward_names == ["down", "up", "up"]
