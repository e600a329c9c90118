"""Measures `autocast` on the models of the tests: matmuls, errors and costs.

  python benchmarks/autocast/autocast.py  # in the environment of the tests

It prints a table. In parentheses are the errors of the float32 model with its
parameters rounded to float16. Arguments are the names of models.
"""

import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

import optax_lossscale as ols

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))
from helpers import float32_models, jaxprs
from shared.clock import time_call
from shared.tables import markdown

COLUMNS = [
  "model",
  "products in half",
  "1 - cosine of gradients",
  "loss, relative",
  "equations",
  "tracing",
  "temporary memory",
]
ROUNDS = 6  # traces of each
as_written = lambda fun: fun  # in place of autocast


def main():
  names = sys.argv[1:] or float32_models.NAMES
  rows = [
    [name, *measure(float32_models.make_model(name))]
    for name in tqdm.tqdm(names)
  ]
  print(markdown([COLUMNS, *rows], right_from=1))


def measure(model):
  """Return the cells of a model after its name."""
  params, *others = model.arrays
  fun = lambda cast: lambda p: model.value_and_grad((p, *others), cast)
  funs = fun(as_written), fun(ols.autocast)
  written, cast = (jax.jit(f).lower(params).compile() for f in funs)
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.float16).astype(x.dtype), params
  )
  cosine, loss = errors(cast(params), written(params))
  least_cosine, least_loss = errors(written(rounded), written(params))
  counts = [len(jaxprs.list_eqns(f, params)) for f in funs]
  memory = [c.memory_analysis().temp_size_in_bytes for c in (written, cast)]
  return [
    f"{ols.diagnostics.count_flops(funs[1], params).fraction:.2%}",
    f"{cosine:.1e} ({least_cosine:.1e})",
    f"{loss:.1e} ({least_loss:.1e})",
    f"{counts[1] / counts[0]:.2f}x",
    f"{measure_trace_ratio(model):.2f}x",
    f"{memory[1] / memory[0]:.2f}x",
  ]


def measure_trace_ratio(model):
  """Return the median time to trace with `autocast`, relative to without."""

  def seconds(cast):
    # JAX caches the trace of a function, so each call traces a new function.
    fun = lambda arrays: model.loss(arrays, cast)
    return time_call(lambda: jax.make_jaxpr(fun)(model.arrays))[0]

  # Alternate, so that both meet the same load. The first pair fills caches.
  pairs = [(seconds(as_written), seconds(ols.autocast)) for _ in range(ROUNDS)]
  return statistics.median(after / before for before, after in pairs[1:])


def errors(result, expected):
  """Return 1 - cosine of the gradients, and the relative error of the loss."""
  a, b = (
    np.concatenate([np.asarray(x, np.float64).ravel() for x in grads])
    for _, _, grads in (result, expected)
  )
  cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
  return 1 - cosine, abs(float(result[0] / expected[0]) - 1)


if __name__ == "__main__":
  main()
