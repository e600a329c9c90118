"""The name of a weight goes wherever it goes, and is that of its gradient."""

from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import optax_lossscale as ols
from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import compare_precision

X = normal(4, 8, seed=1)
STACK = normal(3, 8, 8)


def products(fun, *args):
  """The path, whether it is backward, and the dtype of each product."""
  closed = jax.make_jaxpr(fun)(*args)
  found = []
  for step in _jaxprs.walk(closed, _jaxprs.held_jaxprs):
    if _jaxprs.is_matrix_product(step.eqn):
      dtype = str(step.eqn.outvars[0].aval.dtype)
      found.append((step.place.weights, step.place.backward, dtype))
  return found


def paths(fun, *args):
  return [path for path, _, _ in products(ols.autocast(fun), *args)]


def in_turn(weights, x):
  for w in weights:
    x = jnp.tanh(x @ w)
  return x


@jax.jit
def cast(w):
  return w.astype(jnp.bfloat16).astype(jnp.float32)


PARTS = {
  "for": lambda w: list(w),
  "split": lambda w: [part[0] for part in jnp.split(w, 3)],
  "split along another axis": lambda w: [
    part[:, 0] for part in jnp.split(w.transpose(1, 0, 2), 3, axis=1)
  ],
  "unstack": jnp.unstack,
  "index": lambda w: [w[i] for i in range(3)],
  "a cast before": lambda w: list(cast(w)),
  "a cast after": lambda w: list(map(cast, w)),
  "jitted": jax.jit(lambda w: [jax.jit(jnp.transpose)(part) for part in w]),
  "dynamic_slice": lambda w: [
    lax.dynamic_slice(w, (i, 0, 0), (1, 8, 8))[0] for i in range(3)
  ],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_weight_that_comes_out_of_a_call_has_its_name(name):
  net = lambda params, x: in_turn(PARTS[name](params["w"]), x)
  assert paths(net, {"w": STACK}, X) == ["w/0", "w/1", "w/2"]
  kept = ols.autocast(net, keep_float32="w/1")
  found = products(kept, {"w": STACK}, X)
  assert [dtype for _, _, dtype in found] == ["float16", "float32", "float16"]


def test_which_part_is_taken_may_not_be_known():
  part = lambda w: lax.dynamic_index_in_dim(w, 1, keepdims=False)
  whole = jax.jit(lambda w, x: (x, cast(w)[0]))
  net = lambda params, x: x @ part(params["w"]) + x @ whole(params["w"], x)[1]
  names = paths(net, {"w": STACK}, X)
  assert names[0] in ("w", "w/1") and names[1] == "w/0"
  by_data = lambda params, x: x @ params["w"][jnp.argmax(x[0]) % 3]
  assert paths(by_data, {"w": STACK}, X) == ["w"]


def test_a_weight_is_followed_through_devices():
  mesh = jax.make_mesh((1,), ("i",))
  gather = lambda w, x: x @ lax.all_gather(w, "i", tiled=True)
  net = jax.shard_map(gather, mesh=mesh, in_specs=P(), out_specs=P("i"))
  assert paths(lambda p, x: net(p["w"], x), {"w": STACK[0]}, X) == ["w"]


def block(params, x):
  return jnp.tanh(x @ params["up"]) @ params["down"]


@jax.custom_vjp
def by_pull_back(params, x):
  return block(params, x)


by_pull_back.defvjp(
  lambda params, x: jax.vjp(block, params, x), lambda pull, ct: pull(ct)
)


@jax.custom_vjp
def by_hand(params, x):
  return block(params, x)


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


def network(layer):
  def loss(params, x):
    for its_params in params["blocks"]:
      x = layer(its_params, x)
    return jnp.mean((x @ params["head"]) ** 2)

  draw = lambda i: {
    "up": normal(8, 8, seed=i),
    "down": normal(8, 8, seed=9 + i),
  }
  return loss, {"blocks": [draw(i) for i in range(3)], "head": normal(8, 8)}


@pytest.mark.parametrize("layer", [by_pull_back, by_hand])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_the_backward_pass_of_a_rule_has_the_names_of_its_weights(wrap, layer):
  loss, params = network(wrap(layer))
  found = products(jax.grad(ols.autocast(loss)), params, X)
  names = {f"blocks/{i}/{name}" for i in range(3) for name in ("up", "down")}
  assert {path for path, _, _ in found} == {*names, "head"}
  of_each = [[x for x in found if x[0] == name] for name in names]
  assert min(map(len, of_each)) == 3
  assert {dtype for _, _, dtype in found} == {"float16"}


def drifting(params, x):
  """It loses what is small beside the drift, which is large in one layer."""
  left_out = jnp.sum(params["drift"] * x, -1, keepdims=True)
  return jnp.tanh(x @ params["up"] - left_out) @ params["down"]


def with_rule(fun):
  ruled = jax.custom_vjp(fun)
  ruled.defvjp(lambda *args: jax.vjp(fun, *args), lambda pull, ct: pull(ct))
  return ruled


@pytest.mark.parametrize(
  "wrap", [with_rule, lambda f: with_rule(jax.jit(f)), jax.jit]
)
def test_a_bad_layer_in_a_rule_is_one_place(wrap):
  loss, params = network(wrap(drifting))
  for i, layer in enumerate(params["blocks"]):
    layer["drift"] = jnp.float32(40.0 if i == 1 else 0.0)
    layer["up"] += layer["drift"]
  fun = jax.grad(ols.autocast(loss))
  report = compare_precision(fun, params, X, progress=False)
  assert 0.03 < report.error < 0.1
  assert report.standing_out == ("blocks/1/up",)
  (kept,) = report.standing_out
  cured = jax.grad(ols.autocast(loss, keep_float32=kept))
  assert compare_precision(cured, params, X, progress=False).error < 0.01
