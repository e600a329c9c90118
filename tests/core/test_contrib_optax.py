"""The module for optax.contrib equals the package, and runs in Optax alone."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys

from helpers import ROOT
from helpers.bits import has_same_bits
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

CONTRIB = ROOT / "contrib" / "optax"
MODULE = CONTRIB / "_loss_scaling.py"
TEST = CONTRIB / "_loss_scaling_test.py"


def load_module():
  spec = importlib.util.spec_from_file_location("contrib_loss_scaling", MODULE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def loss_fn(params, x):
  half = params["w"].astype(jnp.float16) @ x.astype(jnp.float16)
  return jnp.mean(half.astype(jnp.float32) ** 2) + jnp.sum(params["b"] ** 2)


def train(tx, value_and_grad, params, batches):
  state, losses = tx.init(params), []
  # Outside of jit, since XLA may round fused operations otherwise.
  for x in batches:
    loss, grads = value_and_grad(loss_fn, state)(params, x)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    losses.append(loss)
  return losses, params, state


# Scales that are a power of two, and that bfloat16 would round.
CASES = [
  *((optax.adam, dtype, 1001.0) for dtype in ("float32", "float16")),
  *((optax.sgd, dtype, 1001.0) for dtype in ("float32", "bfloat16")),
  (optax.adamw, "bfloat16", 2.0**12),
  (optax.lion, "float16", 2.0**12),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make_optimizer", "dtype", "init_scale"), CASES)
def test_the_module_equals_the_package(make_optimizer, dtype, init_scale):
  contrib = load_module()
  settings = dict(init_scale=init_scale, growth_interval=3, max_scale=2.0**16)
  params = {"w": jnp.eye(3, dtype=dtype), "b": jnp.ones(2, dtype)}
  batches = jax.random.normal(jax.random.key(0), (12, 3, 2))
  batches = batches.at[4].set(1e6).at[7, 0, 0].set(jnp.nan)
  inner, policy = make_optimizer(1e-2), ols.DynamicLossScale(**settings)
  our_tx = ols.with_loss_scaling(inner, policy)
  their_tx = contrib.with_loss_scaling(inner, **settings)
  ours = train(our_tx, ols.value_and_grad, params, batches)
  theirs = train(their_tx, contrib.scaled_value_and_grad, params, batches)
  assert int(theirs[2].loss_scale_state.total_notfinite) >= 2
  for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
    assert has_same_bits(a, b)


@pytest.mark.slow
def test_the_module_and_its_test_run_in_optax_alone(tmp_path):
  package = pathlib.Path(optax.__file__).parent
  ignore = shutil.ignore_patterns("__pycache__")
  shutil.copytree(package, tmp_path / "optax", ignore=ignore)
  contrib = tmp_path / "optax" / "contrib"
  for path in MODULE, TEST:
    shutil.copy(path, contrib)
  with (contrib / "__init__.py").open("a") as init:
    for name in "with_loss_scaling", "scaled_value_and_grad":
      init.write(f"from optax.contrib._loss_scaling import {name}\n")
  code = """
import doctest, runpy, sys
sys.modules["optax_lossscale"] = None  # It cannot be imported.
from optax.contrib import _loss_scaling
result = doctest.testmod(_loss_scaling)
assert result.attempted and not result.failed
sys.argv = ["_loss_scaling_test"]
name = "optax.contrib._loss_scaling_test"
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
  command = sys.executable, "-W", "ignore", "-c", code
  subprocess.run(command, cwd=tmp_path, check=True)
