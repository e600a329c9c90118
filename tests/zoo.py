"""Leaves of every kind that a tree of gradients may hold."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

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

OTHERS = {
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

ZOO = {"floats": FLOATS, "others": OTHERS, "nothing": {}}
