"""A problem whose arithmetic is exact, to compare runs on many devices by.

The loss is linear and its gradients are small integers, so that every sum is
exact in whatever order devices add; the optimizer multiplies by powers of two.
The results of eight devices must equal those of one device bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

EXAMPLES = 8  # in a batch
SHAPES = {"table": (8, 8), "rows": (8,), "bias": (8,)}
POLICY = ols.DynamicLossScale(
  init_scale=2.0**10, growth_interval=3, min_scale=2.0**4, max_scale=2.0**12
)
OVERFLOWING = 60000  # times any scale above, over EXAMPLES: not in float16


def make_optimizer(inner=None, **options):
  inner = inner or optax.sgd(2.0**-4, momentum=0.5)
  return ols.with_loss_scaling(inner, POLICY, **options)


def init_params():
  """A float32 tree; its leaves can be sharded over up to eight devices."""
  return {
    name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 8
    for name, shape in SHAPES.items()
  }


def make_batches(steps, seed=0, overflows=0.3):
  """For each leaf float16[steps, examples, *shape], and which steps overflow.

  An overflow is in one entry of one example: one device has the example, and
  under a sharded parameter one device has the entry.
  """
  rng = np.random.default_rng(seed)
  batches = {
    name: rng.integers(-8, 9, (steps, EXAMPLES, *shape)).astype(np.float16)
    for name, shape in SHAPES.items()
  }
  has_overflow = rng.random(steps) < overflows
  for step in np.flatnonzero(has_overflow):
    name = rng.choice(list(SHAPES))
    entry = tuple(rng.integers(EXAMPLES, size=1 + len(SHAPES[name])))
    batches[name][step][entry] = OVERFLOWING
  return batches, ~has_overflow


def loss_fn(params, batch):
  """The sum over the examples given, over the size of the whole batch."""
  losses = jax.tree.map(
    lambda p, x: jnp.sum((p.astype(jnp.float16) * x).astype(jnp.float32)),
    params,
    batch,
  )
  return sum(jax.tree.leaves(losses)) / EXAMPLES


def train_step(tx, params, opt_state, batch):
  grads = ols.grad(loss_fn, opt_state)(params, batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


def train(step, params, opt_state, batches):
  """Runs a step over all batches; also returns the scale after each."""

  def body(carry, batch):
    carry = step(*carry, batch)
    return carry, ols.get_loss_scale_state(carry[1]).loss_scale

  carry, scales = jax.lax.scan(body, (params, opt_state), batches)
  return *carry, scales


@functools.cache
def train_on_one_device(steps):
  """Return the results of one device, the reference for all others."""
  tx, params = make_optimizer(), init_params()
  step = lambda *args: train_step(tx, *args)
  run = jax.jit(lambda *args: train(step, *args))
  return run(params, tx.init(params), make_batches(steps)[0])
