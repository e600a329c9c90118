"""The page on many devices: its code runs, top to bottom."""

import pathlib
import re

import jax
from jax.sharding import PartitionSpec as P
import pytest

import optax_lossscale as ols

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "many_devices.md"


@pytest.mark.skipif(
  not hasattr(jax.lax, "pcast"), reason="called pvary in JAX 0.8.0"
)
def test_every_block_of_code_on_the_page_runs():
  blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  assert len(blocks) == 5
  names = {}
  for block in blocks:
    exec(compile(block, str(PAGE), "exec"), names)
  # The function that is only defined there, in the step before it.
  grad = jax.shard_map(
    ols.grad(names["loss_of_part"], names["opt_state"]),
    mesh=names["mesh"],
    in_specs=(P(), P("data")),
    out_specs=P(),
  )
  assert ols.all_finite(jax.jit(grad)(names["params"], names["x"]))
