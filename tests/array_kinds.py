"""Arrays of every kind, for the tests of what is read from them."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np


def bad_weight(where, values, shape=(4, 8)):
  weight = np.ones(shape, np.float32)
  for index, value in zip(where, values, strict=True):
    weight[index] = value
  return weight


def shard(x, axis_type=AxisType.Auto, spec=("x", "y")):
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
  return jax.device_put(x, NamedSharding(mesh, P(*spec)))


AS_ARRAYS = {
  "numpy": lambda x: x,
  "jax": jnp.asarray,
  "sharded": shard,
  "explicitly sharded": lambda x: shard(x, AxisType.Explicit),
  "partly sharded": lambda x: shard(x, spec=(None, ("x", "y"))),
  "float16": lambda x: jnp.asarray(x, jnp.float16),
  "bfloat16 numpy": lambda x: x.astype(ml_dtypes.bfloat16),
}
