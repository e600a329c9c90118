"""Measures the time of the reports, next to the time to compile the step.

  python benchmarks/autocast/reports.py  # in the environment of the tests

It prints the table of `README.md`: the CPU seconds to compile a step, those of
`find_overflow` and `check_step` relative to it, and how many programs
`check_step` compiles: those of more than a hundred operations, and all. Nothing
is taken from a cache. Arguments are the names of rows.
"""

from functools import partial
import pathlib
import sys
import tempfile
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import tqdm

import optax_lossscale as ols
from optax_lossscale import diagnostics

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from shared import models, weights
from shared.clock import time_call
from shared.tables import markdown

GPT = SimpleNamespace(
  width=32, depth=12, heads=4, vocabulary=64, sequences=2, length=16
)


def gpt(
  loss_scale=2.0**10,
  overflowing_layer=None,
  dtype=jnp.float32,
  inaccurate_layer=None,
):
  """The transformer of `models`, whose layers are not in a loop.

  It is cast by `autocast`, or by hand if `dtype` is not float32. The MLP of one
  layer may overflow, and a norm of one layer may be inaccurate.
  """
  norms = {inaccurate_layer: inaccurate_norm}
  loss_fn = models.transformer_loss(GPT.heads, dtype, norms)
  if dtype == jnp.float32:
    loss_fn = ols.autocast(loss_fn)
  params = jax.tree.map(jnp.asarray, weights.transformer(GPT))
  if overflowing_layer is not None:
    params["layers"][overflowing_layer]["up"] *= 1e5
  batch = jax.tree.map(jnp.asarray, weights.token_batches(GPT)[0])
  return make_step(loss_fn, params, batch, loss_scale)


def inaccurate_norm(x, gain):
  """A norm that loses the bits of numbers with a large mean."""
  x = x + jnp.asarray(40.0, x.dtype)
  mean = x.mean(-1, keepdims=True)
  variance = (x * x).mean(-1, keepdims=True) - mean * mean
  y = (x - mean) * jax.lax.rsqrt(variance + 1e-3)
  return (gain * y).astype(x.dtype)


def small_layers(count, loss_scale=2.0**10, width=16):
  """Layers of one shape, each with a matrix and a bias."""

  def loss_fn(params, x):
    for w, bias in params:
      x = x + jnp.tanh(x @ w + bias) / count
    return jnp.mean(x**2)

  keys = jax.random.split(jax.random.key(0), count)
  matrix = lambda key: jax.random.normal(key, (width, width)) / width**0.5
  params = [(matrix(key), jnp.zeros(width)) for key in keys]
  x = jax.random.normal(jax.random.key(1), (8, width))
  return make_step(ols.autocast(loss_fn), params, x, loss_scale)


def make_step(loss_fn, params, batch, loss_scale):
  """A training step, and its arguments; without a loss scale, a bare one."""
  tx, differentiate = optax.adam(1e-3), lambda fun, _: jax.value_and_grad(fun)
  if loss_scale is not None:
    tx = ols.with_loss_scaling(tx, ols.DynamicLossScale(loss_scale))
    differentiate = ols.value_and_grad

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = differentiate(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, params, tx.init(params), batch


by_hand = partial(gpt, dtype=jnp.float16)
STEPS = {
  "GPT of 12 layers, sound": gpt,
  "the same, overflow in the forward pass": partial(gpt, overflowing_layer=5),
  "the same, overflow in the backward pass": partial(gpt, loss_scale=2.0**30),
  "GPT of 12 layers by hand, sound": by_hand,
  "the same, an error in one norm": partial(by_hand, inaccurate_layer=5),
  "a bare GPT of 12 layers in bfloat16": partial(gpt, None, None, jnp.bfloat16),
  "200 layers, 400 arrays": partial(small_layers, 200),
  "the same arrays, overflow": partial(small_layers, 200, 2.0**40),
  "1,000 layers, 2,000 arrays": partial(small_layers, 1000),
}
COLUMNS = [
  "step", "to compile it", "`find_overflow`", "`check_step`", "programs",
  "problems",
]  # fmt: skip


def main():
  jax.config.update("jax_enable_compilation_cache", False)
  names = sys.argv[1:] or STEPS
  rows = [[name, *measure(*STEPS[name]())] for name in tqdm.tqdm(names)]
  print(markdown([COLUMNS, *rows], right_from=1))


def measure(step, *args):
  """Return the cells of a step after its name."""
  args = jax.block_until_ready(args)
  compiling, _ = time_cold(lambda: step.lower(*args).compile())
  finding, _ = time_cold(lambda: diagnostics.find_overflow(step, *args))
  with tempfile.TemporaryDirectory() as folder:
    jax.config.update("jax_dump_ir_to", folder)
    checking, check = time_cold(
      lambda: diagnostics.check_step(step, *args, progress=False)
    )
    jax.config.update("jax_dump_ir_to", "")
    modules = [path.read_text() for path in pathlib.Path(folder).iterdir()]
  num_large = sum(module.count("= stablehlo.") > 100 for module in modules)
  return [
    f"{compiling:.1f}",
    f"{finding / compiling:.1f}x",
    f"{checking / compiling:.1f}x",
    f"{num_large} of {len(modules)}",
    str(len(check.problems)),
  ]


def time_cold(call):
  jax.clear_caches()
  return time_call(call)


if __name__ == "__main__":
  main()
