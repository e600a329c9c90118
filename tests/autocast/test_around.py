"""`autocast` among arguments, effects, devices, transformations and kernels."""

from collections import defaultdict, OrderedDict
import functools
import gc
import sys
import weakref

import equinox as eqx
from flax import nnx
from helpers import equations, line_of, sharding
from helpers.bits import assert_close, assert_same_bits
import jax
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _messages
from optax_lossscale._jaxprs import _equations, _types

X = jnp.float32(np.arange(32).reshape(8, 4) % 5 - 2)
W = jnp.float32(np.arange(16).reshape(4, 4) % 3 - 1)


def test_arguments_and_results_may_be_any_objects():
  thing = object()

  def fun(mode, x, *rest, activation, table=None):
    """A docstring."""
    assert mode == "train" and rest == (3, None) and activation is jnp.tanh
    if rest[0] > 2:  # A number stays a number.
      y = activation(x @ W)
    return {
      "y": y,
      "x": x,
      "none": None,
      "thing": [thing, mode],
      "n": rest[0],
      "host": table["host"],
    }

  table = {"host": np.arange(3)}
  out = ols.autocast(fun)("train", X, 3, None, activation=jnp.tanh, table=table)
  assert out["thing"] == [thing, "train"] and out["n"] == 3
  assert out["x"] is X and out["host"] is table["host"]
  assert out["y"].dtype == jnp.float32
  assert ols.autocast(fun).__name__ == "fun"
  assert ols.autocast(fun).__doc__ == "A docstring."


@pytest.mark.parametrize("kind", [dict, functools.partial(defaultdict, None)])
def test_keys_of_an_argument_may_be_of_several_types(kind):
  # JAX cannot sort them. Nor need it, as long as they hold no NNX module.
  assert "flax.nnx" in sys.modules
  half = ols.autocast(lambda tables, x: tables["w"] @ tables[1] @ x)
  tables = kind({"w": jnp.eye(4), 1: jnp.eye(4)})
  counts = equations.products(lambda x: half(tables, x), jnp.eye(4))
  assert counts == {"float16": 2}


def test_a_module_is_found_beside_keys_of_several_types():
  def fun(tables, x):
    tables["layer"].count[...] += 1
    return tables["layer"](x)

  layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  layer.count = nnx.Variable(jnp.array(0))
  ols.autocast(fun)(OrderedDict(layer=layer), jnp.eye(4))
  assert layer.count[...] == 1


def test_arguments_may_be_static_and_donated():
  fun = ols.autocast(lambda x, n, scale=1: scale * (x @ W) + n)
  step = jax.jit(fun, static_argnames=("n", "scale"), donate_argnums=0)
  x = X + 0
  assert_same_bits(step(x, n=2, scale=3), 3 * (X @ W) + 2)
  assert x.is_deleted()


def test_a_compiled_function_is_traced_once():
  traces = []

  def fun(x):
    traces.append(x)
    return x @ W

  step = jax.jit(ols.autocast(fun))
  for _ in range(3):
    step(X)
  assert len(traces) == 1


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_effects_happen_once_and_in_order(ordered, jitted):
  def body(seen, x, w):
    note = lambda value: seen.append(int(value))
    io_callback(note, None, 1, ordered=ordered)
    y = x @ w
    jax.debug.callback(note, 2, ordered=ordered)

    def step(c, i):
      io_callback(note, None, 10 + i, ordered=ordered)
      return c @ w, None

    y, _ = lax.scan(step, y, jnp.arange(3))
    branch = lambda c: (io_callback(note, None, 20, ordered=ordered), c @ w)[1]
    y = lax.cond(jnp.sum(x) > -1e9, branch, lambda c: c, y)
    double = jax.pure_callback(lambda v: 2 * v, y, y)
    io_callback(note, None, 3, ordered=ordered)
    return double

  seen, expected = [], []
  for fun, to in ((ols.autocast(body), seen), (body, expected)):
    run = functools.partial(fun, to)
    out = (jax.jit(run) if jitted else run)(X, W)
    jax.effects_barrier()
    np.testing.assert_array_equal(out, 2 * (X @ W @ W @ W @ W @ W))
  assert sorted(seen) == sorted(expected) == [1, 2, 3, 10, 11, 12, 20]
  if ordered:  # Among callbacks of one kind.
    seen.remove(2)
    assert seen == [1, 10, 11, 12, 20, 3]


def test_a_reference_is_read_and_written():
  def fun(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ W
    return ref[...] + 1

  if not hasattr(jax, "new_ref"):
    pytest.skip("This version of JAX has no references.")
  assert_same_bits(jax.jit(ols.autocast(fun))(X), X @ W + 1)


def keep(w):
  return ols.keep_float32(lambda x: jnp.sin(x @ w))


def step(fun):
  return lambda carry, _: (fun(carry), None)


# Parts of a model that are kept, of two arrays.
KEPT = {
  "in place": lambda x, w: keep(w)(x),
  "around a jit": lambda x, w: ols.keep_float32(
    jax.jit(lambda x: jnp.sin(x @ w))
  )(x),
  "around a scan": lambda x, w: ols.keep_float32(
    lambda x: lax.scan(step(lambda x: jnp.sin(x @ w)), x, length=1)[0]
  )(x),
  "in a scan": lambda x, w: lax.scan(step(keep(w)), x, length=1)[0],
  "in a jit": lambda x, w: jax.jit(keep(w))(x),
  "under vmap": lambda x, w: jax.vmap(keep(w))(x),
  "a checkpoint": lambda x, w: ols.keep_float32(
    jax.checkpoint(lambda x: jnp.sin(x @ w))
  )(x),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_part_that_is_kept_runs_in_float32_and_so_do_its_derivatives(name):
  part = KEPT[name]
  model = lambda x, w: part(x, w) @ w
  loss = lambda x, w: jnp.sum(model(x, w))
  half = ols.autocast(model)
  assert equations.products(half, X, W) == {"float32": 1, "float16": 1}
  both = equations.products(jax.grad(ols.autocast(loss), (0, 1)), X, W)
  assert both["float32"] >= 3 and both["float16"] == 3
  # Also where the gradient is taken inside.
  inside = equations.products(ols.autocast(jax.grad(loss, (0, 1))), X, W)
  assert inside == both
  # Outside of autocast nothing changes.
  assert_same_bits(part(X, W), jnp.sin(X @ W))


def test_only_the_mark_itself_keeps_a_part():
  @jax.named_scope("keep_float32_not")
  def part(x, w):
    with jax.named_scope("do_keep_float32"):
      return jnp.sin(x @ w)

  assert equations.products(ols.autocast(part), X, W) == {"float16": 1}
  inside = lambda f: jax.vmap(jax.checkpoint(f), (None, 0))
  kept = jax.grad(lambda x, w: jnp.sum(inside(ols.keep_float32(part))(x, w)))
  loss = lambda x, w: jnp.sum(kept(x, w) @ w[0])
  counts = equations.products(ols.autocast(loss), X[:4], jnp.stack([W, W]))
  assert counts["float16"] == 1 and counts["float32"] >= 2


def test_a_leaked_tracer_is_told_with_the_users_function():
  seen = []

  def loss_that_writes_outside(w):
    seen.append(2 * w)
    return jnp.sum(w @ w)

  jax.grad(ols.autocast(loss_that_writes_outside))(W)
  with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
    seen[0] + 1
  number = loss_that_writes_outside.__code__.co_firstlineno
  assert f"loss_that_writes_outside at {__file__}:{number}" in str(caught.value)


def test_a_kept_function_has_its_name_its_notes_and_its_arguments():
  def part(x, *, n):
    """A docstring."""
    return x + n

  part.noted = True
  kept = ols.keep_float32(part)
  assert (kept.__name__, kept.__doc__) == ("part", "A docstring.")
  assert kept.noted and kept(1, n=2) == 3
  # What a layer holds stays in it.
  layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  assert not hasattr(ols.keep_float32(layer), "kernel")


def test_a_hessian_is_that_of_float32():
  loss = lambda w: jnp.sum(jnp.tanh(X @ w / 4) ** 2)
  hessian, half = map(jax.hessian, (loss, ols.autocast(loss)))
  assert set(equations.products(half, W)) == {"float16"}
  assert_close(jax.jit(half)(W), jax.jit(hessian)(W))


def test_a_checkpoint_around_it_saves_its_products():
  loss = ols.autocast(lambda w: jnp.sum(jnp.tanh(jnp.tanh(X @ w) @ w)))
  policy = jax.checkpoint_policies.dots_saveable
  kept = jax.grad(jax.checkpoint(loss, policy=policy))
  assert equations.products(kept, W) == equations.products(jax.grad(loss), W)
  np.testing.assert_array_equal(jax.jit(kept)(W), jax.jit(jax.grad(loss))(W))


def test_a_checkpoint_inside_keeps_its_options():
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  layer = jax.checkpoint(lambda x: x @ W, prevent_cse=False, policy=policy)
  (eqn,) = jax.make_jaxpr(ols.autocast(layer))(X).eqns
  hidden = _equations.hi_primitive(eqn)
  params = eqn.params if hidden is None else hidden.params
  assert params["policy"] is policy
  assert params["prevent_cse"] in (False, (False,))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shardings_are_kept(axis_type):
  mesh = sharding.make_mesh((4, 2), ("data", "model"), axis_type)
  specs = {"x": P("data", None), "w": P(None, "model")}
  trees = sharding.put({"x": X, "w": W}, sharding.named(mesh, specs))
  inner = jax.jit(
    lambda x, w: jnp.tanh(x @ w),
    out_shardings=jax.NamedSharding(mesh, P("data", "model")),
  )

  def fun(tree):
    y = inner(tree["x"], tree["w"])
    step = lambda c, _: (jnp.sin(c), None)
    return {"y": lax.scan(step, y, length=2)[0], **tree}

  def loss(tree):
    return jnp.sum(fun(tree)["y"])

  with jax.set_mesh(mesh):
    for full in (fun, jax.grad(loss)):
      half = ols.autocast(fun) if full is fun else jax.grad(ols.autocast(loss))
      actual, expected = jax.jit(half)(trees), jax.jit(full)(trees)
      sharding.assert_shardings_equal(actual, expected)
      assert_close(actual, expected)
      assert set(equations.products(half, trees)) == {"float16"}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_inside_and_outside_is_entered(axis_type, check_vma):
  mesh = sharding.make_mesh((8,), ("data",), axis_type)
  x, w = sharding.put((X, W), sharding.named(mesh, (P("data"), P())))

  def local_loss(x, w):
    y, _ = lax.scan(lambda c, _: (c @ w, None), x, length=2)
    return lax.pmean(jnp.sum(y), "data")

  mapped = functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("data"), P()),
    out_specs=P(),
    check_vma=check_vma,
  )
  expected = jax.jit(jax.grad(mapped(local_loss), (0, 1)))(x, w)
  inside = jax.grad(mapped(ols.autocast(local_loss)), (0, 1))
  outside = jax.grad(ols.autocast(mapped(local_loss)), (0, 1))
  for half in (inside, outside):
    assert set(equations.products(half, x, w)) == {"float16"}
    actual = jax.jit(half)(x, w)
    assert_same_bits(actual, expected)
    sharding.assert_shardings_equal(actual, expected)


def test_an_exchange_of_products_between_devices_is_in_half():
  mesh = sharding.make_mesh((8,), ("data",))
  to_next = [(i, (i + 1) % 8) for i in range(8)]

  def local(x, w):
    return lax.ppermute(x @ w, "data", to_next), lax.psum(x @ w, "data")

  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())
  )
  half = ols.autocast(mapped)
  names = equations.in_half(half, X, W)
  # A sum over devices is arithmetic, which is never done in half.
  assert "ppermute" in names and not names & {"psum", "psum2"}
  assert_same_bits(jax.jit(half)(X, W), jax.jit(mapped)(X, W))


def test_pmap_and_vmap_with_a_name_run_it():
  def local(x):
    return lax.pmean(x @ W, "i") + lax.axis_index("i")

  x = jnp.stack([X, X + 1])
  for transform in (jax.vmap, jax.pmap):
    half = transform(ols.autocast(local), axis_name="i")
    assert_same_bits(half(x), transform(local, axis_name="i")(x))


def test_gradients_of_a_scaled_loss_are_those_of_a_hand_cast_model():
  def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

  def by_hand(w, x):
    y = jnp.float32(x.astype(jnp.float16) @ w.astype(jnp.float16))
    return jnp.mean(jnp.tanh(y) ** 2)

  state = ols.DynamicLossScale().init()
  actual = jax.jit(ols.value_and_grad(ols.autocast(loss), state))(W, X)
  assert_same_bits(actual, jax.jit(ols.value_and_grad(by_hand, state))(W, X))


def test_an_overflow_of_the_backward_pass_is_found_at_its_line():
  def layer(x, w):
    return jnp.tanh(x) @ w * 3  # layer

  def loss_fn(w):
    x, _ = lax.scan(lambda c, _: (layer(c, w), None), X, length=3)
    return 1e6 * jnp.mean(x)

  state = ols.DynamicLossScale().init()
  grad_fn = ols.value_and_grad(ols.autocast(loss_fn), state)
  hit = ols.diagnostics.find_overflow(grad_fn, W)
  assert hit.source == f"test_around.py:{line_of('layer', __file__)} (layer)"
  assert (hit.path, hit.backward) == ("scan[2]/convert_element_type", True)
  assert hit.dtype == "float16"


# Calls outside of `jit` in a loop are told, and no others are.
STATE = ols.DynamicLossScale().init()
WARNS = functools.partial(pytest.warns, UserWarning, match="outside of jit")


def loss_fn(w, x):
  return jnp.mean((x @ w) ** 2)


def make_loss():
  """The same function made anew, as within a step that is not jitted."""
  return lambda w, x: jnp.mean((x @ w) ** 2)


class Method:
  def loss(self, w, x):
    return loss_fn(w, x)


class Layer(eqx.Module):
  w: jax.Array

  def __call__(self, x):
    return loss_fn(self.w, x)


def in_nnx(w, x):
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  return nnx.grad(ols.autocast(lambda model: loss_fn(w, model(x))))(model)


UNHASHABLE = {"w": W}  # bound by a partial, which cannot be hashed with it
CALLS = {
  "function": lambda: ols.autocast(loss_fn)(W, X),
  "gradient": lambda: ols.grad(ols.autocast(loss_fn), STATE)(W, X),
  "two gradients": lambda: jax.grad(
    lambda w: jnp.sum(jax.grad(ols.autocast(loss_fn))(w, X))
  )(W),
  "made anew": lambda: ols.autocast(make_loss())(W, X),
  "method": lambda: ols.autocast(Method().loss)(W, X),
  "layer": lambda: ols.autocast(Layer(W))(X),
  "partial": lambda: ols.autocast(
    functools.partial(lambda tree, x: loss_fn(tree["w"], x), UNHASHABLE)
  )(X),
  "jitted inside": lambda: ols.autocast(jax.jit(loss_fn))(W, X),
  "nnx": lambda: in_nnx(W, X),
  "keys without an order": lambda: ols.autocast(
    lambda tree: loss_fn(tree[1], tree["x"])
  )({1: W, "x": X}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_third_call_outside_of_jit_is_told_and_no_other(name):
  CALLS[name]()
  CALLS[name]()
  with WARNS() as told:
    CALLS[name]()
  assert len(told) == 1 and told[0].filename == __file__
  CALLS[name]()


def loop_within(transform):
  """Five steps of a loop whose calls something transforms."""
  for _ in range(5):
    transform(ols.grad(ols.autocast(loss_fn), STATE))(W, X)


COMPILED = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "vmap": lambda fun: jax.jit(
    lambda w, x: jax.vmap(fun, (None, 0))(w, x[None])
  ),
  "eval_shape": lambda fun: functools.partial(jax.eval_shape, fun),
  "make_jaxpr": jax.make_jaxpr,
  "precision_report": lambda fun: functools.partial(
    ols.diagnostics.precision_report, fun
  ),
  "find_overflow": lambda fun: functools.partial(
    ols.diagnostics.find_overflow, fun
  ),
  "compare_precision": lambda fun: functools.partial(
    ols.diagnostics.compare_precision, fun, progress=False
  ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_or_only_traced_is_not_told(name):
  loop_within(COMPILED[name])


def test_who_turned_jit_off_is_not_told():
  with jax.disable_jit():
    loop_within(jax.jit)


def test_calls_with_other_shapes_or_dtypes_are_not_told():
  cast = ols.autocast(lambda w, x: loss_fn(w.astype(jnp.float32), x))
  for i in range(1, 5):
    cast(W, jnp.ones((i, 4)))
  cast(W.astype(jnp.bfloat16), X)


def test_a_result_without_arrays_tells_nothing():
  def without(w, x):
    w @ x.T

  for _ in range(4):
    ols.autocast(without)(W, X)


def test_nothing_that_a_function_holds_is_kept():
  model = Layer(W)
  for _ in range(2):
    ols.autocast(lambda x, model=model: model(x))(X)
    ols.autocast(model)(X)
  kept = weakref.ref(model)
  del model
  gc.collect()
  assert kept() is None


def test_code_that_is_gone_is_forgotten():
  names = {"jnp": jnp}
  exec("fun = lambda w, x: jnp.mean((x @ w) ** 2)", names)
  ols.autocast(names["fun"])(W, X)
  assert len(_messages._counts) == 1
  names.clear()
  jax.clear_caches()
  gc.collect()
  assert not _messages._counts


def test_a_tracer_that_does_not_tell_is_taken_for_one_of_a_program(monkeypatch):
  class Silent(jax.core.Tracer):  # as those of another JAX may be
    aval = jax.typeof(W)

  monkeypatch.delattr(jax.core.Tracer, "to_concrete_value")
  assert not _types.is_known(object.__new__(Silent))


# Kernels that take half precision alone, in a float32 model: the recipe. This
# one is of Pallas, which is interpreted here. That of cuDNN is compiled for an
# H100 by `tests/devices/test_compilers.py`.
HALF = jnp.float16
KEYS = jax.random.split(jax.random.key(0), 3)
INPUT, *WEIGHTS = (jax.random.normal(key, (8, 8)) / 2 for key in KEYS)
PARAMS = dict(zip(("w", "head"), WEIGHTS, strict=True))


def multiply(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def forward_kernel(x, w, out):
  out[:] = jnp.tanh(multiply(x[:], w[:])).astype(HALF)


def backward_kernel(x, w, g, dx, dw):
  y = jnp.tanh(multiply(x[:], w[:]))
  d = (g[:] * (1 - y**2)).astype(HALF)
  dx[:] = multiply(d, w[:].T).astype(HALF)
  dw[:] = multiply(x[:].T, d).astype(HALF)


def call(kernel, outputs, *args):
  for x in args:
    if x.dtype != HALF:
      raise TypeError(f"the kernel takes float16, got {x.dtype}")
  out_shape = [jax.ShapeDtypeStruct((8, 8), HALF)] * outputs
  return pl.pallas_call(kernel, out_shape=out_shape, interpret=True)(*args)


@jax.custom_vjp
def half_layer(x, w):
  return call(forward_kernel, 1, x, w)[0]


half_layer.defvjp(
  lambda *xw: (half_layer(*xw), xw),
  lambda xw, g: tuple(call(backward_kernel, 2, *xw, g)),
)


def recipe(x, w):
  x_half, w_half = (a.astype(jnp.float16) for a in (x, w))
  return half_layer(x_half, w_half).astype(x.dtype)


def in_float32(x, w):
  return jnp.tanh(x @ w)


def loss_with(layer):
  def loss_fn(params, x):
    return jnp.mean((layer(x, params["w"]) @ params["head"]) ** 2)

  return loss_fn


@pytest.mark.parametrize("change", [lambda f: f, ols.autocast])
def test_such_a_kernel_refuses_float32_also_inside_of_autocast(change):
  with pytest.raises(TypeError, match="takes float16, got float32"):
    change(loss_with(half_layer))(PARAMS, INPUT)


def test_with_casts_around_it_the_gradient_is_that_of_float32():
  grad_fn = ols.value_and_grad(ols.autocast(loss_with(recipe)), STATE)
  actual = jax.jit(grad_fn)(PARAMS, INPUT)
  assert_close(actual, jax.value_and_grad(loss_with(in_float32))(PARAMS, INPUT))


def test_the_loss_scale_reaches_the_backward_pass_of_the_kernel():
  """Gradients of 1e-7 would be lost in float16 without it."""
  tiny = lambda layer: lambda params, x: 1e-7 * loss_with(layer)(params, x)
  grads = ols.grad(ols.autocast(tiny(recipe)), STATE)(PARAMS, INPUT)
  assert_close(grads["w"], jax.grad(tiny(in_float32))(PARAMS, INPUT)["w"], 0.05)
  unscaled = jax.grad(ols.autocast(tiny(recipe)))(PARAMS, INPUT)
  assert not jnp.any(unscaled["w"])


def test_around_it_all_products_are_half_and_nothing_is_told():
  grad_fn = ols.grad(ols.autocast(loss_with(recipe)), STATE)
  # A warning would be an error.
  assert ols.diagnostics.precision_report(grad_fn, PARAMS, INPUT).share == 1.0
