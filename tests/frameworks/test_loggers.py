"""What a loop logs, and when it waits for it."""

from helpers.small_model import (
  half_loss_fn,
  init_params,
  make_batches,
  make_step,
  overflowing,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols


class ScalarWriter:
  """What TensorBoard's writers have in common: a tag, a number, a step."""

  def __init__(self):
    self.rows = []

  def scalar(self, tag, value, step):
    # As they do: to NumPy, then to one float.
    self.rows.append((tag, float(np.asarray(value).squeeze()), step))


def make_logged_step():
  """A step that returns what is to be logged, and how often it was traced."""
  tx = ols.with_loss_scaling(optax.adam(0.01), 2.0**10)
  inner_step = make_step(tx, half_loss_fn)
  traces = []

  @jax.jit
  def step(carry, batch):
    traces.append(None)
    params, opt_state, loss = inner_step(*carry, batch)
    return (params, opt_state), {"loss": loss} | ols.loss_scale_metrics(
      opt_state
    )

  params = init_params()
  return step, (params, tx.init(params)), traces


def make_data():
  batches = make_batches(4)
  batches[2] = overflowing(batches[2])
  return batches


def test_metrics_pile_up_in_a_scan_without_a_look_from_the_host():
  step, carry, _ = make_logged_step()
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *make_data())
  _, logs = jax.jit(lambda carry: jax.lax.scan(step, carry, stacked))(carry)
  assert {name: x.shape for name, x in logs.items()} == dict.fromkeys(
    logs, (4,)
  )
  np.testing.assert_array_equal(logs["last_finite"], [1, 1, 0, 1])
  np.testing.assert_array_equal(logs["total_notfinite"], [0, 0, 1, 1])
  np.testing.assert_array_equal(logs["log2_loss_scale"], [10] * 4)


def test_a_step_that_logs_calls_nothing_on_the_host():
  step, carry, _ = make_logged_step()
  jaxpr = str(jax.make_jaxpr(step)(carry, make_data()[0]))
  assert "callback" not in jaxpr
  assert "debug" not in jaxpr


def test_metrics_go_into_tensorboard_by_their_names():
  step, carry, traces = make_logged_step()
  writer = ScalarWriter()
  for i, batch in enumerate(make_data()):
    carry, logs = step(carry, batch)
    for name, value in logs.items():
      writer.scalar(f"loss_scale/{name}", value, i)
  assert len(traces) == 1
  assert ("loss_scale/log2_loss_scale", 10.0, 3) in writer.rows
  assert ("loss_scale/last_finite", 0.0, 2) in writer.rows
