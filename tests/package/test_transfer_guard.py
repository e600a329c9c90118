"""Every public function that runs on the host may transfer what it needs.

Trainers set ``jax.transfer_guard`` to find transfers that they did not mean,
and those of a report are meant.
"""

import functools
import inspect

from helpers import interop_samples as samples
from helpers import parametrize_slow
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale import _arrays, diagnostics, interop, plots

matplotlib.use("Agg")

POLICY = ols.DynamicLossScale(min_scale=2.0**-126)
STATE = POLICY.init()
PARAMS = {"w": np.eye(4, dtype=np.float32)}
X = np.full((2, 4), 3.0, np.float32)
GRADS = jax.tree.map(jnp.asarray, {"w": [1.0, np.inf], "b": [0.5]})


def loss_fn(params, x):
  with jax.ensure_compile_time_eval():
    # Computed while the function is traced, from an array of NumPy.
    factor = jnp.sum(jnp.asarray(np.ones(2, np.float32)) * np.float32(2))
  return jnp.mean((factor * x @ params["w"]) ** 2)


GRAD_FN = ols.grad(ols.autocast(loss_fn), STATE)
TX = ols.with_loss_scaling(optax.sgd(0.1))
OPT_STATE = TX.init(PARAMS)


def train_step(params, state, x):
  grads = ols.grad(ols.autocast(loss_fn), state)(params, x)
  return TX.update(grads, state, params)


@functools.cache
def compare():
  return diagnostics.compare_precision(GRAD_FN, PARAMS, X, progress=False)


# Each function that reads, and its row in the table of valid values.
READERS = {
  interop.from_flax: "Flax",
  interop.from_jmp: "jmp",
  interop.from_keras: "Keras 3",
  interop.from_torch: "torch",
}
# Each is called with what is not on a device yet, or must be read back.
ON_HOST = {
  ols.loss_scale_metrics: lambda: ols.loss_scale_metrics(
    STATE, policy=POLICY, steps=np.int32(3)
  ),
  ols.raise_if_stuck: lambda: ols.raise_if_stuck(STATE),
  ols.set_loss_scale: lambda: ols.set_loss_scale(STATE, 2.0**10),
  diagnostics.check_step: lambda: diagnostics.check_step(
    train_step, PARAMS, OPT_STATE, X, progress=False
  ),
  diagnostics.compare_precision: lambda: compare.__wrapped__(),
  diagnostics.find_overflow: lambda: diagnostics.find_overflow(
    GRAD_FN, PARAMS, 1e30 * X
  ),
  diagnostics.nonfinite_leaves: lambda: diagnostics.nonfinite_leaves(GRADS),
  diagnostics.count_flops: lambda: diagnostics.count_flops(GRAD_FN, PARAMS, X),
  plots.exponent_histogram: lambda: plots.exponent_histogram(GRADS),
  plots.plot_exponents: lambda: plots.plot_exponents(GRADS, loss_scale=STATE),
  plots.plot_loss_scale: lambda: plots.plot_loss_scale([STATE, STATE]),
  plots.plot_precision: lambda: plots.plot_precision(compare()),
  interop.to_flax: functools.partial(interop.to_flax, POLICY, STATE),
  interop.to_keras: lambda: interop.to_keras(ols.DynamicLossScale(), STATE),
  interop.to_torch: functools.partial(interop.to_torch, POLICY, STATE),
} | {fun: functools.partial(*samples.CALLS[x]) for fun, x in READERS.items()}
# These are parts of a training step, which transfers nothing; or they only look
# for a state, or make a function.
IN_A_STEP = {
  ols.all_finite,
  ols.autocast,
  ols.get_loss_scale_state,
  ols.get_master_weights,
  ols.grad,
  ols.keep_float32,
  ols.scale_loss,
  ols.select_if_applied,
  ols.unscale_grads,
  ols.value_and_grad,
  ols.with_loss_scaling,
  ols.with_master_weights,
  diagnostics.probe,
  diagnostics.probe_counters,
  diagnostics.probe_metrics,
  diagnostics.probe_update_kwargs,
}


def test_each_public_function_runs_on_the_host_or_in_a_step():
  public = {
    getattr(module, name)
    for module in (ols, diagnostics, interop, plots)
    for name in module.__all__
  }
  functions = {x for x in public if not inspect.isclass(x)}
  assert functions == {*ON_HOST, *IN_A_STEP}


def test_each_function_on_the_host_allows_transfers():
  # On CPU, reads are free, and so no guard would stop them.
  guarded = _arrays.allow_transfers(len).__code__
  assert [fun for fun in ON_HOST if fun.__code__ is not guarded] == []


# The reports take seconds.
REPORTS = {
  diagnostics.check_step,
  diagnostics.compare_precision,
  diagnostics.find_overflow,
  plots.plot_exponents,
  plots.plot_precision,
}


@parametrize_slow(
  "fun",
  [*(ON_HOST.keys() - REPORTS)],
  list(ON_HOST),
  ids=lambda fun: fun.__name__,
)
def test_a_function_on_the_host_transfers_under_a_guard(fun):
  for guard in ("disallow", "disallow_explicit"):
    with jax.transfer_guard(guard):
      ON_HOST[fun]()
