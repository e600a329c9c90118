"""Draw the figure of how_policies_work.md: what the headroom policy does."""

import pathlib

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np

import optax_lossscale as ols

FILE = pathlib.Path(__file__).parents[1] / "_static" / "headroom.png"
STEPS = 320
COLORS = {"target": "#ffcf9e", "limit": "#8fd18f", "loss scale": "tab:blue"}


def main():
  log2_amax = make_gradients()
  draw(log2_amax, *record(log2_amax)).savefig(FILE, dpi=100)
  print(f"The picture is in {FILE.name}.")


def make_gradients():
  """Binary logarithms of the largest gradients; -inf where all are zero."""
  log2_amax = np.full(STEPS, -np.inf)
  at = np.arange(4, STEPS, 8)
  log2_amax[at] = np.random.default_rng(0).normal(-14, 0.5, at.size)
  log2_amax[84::80] += 7
  return log2_amax


def record(log2_amax):
  """Each step's scale, target and limit in binades, and if it was skipped."""
  policy = ols.HeadroomLossScale()

  def step(state, amax):
    held = amax * state.loss_scale
    finite = held < 65520  # From there on float16 rounds to inf.
    after = policy.adjust(state, finite, grads_amax=amax)
    window = after.policy_state.amax_history
    target = jnp.floor(jnp.log2(65504 / jnp.max(window))) - policy.margin
    # 128 if nothing has failed.
    limit = jnp.where(
      after.policy_state.failed_log2_scale < 128,
      after.policy_state.max_log2_scale,
      128,
    )
    log2_scale = jnp.log2(state.loss_scale)
    return after, (log2_scale, target, limit, ~finite)

  amax = jnp.exp2(jnp.asarray(log2_amax, jnp.float32))
  return map(np.asarray, jax.lax.scan(step, policy.init(), amax)[1])


def draw(log2_amax, log2_scale, target, limit, skipped):
  steps = np.arange(STEPS)
  figure = Figure(figsize=(8, 5), layout="constrained")
  axes = figure.subplots()
  # Before the first gradient there is no target, and 128 is no limit.
  target = np.where(np.isinf(target), np.nan, target)
  limit = np.where(limit == 128, np.nan, limit)
  # The lines below are wider, so that each can be seen.
  for log2, width, label in (
    (target, 7, "target"),
    (limit, 4, "limit"),
    (log2_scale, 1, "loss scale"),
  ):
    style = {"where": "mid", "linewidth": width, "label": label}
    axes.step(steps, np.exp2(log2), color=COLORS[label], **style)
  best = 65504 * np.exp2(-log2_amax)  # inf where all gradients are zero
  axes.plot(steps, best, "k.", label="largest scale without overflow")
  crosses = {"color": "tab:red", "label": "skipped step"}
  axes.plot(steps[skipped], np.exp2(log2_scale[skipped]), "x", **crosses)
  axes.set_title(
    "Gradients in every 8th step, 128 times as large in every 80th"
  )
  axes.set(xlabel="step", ylabel="loss scale (a factor)", yscale="log")
  ticks = range(-30, 100, 10)
  axes.set_yticks(np.exp2(ticks), [f"$2^{{{tick}}}$" for tick in ticks])
  axes.minorticks_off()
  axes.legend(loc="upper right", fontsize=8)
  axes.grid(alpha=0.3)
  return figure


if __name__ == "__main__":
  main()
