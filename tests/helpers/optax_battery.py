"""Trains with each optimizer that Optax exports, bare and wrapped.

Run as a script, in a separate process, with `tests` in PYTHONPATH: it prints,
as JSON, the problems of each optimizer. XLA's CPU compiler turns `a * b + c`
into one instruction that rounds once, where both happen to be in one of its
fusions. A wrapped optimizer is fused differently, so that a last bit differs
here and there, by nobody's fault. Compiled for a processor without that
instruction, every number has one meaning, and bare and wrapped runs can be
compared bit for bit.
"""

import itertools
import json
import os
import subprocess
import sys

import jax
import optax

from helpers import ROOT
from helpers.bits import has_same_bits
from helpers.optimizers import compute_loss_and_grads, extra_args, get_factories
from helpers.small_model import (
  init_params,
  loss_fn,
  make_batches,
  make_overflowing_batch,
)
import optax_lossscale as ols

# AVX came before the multiply-add. Less optimization is as exact, and saves a
# third of the time.
ENVIRONMENT = {
  "XLA_FLAGS": "--xla_cpu_max_isa=AVX --xla_backend_optimization_level=0"
}

STEPS = 6
SCALES = (1.0, 2.0**15)
IDIOMS = ("two_lines", "scaled")


def make_steps(name, bare):
  """Each transformation with its jitted step, and a list that traces append to.

  In one that is "scaled" the user hands over the gradients of a scaled loss.
  """
  traces = []

  def jit(tx, differentiate, unscale=lambda grads, state: grads):
    @jax.jit
    def step(params, state, batch):
      traces.append(tx)
      value, grads = compute_loss_and_grads(
        name, differentiate(state), params, batch
      )
      fun = lambda params: loss_fn(params, batch)
      extra = extra_args(name, value, unscale(grads, state), fun)
      updates, state = tx.update(grads, state, params, **extra)
      return optax.apply_updates(params, updates), state, value

    return tx, step

  def grad_of_scaled_loss(state):
    scaled = lambda *args: ols.scale_loss(loss_fn(*args), state)
    return lambda *args: (loss_fn(*args), jax.grad(scaled)(*args))

  steps = {
    "bare": jit(bare, lambda state: jax.value_and_grad(loss_fn)),
    "two_lines": jit(
      ols.with_loss_scaling(bare, 1.0),
      lambda state: ols.value_and_grad(loss_fn, state),
    ),
    "scaled": jit(
      ols.with_loss_scaling(bare, 1.0, grads_are_scaled=True),
      grad_of_scaled_loss,
      ols.unscale_grads,
    ),
  }
  return steps, traces


def run_trajectory(tx, step, batches, scale=None):
  """(params, inner state, loss) after each step; no scale for bare ones."""
  params = init_params()
  state = tx.init(params)
  if scale is not None:
    state = ols.set_loss_scale(state, scale)
  history = []
  for batch in batches:
    params, state, value = step(params, state, batch)
    inner_state = state if scale is None else state.inner_state
    history.append((params, inner_state, value))
  return history


def list_problems(name, factory, kwargs):
  """Return what an optimizer does not do as it should."""
  bare = optax.with_extra_args_support(factory(**kwargs))
  steps, traces = make_steps(name, bare)
  batches = make_batches(STEPS)
  expected = run_trajectory(*steps["bare"], batches)
  problems = []
  for scale, idiom in itertools.product(SCALES, IDIOMS):
    actual = run_trajectory(*steps[idiom], batches, scale)
    for i, states in enumerate(zip(actual, expected, strict=True)):
      if not has_same_bits(*states):
        problems.append(f"{idiom} at {scale:g} differs in step {i}")
  # Overflowing steps are as if they had not been.
  good_batches, bad_batch = batches[:4], make_overflowing_batch(batches[0])
  run = lambda batches: run_trajectory(*steps["two_lines"], batches, SCALES[-1])
  all_batches = [*good_batches[:3], bad_batch, bad_batch, good_batches[3]]
  if not has_same_bits(run(all_batches)[-1], run(good_batches)[-1]):
    problems.append("a skipped step changes something")
  # The loss on one batch becomes half of what it was. Some go up at the end.
  losses = [loss for _, _, loss in run([batches[0]] * 200)]
  if not min(losses) < losses[0] / 2:
    problems.append("the loss does not fall")
  if len([tx for tx in traces if tx is not bare]) != len(IDIOMS):
    problems.append("a step is traced again")
  return problems


def run_script(script, module):
  """Return what a battery prints, of the optimizers of a module of Optax."""
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  process = subprocess.run(
    [sys.executable, "-W", "ignore", script.__file__, module],
    env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
    stdout=subprocess.PIPE,
    check=True,
  )
  return json.loads(process.stdout)


def main(list_problems):
  jax.config.update("jax_platforms", "cpu")
  results = {
    name: list_problems(name, factory, kwargs)
    for name, (factory, kwargs) in get_factories(sys.argv[1]).items()
  }
  print(json.dumps(results))


if __name__ == "__main__":
  main(list_problems)
