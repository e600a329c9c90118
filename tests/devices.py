"""A problem whose arithmetic is exact, to compare runs on many devices by.

The loss is linear and its gradients are small integers, so that every sum is
exact in whatever order devices add; the optimizer multiplies by powers of two.
What a run on eight devices computes must equal one device's bit for bit.
"""

from collections import Counter
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import optax_lossscale as ols

EXAMPLES = 8  # in a batch
SHAPES = {"table": (8, 8), "rows": (8,), "bias": (8,)}
POLICY = ols.DynamicLossScale(
  init_scale=2.0**10, growth_interval=3, min_scale=2.0**4, max_scale=2.0**12
)
OVERFLOWING = 60000  # times any scale above, over EXAMPLES: not in float16


def make_optimizer(**options):
  inner = optax.sgd(2.0**-4, momentum=0.5)
  return ols.with_loss_scaling(inner, POLICY, **options)


def init_params():
  """A float32 tree; its leaves can be sharded over up to eight devices."""
  return {
    name: jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) / 8
    for name, shape in SHAPES.items()
  }


def make_batches(steps, seed=0, overflows=0.3):
  """For each leaf float16[steps, examples, *shape], and which steps overflow.

  An overflow is in one entry of one example: one device has the example, and
  under a sharded parameter one device has the entry.
  """
  rng = np.random.default_rng(seed)
  batches = {
    name: rng.integers(-8, 9, (steps, EXAMPLES, *shape)).astype(np.float16)
    for name, shape in SHAPES.items()
  }
  has_overflow = rng.random(steps) < overflows
  for step in np.flatnonzero(has_overflow):
    name = rng.choice(list(SHAPES))
    entry = tuple(rng.integers(EXAMPLES, size=1 + len(SHAPES[name])))
    batches[name][step][entry] = OVERFLOWING
  return batches, ~has_overflow


def loss_fn(params, batch):
  """The sum over the examples given, over the size of the whole batch."""
  losses = jax.tree.map(
    lambda p, x: jnp.sum((p.astype(jnp.float16) * x).astype(jnp.float32)),
    params,
    batch,
  )
  return sum(jax.tree.leaves(losses)) / EXAMPLES


def train_step(tx, params, opt_state, batch, loss_fn=loss_fn):
  grads = ols.grad(loss_fn, opt_state)(params, batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


def train(step, params, opt_state, batches):
  """Runs a step over all batches; also returns the scale after each."""

  def body(carry, batch):
    carry = step(*carry, batch)
    return carry, ols.get_loss_scale_state(carry[1]).loss_scale

  carry, scales = jax.lax.scan(body, (params, opt_state), batches)
  return *carry, scales


def train_on_one_device(tx, batches):
  """What all others are compared with."""
  params = init_params()
  step = lambda *args: train_step(tx, *args)
  run = jax.jit(lambda *args: train(step, *args))
  return run(params, tx.init(params), batches)


def make_mesh(shape, names, axis_type=AxisType.Auto):
  return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def named(mesh, specs):
  """PartitionSpecs to NamedShardings."""
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec
  )


def put(tree, shardings):
  """Host data to devices, some of which may be other processes'."""
  return jax.tree.map(
    lambda x, sharding: jax.make_array_from_callback(
      np.shape(x), sharding, lambda index: np.asarray(x)[index]
    ),
    tree,
    shardings,
  )


def state_specs(tx, params, specs):
  """The specs of an optimizer's state: its params' where it has such leaves.

  Nothing is said about loss scaling: scalars are replicated, as they are in
  any optimizer.
  """
  return optax.tree.map_params(
    tx,
    lambda _, spec: spec,
    jax.eval_shape(tx.init, params),
    specs,
    transform_non_params=lambda _: P(),
  )


def is_spec(x):
  return isinstance(x, P)


def assert_shardings_equal(actual, expected):
  def check(path, a, b):
    where = jax.tree_util.keystr(path)
    assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (
      f"{where}: {b.sharding} became {a.sharding}"
    )

  jax.tree_util.tree_map_with_path(check, actual, expected)


def assert_replicas_equal(tree):
  """Devices that hold the same part of an array hold the same bits."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    seen = {}
    for shard in leaf.addressable_shards:
      bits = np.asarray(shard.data).tobytes()
      expected = seen.setdefault(str(shard.index), bits)
      assert bits == expected, jax.tree_util.keystr(path)


_WIRE_OPS = (
  "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  "|infeed|outfeed|recv|send"
)


def count_wire_ops(compiled):
  """Counts what an optimized program sends to other devices, or the host.

  Args:
    compiled: what ``lower(...).compile()`` returns.

  Returns:
    A Counter of operations. Several all-reduces that XLA merged are one.
  """
  return Counter(name for name, _ in _wire_ops(compiled))


def count_scalar_all_reduces(compiled):
  """How many of the all-reduces carry nothing but scalars."""
  is_scalars = lambda shapes: not re.search(r"\[\d", shapes)
  return sum(
    name == "all-reduce" and is_scalars(shapes)
    for name, shapes in _wire_ops(compiled)
  )


def _wire_ops(compiled):
  hlo = compiled.as_text()
  assert "callback" not in hlo
  pattern = rf" = (\(.*?\)|\S+) ({_WIRE_OPS})(?:-start)?\("
  return [(name, shapes) for shapes, name in re.findall(pattern, hlo)]
