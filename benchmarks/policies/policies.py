"""Every policy against the same gradients: what is lost, and how long it takes.

Simulates only the largest gradient of each step, in 100,000 steps of many
kinds, and what float16 makes of it at the scale that the policy chose. Writes
its part of policies.json, and policies.png; prints the tables of README.md.

  python benchmarks/policies/policies.py  # two minutes
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import log_max
import numpy as np

import optax_lossscale as ols

STEPS, SEEDS = 100_000, 5
LEVEL = -14  # log2 of the largest gradient, on average
TOP = np.log2(65504)
NEAR = 6  # binades: so far under the best scale still counts as near it


@dataclasses.dataclass(frozen=True)
class RecoveringLossScale:
  """The example of docs/explanation/how_policies_work.md."""

  dynamic: ols.DynamicLossScale = ols.DynamicLossScale()  # noqa: RUF009

  def init(self):
    return self.dynamic.init()

  def adjust(self, state, grads_finite, *, grads_amax=None):
    state = self.dynamic.adjust(state, grads_finite)
    grow = (state.loss_scale < 8) & (state.finite_count >= 100)
    scale = jnp.where(grow, 2 * state.loss_scale, state.loss_scale)
    count = jnp.where(grow, 0, state.finite_count)
    return state._replace(loss_scale=scale, finite_count=count)


POLICIES = {
  "fixed, 2**15": ols.FixedLossScale(2.0**15),
  "dynamic": ols.DynamicLossScale(),
  "dynamic, every 200": ols.DynamicLossScale(growth_interval=200),
  "dynamic, hysteresis 2": ols.DynamicLossScale(hysteresis=2),
  "dynamic, recovering": RecoveringLossScale(),
  "log-max, published": log_max.Published(),
  "log-max, mended": log_max.Mended(),
  "headroom": ols.HeadroomLossScale(),
  "headroom, target -1": ols.HeadroomLossScale(margin=1),
}
# In the tables; policies.json has all.
COMPARED = (
  "dynamic",
  "dynamic, every 200",
  "log-max, published",
  "log-max, mended",
  "headroom",
  "headroom, target -1",
)


@dataclasses.dataclass(frozen=True)
class Process:
  """The largest gradient of each step, whatever the scale.

  Attributes:
    log2_amax: its binary logarithm, shape (seed, step); -inf where all
      gradients are zero, NaN where they are NaN.
    level: the same without spikes, zeros and NaNs, against which the best scale
      is judged; as log2_amax if not given.
    on_the_way: by how many binades the backward pass exceeds it on its way.
    log2_init_scale: where policies that have a start begin.
    change: the step from which on the time to come near again is measured.
  """

  log2_amax: np.ndarray
  level: np.ndarray | None = None
  on_the_way: float = 0
  log2_init_scale: int = 15
  change: int | None = None


def main():
  here = pathlib.Path(__file__).parent
  file = here / "policies.json"
  processes = make_processes(STEPS)
  traces = {name: simulate(p, processes) for name, p in POLICIES.items()}
  results = json.loads(file.read_text()) if file.exists() else {}
  results["simulation"] = {
    process: {
      name: summarize(processes[process], traces[name][process])
      for name in POLICIES
    }
    for process in processes
  }
  file.write_text(json.dumps(results, indent=1) + "\n")
  draw(processes, traces, here / "policies.png")
  print_tables(results["simulation"])


def make_processes(steps):
  """All processes by name."""
  rng = np.random.default_rng(0)
  calm, noise = make_calm(rng, steps)
  at, shape = np.arange(steps), calm.shape
  half, past_half = steps // 2, np.arange(steps) >= steps // 2
  warm = at < 100
  spikes = rng.exponential(2, shape) * (rng.random(shape) < 1e-3)
  some = rng.random(shape) < 0.05

  def every(n):
    return at % n == n - 1

  def keep_where(mask, x=calm):
    return Process(np.where(mask, x, -np.inf), level=x)

  def make_changing(by):
    x = calm + by
    return Process(x, change=half if np.ptp(by) == abs(by).max() else None)

  def with_nan(mask, x=calm, change=None):
    return Process(np.where(mask, np.nan, x), level=x, change=change)

  slow = np.linspace(0, 1, steps)
  burst = (at >= half) & (at < half + 40)
  return {
    "calm": Process(calm),
    "spiky": Process(calm + spikes, level=calm),
    "falls slowly by 14": Process(calm - 14 * slow),
    "rises slowly by 14": Process(calm + 14 * slow),
    **{
      f"jumps by {k}": make_changing(k * past_half) for k in (10, 14, -10, -14)
    },
    "40 NaNs": with_nan(burst, change=half + 40),
    **{f"sparse: every {n}": keep_where(every(n)) for n in (2, 8, 40)},
    "sparse: random 5%": keep_where(some),
    **{f"100, then every {n}": keep_where(every(n) | warm) for n in (2, 8, 40)},
    "100, then random 5%": keep_where(some | warm),
    "20 zeros first": keep_where(at >= 20),
    "2**7 more every 40": Process(calm + 7 * every(40), level=calm),
    "2**7 more every 400": Process(calm + 7 * every(400), level=calm),
    "2**6 more on the way": Process(calm, level=calm + 6, on_the_way=6),
    "a NaN every 500": with_nan(every(500)),
    "a NaN every 500, random": with_nan(rng.random(shape) < 1 / 500),
    "a NaN every 100": with_nan(every(100)),
    "white noise of 2": Process(LEVEL + 4 * noise, LEVEL + 0 * noise),
    "starts at 2**0": Process(calm, log2_init_scale=0),
    "starts at 2**60": Process(calm, log2_init_scale=60),
    "every 40, from 2**60": dataclasses.replace(
      keep_where(every(40)), log2_init_scale=60
    ),
    "10 NaNs first": with_nan(at < 10),
    "NaNs and zeros first": Process(
      np.where(at < 400, np.where(every(3), np.nan, -np.inf), calm - 6),
      level=calm - 6,
    ),
    "every 40, jumps by 10": keep_where(every(40), calm + 10 * past_half),
    "every 40, jumps by -10": keep_where(every(40), calm - 10 * past_half),
    "10,000 zeros, by turns": keep_where(at // 10_000 % 2 == 0),
    "jumps by -30": make_changing(-30 * past_half),
  }


def make_calm(rng, steps):
  """Noise of half a binade, correlated from step to step and white."""
  shocks = rng.normal(size=(SEEDS, steps)) * 0.5
  calm = np.empty_like(shocks)
  calm[:, 0] = shocks[:, 0]
  for t in range(1, steps):
    calm[:, t] = 0.9 * calm[:, t - 1] + np.sqrt(1 - 0.9**2) * shocks[:, t]
  return LEVEL + calm, shocks


def simulate(policy, processes):
  """What the policy makes of each process.

  Returns:
    For each process the scale of each step, as a binary logarithm, and whether
    the step was finite, and whether float16 held anything but zeros; all of
    shape (seed, step).
  """
  traces = {}
  for start in {process.log2_init_scale for process in processes.values()}:
    names = [n for n, p in processes.items() if p.log2_init_scale == start]
    found = simulate_all(
      _with_init_scale(policy, 2.0**start),
      np.concatenate([processes[name].log2_amax for name in names]),
      np.repeat([processes[name].on_the_way for name in names], SEEDS),
    )
    found = [np.split(x, len(names)) for x in found]
    traces |= dict(zip(names, zip(*found, strict=True), strict=True))
  return {name: traces[name] for name in processes}


def simulate_one(policy, process):
  """The same for one process, with any number of seeds."""
  on_the_way = np.full(len(process.log2_amax), process.on_the_way)
  return simulate_all(policy, process.log2_amax, on_the_way)


def _with_init_scale(policy, scale):
  if hasattr(policy, "dynamic"):
    return RecoveringLossScale(_with_init_scale(policy.dynamic, scale))
  has_start = hasattr(policy, "init_scale")
  return dataclasses.replace(policy, init_scale=scale) if has_start else policy


def simulate_all(policy, log2_amax, on_the_way):
  """The same for sequences of shape (run, step), and on the way by run."""
  to_float32 = lambda x: np.asarray(x, np.float32)
  found = _compiled(policy)(to_float32(log2_amax), to_float32(on_the_way))
  return [np.asarray(x) for x in found]


@functools.cache
def _compiled(policy):
  def run(log2_amax, on_the_way):
    def step(state, log2_amax):
      scale = state.loss_scale
      # What float16 holds of it: 65520 rounds to inf, 2**-25 to zero.
      held = jnp.exp2(log2_amax) * scale
      finite = held * jnp.exp2(on_the_way) < 65520
      held = held.astype(jnp.float16).astype(jnp.float32)
      after = policy.adjust(state, finite, grads_amax=held / scale)
      return after, (jnp.log2(scale), finite, held > 0)

    return jax.lax.scan(step, policy.init(), log2_amax)[1]

  return jax.jit(jax.vmap(run))


def forget_compiled():
  """For a policy whose rule has changed, but not its hyperparameters."""
  _compiled.cache_clear()


def summarize(process, trace):
  """The figures of a process under a policy, a list with one for each seed."""
  log2_scale, _, _ = trace
  level = process.log2_amax if process.level is None else process.level
  under = TOP - level - log2_scale
  rows = {
    "lost": count_lost(process, trace),
    "binades_under": np.median(under, axis=1),
    "until_near": first(under <= NEAR),
  }
  if process.change is not None:
    rows["until_near_again"] = first(under[:, process.change :] <= NEAR)
  return {name: [to_json(x) for x in row] for name, row in rows.items()}


def count_lost(process, trace):
  """The steps lost of those that were informative, for each seed.

  A step is lost if it is skipped, or if float16 made zeros of all its
  gradients. Those with zeros or NaNs whatever the scale do not count.
  """
  _, finite, held = trace
  informative = np.isfinite(process.log2_amax)
  return (informative & ~(finite & held)).sum(axis=1)


def first(flags):
  """The first step at which the flag is set; inf if it never is."""
  return np.where(flags.any(axis=1), flags.argmax(axis=1), np.inf)


def to_json(x):
  x = round(float(x), 1)
  return None if not np.isfinite(x) else int(x) if x == int(x) else x


def print_tables(simulation):
  """A table for each figure, where it differs from that of calm gradients."""
  for column in ("lost", "binades_under", "until_near", "until_near_again"):
    rows = {k: v for k, v in simulation.items() if column in v["dynamic"]}
    print(f"\n### {column.replace('_', ' ').capitalize()}\n")
    print(" | ".join(["| gradients", *COMPARED]) + " |")
    print("|---|" + "--:|" * len(COMPARED))
    for process, found in rows.items():
      cells = [format_cell(found[name][column], column) for name in COMPARED]
      is_usual = process != "calm" and all(
        found[name][column] == simulation["calm"][name].get(column)
        for name in ("dynamic", "headroom")
      )
      if not is_usual:
        print(" | ".join([f"| {process}".replace("2**", "2^"), *cells]) + " |")


def print_table(title, rows):
  """The figures of a training, with a row for each policy."""
  columns = list(next(iter(rows.values())))
  heads = [column.replace("_", " ") for column in columns]
  print(f"\n### {title}\n")
  print(" | ".join(["| policy", *heads]) + " |")
  print("|---|" + "--:|" * len(columns))
  for name, row in rows.items():
    cells = [format_cell(row[column], column) for column in columns]
    print(" | ".join([f"| {name}", *cells]) + " |")


def format_cell(values, column):
  """The median over the seeds, and the range if there is any."""
  missing = "never" if column.startswith("until") else "NaN"
  values = sorted(np.inf if x is None else x for x in values)
  middle, low, high = values[len(values) // 2], values[0], values[-1]
  show = lambda x: missing if x == np.inf else f"{x:,.5g}"
  if low == high:
    return show(middle)
  return f"{show(middle)} ({show(low)} to {show(high)})"


def draw(processes, traces, file):
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  shown = ["dynamic", "log-max, mended", "headroom"]
  names = ["calm", "sparse: every 40", "2**7 more every 40", "40 NaNs"]
  figure, all_axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
  steps = np.arange(0, STEPS, 20)
  for axes, process in zip(all_axes.flat, names, strict=True):
    level = processes[process].level
    best = TOP - (processes[process].log2_amax if level is None else level)[0]
    axes.plot(steps, best[steps], color="black", lw=0.2, label="overflow")
    for name in shown:
      lost = count_lost(processes[process], traces[name][process])[0]
      label = f"{name}: {lost:,} lost"
      axes.plot(steps, traces[name][process][0][0][steps], lw=1, label=label)
    axes.set_title(process)
    axes.set_ylim(-26, 50)
    axes.set_ylabel("log2 of the loss scale")
    axes.legend(loc="lower right")
  for axes in all_axes[1]:
    axes.set_xlabel("step")
  figure.tight_layout()
  figure.savefig(file, dpi=100)


if __name__ == "__main__":
  main()
