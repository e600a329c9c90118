"""The page on many devices: its code runs, top to bottom."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "many_devices.md"


def test_every_block_of_code_on_the_page_runs():
  blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  assert len(blocks) == 5
  names = {}
  for block in blocks:
    exec(compile(block, str(PAGE), "exec"), names)
  # The function that is only defined there, in the step before it.
  grads = names["jax"].jit(
    names["jax"].shard_map(
      names["ols"].grad(names["loss_of_part"], names["opt_state"]),
      mesh=names["mesh"],
      in_specs=(names["P"](), names["P"]("data")),
      out_specs=names["P"](),
    )
  )(names["params"], names["x"])
  assert names["ols"].all_finite(grads)
