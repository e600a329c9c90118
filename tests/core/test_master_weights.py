"""Half-precision parameters train as float32 master weights do."""

import functools
import inspect
import platform

import equinox as eqx
from flax import nnx
from helpers import (
  master_weights_battery,
  optax_battery,
  optimizers,
  parametrize_slow,
  sharding,
)
from helpers.bits import assert_same_bits
from helpers.checkpoints import restore_by_msgpack, restore_by_orbax
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols

DTYPES = [jnp.bfloat16, jnp.float16]
in_each_dtype = pytest.mark.parametrize(
  "dtype", DTYPES, ids=lambda x: x.__name__
)


def make_params(dtype=jnp.bfloat16):
  """Return a matrix in half precision, and a vector in float32."""
  w = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
  return {"scale": np.ones(3, np.float32), "w": w.astype(dtype)}


def loss_fn(params, x):
  return jnp.mean((x @ params["w"].astype(jnp.float32)) ** 2 * params["scale"])


X = np.linspace(-2, 1, 8, dtype=np.float32).reshape(2, 4)
BAD_X = np.full_like(X, np.inf)


def make_step(tx):
  def step(params, opt_state, x):
    grads = ols.grad(loss_fn, opt_state)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return step


def make_tx():
  inner = ols.with_loss_scaling(optax.adamw(1e-4), 2.0**8)
  return ols.with_master_weights(inner)


@functools.cache
def train(steps, dtype=jnp.bfloat16):
  """Return the parameters and the state after some steps, jitted."""
  tx = make_tx()
  params = jax.tree.map(jnp.asarray, make_params(dtype))
  opt_state, step = tx.init(params), jax.jit(make_step(tx))
  for _ in range(steps):
    params, opt_state = step(params, opt_state, X)
  return params, opt_state


def to_bits(x):
  x = np.asarray(x)
  return x.view({2: np.uint16, 4: np.uint32}[x.itemsize])


@pytest.mark.slow
@pytest.mark.skipif(
  platform.machine() != "x86_64",
  reason="XLA leaves the multiply-add out for x86 processors only",
)
@pytest.mark.parametrize("module", [*optimizers.MODULES, "wrappers"])
def test_optimizers_of_optax_train_as_with_masters_by_hand(module):
  # Bit for bit, in both dtypes; one step is skipped; one trace.
  found = optax_battery.run_script(master_weights_battery, module)
  assert found == {name: [] for name in optimizers.get_factories(module)}


@in_each_dtype
def test_small_updates_add_up(dtype):
  # Powers of two, so that the sums are exact.
  tx = ols.with_master_weights(optax.sgd(2.0**-13))
  params = jnp.ones(3, dtype)
  grads = jnp.array([1, -1, 0], dtype)

  @jax.jit
  def train(params):
    def step(carry, _):
      params, opt_state = carry
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), updates

    return jax.lax.scan(step, (params, tx.init(params)), length=100)

  (params, opt_state), updates = train(params)
  masters = ols.get_master_weights(opt_state, params)
  expected = np.float32([1 - 100 / 2**13, 1 + 100 / 2**13, 1])
  assert_same_bits(masters, expected)
  assert_same_bits(params, expected.astype(dtype))
  assert updates.dtype == jnp.float32
  # An entry that does not change has the update -0.0.
  assert np.array_equal(np.signbit(updates[0]), [True, True, True])
  assert np.all(np.asarray(updates[0]) == 0)


@jax.jit
def replace_masters(old, *masters):
  """Return the parameter and the master after updates that replace it."""
  tx = ols.with_master_weights(
    optax.stateless(lambda new, old: jax.tree.map(jnp.subtract, new, old))
  )
  params, state = old, tx.init(old)
  for new in masters:
    updates, state = tx.update(new, state, params)
    params = optax.apply_updates(params, updates)
  return params, ols.get_master_weights(state, params)


@pytest.mark.parametrize(
  "lower", ["random", 0x0, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
)
def test_a_bfloat16_parameter_and_its_remainder_have_all_bits_of_the_master(
  lower,
):
  if lower == "random":
    lower = np.random.default_rng(0).integers(2**16, size=2**16)
  upper = np.arange(2**16, dtype=np.uint32) << 16
  masters = (upper | np.uint32(lower)).view(np.float32)
  # From zero, the update is the master itself. Subnormals are flushed.
  normal = np.isfinite(masters) & (np.abs(masters) >= 2.0**-126)
  masters = masters[normal]
  zeros = np.zeros(masters.shape, jnp.bfloat16)
  params, actual = replace_masters(zeros, masters)
  assert_same_bits(actual, masters)
  # The parameter is the nearest one; ties are away from zero.
  rounded = (to_bits(masters) + np.uint32(0x8000)) >> 16
  assert np.array_equal(to_bits(params), rounded)


@pytest.mark.parametrize(
  "dtype",
  [*DTYPES, jnp.float8_e5m2, jnp.float8_e4m3fn],
  ids=lambda x: x.__name__,
)
@pytest.mark.parametrize(
  "name", ["inf", "-inf", "nan", "0x7f7fffff", "all NaN bits"]
)
def test_masters_that_are_not_representable_round_as_casts_do(name, dtype):
  numbers = {
    "0x7f7fffff": np.finfo(np.float32).max,
    "all NaN bits": np.uint32(0x7FFFFFFF).view(np.float32),
  }
  master = np.float32(numbers.get(name, name))
  with np.errstate(all="ignore"):
    expected = np.array([master]).astype(dtype)
  params, masters = replace_masters(np.zeros(1, dtype), np.array([master]))
  assert np.array_equal(
    np.float32(params), np.float32(expected), equal_nan=True
  )
  # A finite master stays, although its parameter is inf.
  is_kept = not np.isnan(np.float32(expected))
  assert np.array_equal(
    masters, [master] if is_kept else [np.nan], equal_nan=True
  )


def test_float16_parameters_are_rounded_as_by_casts():
  rng = np.random.default_rng(0)
  halves = np.arange(2**15, dtype=np.uint16).view(np.float16)
  halves = halves[np.isfinite(halves)].astype(np.float32)
  ties = (halves[1:] + halves[:-1]) / 2
  spread = rng.normal(size=10_000) * 10.0 ** rng.uniform(-9, 6, 10_000)
  masters = np.concatenate(
    [halves, ties, np.nextafter(ties, np.float32(0)), -ties, spread]
  ).astype(np.float32)
  params, actual = replace_masters(np.zeros(masters.shape, np.float16), masters)
  with np.errstate(over="ignore"):
    expected = masters.astype(np.float16)
  # From zero, no sum gives -0.0.
  assert_same_bits(params + np.float16(0), expected + np.float16(0))
  assert_same_bits(actual, masters)


@in_each_dtype
def test_a_parameter_that_a_sum_cannot_reach_is_its_own_master(dtype):
  # The masters are below 1, where float32 is twice as fine as above it, and
  # then change their sign: 1 + 3 * 2**-24 has no float32.
  below_one = np.full(3, 1 - 2.0**-13, np.float32)
  masters = np.float32([-3, -4, 5]) * np.float32(2.0**-24)
  params, actual = replace_masters(np.ones(3, dtype), below_one, masters)
  assert_same_bits(np.float32(params), np.float32([-4, -4, 5]) * 2.0**-24)
  assert_same_bits(actual, np.float32(params))


@in_each_dtype
def test_a_skipped_step_changes_no_bit(dtype):
  params, opt_state = train(3, dtype)
  new = jax.jit(make_step(make_tx()))(params, opt_state, BAD_X)
  masters = ols.get_master_weights(opt_state, params)
  assert_same_bits(new[0], params)
  assert_same_bits(new[1].remainder, opt_state.remainder)
  assert_same_bits(new[1].inner_state[1], opt_state.inner_state[1])
  assert_same_bits(ols.get_master_weights(new[1], new[0]), masters)
  assert ols.get_loss_scale_state(new[1]).total_notfinite == 1


@in_each_dtype
def test_negative_zeros_keep_their_sign(dtype):
  tx = ols.with_master_weights(optax.sgd(1.0))
  params = jnp.array([-0.0, 0.0], dtype)
  updates, _ = tx.update(jnp.zeros(2, dtype), tx.init(params), params)
  assert_same_bits(optax.apply_updates(params, updates), params)
  assert np.all(np.signbit(updates))


@in_each_dtype
def test_parameters_that_change_outside_are_not_undone(dtype):
  params, opt_state = train(3, dtype)
  params = params | {"w": params["w"] * 2}
  masters = ols.get_master_weights(opt_state, params)["w"]
  half_unit = 2.0**-8 if dtype == jnp.bfloat16 else 0
  np.testing.assert_allclose(masters, np.float32(params["w"]), half_unit)


def test_float32_parameters_pass_through():
  params, opt_state = train(3)
  assert opt_state.remainder["w"].dtype == jnp.int16
  assert opt_state.remainder["w"].shape == params["w"].shape
  assert opt_state.remainder["scale"] == optax.MaskedNode()
  tx = ols.with_master_weights(optax.sgd(0.5))
  leaves = {
    "complex": np.complex64([1 + 1j]),
    "float0": np.zeros(2, jax.dtypes.float0),
    "float32": np.float32([1.0]),
    "int": np.int32([3]),
    "key": jax.random.key(0),
    "none": None,
  }
  state = tx.init({"float32": leaves["float32"]})
  assert jax.tree.leaves(state) == []
  identity = ols.with_master_weights(optax.identity())
  updates, _ = identity.update(leaves, identity.init(leaves), leaves)
  assert all(updates[name] is leaf for name, leaf in leaves.items())


def test_the_inner_optimizer_receives_float32():
  seen = []

  def update(grads, state, params, **extra):
    seen.append(jax.tree.map(jnp.result_type, (grads, params, extra)))
    return grads, state

  spy = optax.GradientTransformationExtraArgs(lambda params: params, update)
  tx = ols.with_master_weights(spy)
  params = make_params()
  state = tx.init(params)
  assert state.inner_state["w"].dtype == jnp.float32
  loss = jnp.zeros((), jnp.bfloat16)
  tx.update(params, state, params, value=loss, grad=params)
  assert set(jax.tree.leaves(seen)) == {np.dtype(np.float32)}


def test_a_function_argument_receives_the_dtypes_of_the_parameters():
  def value_fn(params, shift=0.0):
    assert params["w"].dtype == jnp.bfloat16
    return loss_fn(params, X) + shift

  def update(grads, state, params, *, value_fn):
    return jax.grad(value_fn)(params, shift=1.0), state

  inner = optax.GradientTransformationExtraArgs(optax.sgd(1).init, update)
  tx, params = ols.with_master_weights(inner), make_params()
  updates, _ = tx.update(params, tx.init(params), params, value_fn=value_fn)
  assert updates["w"].dtype == jnp.float32


def with_masters():
  return ols.with_master_weights(optax.adamw(1e-4))


# Wrappers outside. Those inside are among the optimizers of the first test.
COMPOSITIONS = {
  "masked": lambda: optax.masked(with_masters(), {"w": True, "scale": True}),
  "partition": lambda: optax.partition(
    {"a": with_masters(), "b": with_masters()}, {"w": "a", "scale": "b"}
  ),
}
# Before 0.2.7, MultiSteps changes the dtype of its sum if the updates have
# another dtype than the gradients.
if "accumulator_dtype" in inspect.signature(optax.MultiSteps).parameters:
  COMPOSITIONS["MultiSteps"] = lambda: optax.MultiSteps(
    with_masters(), 1
  ).gradient_transformation()


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_train_as_the_wrapped_optimizer(name):
  params = jax.tree.map(jnp.asarray, make_params())
  grads = jax.tree.map(jnp.ones_like, params)

  def train(tx):
    @jax.jit
    def step(carry, _):
      params, state = carry
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), ()

    (new, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=3)
    return new, ols.get_master_weights(state, new)

  assert_same_bits(train(COMPOSITIONS[name]()), train(with_masters()))


@parametrize_slow(
  "restore",
  [restore_by_msgpack],
  [restore_by_msgpack, restore_by_orbax],
  ids=lambda x: x.__name__,
)
@in_each_dtype
def test_a_run_continues_from_a_checkpoint_bit_for_bit(
  restore, dtype, tmp_path
):
  target = train(0, dtype)
  params, opt_state = restore(train(2, dtype), target, tmp_path)
  step = jax.jit(make_step(make_tx()))
  for _ in range(2):
    params, opt_state = step(params, opt_state, X)
  assert_same_bits((params, opt_state), train(4, dtype))


@parametrize_slow(
  "axis_type", [AxisType.Explicit], [AxisType.Auto, AxisType.Explicit]
)
@in_each_dtype
def test_sharded_params_have_sharded_remainders_and_both_are_donated(
  dtype, axis_type
):
  tx, traces = ols.with_master_weights(optax.adamw(1e-4)), []

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state):
    traces.append(1)
    updates, opt_state = tx.update(params, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  mesh = sharding.make_mesh((4,), ("data",), axis_type)
  sharded = NamedSharding(mesh, P("data", None))
  w = make_params(dtype)["w"]
  expected = step(jnp.array(w), tx.init(w))
  with jax.set_mesh(mesh):
    params = jax.device_put(w, sharded)
    old = params, tx.init(params)
    with jax.transfer_guard("disallow"):
      params, opt_state = step(*old)
  assert all(x.is_deleted() for x in jax.tree.leaves(old))
  for x in params, opt_state.remainder:
    assert x.sharding.is_equivalent_to(sharded, 2)
  assert_same_bits((params, opt_state), expected)
  assert len(traces) == 2  # One without the mesh.


def test_a_sharded_parameter_under_shard_map():
  mesh = sharding.make_mesh((4,), ("data",))
  tx = ols.with_master_weights(optax.sgd(2.0**-12))

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data")
  )
  def train(params):
    def step(carry, _):
      params, state = carry
      updates, state = tx.update(jnp.ones_like(params), state, params)
      return (optax.apply_updates(params, updates), state), ()

    return jax.lax.scan(step, (params, tx.init(params)), length=5)[0]

  ones = jax.device_put(
    np.ones(8, jnp.bfloat16), NamedSharding(mesh, P("data"))
  )
  params, state = train(ones)
  masters = ols.get_master_weights(state, params)
  assert_same_bits(masters, np.full(8, 1 - 5 / 2**12, np.float32))


@in_each_dtype
def test_meta_gradients_are_those_of_float32(dtype):
  def train(params, wrap):
    tx = wrap(optax.sgd(0.5))
    state = tx.init(params)
    for _ in range(2):
      grads = jax.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2))(params)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return jnp.sum(params.astype(jnp.float32))

  # Each step multiplies by 1 - 2 * 0.25.
  quarter = lambda inner: optax.chain(optax.scale(0.5), inner)
  wrap = lambda inner: ols.with_master_weights(quarter(inner))
  actual = jax.jit(jax.grad(lambda x: train(x, wrap)))(jnp.ones(2, dtype))
  assert_same_bits(actual, np.full(2, 0.25, dtype))


def test_states_map_over_params():
  tx, params = make_tx(), make_params()
  state = tx.init(params)
  mapped = optax.tree.map_params(
    tx, lambda _: "param", state, transform_non_params=lambda _: "other"
  )
  assert mapped.remainder == {"scale": optax.MaskedNode(), "w": "param"}
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
  )
  shapes = jax.eval_shape(tx.init, params)
  assert jax.tree.map(jnp.shape, tx.init(structs)) == jax.tree.map(
    jnp.shape, shapes
  )
  assert jax.tree.leaves(ols.with_master_weights(optax.sgd(1)).init({})) == []


def test_flax_nnx_optimizers_apply_the_rounded_masters():
  model = nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, make_tx(), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    loss = lambda model: jnp.mean(model(X).astype(jnp.float32) ** 2)
    grads = ols.grad(loss, optimizer, using=nnx.value_and_grad)(model)
    optimizer.update(model, grads)

  for _ in range(3):
    step(model, optimizer)
  params = nnx.state(model, nnx.Param)
  masters = ols.get_master_weights(optimizer, params)
  assert masters["kernel"].dtype == jnp.float32
  rounded = np.float32(masters["kernel"][...]).astype(jnp.bfloat16)
  assert_same_bits(model.kernel[...], rounded)
  # The nested mapping of a checkpoint has the same fields.
  saved = ols.get_master_weights(nnx.state(optimizer), params)
  assert_same_bits(saved["kernel"][...], masters["kernel"][...])


def update_promoted_params():
  params, opt_state = train(1)
  updates, opt_state = make_tx().update(params, opt_state, params)
  make_tx().update(params, opt_state, eqx.apply_updates(params, updates))


ERRORS = {
  "no optimizer": (
    lambda: ols.with_master_weights(optax.adam),
    TypeError,
    r"got <function adam .*",
  ),
  "no params": (
    lambda: make_tx().update(*train(1)),
    ValueError,
    r"Call tx.update\(grads, opt_state, params\)",
  ),
  "another state": (
    lambda: make_tx().update(None, train(1)[1].inner_state, train(1)[0]),
    TypeError,
    r"got a WithLossScalingState.* use tx.init\(params\)._replace",
  ),
  "promoted params": (
    update_promoted_params,
    ValueError,
    r"got float32 of shape \(4, 3\) at \['w'\].*optax.apply_updates",
  ),
  "the wrong order": (
    lambda: ols.with_loss_scaling(
      optax.chain(optax.clip(1.0), ols.with_master_weights(optax.sgd(1)))
    ).init(make_params()),
    ValueError,
    r"Use with_master_weights\(with_loss_scaling\(optimizer\)\)",
  ),
  "no masters": (
    lambda: ols.get_master_weights(optax.adam(1).init({}), {}),
    ValueError,
    "got a tuple that holds none",
  ),
  "masters of other params": (
    lambda: ols.get_master_weights(train(1)[1], {"w": X}),
    ValueError,
    "got the masters of a tree with other leaves",
  ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name):
  call, error, message = ERRORS[name]
  with pytest.raises(error, match=message):
    call()
