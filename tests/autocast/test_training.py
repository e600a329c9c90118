"""The examples train as well with `autocast` as they do in float32."""

from helpers import ROOT
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_transformer_ends_within_2_percent_of_float32(monkeypatch, dtype):
  monkeypatch.syspath_prepend(str(ROOT / "examples"))
  import transformer

  sizes = {"LAYERS": 2, "WIDTH": 32, "CONTEXT": 32, "BATCH_SIZE": 8}
  for name, size in sizes.items():
    monkeypatch.setattr(transformer, name, size)
  text = transformer.load_text()

  def test_loss(dtype):
    policy = ols.DynamicLossScale()
    return transformer.train(text, policy, steps=100, dtype=dtype).test_loss

  loss = test_loss(dtype)
  assert loss == pytest.approx(test_loss(jnp.float32), rel=0.02)
  assert loss < 3.2  # It learned: at first this is log(96) = 4.6.
