"""Every policy against the same gradients: what is lost, and how long it takes.

Simulates only the largest gradient of each step, in 100,000 steps of four
kinds, and what float16 makes of it at the scale that the policy chose. Writes
its part of policies.json, and policies.png; prints the tables of policies.md.

  python benchmarks/policies.py  # half a minute
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols

STEPS = 100_000
SEEDS = 5
BURST = STEPS // 2  # where the burst begins,
BURST_STEPS = 40  # and how long it lasts
TOP = np.log2(65504)
NEAR = 6  # binades: so far under the best scale still counts as near it


@dataclasses.dataclass(frozen=True)
class RecoveringLossScale:
  """The example of docs/policies.md: below 8, it doubles every 100 steps."""

  usual: ols.DynamicLossScale = ols.DynamicLossScale()  # noqa: RUF009

  def init(self):
    return self.usual.init()

  def adjust(self, state, grads_finite, *, grads_amax=None):
    state = self.usual.adjust(state, grads_finite)
    hurry = (state.loss_scale < 8) & (state.finite_count >= 100)
    scale = jnp.where(hurry, 2 * state.loss_scale, state.loss_scale)
    count = jnp.where(hurry, 0, state.finite_count)
    return state._replace(loss_scale=scale, finite_count=count)


@dataclasses.dataclass(frozen=True)
class PublishedLogMax(ols.LogMaxLossScale):
  """The averages as OpenSeq2Seq keeps them.

  An overflow enters 65536 among the logarithms, a zero its own; and the scale
  is not rounded to a power of two.
  """

  def adjust(self, state, grads_finite, *, grads_amax=None):
    memory = state.memory
    x = jnp.where(grads_finite, jnp.log2(grads_amax), 2.0**16)

    def averaged(decay, name, value):
      return decay * memory[name] + (1 - decay) * value

    new = {
      "log2_mean": averaged(0.99, "log2_mean", x),
      "log2_mean_weight": averaged(0.99, "log2_mean_weight", 1),
      "log2_slow_mean": averaged(0.999, "log2_slow_mean", x),
      "log2_variance": averaged(0.999, "log2_variance", x * x),
      "log2_variance_weight": averaged(0.999, "log2_variance_weight", 1),
    }
    mean = new["log2_mean"] / new["log2_mean_weight"]
    slow_mean = new["log2_slow_mean"] / new["log2_variance_weight"]
    square = new["log2_variance"] / new["log2_variance_weight"]
    deviation = jnp.sqrt(jnp.maximum(square - slow_mean**2, 0))
    scale = 2 ** (16 - (mean + 3.09 * deviation))
    return state._replace(
      loss_scale=jnp.clip(scale, 1, 2.0**126),
      last_finite=jnp.asarray(grads_finite),
      memory=new,
    )


POLICIES = {
  "fixed, 2**15": ols.FixedLossScale(2.0**15),
  "dynamic": ols.DynamicLossScale(),
  "dynamic, every 200": ols.DynamicLossScale(growth_interval=200),
  "dynamic, hysteresis 2": ols.DynamicLossScale(hysteresis=2),
  "dynamic, recovering": RecoveringLossScale(),
  "log-max, published": PublishedLogMax(min_scale=1.0),
  "log-max": ols.LogMaxLossScale(),
  "headroom": ols.HeadroomLossScale(),
}


def main():
  here = pathlib.Path(__file__).parent
  file = here / "policies.json"
  results = json.loads(file.read_text()) if file.exists() else {}

  processes = make_processes()
  traces = {name: simulate(p, processes) for name, p in POLICIES.items()}
  results["simulation"] = {
    process: {
      name: summarize(process, processes[process], traces[name][process])
      for name in POLICIES
    }
    for process in processes
  }
  draw(processes, traces, here / "policies.png")
  file.write_text(json.dumps(results, indent=1) + "\n")
  for process, rows in results["simulation"].items():
    print_table(process.capitalize(), rows)
  # What policies_training.py has measured.
  for name in ("digits", "transformer"):
    print_table(f"Training: {name}", results.get(name, {}))


def make_processes():
  """Binary logarithms of the largest gradient, as arrays of (seed, step).

  Each is a pair: what happens, and the level without spikes and NaN, against
  which the best scale is judged.
  """
  rng = np.random.default_rng(0)
  shape = SEEDS, STEPS
  noise = np.zeros(shape)
  shocks = rng.normal(size=shape) * 0.5 * np.sqrt(1 - 0.9**2)
  noise[:, 0] = rng.normal(size=SEEDS) * 0.5
  for t in range(1, STEPS):
    noise[:, t] = 0.9 * noise[:, t - 1] + shocks[:, t]
  calm = noise - 14
  spikes = rng.exponential(2, shape) * (rng.random(shape) < 1e-3)
  drifting = calm - np.linspace(0, 14, STEPS)
  burst = calm.copy()
  burst[:, BURST : BURST + BURST_STEPS] = np.nan
  pairs = {
    "calm": (calm, calm),
    "spiky": (calm + spikes, calm),
    "drifting": (drifting, drifting),
    "burst": (burst, calm),
  }
  return {
    name: (np.float32(x), np.float32(level))
    for name, (x, level) in pairs.items()
  }


def simulate(policy, processes):
  """What the policy makes of each process.

  Returns:
    For each process the scale of each step, as a binary logarithm, and whether
    the step was finite; both of shape (seed, step).
  """

  def step(state, log2_amax):
    # What float16 holds of it: 65520 rounds to inf, 2**-25 to zero.
    held = jnp.exp2(log2_amax) * state.loss_scale
    finite = held < 65520
    held = held.astype(jnp.float16).astype(jnp.float32)
    after = policy.adjust(state, finite, grads_amax=held / state.loss_scale)
    return after, (state.loss_scale, finite)

  @jax.jit
  @jax.vmap
  def run(log2_amax):
    return jax.lax.scan(step, policy.init(), log2_amax)[1]

  happens = np.concatenate([happens for happens, _ in processes.values()])
  scale, finite = run(happens)
  log2_scale = np.log2(np.asarray(scale)).reshape(-1, SEEDS, STEPS)
  finite = np.asarray(finite).reshape(-1, SEEDS, STEPS)
  return dict(zip(processes, zip(log2_scale, finite, strict=True), strict=True))


def summarize(process, happens_and_level, trace):
  happens, level = happens_and_level
  log2_scale, finite = trace
  under = TOP - level - log2_scale
  # Steps that were NaN whatever the scale are not the policy's loss.
  skipped = (~finite & ~np.isnan(happens)).sum(axis=1)
  rows = {
    "skipped": skipped,
    "steps_until_near": first(under <= NEAR),
    "median_binades_under": np.median(under, axis=1),
  }
  if process == "burst":
    rows["steps_to_recover"] = first(under[:, BURST + BURST_STEPS :] <= NEAR)
  return {name: [to_json(x) for x in row] for name, row in rows.items()}


def first(flags):
  """The first step at which the flag is set; inf if it never is."""
  return np.where(flags.any(axis=1), flags.argmax(axis=1), np.inf)


def to_json(x):
  x = round(float(x), 2)
  return None if not np.isfinite(x) else int(x) if x == int(x) else x


def print_table(title, rows):
  if not rows:
    return
  columns = list(next(iter(rows.values())))
  heads = [column.replace("_", " ") for column in columns]
  print(f"\n### {title}\n")
  print(" | ".join(["| policy", *heads]) + " |")
  print("|---|" + "--:|" * len(columns))
  for name, row in rows.items():
    cells = [format_cell(row[column]) for column in columns]
    print(" | ".join([f"| {name}", *cells]) + " |")


def format_cell(values):
  """The median over the seeds, and the range if there is any."""
  values = sorted(np.inf if x is None else x for x in values)
  middle, low, high = values[len(values) // 2], values[0], values[-1]
  show = lambda x: "never" if x == np.inf else f"{x:,.5g}"
  if low == high:
    return show(middle)
  return f"{show(middle)} ({show(low)} to {show(high)})"


def draw(processes, traces, file):
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  shown = ["dynamic", "dynamic, recovering", "log-max", "headroom"]
  figure, all_axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
  steps = np.arange(0, STEPS, 20)
  for axes, (process, (_, level)) in zip(
    all_axes.flat, processes.items(), strict=True
  ):
    best = TOP - level[0]
    axes.plot(steps, best[steps], color="black", lw=0.2, label="overflow")
    for name in shown:
      log2_scale, _ = traces[name][process]
      axes.plot(steps, log2_scale[0][steps], lw=1, label=name)
    axes.set_title(process)
    axes.set_ylim(-26, 50)
    axes.set_ylabel("log2 of the loss scale")
  for axes in all_axes[1]:
    axes.set_xlabel("step")
  all_axes[0, 0].legend(loc="lower right")
  figure.tight_layout()
  figure.savefig(file, dpi=100)


if __name__ == "__main__":
  main()
