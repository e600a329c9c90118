"""Bytes, kernels and collectives of steps, by the compilers of TPU and GPU."""

import argparse
from collections import Counter
import dataclasses
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

import attention_costs
import compiled_bytes  # Before others import jax.
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sharded_costs
import tqdm
import trained_models
import training_costs

import optax_lossscale as ols

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from shared.tables import markdown
from shared.variants import VARIANTS
from shared.workloads import make_workloads, Workload
from training_tables import calls, table

HERE = pathlib.Path(__file__).parent
# The version of the figures; "environments" has the versions of each device.
PARTS = (
  "environments",
  "steps",
  "optimizers",
  "training",
  "attention",
  "collectives",
)
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
# Optimizers that reduce the gradients before they use them, which costs one
# more pass, and one in which XLA's fusions are a matter of chance.
OPTIMIZERS = {
  "clip_by_global_norm, adamw": lambda: optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
  ),
  "adafactor": lambda: optax.adafactor(1e-3),
  "novograd": lambda: optax.novograd(1e-3),
  "adaptive_grad_clip, sgd": lambda: optax.chain(
    optax.adaptive_grad_clip(0.1), optax.sgd(0.1, momentum=0.9)
  ),
  "adadelta": lambda: optax.adadelta(1e-3),
}


def main() -> None:
  """Takes the figures that the command line asks for, prints and writes."""
  args = _parse_args()
  results = {part: {} for part in PARTS}
  for device in args.devices:
    results["steps"][device] = _steps(device, args.workloads)
    results["optimizers"][device] = _measure_optimizers(device)
    _write(args.output, results, f"steps, {device}")
  for device in args.training:
    results["training"][device] = _training(device)
    _write(args.output, results, f"training, {device}")
  for device in args.attention:
    results["attention"][device] = attention_costs.attention(device)
    _write(args.output, results, f"attention, {device}")
  for chips in args.chips:
    results["collectives"].update(_collectives(chips))
    _write(args.output, results, f"collectives, {chips} chips")
  _print(results)


def _parse_args():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument(
    "--devices",
    nargs="*",
    default=["v5e", "v6e", "t4", "v100", "h100"],
    choices=("v5e", "v5p", "v6e", "t4", "v100", "h100"),
  )
  parser.add_argument(
    "--workloads",
    nargs="+",
    default=WORKLOADS,
    choices=WORKLOADS,
    help="of the steps; models take longer than an optimizer alone",
  )
  parser.add_argument(
    "--training",
    nargs="*",
    default=["t4", "v100"],
    choices=("t4", "v100"),
    help="whole steps of models; each device takes ten minutes",
  )
  parser.add_argument(
    "--attention",
    nargs="*",
    default=["h100"],
    choices=("h100",),
    help="a layer of attention by cuDNN, which needs an Ampere or later",
  )
  parser.add_argument(
    "--chips",
    nargs="*",
    type=int,
    default=[8, 16],
    choices=list(sharded_costs.CHIPS),
    help="of the sharded steps; each number takes some minutes",
  )
  parser.add_argument("--output", type=pathlib.Path, default=HERE)
  return parser.parse_args()


def _write(output: pathlib.Path, results: dict[str, Any], taken: str) -> None:
  """Write the figures so far, and keep the figures of other devices on file."""
  installed = {d.name: d.version for d in importlib.metadata.distributions()}
  versions = {name: installed[name] for name in PACKAGES if name in installed}
  results["environments"][taken] = versions
  output.mkdir(parents=True, exist_ok=True)
  path = output / "compile_costs.json"
  earlier = json.loads(path.read_text()) if path.exists() else {}
  merged = {part: earlier.get(part, {}) | results[part] for part in PARTS}
  path.write_text(json.dumps(merged, indent=1) + "\n")


def _make_workloads() -> dict[str, Workload]:
  """Those of WORKLOADS."""
  workloads = {name: make() for name, make in make_workloads(1).items()}
  adam = workloads["adam"]
  names = ("adam, float16 gradients", "adamw, clipped", "adam, 100 leaves")
  return {
    "adam": adam,
    **{name: workloads[name] for name in names},
    "adam, bfloat16 moments": dataclasses.replace(adam, mu_dtype=jnp.bfloat16),
    "mlp": workloads["mlp"],
    "transformer": workloads["transformer"],
  }


def _steps(device: str, names: list[str]) -> dict[str, dict[str, Any]]:
  """Figures by workload and variant."""
  results: dict[str, dict[str, Any]] = {}
  workloads = _make_workloads()
  pairs = [(w, v) for w in names for v in COMPARED]
  for name, variant in tqdm.tqdm(pairs, desc=device):
    workload = workloads[name]
    step, carry = VARIANTS[variant][0](workload)
    figures = compiled_bytes.figures(
      step, carry, workload.data, device=device, donate_argnums=0
    )
    results.setdefault(name, {})[variant] = _divide_by_parameters(
      figures, workload.params
    )
  return results


def _measure_optimizers(device: str) -> dict[str, dict[str, Any]]:
  """Figures of other optimizers, bare and ours, by optimizer."""
  shape = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
  params = {f"w{i}": shape for i in range(4)}
  results: dict[str, dict[str, Any]] = {}
  for name, make in OPTIMIZERS.items():
    wrapped = ols.with_loss_scaling(make())
    for variant, tx in {"bare": make(), "ours": wrapped}.items():

      def step(carry, grads, tx=tx):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

      carry = params, jax.eval_shape(tx.init, params)
      figures = compiled_bytes.figures(
        step, carry, params, device=device, donate_argnums=0
      )
      results.setdefault(name, {})[variant] = _divide_by_parameters(
        figures, params
      )
  return results


def _divide_by_parameters(figures: compiled_bytes.Figures, params: Any) -> dict:
  n_params = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
  names = "bytes", "temporary", "peak", "aliased"
  per_parameter = {
    name: round(getattr(figures, name) / n_params, 4) for name in names
  }
  return per_parameter | {"kernels": figures.kernels}


def _training(device: str) -> dict[str, dict[str, Any]]:
  """Figures of whole steps by model and variant."""
  results: dict[str, dict[str, Any]] = {}
  models, variants = trained_models.MODELS, trained_models.VARIANTS
  pairs = [(m, v) for m in models for v in variants]
  for model, variant in tqdm.tqdm(pairs, desc=f"training, {device}"):
    figures = training_costs.training(device, model, variant)
    results.setdefault(model, {})[variant] = figures
  return results


def _collectives(chips: int) -> dict[str, list[str]]:
  """Return the added collectives, by a sentence that describes the step."""
  results = {}
  cases = [(layout, n) for layout in sharded_costs.LAYOUTS for n in (8, 300)]
  for layout, n in tqdm.tqdm(cases, desc=f"{chips} chips"):
    gain = sharded_costs.gained(layout, chips, n)
    results[f"{layout}, {chips} chips, {n} leaves"] = _describe_gain(gain)
  for layout in sharded_costs.LAYOUTS:
    gain = sharded_costs.gained(layout, chips, 8, max_norm=1.0)
    key = f"{layout}, {chips} chips, 8 leaves, max_norm"
    results[key] = _describe_gain(gain)
  return results


def _describe_gain(gain: Counter) -> list[str]:
  return [
    f"{abs(n)} {'fewer ' if n < 0 else ''}{name} of {types}"
    for (name, types), n in gain.items()
  ]


def _print(results: dict[str, Any]) -> None:
  for taken, versions in results["environments"].items():
    pairs = (f"{name} {version}" for name, version in versions.items())
    print(f"{taken}: {', '.join(pairs)}")
  for device, steps in results["steps"].items():
    for title, cell in (
      ("bytes per parameter", lambda f: f"{f['bytes']:.2f}"),
      ("kernels", lambda f: str(f["kernels"])),
    ):
      print(f"\n### {device}, {title}\n\n{_table(steps, COMPARED, cell)}")
    print(f"\n### {device}, other optimizers, bytes per parameter\n")
    cell = lambda f: f"{f['bytes']:.2f}"
    print(_table(results["optimizers"][device], ["bare", "ours"], cell))
  for device, models in results["training"].items():
    for model, by_variant in models.items():
      print(f"\n### {device}, {model}\n")
      print(table(by_variant))
  for device, by_name in results["attention"].items():
    print(f"\n### {device}, attention, MB\n")
    rows = [
      [name, f"{f['bytes'] / 1e6:,.0f}", calls(f["products"])]
      for name, f in by_name.items()
      if "error" not in f
    ]
    print(markdown([["", "moved", "products"], *rows]))
  if results["collectives"]:
    print("\n### Collectives that bare Optax has not\n")
    rows = [
      [name, "; ".join(gain) or "none"]
      for name, gain in results["collectives"].items()
    ]
    print(markdown([["step", "gained"], *rows]))


def _table(results, variants, cell) -> str:
  rows = [
    [name, *(cell(by_variant[v]) for v in variants)]
    for name, by_variant in results.items()
  ]
  return markdown([["step", *variants], *rows])


if __name__ == "__main__":
  main()
