"""Mutated input gives a clear error or a valid policy.

100 inputs here, 300 in CI; `make nightly` tries 10,000.
"""

import sys

from helpers import interop_samples as samples
from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

NUMBERS = st.one_of(
  st.integers(),
  st.integers(min_value=2**200, max_value=2**2000),
  st.floats(),
  st.sampled_from([0, -0.0, 1, 2**31, 2.0**127, 2.0**-127, 5e-324, 1e308]),
  st.floats(width=32).map(np.float32),
  st.floats(width=16).map(np.float16),
  st.integers(-(2**31), 2**31 - 1).map(np.int32),
  st.floats(width=32).map(lambda x: np.array([x], np.float32)),
)
OTHERS = st.one_of(
  st.none(),
  st.booleans(),
  st.text(max_size=20),
  st.sampled_from(["1024", "__import__('os').abort()", "inf", "True", "1_000"]),
  st.binary(max_size=20),
  # By name, since some of them cannot be printed.
  st.sampled_from(sorted(samples.WRONG_TYPE)).map(
    lambda name: samples.WRONG_TYPE[name]
  ),
)
VALUES = st.recursive(
  NUMBERS | OTHERS,
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=8), inner, max_size=3)
  ),
  max_leaves=8,
)


@given(st.sampled_from(sorted(samples.CALLS)), st.data())
def test_mutated_input_gives_a_clear_error_or_a_valid_policy(name, data):
  call, valid = samples.CALLS[name]
  values = dict(valid)
  keys = sorted(valid)
  for _ in range(data.draw(st.integers(1, 3))):
    kind = data.draw(st.sampled_from(["change", "change", "drop", "add"]))
    key = data.draw(st.sampled_from(keys))
    if kind == "drop":
      values.pop(key, None)
    elif kind == "add":
      key = data.draw(st.text(max_size=20).filter(str.isidentifier))
      values[key] = data.draw(VALUES)
    else:
      values[key] = data.draw(VALUES)
  modules = set(sys.modules)
  try:
    policy, state = call(values)
  except (TypeError, ValueError) as error:
    assert 10 < len(str(error)) < 1_000
  else:
    check_valid(policy, state)
  loaded = {module.split(".")[0] for module in set(sys.modules) - modules}
  assert loaded <= {"jax", "jaxlib", "numpy", "optax_lossscale"}


def check_valid(policy, state):
  """Whether a step can be taken either way, and leaves a sound state."""
  assert isinstance(policy, ols.LossScalePolicy)
  for finite in (True, False):
    after = policy.adjust(state, jnp.bool_(finite))
    assert 2.0**-126 <= after.loss_scale <= 2.0**126
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
