"""Bytes and kernels of steps, by the compilers of TPU and GPU."""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import compiled_bytes  # Before others import jax.
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scheduled_hlo
from shared import master_weights
from shared.models import RECOMPUTE
from shared.steps import make_step
from shared.tables import tabulate
from shared.variants import VARIANTS
from shared.workloads import make_workloads, Workload
import tqdm

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
Figures = dict[str, Any]


def main() -> None:
  """Measure what the command line asks for, and print and write it."""
  known = sorted({*sum(DEVICES.values(), ())})
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
  devices_help = "by default, each part has its own devices"
  add("--devices", nargs="+", choices=known, help=devices_help)
  add("--output", type=pathlib.Path, default=FOLDER)
  args = parser.parse_args()
  for part in args.parts:
    measure = PARTS[part][0]
    for device in args.devices or DEVICES[part]:
      if device in DEVICES[part]:
        figures = measure(device)
        _write(args.output, part, device, figures)
        for title, table in _make_tables(part, figures).items():
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
  pairs = [(name, variant) for name in WORKLOADS for variant in COMPARED]
  results: Figures = {name: {} for name in WORKLOADS}
  for name, variant in tqdm.tqdm(pairs, desc=device):
    step, carry = VARIANTS[variant][0](workloads[name])
    data, params = workloads[name].data, workloads[name].params
    results[name][variant] = measure_per_parameter(
      device, step, carry, data, params
    )
  return results


def measure_master_weights(device: str) -> Figures:
  """Return the figures of AdamW by the dtype of the stored parameters."""
  workload = master_weights.make_workload(1)
  results = {}
  for name, make in master_weights.VARIANTS.items():
    step, carry = make(workload)
    resident = master_weights.count_resident_bytes(carry, workload)
    results[name] = {"resident": resident} | measure_per_parameter(
      device, step, carry, workload.data, workload.params
    )
  return results


class Stack(nn.Module):
  """Blocks of a transformer, on activations of float32.

  With `dtype=`, each layer casts, and the activations are in half precision.
  """

  dtype: Any = None
  depth: int = 16
  width: int = 512
  heads: int = 8

  @nn.compact
  def __call__(self, x):
    x = x.astype(self.dtype or x.dtype)
    dense = functools.partial(nn.Dense, dtype=self.dtype)
    norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
    for _ in range(self.depth):
      attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
      x += attention(norm()(x))
      x += dense(self.width)(nn.gelu(dense(4 * self.width)(norm()(x))))
    return x.astype(jnp.float32)


def _measure_autocast(device: str, **sizes: int) -> Figures:
  """Return figures of the gradient of a stack of blocks, by variant."""
  half = jnp.bfloat16 if device in ON_TPU else jnp.float16
  make_loss = lambda dtype: (
    lambda params, x: jnp.mean(Stack(dtype, **sizes).apply(params, x) ** 2)
  )
  by_hand, cast = make_loss(half), ols.autocast(make_loss(None), half)
  variants = {
    "float32": make_loss(None),
    "by hand": by_hand,
    "`autocast`": cast,
    "by hand, `dots_saveable`": RECOMPUTE(by_hand),
    "`autocast`, `dots_saveable`": RECOMPUTE(cast),
  }
  stack = Stack(**sizes)
  x = jax.ShapeDtypeStruct((16, 512, stack.width), jnp.float32)
  params = jax.eval_shape(stack.init, jax.random.key(0), x)
  measure = lambda loss_fn: compiled_bytes.figures(
    jax.grad(loss_fn), params, x, device=device
  )
  return {name: measure(fun)._asdict() for name, fun in variants.items()}


def attend_in_half(q, k, v):
  """Cast the operands by hand, as the pages recommend."""
  q_half, k_half, v_half = (x.astype(jnp.float16) for x in (q, k, v))
  y = jax.nn.dot_product_attention(
    q_half, k_half, v_half, implementation="cudnn"
  )
  return y.astype(q.dtype)


ATTENTIONS = {
  name: functools.partial(jax.nn.dot_product_attention, implementation=library)
  for name, library in {"XLA": "xla", "cuDNN": "cudnn"}.items()
} | {"cuDNN, in half": attend_in_half}


def measure_attention(device: str) -> Figures:
  """Return the costs of a layer's gradient with ``autocast``, by attention.

  cuDNN's kernels need an Ampere or later, which the compiler does not check.
  """

  def make_loss(attend):
    def loss_fn(params, x):
      split = lambda y: y.reshape(*y.shape[:2], heads, -1)
      q, k, v = (split(x @ params[name]) for name in "qkv")
      return jnp.mean((attend(q, k, v).reshape(x.shape) @ params["o"]) ** 2)

    return loss_fn

  heads, width = 8, 512
  params = {
    n: jax.ShapeDtypeStruct((width, width), jnp.float32) for n in "qkvo"
  }
  x = jax.ShapeDtypeStruct((4, 1024, width), jnp.float32)
  results = {}
  for name, attend in ATTENTIONS.items():
    grad_fn = jax.value_and_grad(ols.autocast(make_loss(attend)))
    try:
      figures = compiled_bytes.figures(grad_fn, params, x, device=device)
      results[name] = figures._asdict()
    except NotImplementedError as error:
      results[name] = {"error": str(error)}
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


def _make_tables(part: str, figures: Figures) -> dict[str, str]:
  """Return the tables of a part by title."""
  if part == "steps":
    return _tabulate_steps(figures)
  rows = [{"name": name} | found for name, found in figures.items()]
  return {part: tabulate(PARTS[part][1], rows)}


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


GRADIENT_COLUMNS = {
  "gradient": "{name}",
  "MB moved": lambda f: f"{f['bytes'] / 1e6:,.0f}",
  "peak MB": lambda f: f"{f['peak'] / 1e6:,.0f}",
  "temporary MB": lambda f: f"{f['temporary'] / 1e6:,.0f}",
  "kernels": "{kernels:,}",
  "products": lambda f: scheduled_hlo.format_matmuls(f["products"]),
}


MASTER_WEIGHTS_COLUMNS = {
  "bytes per parameter": "{name}",
  "moved": "{bytes:.2f}",
  "resident": "{resident:.2f}",
  "temporary": "{temporary:.2f}",
  "kernels": "{kernels}",
}


ON_TPU = ("v5e", "v5p", "v6e")
# The function that measures a part on a device, and the columns of its table.
PARTS: dict[str, Any] = {
  "steps": (_measure_steps, None),  # which have two tables
  "master weights": (measure_master_weights, MASTER_WEIGHTS_COLUMNS),
  "autocast": (_measure_autocast, GRADIENT_COLUMNS),
  "attention": (measure_attention, GRADIENT_COLUMNS),
}
DEVICES = {
  "steps": ("v5e", "v6e", "t4", "v100", "h100"),
  "master weights": ("v5e", "v6e", "t4", "v100", "h100"),
  "autocast": ("v5e", "t4", "v100", "h100"),
  "attention": ("h100",),
}

if __name__ == "__main__":
  main()
