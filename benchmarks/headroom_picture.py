"""Draws what the headroom rule does, for docs/policies.md.

python benchmarks/headroom_picture.py  # a few seconds
"""

import pathlib

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np

import optax_lossscale as ols

FILE = pathlib.Path(__file__).parents[1] / "docs" / "_static" / "headroom.png"
STEPS = 320


def main():
  log2_amax = make_gradients()
  draw(log2_amax, *record(log2_amax)).savefig(FILE, dpi=100)
  print(f"The picture is in {FILE.name}.")


def make_gradients():
  """Binary logarithms of the largest gradients; -inf where all are zero."""
  log2_amax = np.full(STEPS, -np.inf)
  at = np.arange(8, STEPS, 8)
  log2_amax[at] = np.random.default_rng(0).normal(-14, 0.5, at.size)
  log2_amax[80::80] += 7
  return log2_amax


def record(log2_amax):
  """Each step's scale and evidence in binades, caution, and if it was lost."""
  policy = ols.HeadroomLossScale()

  def step(state, amax):
    held = amax * state.loss_scale
    finite = held < 65520  # From there on float16 rounds to inf.
    after = policy.adjust(state, finite, grads_amax=amax)
    window, caution = after.memory.amax_window, after.memory.caution
    evidence = jnp.floor(jnp.log2(65504 / jnp.max(window))) + policy.target
    log2_scale = jnp.log2(state.loss_scale)
    return after, (log2_scale, evidence, caution, ~finite)

  amax = jnp.exp2(jnp.asarray(log2_amax, jnp.float32))
  return map(np.asarray, jax.lax.scan(step, policy.init(), amax)[1])


def draw(log2_amax, log2_scale, evidence, caution, lost):
  steps = np.arange(STEPS)
  figure = Figure(figsize=(8, 4.8), layout="constrained")
  top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 1))
  ceiling = np.where(np.isinf(log2_amax), np.nan, np.log2(65504) - log2_amax)
  top.plot(
    steps, ceiling, ".", color="black", label="largest scale without overflow"
  )
  # Before the first gradient there is none.
  evidence = np.where(np.isinf(evidence), np.nan, evidence)
  top.step(steps, evidence, where="post", color="tab:orange", label="evidence")
  top.step(steps, log2_scale, where="mid", color="tab:blue", label="loss scale")
  top.plot(
    steps[lost], log2_scale[lost], "x", color="tab:red", label="lost step"
  )
  top.set(
    ylabel="log2",
    ylim=(0, 85),
    title="Gradients in every 8th step, larger by 7 binades in every 80th",
  )
  top.legend(loc="upper right", fontsize=8)
  bottom.step(steps, caution, where="post", color="tab:green")
  bottom.set(xlabel="step", ylabel="caution (binades)")
  for axes in (top, bottom):
    axes.grid(alpha=0.3)
  return figure


if __name__ == "__main__":
  main()
