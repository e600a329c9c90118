"""The communication of a step, counted in the optimized programs."""

from collections import Counter
import functools

from helpers import sharding
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

ONE_ALL_REDUCE = Counter({"all-reduce": 1})
WIDTH = 16

# Name: (mesh, spec of the even layers, of the odd ones, of the batch).
LAYOUTS = {
  "data parallel": (((8,), ("data",)), P(), P(), P("data")),
  "fsdp": (((8,), ("data",)), P("data"), P("data"), P("data")),
  "tensor parallel": (
    ((8,), ("model",)),
    P(None, "model"),
    P("model", None),
    P(),
  ),
  "2x4": (
    ((2, 4), ("data", "model")),
    P("data", "model"),
    P("model", "data"),
    P("data"),
  ),
}


ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def scaled_adam(**options):
  return ols.with_loss_scaling(ADAM, **options)


SCALED = scaled_adam()


NOTHING = Counter()


@pytest.mark.parametrize(
  "layout, depth, tx, reference, gain",
  [
    # One for any number of leaves.
    ("fsdp", 7, SCALED, ADAM, ONE_ALL_REDUCE),
    ("tensor parallel", 2, SCALED, ADAM, ONE_ALL_REDUCE),
    # None if every device has all gradients, or if there is one already.
    ("data parallel", 2, SCALED, ADAM, NOTHING),
    ("fsdp", 2, scaled_adam(max_norm=1.0), CLIPPED, NOTHING),
    ("2x4", 2, scaled_adam(max_norm=1.0), CLIPPED, NOTHING),
    ("fsdp", 2, scaled_adam(grads_are_scaled=True), SCALED, NOTHING),
    ("2x4", 2, scaled_adam(grads_are_scaled=True), SCALED, NOTHING),
  ],
)
def test_sharded_jit_adds_at_most_one_all_reduce(
  layout, depth, tx, reference, gain
):
  compiled, bare = (compile_jit(layout, x, depth) for x in (tx, reference))
  assert compute_gain(compiled, bare) == gain


@pytest.mark.parametrize(
  "spec, check_vma, options, reductions",
  [
    (P(), True, {}, 0),  # types say that all agree
    (P(), False, {}, 1),
    (P("data"), True, {"max_norm": 1.0}, 1),
    (P("data"), False, {"loss_scale": "headroom"}, 1),
    (P(), True, {"max_norm": 1.0}, 0),
    (P("data"), True, {"grads_are_scaled": True}, 1),
    (P("data"), True, {"loss_scale": "headroom"}, 1),
  ],
  ids=str,
)
def test_shard_map_adds_at_most_one_all_reduce_for_any_arguments(
  spec, check_vma, options, reductions
):
  bare = compile_shard_map(spec, check_vma)
  scaled = compile_shard_map(spec, check_vma, axis_name="data", **options)
  assert compute_gain(scaled, bare) == Counter({"all-reduce": reductions})


def compute_gain(compiled, bare):
  """Return the additional collectives of a program, relative to another."""
  counts = sharding.count_wire_ops(compiled)
  counts.subtract(sharding.count_wire_ops(bare))
  return Counter({name: n for name, n in counts.items() if n})


@functools.cache
def compile_jit(layout, tx, depth=2):
  """A step of a multilayer perceptron in float16, compiled."""
  mesh, even, odd, batch_spec = LAYOUTS[layout]
  mesh = sharding.make_mesh(*mesh)
  specs = [(even, odd)[i % 2] for i in range(depth)]
  shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * depth
  shardings = sharding.to_named_shardings(
    mesh, (specs, sharding.infer_state_specs(tx, shapes, specs), batch_spec)
  )
  batch = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float16)
  args = jax.tree.map(
    lambda x, sharding: x.update(sharding=sharding),
    (shapes, jax.eval_shape(tx.init, shapes), batch),
    shardings,
  )

  def loss_fn(params, x):
    for weight in params:
      x = jnp.tanh(x @ weight.astype(jnp.float16))
    return jnp.mean(x.astype(jnp.float32) ** 2)

  with jax.set_mesh(mesh):
    step = jax.jit(make_step(tx, loss_fn), out_shardings=shardings[:2])
    return step.lower(*args).compile()


@functools.cache
def compile_shard_map(spec, check_vma, *, depth=2, **options):
  """Such a step, its params replicated, or gathered for use."""
  mesh = sharding.make_mesh((8,), ("data",))
  tx = scaled_adam(**options) if options else ADAM
  params = [jnp.ones((WIDTH, WIDTH)) for _ in range(depth)]
  specs = [spec] * depth

  def loss_fn(params, x):
    for weight in params:
      if spec != P():
        weight = lax.all_gather(weight, "data", tiled=True)
      x = jnp.tanh(x @ weight.astype(jnp.float16))
    return jnp.sum(x.astype(jnp.float32) ** 2) / WIDTH**2

  reduces_by_hand = spec == P() and not check_vma
  carry_specs = specs, sharding.infer_state_specs(tx, params, specs)
  step = jax.shard_map(
    make_step(tx, loss_fn, "data" if reduces_by_hand else None),
    mesh=mesh,
    in_specs=(*carry_specs, P("data")),
    out_specs=carry_specs,
    check_vma=check_vma,
  )
  args = params, tx.init(params), jnp.ones((WIDTH, WIDTH), jnp.float16)
  return jax.jit(step).lower(*args).compile()


def make_step(tx, loss_fn, axis_name=None):
  # It returns no loss: XLA would merge the mean's all-reduce with the flag's,
  # which are independent, and there would be nothing to count.
  def step(params, opt_state, x):
    if isinstance(opt_state, ols.WithLossScalingState):
      grads = ols.grad(loss_fn, opt_state)(params, x)
    else:
      grads = jax.grad(loss_fn)(params, x)
    if axis_name is not None:
      grads = lax.psum(grads, axis_name)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return step
