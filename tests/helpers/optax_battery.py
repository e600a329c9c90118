"""Trains with each optimizer that Optax exports, bare and wrapped.

Run as a script, in a process of its own, with `tests` in PYTHONPATH: it prints,
as JSON, what it found for each optimizer. XLA's CPU compiler turns `a * b + c`
into one instruction that rounds once, where both happen to be in one of its
fusions. A wrapped optimizer is fused differently, so that a last bit differs
here and there, by nobody's fault. Compiled for a processor without that
instruction, every number has one meaning, and bare and wrapped runs can be
compared bit for bit.
"""

import json
import sys

import jax
import optax

from helpers.bits import has_same_bits
from helpers.optimizers import extra_args, factories, loss_and_grads
from helpers.small_model import init_params, loss_fn, make_batches, overflowing
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
      value, grads = loss_and_grads(name, differentiate(state), params, batch)
      fun = lambda params: loss_fn(params, batch)
      extra = extra_args(name, value, unscale(grads, state), fun)
      updates, state = tx.update(grads, state, params, **extra)
      return optax.apply_updates(params, updates), state, value

    return tx, step

  def differentiate_scaled(state):
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
      differentiate_scaled,
      ols.unscale_grads,
    ),
  }
  return steps, traces


def trajectory(tx, step, batches, scale=None):
  """(params, inner state, loss) after each step; no scale for bare ones."""
  params = init_params()
  state = tx.init(params)
  if scale is not None:
    state = ols.set_loss_scale(state, scale)
  found = []
  for batch in batches:
    params, state, value = step(params, state, batch)
    inner_state = state if scale is None else state.inner_state
    found.append((params, inner_state, value))
  return found


def examine(name, factory, kwargs):
  """What is found of one optimizer; `expected_of_each` says what should be."""
  bare = optax.with_extra_args_support(factory(**kwargs))
  steps, traces = make_steps(name, bare)
  batches = make_batches(STEPS)
  expected = trajectory(*steps["bare"], batches)
  found = {}
  for scale in SCALES:
    for idiom in IDIOMS:
      actual = trajectory(*steps[idiom], batches, scale)
      same = map(has_same_bits, actual, expected)
      found[f"{idiom} at {scale:g}"] = [
        "same" if is_same else "differs" for is_same in same
      ]
  # Overflowing steps are as if they had not been.
  first, bad = batches[:4], overflowing(batches[0])
  run = lambda batches: trajectory(*steps["two_lines"], batches, SCALES[-1])
  with_bad = [*first[:3], bad, bad, first[3]]
  found["skips"] = has_same_bits(run(with_bad)[-1], run(first)[-1])
  # The loss on one batch becomes half of what it was. Some go up at the end.
  losses = [loss for _, _, loss in run([batches[0]] * 200)]
  found["trains"] = bool(min(losses) < losses[0] / 2)
  found["traces"] = len([tx for tx in traces if tx is not bare])
  return found


def expected_of_each():
  """What `examine` should find of every optimizer."""
  expected = {
    f"{idiom} at {scale:g}": ["same"] * STEPS
    for scale in SCALES
    for idiom in IDIOMS
  }
  return expected | {"skips": True, "trains": True, "traces": len(IDIOMS)}


def main():
  jax.config.update("jax_platforms", "cpu")
  found = {
    name: examine(name, factory, kwargs)
    for name, (factory, kwargs) in factories(sys.argv[1]).items()
  }
  print(json.dumps(found))


if __name__ == "__main__":
  main()
