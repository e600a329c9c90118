"""A skipped step changes no bit, in no dtype, jitted or not.

test_optax_battery.py shows this for other optimizers.

XLA reduces large arrays by other paths than small ones, and in other orders. It
treats subnormal numbers as zero when it adds on CPU, whatever is added, and
with it `optax.apply_updates`; the wrapper's -0.0 adds nothing.
"""

from typing import NamedTuple

from helpers import parametrize_slow
from helpers.bits import has_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
  "adam": optax.adam(0.1),
  "adafactor": optax.adafactor(0.1),
}


class Skip(NamedTuple):
  """An optimizer, the dtypes of params and gradients, and how it is used."""

  optimizer: str
  params: str
  grads: str
  options: tuple[tuple[str, object], ...] = ()
  jitted: bool = True
  size: int = 6


SCALED = (("grads_are_scaled", True), ("max_norm", 1.0))
CHECKED = (("check_updates", True),)
QUICK = [
  Skip("adam", "float16", "float32"),
  Skip("momentum", "bfloat16", "bfloat16", SCALED),
]
HALVES = "float16", "bfloat16", "float32"
SKIPS = [
  *QUICK,
  *(
    Skip("adam", params, grads, options)
    for params in HALVES
    for grads in HALVES
    for options in ((), SCALED)
    if Skip("adam", params, grads, options) not in QUICK
  ),
  Skip("adafactor", "float16", "float16", SCALED),
  Skip("adam", "bfloat16", "bfloat16", CHECKED),
  Skip("momentum", "complex64", "complex64"),
  Skip("sgd", "float32", "float32", jitted=False),
  Skip("adam", "float32", "float16", SCALED, jitted=False),
  # XLA's maximum on CPU loses a NaN in leaves of some 4,000 entries.
  *(
    Skip(optimizer, "float32", grads, options, size=size)
    for optimizer, size in (("adam", 4098), ("adafactor", 1_000_002))
    for grads in HALVES
    for options in ((), SCALED)
  ),
]


def make_tree(dtype, size):
  """Leaves with zeros of both signs among their entries."""
  w = np.tile([[1.0, -2.0, 0.5], [-0.0, 0.0, 4.0]], (1, size // 6))
  return {"w": w.astype(dtype), "b": np.array([-0.0, 3.0], dtype)}


def insert_bad(tree, bad, leaf, index):
  tree = jax.tree.map(np.array, tree)
  tree[leaf].reshape(-1)[index] = bad
  return tree


@parametrize_slow("skip", QUICK, SKIPS, ids=str)
def test_a_skipped_step_changes_no_bit_and_no_type(skip):
  tx = ols.with_loss_scaling(OPTIMIZERS[skip.optimizer], **dict(skip.options))
  params = make_tree(skip.params, skip.size)
  shift = lambda x: (x * 0.25 + 0.5).astype(skip.grads)
  grads = jax.tree.map(shift, make_tree(skip.grads, skip.size))
  traces = []

  def step(grads, state, params):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), updates, state

  step = jax.jit(step) if skip.jitted else step
  state = tx.init(params)
  params, _, state = step(grads, state, jax.tree.map(jnp.asarray, params))
  middle = skip.size // 2
  for case in (np.nan, "w", 0), (np.inf, "b", -1), (-np.inf, "w", middle):
    new, updates, skipped = step(insert_bad(grads, *case), state, params)
    assert has_same_bits(new, params)
    assert has_same_bits(skipped.inner_state, state.inner_state)
    for x in map(np.asarray, jax.tree.leaves(updates)):
      assert (x == 0).all() and np.signbit(np.float64(x.real)).all()
    assert not skipped.loss_scale_state.last_finite
    state = state._replace(loss_scale_state=skipped.loss_scale_state)
  new, updates, state = step(grads, state, params)
  assert not has_same_bits(new, params)
  assert state.loss_scale_state.total_notfinite == 3
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  assert dtypes(updates) == dtypes(params)
  assert len(traces) == 1 or not skip.jitted


# Subnormal parameters: the sentences that the pages say.


def make_subnormals(dtype):
  """The smallest and the largest of both signs, among other numbers."""
  info = jnp.finfo(dtype)
  smallest = np.array(info.smallest_subnormal, dtype)
  largest = np.array(info.tiny, dtype) - smallest
  few = [smallest, -smallest, largest, -largest, 0.0, -0.0, 1.0]
  return np.tile(np.array(few, dtype), 9)


def run_skipped_step(optimizer, params, jitted, select):
  tx = ols.with_loss_scaling(OPTIMIZERS[optimizer])

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    return ols.select_if_applied(state, new, params) if select else new

  grads = (params + np.nan).astype(params.dtype)
  step = jax.jit(step) if jitted else step
  return np.asarray(step(jnp.asarray(params), tx.init(params), grads))


EXACT = ["float16", "float8_e4m3fn", "float8_e5m2"]
FLUSHED = ["float32", "bfloat16", "float64", "complex64"]
HOW = [
  (optimizer, jitted, select)
  for optimizer in ("sgd", "adam")
  for jitted in (True, False)
  for select in (True, False)
]


def keeps_subnormals(dtype, optimizer, jitted, select):
  """Whether the pages say that a skipped step keeps them."""
  if select or dtype in EXACT:
    return True
  return jitted and (dtype in ("float32", "float64") or optimizer == "sgd")


@parametrize_slow(
  "case",
  [("bfloat16", "sgd", True, False)],
  [(dtype, *how) for dtype in (*EXACT, *FLUSHED) for how in HOW],
  ids=str,
)
def test_subnormal_params_are_kept_or_flushed_as_the_pages_say(case):
  dtype, optimizer, jitted, select = case
  with jax.enable_x64(True):
    old = make_subnormals(dtype)
    new = run_skipped_step(optimizer, old, jitted, select)
    if keeps_subnormals(*case):
      assert has_same_bits(new, old)
      return
    # In NumPy, which preserves subnormal numbers.
    are_subnormal = (old != 0) & (abs(old) < np.array(jnp.finfo(dtype).tiny))
    are_kept = jitted & (new == old)  # The program may keep some of them.
    assert ((new == 0) | are_kept)[are_subnormal].all()
    assert has_same_bits(new[~are_subnormal], old[~are_subnormal])
