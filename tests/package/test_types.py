"""The types that checkers and editors infer for code of users."""

import json
import os
import pathlib
import subprocess
import sys

from helpers import markdown, ROOT
import pytest

pytestmark = pytest.mark.slow

MISTAKES = """
import jax
import jax.numpy as jnp
import optax
import optax_lossscale as ols


def loss_fn(
  params: dict[str, jax.Array], x: jax.Array, *, weight: float = 1.0
) -> jax.Array:
  return weight * jnp.mean(x @ params["w"])


@ols.autocast(keep_float32="w")
def half_loss_fn(params: dict[str, jax.Array]) -> jax.Array:
  return params["w"]


tx = optax.sgd(0.1)
params, x = {"w": jnp.ones((2, 2))}, jnp.ones((2, 2))
state = ols.DynamicLossScale().init()

# Correct code.
ols.with_loss_scaling(tx)
ols.with_loss_scaling(optax.MultiSteps(tx, 2), "headroom", max_norm=1.0)
ols.with_loss_scaling(tx, ols.HeadroomLossScale())
ols.with_loss_scaling(tx, jnp.float32(8.0))
ols.loss_scale_metrics(state, policy="dynamic", steps=1)
ols.raise_if_stuck(state, max_consecutive_skips=8)
loss, grads = ols.value_and_grad(ols.autocast(loss_fn), state)(params, x)
grads = ols.grad(loss_fn, state, (0,))(params, x=x, weight=2.0)
params = ols.select_if_applied(state, params, params)
value: jax.Array = loss
check = ols.diagnostics.check_step(loss_fn, params, x, progress=False)
fixes: list[str] = [problem.fix for problem in check.problems]
total_flops: int | float = check.flops.total_flops
kept: dict[str, jax.Array] = params
state = ols.set_loss_scale(state, 8.0)
value = ols.autocast()(ols.keep_float32(loss_fn))(params, x)

# Mistakes.
ols.with_loss_scaling(tx, "dynmic")  # mistake
ols.with_loss_scaling(tx, growth_interval=3)  # mistake
ols.loss_scale_metrics(state, policy="dynmic")  # mistake
ols.raise_if_stuck(state, max_consecutive_skips="8")  # mistake
ols.DynamicLossScale(hysteresis_refill="never")  # mistake
ols.value_and_grad(loss_fn, state)(params, x, wieght=2.0)  # mistake
ols.value_and_grad(loss_fn, state, params, x)  # mistake
ols.grad(ols.autocast(loss_fn), state)(params)  # mistake
ols.autocast(loss_fn)(params, "x")  # mistake
ols.autocast(dtype=jnp.float16)(loss_fn)(params)  # mistake
half_loss_fn(params, x)  # mistake
ols.keep_float32(loss_fn)(params)  # mistake
text: str = ols.value_and_grad(loss_fn, state)(params, x)[0]  # mistake
text = ols.select_if_applied(state, params, params)  # mistake
with ols.autocast():  # mistake
  pass
"""


def check(folder: pathlib.Path, module: str, *options: str) -> str:
  """Return what a checker prints."""
  out = subprocess.run(
    [sys.executable, "-m", module, *options],
    cwd=folder,
    env=os.environ | {"MYPYPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert out.returncode in (0, 1), out.stderr
  return out.stdout


def mypy(folder: pathlib.Path) -> set[tuple[str, int]]:
  options = "--config-file=", "--output=json", "--cache-dir=cache"
  checks = "--check-untyped-defs", "--ignore-missing-imports"
  lines = check(folder, "mypy", *options, *checks, *FILES).splitlines()
  found = [json.loads(line) for line in lines if line.startswith("{")]
  return {(x["file"], x["line"]) for x in found if x["severity"] == "error"}


def pyright(folder: pathlib.Path) -> set[tuple[str, int]]:
  settings = {
    "extraPaths": [str(ROOT)],
    # Users define variables in loops, which might run no step.
    "reportPossiblyUnboundVariable": False,
  }
  (folder / "pyrightconfig.json").write_text(json.dumps(settings))
  options = "--outputjson", "--pythonpath", sys.executable
  found = json.loads(check(folder, "pyright", *options))["generalDiagnostics"]
  return {
    (pathlib.Path(x["file"]).name, x["range"]["start"]["line"] + 1)
    for x in found
    if x["severity"] == "error"
  }


FILES = "mistakes.py", "readme.py"


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_mistakes_are_found_and_programs_of_users_have_none(checker, tmp_path):
  readme = "\n".join(markdown.find_code_blocks(ROOT / "README.md"))
  for file, text in zip(FILES, (MISTAKES, readme), strict=True):
    (tmp_path / file).write_text(text)
  lines = enumerate(MISTAKES.splitlines(), 1)
  mistakes = {(FILES[0], i) for i, x in lines if x.endswith("# mistake")}
  assert checker(tmp_path) == mistakes
