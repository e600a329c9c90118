"""The pages on performance show the figures of the last run, and these hold."""

import json
import re

from helpers import ROOT
from helpers.benchmark import load_benchmark
import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = ROOT / "benchmarks"
GUIDE = ROOT / "docs" / "reference" / "performance.md"
RESULTS, BY_ARRAYS = (
  json.loads((BENCHMARKS / "cpu" / f"{name}.json").read_text())["results"]
  for name in ("results", "many_arrays")
)
COMPILED = json.loads(
  (BENCHMARKS / "compilers" / "compile_costs.json").read_text()
)
TRAINING = COMPILED["training"]
REPORT = vars(load_benchmark("cpu/report"))
MANY_ARRAYS = load_benchmark("cpu/many_arrays")
BOUNDS = load_benchmark("compilers/bounds")
GPUS = load_benchmark("compilers/gpus").GPUS
SCHEDULED_HLO = load_benchmark("compilers/scheduled_hlo")
MODELS = load_benchmark("compilers/trained_models")


def bytes_of_steps():
  """The rows of the guide's table of bytes."""
  columns = "bare", "ours", "Flax DynamicScale", "apply_if_finite"
  for name, step in {
    "Adam": "adam",
    "AdamW with a clip": "adamw, clipped",
  }.items():
    for device in ("v5e", "H100"):
      found = COMPILED["steps"][device.lower()][step]
      moved = [str(round(found[column]["bytes"])) for column in columns]
      yield f"| {name}, {device} | {' | '.join(moved)} |"


def whole_steps():
  """The rows of the guide's table of steps on T4 and V100."""
  for model in TRAINING["t4"]:
    for name, cast in {"float32": "float32", "`autocast`": "autocast"}.items():
      cells = []
      for device in ("t4", "v100"):
        found = TRAINING[device][model][cast]
        cells += [f"{found[x] / 1e9:.1f}" for x in ("bytes", "needed")]
        cells.append(f"{1e3 * max(found['seconds'].values()):.0f}")
        cells.append(str(found["largest_batch"] or ""))
      yield f"| {model}, {name} | {' | '.join(cells)} |"


def headlines():
  """The cells of the index, from the times of CPU."""
  for workload in ("adam", "transformer"):
    times = {name: x["time"][1] for name, x in RESULTS[workload].items()}
    others = set(REPORT["COMPARED"]) - {"bare", "ours"}
    found = sorted(times[name] for name in others)
    yield f"| {times['ours']:.2f}x | {found[0]:.2f}x to {found[-1]:.2f}x |"


def sentences():
  """The sentences of the guide that have figures in them."""
  attention = COMPILED["attention"]["h100"]
  half, plain = (
    f"{attention[name]['bytes'] / 1e6:,.0f} MB"
    for name in ("cuDNN, in half", "XLA")
  )
  yield f"moves {half}, where JAX's own attention moves {plain}."
  ours = BY_ARRAYS["1000"]["ours"]
  trace, compiling = (ours[f"{x}_ratio"][1] for x in ("trace", "compile"))
  yield (
    f"with 1,000 arrays takes {trace:.1f} times as long to trace and"
    f" {compiling:.1f} times as long to compile"
  )


def share_of_t4():
  steps = TRAINING["t4"]["ViT-B/16"]
  share = steps["autocast"]["bytes"] / steps["float32"]["bytes"]
  yield f"ViT-B/16 moves {100 * share:.0f}% of the bytes"


# The figures of the last run, by the page that shows them.
FIGURES = [
  (
    BENCHMARKS / "cpu" / "README.md",
    [
      REPORT["summary"](RESULTS),
      *(REPORT["folded"](name, RESULTS[name]) for name in RESULTS),
      MANY_ARRAYS.table(BY_ARRAYS),
    ],
  ),
  (
    BENCHMARKS / "compilers" / "README.md",
    [
      f"### {device}, {model}\n\n{BOUNDS.format_steps(by_variant)}\n"
      for device, by_model in TRAINING.items()
      for model, by_variant in by_model.items()
    ],
  ),
  (BENCHMARKS / "README.md", [*headlines()]),
  (GUIDE, [*bytes_of_steps(), *whole_steps(), *sentences()]),
  (ROOT / "README.md", [*share_of_t4()]),
]


@pytest.mark.parametrize(
  ("page", "figures"), FIGURES, ids=lambda x: getattr(x, "name", "")
)
def test_a_page_has_the_figures_of_the_last_run(page, figures):
  found = " ".join(page.read_text().split())
  for figure in figures:
    assert " ".join(figure.split()) in found, figure


def test_the_times_on_a_gpu_are_the_same_on_all_pages():
  table = GUIDE.read_text().split("\n## Time on an H100\n")[1].split("\n## ")[0]
  rows = re.findall(r"^\| Adam.*? \| ([\d.]+ \| [\d.]+) \|", table, re.M)
  assert len(rows) == 4
  own_page = (BENCHMARKS / "on_gpu" / "README.md").read_text()
  assert all(f"| {times} |" in own_page for times in rows)
  bare, ours = map(float, rows[0].split(" | "))
  readme = (ROOT / "README.md").read_text()
  assert f"takes {bare:.2f} ms without and {ours:.2f} ms with" in readme
  index = (BENCHMARKS / "README.md").read_text()
  assert f"time on an H100 | {ours / bare:.2f}x |" in index


@pytest.mark.parametrize("device", TRAINING)
def test_the_stored_bounds_are_those_of_the_data_sheet(device):
  for by_variant in TRAINING[device].values():
    for found in by_variant.values():
      least = BOUNDS.least_seconds(GPUS[device], found["bytes"], found["flops"])
      assert found["seconds"] == least
    share = by_variant["autocast"]["bytes"] / by_variant["float32"]["bytes"]
    # The pages say that a step in float16 moves about half of the bytes.
    assert share == pytest.approx(0.55, abs=0.07)


def test_a_step_is_bound_by_its_bytes_and_by_its_flops():
  flops = {"f32": 81 * 10**11, "f16": 65 * 10**12}
  seconds = BOUNDS.least_seconds(GPUS["t4"], 640 * 10**9, flops)
  assert seconds == {"memory": 2.0, "products": 2.0}


@pytest.mark.parametrize("largest", [0, 8, 56, 64, 72, 120, 128, 1000])
def test_the_largest_batch_fits_and_the_next_does_not(largest):
  asked = []

  def needed(batch):  # beyond 100 something is computed again
    asked.append(batch)
    return 10 * batch if batch <= 100 else 1000 + (batch - 100)

  available = needed(largest)
  assert BOUNDS.largest_batch(needed, available) == largest
  assert {b % BOUNDS.MULTIPLE for b in asked} == {0} and len(asked) < 24


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, n_params", [("ViT-B/16", 86_567_656), ("ResNet-50", 25_557_032)]
)
@pytest.mark.parametrize("variant", MODELS.VARIANTS)
def test_a_model_has_the_parameters_of_the_one_it_is_named_after(
  name, variant, n_params
):
  _, ((params, _), _), (images, _) = MODELS.make_training_step(name, variant, 2)
  leaves = jax.tree.leaves(params)
  assert sum(leaf.size for leaf in leaves) == n_params
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
  assert images.shape == (2, 224, 224, 3)


def test_library_calls_are_told_by_library_and_dtype():
  products = {
    "__cublas$gemm": {"f32": 1},
    "__cublas$lt$matmul": {"f16": 40},
    "__cudnn$convBackwardFilter": {"f16": 1},
    "__cudnn$convForward": {"f16": 2, "f32": 1},
    "dot": {"f32": 3},
  }
  assert SCHEDULED_HLO.format_matmuls(products) == (
    "XLA: 3 f32; cuBLAS: 1 f32; cuBLASLt: 40 f16; cuDNN: 3 f16, 1 f32"
  )
