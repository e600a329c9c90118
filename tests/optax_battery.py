"""Trains with each optimizer that Optax exports, bare and wrapped.

Run as a script, in a process of its own: it prints, as JSON, what it found for
each optimizer. XLA's CPU compiler turns `a * b + c` into one instruction that
rounds once, where both happen to be in one of its fusions. A wrapped optimizer
is fused differently, so that a last bit differs here and there, by nobody's
fault. Compiled for a processor without that instruction, every number has one
meaning, and bare and wrapped runs can be compared bit for bit.
"""

import inspect
import json
import sys

from ecosystem import (
  init_params,
  loss_fn,
  make_batches,
  overflowing,
)
from helpers.bits import same_bits
import jax
import jax.numpy as jnp
import optax
from optax import contrib

import optax_lossscale as ols

# AVX came before the multiply-add. Less optimization is as exact, and saves a
# third of the time.
ENVIRONMENT = {
  "XLA_FLAGS": "--xla_cpu_max_isa=AVX --xla_backend_optimization_level=0"
}

STEPS = 6
SCALES = (1.0, 2.0**15)
IDIOMS = ("two_lines", "scaled")

# Optimizers by name, with their arguments; a name that this version of Optax
# does not have yet is passed over.
OPTAX = {
  "adabelief": {},
  "adadelta": {"learning_rate": 1.0},
  "adafactor": {},
  "adagrad": {"learning_rate": 0.1},
  "adam": {},
  "adamax": {},
  "adamaxw": {},
  "adamw": {},
  "adan": {},
  "amsgrad": {},
  "fromage": {},
  "lamb": {},
  "lars": {"learning_rate": 1.0},
  "lbfgs": {},
  "lion": {},
  "nadam": {},
  "nadamw": {},
  "noisy_sgd": {"key": 0},
  "novograd": {},
  "optimistic_adam": {"optimism": 0.1},
  "optimistic_adam_v2": {},
  "optimistic_gradient_descent": {},
  "polyak_sgd": {},
  "radam": {},
  "rmsprop": {"momentum": 0.9},
  "rprop": {},
  "sgd": {"momentum": 0.9, "nesterov": True},
  "sign_sgd": {},
  "signum": {},
  "sm3": {"learning_rate": 0.1},
  "yogi": {},
}
CONTRIB = {
  "acprop": {},
  "ademamix": {},
  "adopt": {},
  "cocob": {},
  "dadapt_adamw": {},
  "dog": {"learning_rate": 1.0},
  "dowg": {"learning_rate": 1.0},
  "dpsgd": {
    "learning_rate": 0.1,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "seed": 0,
  },
  "galore": {"rank": 2},
  "madgrad": {},
  "mechanize": {"base_optimizer": optax.sgd(0.1)},
  "momo": {"learning_rate": 1.0},
  "momo_adam": {},
  "muon": {},
  "prodigy": {"learning_rate": 1.0},
  "schedule_free": {"base_optimizer": optax.sgd(0.1), "learning_rate": 0.1},
  "schedule_free_adamw": {},
  "schedule_free_sgd": {"learning_rate": 0.1},
  "simplified_ademamix": {},
  "sophia": {},
}
MODULES = {"optax": (optax, OPTAX), "optax.contrib": (contrib, CONTRIB)}

# These take the loss as a function, each by its own name, and nothing that
# the function does not take.
NAMES_OF_FUNCTION = {"lbfgs": "value_fn", "sophia": "obj_fn"}


def factories(module):
  """Name to (factory, arguments), of those that this version exports."""
  namespace, table = MODULES[module]
  found = {}
  for name, kwargs in table.items():
    factory = getattr(namespace, name, None)
    if factory is None:
      continue
    parameters = inspect.signature(factory).parameters
    learning_rate = parameters.get("learning_rate")
    if learning_rate and learning_rate.default is inspect.Parameter.empty:
      kwargs = {"learning_rate": 0.01} | kwargs
    found[name] = factory, kwargs
  return found


def all_factories():
  """The same for both modules, by names such as `optax.adam`."""
  return {
    f"{module}.{name}": factory
    for module in MODULES
    for name, factory in factories(module).items()
  }


def sum_of_squares(params):
  return sum(jnp.vdot(x, x).real for x in jax.tree.leaves(params))


def update(name, tx, value, grads, state, params):
  """An update by a name such as `optax.adam`, with all that it may need."""
  _, name = name.rsplit(".", 1)
  true_grads = jax.grad(sum_of_squares)(params)
  if name == "dpsgd":  # of each example
    grads = jax.tree.map(lambda x: x[None], grads)
  extra = extra_args(name, value, true_grads, sum_of_squares)
  return tx.update(grads, state, params, **extra)


def extra_args(name, value, grads, fun):
  """What some of the optimizers need beside the gradients."""
  extra = {"value": value, "grad": grads}
  if name in NAMES_OF_FUNCTION:
    return extra | {NAMES_OF_FUNCTION[name]: fun}
  return extra | {"not_expected": value}


def make_steps(name, bare):
  """A dict of (transformation, jitted step), and a list that traces append to.

  In a step with two changed lines the gradients are true; in one that is
  "scaled" the user differentiates a scaled loss, and hands over what comes out.
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
    def scaled_loss_fn(params, batch):
      value = loss_fn(params, batch)
      return ols.scale_loss(value, state), value

    differentiated = jax.value_and_grad(scaled_loss_fn, has_aux=True)

    def value_and_scaled_grad(params, batch):
      (_, value), grads = differentiated(params, batch)
      return value, grads

    return value_and_scaled_grad

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


def loss_and_grads(name, differentiated, params, batch):
  if name != "dpsgd":
    return differentiated(params, batch)
  # It wants the gradients of each example.
  examples = jax.tree.map(lambda x: x[:, None], batch)
  values, grads = jax.vmap(differentiated, (None, 0))(params, examples)
  return jnp.mean(values), grads


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
      same = map(same_bits, actual, expected)
      found[f"{idiom} at {scale:g}"] = [
        "same" if is_same else "differs" for is_same in same
      ]
  found["skips"] = examine_skips(steps["two_lines"], batches)
  found["trains"] = examine_training(steps["two_lines"], batches[0])
  found["traces"] = len([tx for tx in traces if tx is not bare])
  return found


def examine_skips(step, batches):
  """Whether overflowing steps are as if they had not been."""
  bad = overflowing(batches[0])
  *_, expected = trajectory(*step, batches[:4], SCALES[-1])
  batches = [*batches[:3], bad, bad, batches[3]]
  *_, actual = trajectory(*step, batches, SCALES[-1])
  return same_bits(actual, expected)


def examine_training(step, batch):
  """Whether the loss on one batch becomes half of what it was, or less."""
  run = trajectory(*step, [batch] * 200, SCALES[-1])
  (_, _, first), *_, (_, _, last) = run
  return bool(last < first / 2)


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
