"""Train five small tasks in eight variants, and compare them with float32.

`make parity` runs it in at most 25 minutes on two cores. It writes the figures
of README.md. If it is interrupted, the next run continues.
"""

from collections.abc import Callable
import functools
import itertools
import json
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
from scipy import special
import tqdm

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from shared.tables import markdown, tabulate
from tasks import Task, TASKS

import optax_lossscale as ols

FOLDER = pathlib.Path(__file__).parent
SEEDS = 10
BLOCKS = 20  # The progress bar moves after each of them.
# XLA rounds wherever the program does.
OPTIONS = {"xla_allow_excess_precision": False}
jit = functools.partial(jax.jit, compiler_options=OPTIONS)
COLUMNS = {
  "task": "{task}",
  "variant": "{variant}",
  "mean ± SD": "{metric:.4g} ± {sd:.2g}",
  "difference in SDs": "{mean:+.2f}",
  "90% interval": "{low:+.2f} to {high:+.2f}",
  "verdict": "{verdict}",
  "steps skipped": "{skipped:.1f}",
  "sampler to trainer": "{logps_rms:.2g}",
}
MARK = "<!-- parity.py writes what is between these two lines -->"


class Variant(NamedTuple):
  """How to train: what differs from float32."""

  param_dtype: Any = jnp.float32
  matmul_dtype: Any = jnp.float32  # of autocast
  wrap: Callable[..., Any] = lambda tx: tx
  workers: int = 1  # The loss is the mean over their batches, which are alike.


FLOAT16 = Variant(matmul_dtype=jnp.float16)
SCALED = FLOAT16._replace(wrap=ols.with_loss_scaling)
VARIANTS = {
  "float32": Variant(),
  "bfloat16 by a cast": Variant(matmul_dtype=jnp.bfloat16),
  "bfloat16 parameters": Variant(jnp.bfloat16),
  "bfloat16 with masters": Variant(jnp.bfloat16, wrap=ols.with_master_weights),
  "float16, loss scale": SCALED,
  "float16, no loss scale": FLOAT16,
  "float16 / 1,024, loss scale": SCALED._replace(workers=1024),
  "float16 / 1,024, no loss scale": FLOAT16._replace(workers=1024),
}


def main() -> None:
  device, version = jax.devices()[0], jax.__version__
  name = f"build/parity-{device.platform}-{version}.json"
  unfinished = FOLDER.parents[1] / name
  figures = json.loads(unfinished.read_text()) if unfinished.exists() else {}
  runs = list(itertools.product(TASKS, VARIANTS))
  missing = [(t, v) for t, v in runs if v not in figures.get(t, {})]
  done, total = BLOCKS * (len(runs) - len(missing)), BLOCKS * len(runs)
  with tqdm.tqdm(total=total, initial=done, smoothing=0, miniters=1) as bar:
    for task, variant in missing:
      bar.set_description(f"{task.split(':')[0]}, {variant}")
      found = train(TASKS[task](), VARIANTS[variant], bar)
      figures.setdefault(task, {})[variant] = found
      write(unfinished, figures)
  results = {"device": device.device_kind, "jax": version, "figures": figures}
  write(FOLDER / f"{device.platform}.json", results)
  unfinished.unlink()
  write_page()


def write(path: pathlib.Path, content) -> None:
  """Write JSON; if the program is killed, the old file stays."""
  path.parent.mkdir(exist_ok=True)
  part = path.with_suffix(".part")
  part.write_text(json.dumps(content) + "\n")
  part.replace(path)


def write_page() -> None:
  """Write the part of README.md that shows figures, and its pictures."""
  page = FOLDER / "README.md"
  before, _, after = page.read_text().split(MARK)
  parts = []
  for path in sorted(FOLDER.glob("*.json")):  # one for each platform
    device, version, figures = json.loads(path.read_text()).values()
    picture = path.with_suffix(".png")
    plot(figures).savefig(picture, dpi=120)
    text = "Difference of each variant to float32 in standard deviations"
    parts += f"## Figures: {device}, JAX {version}", make_summary(figures)
    parts += f"![{text}]({picture.name})", make_table(figures)
  text = "\n\n".join(parts)
  page.write_text(f"{before}{MARK}\n\n{text}\n\n{MARK}{after}")
  print(text)


def train(task: Task, variant: Variant, bar, blocks=BLOCKS):
  """Train all seeds of a task in one program, and return the figures."""
  schedule = optax.cosine_decay_schedule(task.learning_rate, task.steps)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
  tx = variant.wrap(tx)
  if variant.matmul_dtype == jnp.float32:
    cast = jax.default_matmul_precision("float32")  # A GPU would use TF32.
  else:
    cast = functools.partial(ols.autocast, dtype=variant.matmul_dtype)
  step = make_step(task, variant, tx, cast)

  def start(seed):
    params = task.init_params(jax.random.key(seed))
    params = optax.tree.cast(params, variant.param_dtype)
    return params, tx.init(params)

  def run_block(carry, seed, block):
    key = jax.random.fold_in(jax.random.key(seed + 1_000), block)
    keys = jax.random.split(key, task.steps // BLOCKS)
    carry, metrics = jax.lax.scan(step, carry, keys)
    return carry, jax.tree.map(jnp.mean, metrics)

  seeds = jnp.arange(SEEDS)
  carry = jit(jax.vmap(start))(seeds)
  run_block = jit(jax.vmap(run_block, (0, 0, None)))
  run_block = run_block.lower(carry, seeds, 0).compile()
  bar.unpause()  # Leaves out the time of the compilation.
  history = []
  for block in range(blocks):
    carry, metrics = jax.block_until_ready(run_block(carry, seeds, block))
    history.append(metrics)
    bar.update()
  params, opt_state = carry
  found = {"metric": jit(jax.vmap(cast(task.evaluate)))(params)}
  if "squared_difference" in metrics:
    squares = [metrics["squared_difference"] for metrics in history]
    found["logps_rms"] = np.sqrt(np.mean(squares, axis=0))
  if variant.wrap is ols.with_loss_scaling:
    found["skipped"] = ols.get_loss_scale_state(opt_state).total_notfinite
  return {
    name: [float(f"{x:.6g}") for x in values] for name, values in found.items()
  }


def make_step(task, variant, tx, cast):
  """Return a training step of one seed, from its carry and a key."""

  @cast
  def loss_fn(params, batch):
    loss, metrics = task.loss_fn(params, batch)
    return loss / variant.workers, metrics

  def step(carry, key):
    params, opt_state = carry
    batch = task.sample_batch(params, key, cast)
    if variant.wrap is ols.with_loss_scaling:
      grad_fn = ols.grad(loss_fn, opt_state, has_aux=True)
    else:
      grad_fn = jax.grad(loss_fn, has_aux=True)
    grads, metrics = grad_fn(params, batch)
    grads = jax.tree.map(lambda g: variant.workers * g, grads)  # their sum
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics

  return step


def compare(values, reference) -> dict[str, Any]:
  """Compare values with those of float32, seed by seed.

  They are equivalent if the 90% interval of the mean difference lies within one
  SD of float32: two one-sided t tests at 5%. NaN and inf are different.

  Returns:
    The mean difference and its interval in SDs of float32, and the verdict.
  """
  differences = np.subtract(values, reference) / np.std(reference, ddof=1)
  mean, n = np.mean(differences), len(differences)
  quantile = special.stdtrit(n - 1, 0.95)  # of Student's t
  reach = quantile * np.std(differences, ddof=1) / np.sqrt(n)
  low, high = mean - reach, mean + reach
  verdict = "unclear" if low <= 0 <= high else "different"
  if low > -1 and high < 1:
    verdict = "equivalent"
  return {"mean": mean, "low": low, "high": high, "verdict": verdict}


def make_summary(figures) -> str:
  """Return a table of the tasks in which each variant is equivalent."""
  verdicts = "equivalent", "unclear", "different"
  rows = [["variant", *verdicts]]
  for variant in list(VARIANTS)[1:]:
    tasks = {verdict: [] for verdict in verdicts}
    for task, found in figures.items():
      test = compare(found[variant]["metric"], found["float32"]["metric"])
      tasks[test["verdict"]].append(task.split(":")[0])
    rows.append([variant, *map(", ".join, tasks.values())])
  return markdown(rows)


def make_table(figures) -> str:
  """Return a table of all variants of all tasks."""
  rows = []
  for task, variants in figures.items():
    for variant, found in variants.items():
      row = {name: np.mean(values) for name, values in found.items()}
      row |= {"variant": variant, "sd": np.std(found["metric"], ddof=1)}
      if variant == "float32":
        row["task"] = task
      else:
        row |= compare(found["metric"], variants["float32"]["metric"])
      rows.append(row)
  return tabulate(COLUMNS, rows, right_from=2)


def plot(figures) -> Figure:
  """Draw the interval of each variant, in standard deviations of float32."""
  figure = Figure(figsize=(12, 4), layout="constrained")
  panels = figure.subplots(1, len(figures), sharey=True, squeeze=False)[0]
  names = list(VARIANTS)[1:]
  colors = {"equivalent": "tab:blue", "unclear": "0.4", "different": "tab:red"}
  for axes, (task, found) in zip(panels, figures.items(), strict=True):
    axes.axvspan(-1, 1, color="0.9")
    axes.axvline(0, color="0.6", linewidth=1)
    reference = found["float32"]["metric"]
    for y, name in enumerate(names):
      values = found[name]["metric"]
      test = compare(values, reference)
      color = colors[test["verdict"]]
      axes.plot([test["low"], test["high"]], [y, y], color=color, linewidth=3)
      axes.plot(test["mean"], y, "o", color=color)
      shifts = np.subtract(values, reference) / np.std(reference, ddof=1)
      axes.plot(shifts, np.full(len(values), y + 0.25), "|", color="0.4")
    axes.set_title(task.replace(": ", "\n"), fontsize=9)
    axes.set_xscale("symlog", linthresh=2)
    low, high = axes.get_xlim()  # The ticks may widen it.
    axes.set_xticks(ticks := [-50, -5, -1, 0, 1, 5, 50], map(str, ticks))
    axes.set_xlim(min(low, -6), max(high, 6))
  panels[0].set_yticks(range(len(names)), names)
  panels[0].invert_yaxis()
  figure.supxlabel("difference to float32, in standard deviations of float32")
  return figure


if __name__ == "__main__":
  main()
