"""The two policies of interop: their rules, exact, and their arguments."""

import fractions

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import pytest

from optax_lossscale import interop


@hypothesis.given(
  part=st.integers(1, 2**31 - 1),
  whole=st.integers(1, 2**31 - 1),
  top=st.integers(0, 2**15),
  bottom=st.integers(1, 2**15),
)
@hypothesis.example(part=1, whole=20, top=1, bottom=20)
@hypothesis.example(part=2**31 - 1, whole=2**31 - 1, top=1, bottom=1)
@hypothesis.example(part=107374182, whole=2147483640, top=1, bottom=20)
@hypothesis.example(part=107374181, whole=2147483640, top=1, bottom=20)
def test_a_share_is_compared_exactly(part, whole, top, bottom):
  share = fractions.Fraction(top, bottom)
  policy = interop.FairseqLossScale(10, tolerance=top / bottom)
  counts = jnp.int32(whole - 1), jnp.int32(part - 1)
  state = policy.init()._replace(memory=interop.FairseqMemory(*counts))
  after = policy.adjust(state, jnp.array(False))
  reached = fractions.Fraction(part, whole) >= share
  assert after.loss_scale == policy.init_scale / (2 if reached else 1)


@pytest.mark.parametrize("digits", [1, 4])
def test_every_tolerance_of_four_digits_is_meant_as_it_is_written(digits):
  bottom = 10**digits
  for top in range(1, bottom, 1 if digits == 1 else 997):
    policy = interop.FairseqLossScale(10, tolerance=top / bottom)
    for overflows, moves in (top, True), (top - 1, False):
      memory = interop.FairseqMemory(
        jnp.int32(bottom - 1), jnp.int32(overflows - 1)
      )
      state = policy.init()._replace(memory=memory)
      after = policy.adjust(state, jnp.array(False))
      assert (after.loss_scale < policy.init_scale) == moves


DEEPSPEED, FAIRSEQ = interop.DeepSpeedLossScale, interop.FairseqLossScale
BAD = [
  (DEEPSPEED, "init_scale", 0.5, ValueError),
  (DEEPSPEED, "init_scale", 2.0**127, ValueError),
  (DEEPSPEED, "init_scale", "65536", TypeError),
  (DEEPSPEED, "growth_interval", 0, ValueError),
  (DEEPSPEED, "min_scale", 0.0, ValueError),
  (DEEPSPEED, "hysteresis", 1.5, ValueError),
  (DEEPSPEED, "hysteresis", True, TypeError),
  (DEEPSPEED, "consecutive_hysteresis", 1, TypeError),
  (FAIRSEQ, "growth_interval", 2**31, ValueError),
  (FAIRSEQ, "init_scale", 1e-9, ValueError),
  (FAIRSEQ, "min_scale", -1.0, ValueError),
  (FAIRSEQ, "threshold", 0.0, ValueError),
  (FAIRSEQ, "threshold", [1.0], TypeError),
  (FAIRSEQ, "tolerance", -0.1, ValueError),
  (FAIRSEQ, "tolerance", float("inf"), ValueError),
  (FAIRSEQ, "tolerance", "0.1", TypeError),
]


@pytest.mark.parametrize("rule, name, value, error", BAD)
def test_a_hyperparameter_out_of_range_or_of_a_wrong_type_is_named(
  rule, name, value, error
):
  with pytest.raises(error, match=name):
    rule(**{"growth_interval": 10, name: value})
