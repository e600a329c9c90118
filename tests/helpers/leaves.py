"""Leaves of every kind that a tree of gradients may hold."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import optax

from helpers import sharding

FLOATS = {
  "f32": jnp.array([1.0, -2.0]),
  "f16": jnp.array([1.0, -2.0], jnp.float16),
  "bf16": jnp.array([1.0, -2.0], jnp.bfloat16),
  "f8": jnp.array([1.0, -2.0], jnp.float8_e4m3fn),
  "f8_5": jnp.array([1.0, -2.0], jnp.float8_e5m2),
  "complex": jnp.array([1.0 - 2.0j, -0.0 + 3.0j], jnp.complex64),
  "scalar": jnp.float32(1.0),
  "python": 1.0,
  "numpy": np.ones(2, np.float32),
  "numpy_bf16": np.ones(2, ml_dtypes.bfloat16),
  "empty": jnp.zeros((0, 3)),
}

NON_FLOATS = {
  "int": jnp.array([1, 2]),
  "bool": jnp.array([True, False]),
  "float0": np.zeros(2, jax.dtypes.float0),
  "key": jax.random.key(0),
  "old_key": jax.random.PRNGKey(0),
  "none": None,
  "masked": optax.MaskedNode(),
  "python_int": 3,
  "python_bool": True,
  # An equal string, not the same: as one that was read from a checkpoint.
  "_".join(["", "overwrite", "with", "gradient"]): {
    "amax": jnp.array([jnp.inf, 1.0])
  },
}

LEAF_GROUPS = {"floats": FLOATS, "others": NON_FLOATS, "nothing": {}}


def make_bad_weight(indices, values, shape=(4, 8)):
  weight = np.ones(shape, np.float32)
  for index, value in zip(indices, values, strict=True):
    weight[index] = value
  return weight


def shard_array(x, axis_type=AxisType.Auto, spec=("x", "y")):
  mesh = sharding.make_mesh((4, 2), ("x", "y"), axis_type)
  return jax.device_put(x, NamedSharding(mesh, P(*spec)))


# One array in each form that what reads values must take.
AS_ARRAYS = {
  "numpy": lambda x: x,
  "jax": jnp.asarray,
  "sharded": shard_array,
  "explicitly sharded": lambda x: shard_array(x, AxisType.Explicit),
  "partly sharded": lambda x: shard_array(x, spec=(None, ("x", "y"))),
  "float16": lambda x: jnp.asarray(x, jnp.float16),
  "bfloat16 numpy": lambda x: x.astype(ml_dtypes.bfloat16),
}
