"""A matmul has the name of its weights if a library gives it none."""

import functools

import equinox as eqx
from flax import linen as nn
from flax import nnx
import haiku as hk
from helpers import jaxprs
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _eqns

X = normal(4, 8, seed=1)
WEIGHTS = normal(8, 8)
STACK = normal(3, 8, 8)
COUNT = 3


def list_matmuls(fun, *args):
  """Return the name and the dtype of each matmul that runs, in order."""
  return [(x.name, x.dtype) for x in jaxprs.list_named_matmuls(fun, *args)]


def list_matmul_names(fun, *args):
  return [name for name, _ in list_matmuls(ols.autocast(fun), *args)]


def mlp(params, x):
  return x + jnp.tanh(x @ params["up"]) @ params["down"]


def network(block):
  def net(params, x):
    for layer in params["blocks"]:
      x = block(layer, x)
    return x @ params["head"]

  layers = [{"up": WEIGHTS, "down": 2 * WEIGHTS} for _ in range(COUNT)]
  return net, {"blocks": layers, "head": WEIGHTS + 1}


EXPECTED = [
  *(f"blocks/{i}/{name}" for i in range(COUNT) for name in ("up", "down")),
  "head",
]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_blocks_that_no_name_distinguishes_still_share_a_function(wrap):
  net, params = network(wrap(mlp))

  def shared(*names):
    cast = ols.autocast(net, keep_float32=names)
    closed = jax.make_jaxpr(cast)(params, X)
    called = map(_eqns.get_call_jaxpr, closed.jaxpr.eqns)
    return len({id(x.jaxpr) for x in called if x is not None})

  assert shared() == 1
  assert shared("blocks/1/up") == shared("blocks/0/up", "blocks/2/up") == 2


def test_scanned_layers_have_the_name_of_their_stack():
  layers = {"up": STACK, "down": STACK}
  shared = {"first": WEIGHTS, "layers": layers, "stop": jnp.ones(())}

  def net(params, x):
    step = lambda x, layer: (mlp(layer, x @ params["first"]), x @ x.T)
    x, _ = lax.scan(step, x, params["layers"])
    loop = lambda i, x: x @ params["first"]
    return lax.fori_loop(0, params["stop"].astype(int), loop, x)

  found = list_matmul_names(net, shared, X)
  assert found == ["first", "layers/up", "layers/down", "", "first"]
  step = lambda w, _: (w @ w, None)
  carried = lambda params, x: lax.scan(step, params["first"], length=3)[0]
  assert list_matmul_names(carried, shared, X) == [""]


def apply_in_order(weights, x):
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
def test_a_slice_of_stacked_weights_has_its_number_in_any_function(name):
  net = lambda params, x: apply_in_order(PARTS[name](params["w"]), x)
  kept = ols.autocast(net, keep_float32="w/1")
  assert list_matmuls(kept, {"w": STACK}, X) == [
    ("w/0", "float16"), ("w/1", "float32"), ("w/2", "float16"),
  ]  # fmt: skip


def test_a_slice_with_an_unknown_index_has_no_number():
  part = lambda w: lax.dynamic_index_in_dim(w, 1, keepdims=False)
  whole = jax.jit(lambda w, x: (x, cast(w)[0]))
  net = lambda params, x: x @ part(params["w"]) + x @ whole(params["w"], x)[1]
  first, second = list_matmul_names(net, {"w": STACK}, X)
  assert first in ("w", "w/1") and second == "w/0"
  by_data = lambda params, x: x @ params["w"][jnp.argmax(x[0]) % 3]
  assert list_matmul_names(by_data, {"w": STACK}, X) == ["w"]
  # A part of a part has the number of the part, and several have none.
  slices = lambda params, x: x @ params["w"][0][2:] + x @ params["w"][1, 1:9]
  found = list_matmul_names(slices, {"w": jnp.ones((2, 10, 8))}, X)
  assert found == ["w/0", "w"]


def test_a_weight_is_followed_through_shard_map():
  mesh = jax.make_mesh((1,), ("i",))
  gather = lambda w, x: x @ lax.all_gather(w, "i", tiled=True)
  mapped = jax.shard_map(gather, mesh=mesh, in_specs=P(), out_specs=P("i"))
  net = lambda params, x: mapped(params["w"], x)
  assert list_matmul_names(net, {"w": WEIGHTS}, X) == ["w"]


def test_data_has_no_param_path():
  def net(params, batch):
    return batch["x"] @ params["w"] + batch["mask"] @ (batch["x"] * 2)

  batch = {"x": X, "mask": jnp.ones((4, 4))}
  assert list_matmul_names(net, {"w": WEIGHTS}, batch) == ["w", ""]
  by_keyword = lambda **kwargs: net(kwargs["weights"], kwargs["batch"])
  declared = lambda weights, *, batch: net(weights, batch)
  first = lambda w: ols.autocast(by_keyword)(weights={"w": w}, batch=batch)
  last = lambda w: ols.autocast(declared)(batch=batch, weights={"w": w})
  for fun in first, last:
    assert {name for name, _ in list_matmuls(fun, WEIGHTS)} == {"w", ""}


def test_a_single_array_has_no_path():
  assert list_matmul_names(lambda w, x: x @ w, WEIGHTS, X) == [""]
  # It is the weights, and what comes after it is data, and names no layer.
  fun = lambda x, data: x @ jax.tree.leaves(data)[0]
  for data in {"image": WEIGHTS}, (WEIGHTS,):
    assert list_matmul_names(fun, X, data) == [""]
    in_numpy = lambda data: ols.autocast(fun)(np.asarray(X), data)
    assert [name for name, _ in list_matmuls(in_numpy, data)] == [""]


class Net(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def test_layers_of_flax_nnx_have_names():
  model = Net()
  layers = [f"layers/{i}/kernel" for i in range(3)]
  state = nnx.state(model)
  pure = lambda state, x: nnx.merge(nnx.graphdef(model), state)(x)
  assert list_matmul_names(pure, state, X) == layers
  loss = lambda model, x: jnp.sum(model(x))
  for fun in loss, Net.__call__:
    traced = nnx.jit(lambda model, x, fun=fun: ols.autocast(fun)(model, x))
    assert [scope for scope, _ in list_matmuls(traced, model, X)] == layers
  bound = [scope for scope, _ in list_matmuls(ols.autocast(model.__call__), X)]
  assert bound == layers


def test_a_model_may_contain_itself():
  model = Net()
  model.layers[0].model = model
  traced = nnx.jit(lambda model, x: ols.autocast(lambda m, x: m(x))(model, x))
  text = traced.lower(model, X).as_text(debug_info=True)
  assert "layers/0/kernel/autocast-float16" in text


def test_sizes_may_be_symbolic():
  rows, size = jax.export.symbolic_shape("rows, size")
  fun = jax.jit(ols.autocast(lambda batch, w: batch["x"][1:2, 3:] @ w))
  types = {"x": jax.ShapeDtypeStruct((rows + 2, 11), jnp.float32)}
  w = jax.ShapeDtypeStruct((8, size), jnp.float32)
  exported = jax.export.export(fun)(types, w)
  assert exported.out_avals[0].shape == (1, size)


class Layer(eqx.Module):
  weight: jax.Array


class Stack(eqx.Module):
  layers: list[Layer]

  def __call__(self, x):
    for layer in self.layers:
      x = jnp.tanh(x @ layer.weight)
    return x


def test_a_model_may_be_the_function():
  model = Stack([Layer(WEIGHTS), Layer(WEIGHTS)])
  trained = lambda model, x: ols.autocast(model)(x)
  params, static = eqx.partition(model, eqx.is_array)
  fun = lambda p, x: trained(eqx.combine(p, static), x)
  names = [name for name, _ in list_matmuls(fun, params, X)]
  assert names == ["layers/0/weight", "layers/1/weight"]
  net = lambda params, x: x @ params["w"]
  bound = jax.tree_util.Partial(net, {"w": WEIGHTS})
  assert list_matmul_names(bound, X) == ["0/0/w"]


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.remat(nn.Dense)(8, name="again")(x)
    x = nn.jit(nn.Dense)(8, name="compiled")(x)
    return nn.Dense(8, name="last")(x)


def test_full_paths_of_a_library_are_not_extended():
  model = Linen()
  params = jax.eval_shape(model.init, jax.random.key(0), X)
  found = list_matmul_names(lambda params, x: model.apply(params, x), params, X)
  assert found == ["Linen/again", "Linen/compiled", "Linen/last"]
  net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 8])(x)))
  params = jax.eval_shape(net.init, jax.random.key(0), X)
  found = list_matmul_names(net.apply, params, X)
  assert found == ["mlp/linear_0", "mlp/linear_1"]
  in_a_list = lambda weights, x: x @ weights[0]
  in_a_scope = jax.named_scope("dense")(in_a_list)
  assert list_matmul_names(in_a_scope, [WEIGHTS], X) == ["dense"]
  assert list_matmul_names(in_a_list, [WEIGHTS], X) == ["0"]


def test_in_a_cast_gradient_only_matmuls_with_weights_have_their_names():
  net, params = network(mlp)
  grad = jax.grad(lambda params, x: jnp.sum(net(params, x)))
  found = list_matmul_names(grad, params, X)
  assert set(found) == {*EXPECTED, ""}


def test_a_function_with_an_unknown_signature_has_names():
  call = functools.partial(max, key=len)  # has no signature
  with pytest.raises(TypeError):
    ols.autocast(call)({"w": WEIGHTS}, 1)
