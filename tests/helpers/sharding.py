"""Puts trees on several devices, and looks at what became of them there."""

from collections import Counter
import math
import re

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from helpers.devices import require_devices


def make_mesh(shape, names, axis_type=AxisType.Auto):
  """Return a mesh, or skip the test if there are too few devices."""
  return jax.make_mesh(
    shape,
    names,
    axis_types=(axis_type,) * len(names),
    devices=require_devices(math.prod(shape)),
  )


# The parameters, the state of the optimizer and the batch.
_STEP_SPECS = P(), P(), P("data")


def map_step(fun, mesh, in_specs=_STEP_SPECS, *, check_vma=False):
  """Return a step whose devices each receive a part of the last argument."""
  options = {"in_specs": in_specs, "out_specs": P(), "check_vma": check_vma}
  return jax.jit(jax.shard_map(fun, mesh=mesh, **options))


def to_named_shardings(mesh, specs):
  """PartitionSpecs to NamedShardings."""
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec
  )


def put_on_devices(tree, shardings):
  """Host data to devices, some of which may be other processes'."""
  return jax.tree.map(
    lambda x, sharding: jax.make_array_from_callback(
      np.shape(x), sharding, lambda index: np.asarray(x)[index]
    ),
    tree,
    shardings,
  )


def infer_state_specs(tx, params, specs):
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
    path_str = jax.tree_util.keystr(path)
    assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (
      f"{path_str}: {b.sharding} became {a.sharding}"
    )

  jax.tree_util.tree_map_with_path(check, actual, expected)


def assert_replicas_equal(tree):
  """Devices that hold the same part of an array hold the same bits."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    bits_by_index = {}
    for shard in leaf.addressable_shards:
      bits = np.asarray(shard.data).tobytes()
      expected = bits_by_index.setdefault(str(shard.index), bits)
      assert bits == expected, jax.tree_util.keystr(path)


_WIRE_OPS = (
  "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  "|infeed|outfeed|recv|send"
)


def count_wire_ops(compiled):
  """Counts what a program sends to other devices, or the host.

  Several all-reduces that XLA merged are one.
  """
  hlo = compiled.as_text()
  assert "callback" not in hlo
  pattern = rf" = (?:\(.*?\)|\S+) ({_WIRE_OPS})(?:-start)?\("
  return Counter(re.findall(pattern, hlo))
