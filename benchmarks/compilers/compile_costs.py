"""Bytes and kernels of steps, by the compilers of TPU and GPU."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import attention_costs
import bounds
import compiled_bytes  # Before others import jax.
import gpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scheduled_hlo
from shared.models import RECOMPUTE
from shared.steps import make_step
from shared.tables import tabulate
from shared.variants import VARIANTS
from shared.workloads import make_workloads, Workload
import tqdm
import trained_models

import optax_lossscale as ols

FOLDER = pathlib.Path(__file__).parent
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "optax", "flax")
# Keras keeps its own optimizers, and is compared with Keras by `cpu/run.py`.
COMPARED = [name for name in VARIANTS if not name.startswith("Keras")]
WORKLOADS = (
  "adam",
  "adam, float16 gradients",
  "adamw, clipped",
  "adam, 100 leaves",
  "adam, bfloat16 moments",
  "mlp",
  "transformer",
)
IMAGES = 64  # of a whole step
Figures = dict[str, Any]


def main() -> None:
  """Measure what the command line asks for, and print and write it."""
  known = {*sum((*DEVICES.values(), *ON_REQUEST.values()), ())}
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
  devices_help = "by default, each part has its own devices"
  add("--devices", nargs="+", choices=sorted(known), help=devices_help)
  add("--output", type=pathlib.Path, default=FOLDER)
  args = parser.parse_args()
  for part in args.parts:
    measure, make_tables = PARTS[part]
    for device in args.devices or DEVICES[part]:
      if device in DEVICES[part] + ON_REQUEST.get(part, ()):
        figures = measure(device)
        _write(args.output, part, device, figures)
        for title, table in make_tables(figures).items():
          print(f"\n### {device}, {title}\n\n{table}")


def _write(output: pathlib.Path, part: str, device: str, figures: Figures):
  """Write figures with their versions, and keep the others on file."""
  output.mkdir(parents=True, exist_ok=True)
  path = output / "compile_costs.json"
  results = json.loads(path.read_text()) if path.exists() else {}
  installed = {d.name: d.version for d in importlib.metadata.distributions()}
  results.setdefault("environments", {})[f"{part}, {device}"] = {
    name: installed[name] for name in PACKAGES if name in installed
  }
  results.setdefault(part, {})[device] = figures
  path.write_text(json.dumps(results, indent=1) + "\n")


def _measure_steps(device: str) -> Figures:
  """Return figures by workload and variant."""
  workloads = _make_workloads()

  def measure(name, variant):
    step, carry = VARIANTS[variant][0](workloads[name])
    data, params = workloads[name].data, workloads[name].params
    return measure_per_parameter(device, step, carry, data, params)

  return _measure_table(WORKLOADS, COMPARED, measure, device)


def _measure_training(device: str) -> Figures:
  """Return figures of whole steps by model and variant."""
  return _measure_table(
    trained_models.MODELS,
    trained_models.VARIANTS,
    functools.partial(_measure_whole_step, device),
    f"training, {device}",
  )


def _measure_autocast(device: str, **sizes: int) -> Figures:
  """Return figures of the gradient of a stack of blocks, by variant."""
  half = jnp.bfloat16 if device in ON_TPU else jnp.float16
  make_loss = lambda dtype: (
    lambda params, x: jnp.mean(
      trained_models.Stack(dtype, **sizes).apply(params, x) ** 2
    )
  )
  by_hand, cast = make_loss(half), ols.autocast(make_loss(None), half)
  variants = {
    "float32": make_loss(None),
    "by hand": by_hand,
    "`autocast`": cast,
    "by hand, `dots_saveable`": RECOMPUTE(by_hand),
    "`autocast`, `dots_saveable`": RECOMPUTE(cast),
  }
  stack = trained_models.Stack(**sizes)
  x = jax.ShapeDtypeStruct((16, 512, stack.width), jnp.float32)
  params = jax.eval_shape(stack.init, jax.random.key(0), x)
  measure = lambda loss_fn: compiled_bytes.figures(
    jax.grad(loss_fn), params, x, device=device
  )
  return {name: measure(fun)._asdict() for name, fun in variants.items()}


def _measure_table(
  names: Iterable[str],
  variants: Iterable[str],
  measure: Callable[[str, str], Figures],
  description: str,
) -> Figures:
  """Measure each pair of a name and a variant."""
  pairs = [(name, variant) for name in names for variant in variants]
  results: Figures = {}
  for name, variant in tqdm.tqdm(pairs, desc=description):
    results.setdefault(name, {})[variant] = measure(name, variant)
  return results


def measure_update(
  device: str, tx: optax.GradientTransformation, params: Any, grads: Any
) -> Figures:
  """Return the figures of an update of params, which are shapes."""
  carry = params, jax.eval_shape(tx.init, params)
  return measure_per_parameter(device, make_step(tx), carry, grads, params)


def measure_per_parameter(
  device: str, step: Callable[..., Any], carry: Any, data: Any, params: Any
) -> Figures:
  """Return the figures of a step that donates its carry."""
  figures = compiled_bytes.figures(
    step, carry, data, device=device, donate_argnums=0
  )
  n_params = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
  names = "bytes", "temporary", "peak", "aliased"
  per_parameter = {
    name: round(getattr(figures, name) / n_params, 4) for name in names
  }
  return per_parameter | {"kernels": figures.kernels}


def _make_workloads() -> dict[str, Workload]:
  makers = make_workloads(1)
  workloads = {name: makers[name]() for name in WORKLOADS if name in makers}
  workloads["adam, bfloat16 moments"] = dataclasses.replace(
    workloads["adam"], mu_dtype=jnp.bfloat16
  )
  return workloads


def _measure_whole_step(device: str, model: str, variant: str) -> Figures:
  """Return the figures of a step with ``IMAGES``, and of the largest batch."""

  @functools.cache
  def figures(batch: int) -> compiled_bytes.Figures:
    batches.append(batch)
    step, carry, data = trained_models.make_training_step(model, variant, batch)
    return compiled_bytes.figures(
      step, carry, data, device=device, donate_argnums=0
    )

  batches: list[int] = []
  found, largest = figures(IMAGES), None
  flops = _count_flops_by_dtype(
    *trained_models.make_training_step(model, variant, IMAGES)
  )
  # The model by hand is only for comparison, and its search would take minutes.
  if variant != "by hand":
    largest = bounds.largest_batch(lambda n: figures(n).needed)
  return found._asdict() | {
    "flops": flops,
    "seconds": bounds.least_seconds(gpus.GPUS[device], found.bytes, flops),
    "batches": {
      batch: {"bytes": figures(batch).bytes, "needed": figures(batch).needed}
      for batch in sorted(batches)
    },
    "largest_batch": largest,
  }


def _count_flops_by_dtype(step: Callable[..., Any], *args: Any) -> Figures:
  """Return the FLOPs of matmuls by operand dtype, before compilation."""
  names = {"float32": "f32", "float16": "f16"}
  counts: Counter = Counter()
  for row in ols.diagnostics.precision_report(step, *args).flops:
    counts[names[row.operand_dtype]] += row.flops
  return dict(counts)


def _tabulate_steps(figures: Figures) -> dict[str, str]:
  rows = [{"step": name} | found for name, found in figures.items()]
  variants = next(iter(figures.values()))
  make_cell = "{{{}[{}]:{}}}".format  # "{ours[bytes]:.2f}"
  tables = {"bytes per parameter": ("bytes", ".2f"), "kernels": ("kernels", "")}
  return {
    title: tabulate(
      {"step": "{step}"} | {v: make_cell(v, *cell) for v in variants}, rows
    )
    for title, cell in tables.items()
  }


def _tabulate_training(figures: Figures) -> dict[str, str]:
  return {model: bounds.format_steps(found) for model, found in figures.items()}


GRADIENT_COLUMNS = {
  "gradient": "{name}",
  "MB moved": lambda f: f"{f['bytes'] / 1e6:,.0f}",
  "peak MB": lambda f: f"{f['peak'] / 1e6:,.0f}",
  "temporary MB": lambda f: f"{f['temporary'] / 1e6:,.0f}",
  "kernels": "{kernels:,}",
  "products": lambda f: scheduled_hlo.format_matmuls(f["products"]),
}


def _tabulate_gradients(figures: Figures, title: str) -> dict[str, str]:
  rows = [{"name": name} | found for name, found in figures.items()]
  return {title: tabulate(GRADIENT_COLUMNS, rows)}


ON_TPU = ("v5e", "v5p", "v6e")
# The functions that measure a part on a device and format its tables.
PARTS = {
  "steps": (_measure_steps, _tabulate_steps),
  "training": (_measure_training, _tabulate_training),
  "autocast": (
    _measure_autocast,
    functools.partial(_tabulate_gradients, title="autocast"),
  ),
  "attention": (
    attention_costs.attention,
    functools.partial(_tabulate_gradients, title="attention"),
  ),
}
DEVICES = {
  "steps": ("v5e", "v6e", "t4", "v100", "h100"),
  "training": ("t4", "v100"),
  "autocast": ("v5e", "t4", "v100", "h100"),
  "attention": ("h100",),
}
ON_REQUEST = {"steps": ("v5p",)}

if __name__ == "__main__":
  main()
