"""The pages on performance show the figures of the last run, and these hold."""

import json
import re

from helpers import mark_slow_params, ROOT
from helpers.benchmark import load_benchmark
import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = ROOT / "benchmarks" / "cpu"
PAGE = (BENCHMARKS / "README.md").read_text()
RESULTS = json.loads((BENCHMARKS / "results.json").read_text())["results"]
GUIDE = (ROOT / "docs" / "reference" / "performance.md").read_text()
COMPILED = json.loads(
  (ROOT / "benchmarks" / "compilers" / "compile_costs.json").read_text()
)
REPORT = vars(load_benchmark("cpu/report"))
BOUNDS = load_benchmark("compilers/bounds")
GPUS = load_benchmark("compilers/gpus").GPUS
SCHEDULED_HLO = load_benchmark("compilers/scheduled_hlo")
MODELS = load_benchmark("compilers/trained_models")
TRAINING = COMPILED["training"]
# Each variant of each model, by the device that it was compiled for.
WHOLE_STEPS = [
  (device, variant, found)
  for device, by_model in TRAINING.items()
  for by_variant in by_model.values()
  for variant, found in by_variant.items()
]


def section(title):
  """A part of the guide, from its heading to the next."""
  return GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_page_of_the_benchmark_begins_with_a_table_that_fits_it():
  table = REPORT["summary"](RESULTS)
  assert max(map(len, table.splitlines())) <= 110
  beginning = PAGE.split("\n## ")[0]
  assert beginning.index(table) < beginning.index("(results.png)")
  assert beginning.count("|\n|") == table.count("|\n|")


# The steps of the guide's table of bytes, and their columns.
STEPS = {
  "Adam": "adam",
  "AdamW with a clip": "adamw, clipped",
}
COLUMNS = ["bare", "ours", "Flax DynamicScale", "jmp", "apply_if_finite"]


def test_the_bytes_of_the_guide_are_those_of_the_compilers():
  rows = re.findall(r"^\| (.+), (v5e|H100) \| (.+) \|$", GUIDE, re.MULTILINE)
  assert {name for name, *_ in rows} == STEPS.keys()
  for name, device, cells in rows:
    step = COMPILED["steps"][device.lower()][STEPS[name]]
    bare, ours, flax, jmp, plain = (round(step[c]["bytes"]) for c in COLUMNS)
    assert flax == jmp
    assert cells == f"{bare} | {ours} | {flax} | {plain}"


def test_what_autocast_moves_is_that_of_its_own_page():
  page = (ROOT / "benchmarks" / "autocast" / "README.md").read_text()
  on_h100 = page.split("\nH100, in float16:\n")[1].split("\nT4")[0]
  first = section("Autocast").strip().split("\n\n")[0]
  shown = re.findall(r"\d+,\d+", first)
  assert len(shown) == 6
  rows = "float32", "`autocast`", "`autocast`, `dots_saveable`"
  for name in rows:
    figures = re.search(rf"^\| {name} \| (\S+) \| (\S+) ", on_h100, re.M)
    assert set(figures.groups()) <= set(shown), name


# The devices and rows of the table of whole steps, and their names elsewhere.
CARDS = {"T4": "t4", "V100": "v100"}
CASTS = {
  "float32": "float32",
  "`autocast`": "autocast",
}


def format_step_cells(found):
  """Moved, needed, least time and largest batch, as the guide has them."""
  least = max(found["seconds"].values())
  sizes = [f"{found[name] / 1e9:.1f}" for name in ("bytes", "needed")]
  return [*sizes, f"{1e3 * least:.0f}", str(found["largest_batch"] or "")]


def test_the_steps_of_the_guide_are_those_compiled_for_t4_and_v100():
  table = section("T4 and V100")
  rows = re.findall(r"^\| (\S+), (.+?) \| (.+) \|$", table, re.MULTILINE)
  assert [row[:2] for row in rows] == [
    (model, cast) for model in TRAINING["t4"] for cast in CASTS
  ]
  for model, cast, cells in rows:
    expected = []
    for device in CARDS.values():
      expected += format_step_cells(TRAINING[device][model][CASTS[cast]])
    assert [cell.strip() for cell in cells.split("|")] == expected


@pytest.mark.parametrize("device", TRAINING)
def test_an_optimizer_moves_on_t4_and_v100_what_it_moves_on_h100(device):
  words = " ".join(section("T4 and V100").split())
  assert "Adam and AdamW alone move as many bytes as on H100." in words
  for step, expected in {"adam": [28, 32], "adamw, clipped": [32, 32]}.items():
    for name in (device, "h100"):
      found = COMPILED["steps"][name][step]
      assert [round(found[c]["bytes"]) for c in ("bare", "ours")] == expected


def test_a_step_in_float16_moves_about_half_of_the_bytes_on_a_t4():
  page = ROOT / "docs" / "explanation" / "should_i_use_float16.md"
  words = " ".join(page.read_text().split())
  claim = "On a T4 or V100, a step in float16 moves about half the bytes"
  assert claim in words
  for device in CARDS.values():
    for casts in TRAINING[device].values():
      share = casts["autocast"]["bytes"] / casts["float32"]["bytes"]
      assert share == pytest.approx(0.55, abs=0.07)


def test_the_readme_says_what_a_t4_moves():
  readme = (ROOT / "README.md").read_text()
  steps = TRAINING["t4"]["ViT-B/16"]
  share = steps["autocast"]["bytes"] / steps["float32"]["bytes"]
  (told,) = re.findall(r"ViT-B/16 moves\s+(\d+)% of the bytes", readme)
  assert int(told) == round(100 * share)


def test_each_product_of_a_whole_step_is_in_one_dtype_by_a_library():
  for _, variant, found in WHOLE_STEPS:
    counts = found["products"].values()
    dtype = "f32" if variant == "float32" else "f16"
    assert {d for by_dtype in counts for d in by_dtype} == {dtype}
    assert found["flops"].keys() == {dtype}
    assert all(name.startswith("__cu") for name in found["products"])


def test_a_bound_follows_from_bytes_flops_and_the_data_sheet():
  for device, _, found in WHOLE_STEPS:
    least = BOUNDS.least_seconds(GPUS[device], found["bytes"], found["flops"])
    assert found["seconds"] == least


@pytest.mark.parametrize("device", TRAINING)
def test_the_largest_batch_was_compiled_and_so_was_the_next(device):
  for by_variant in TRAINING[device].values():
    assert by_variant["by hand"]["largest_batch"] is None
    for variant in ("float32", "autocast"):
      batches = by_variant[variant]["batches"]
      largest = by_variant[variant]["largest_batch"]
      assert batches[str(largest)]["needed"] <= BOUNDS.AVAILABLE
      too_large = batches[str(largest + BOUNDS.MULTIPLE)]["needed"]
      assert too_large > BOUNDS.AVAILABLE


@pytest.mark.parametrize("device", TRAINING)
def test_the_page_on_compilers_has_the_whole_steps(device):
  page = (ROOT / "benchmarks" / "compilers" / "README.md").read_text()
  for model, by_variant in TRAINING[device].items():
    table = BOUNDS.format_steps(by_variant)
    assert f"### {device}, {model}\n\n{table}\n" in page


def test_what_attention_moves_is_that_of_the_compiler():
  h100 = COMPILED["attention"]["h100"]
  half, plain = (
    f"{h100[name]['bytes'] / 1e6:,.0f} MB" for name in ("cuDNN, in half", "XLA")
  )
  words = " ".join(GUIDE.split())
  assert f"moves {half}, where JAX's own attention moves {plain}." in words


@pytest.mark.parametrize("workload", RESULTS)
def test_the_full_table_of_a_workload_is_folded(workload):
  assert REPORT["folded"](workload, RESULTS[workload]) in PAGE


def test_the_table_compares_three_workloads_with_all_peers():
  variants = {name for result in RESULTS.values() for name in result}
  ours = {"ours, scaled grads", "ours, plain select"}
  assert set(REPORT["COMPARED"]) == variants - ours - {"Keras bare"}
  assert len(REPORT["SUMMARY"]) == 3


def test_a_figure_of_the_table_is_that_of_the_run():
  first = REPORT["summary"](RESULTS).splitlines()[2]
  time = RESULTS["adam"]["ours"]["time"][1]
  assert first.split("|")[4].strip() == f"{time:.2f}"


@pytest.mark.parametrize("workload", ["adam", "transformer"])
def test_the_index_has_the_headline_figures_of_the_run(workload):
  times = {v: f["time"][1] for v, f in RESULTS[workload].items()}
  others = set(REPORT["COMPARED"]) - {"bare", "ours"}
  found = sorted(times[name] for name in others)
  cells = f"| {times['ours']:.2f}x | {found[0]:.2f}x to {found[-1]:.2f}x |"
  assert cells in (ROOT / "benchmarks" / "README.md").read_text()


@pytest.mark.parametrize("name", GPUS)
def test_the_peak_of_a_gpu_is_that_of_its_units_at_its_clock(name):
  gpu = GPUS[name]
  units = gpu.cores * gpu.units * 2 * gpu.clock_ghz * 1e9
  assert gpu.flops["f32"] == pytest.approx(units, rel=0.02)


@pytest.mark.parametrize("name", ["t4", "v100"])
def test_the_tensor_cores_of_both_are_eight_times_as_fast(name):
  flops = GPUS[name].flops
  assert flops["f16"] / flops["f32"] == pytest.approx(8, rel=0.01)
  assert BOUNDS.AVAILABLE < GPUS[name].memory < 17e9


def test_a_step_is_bound_by_its_bytes_and_by_its_flops():
  t4 = GPUS["t4"]
  flops = {"f32": 81 * 10**11, "f16": 65 * 10**12}
  seconds = BOUNDS.least_seconds(t4, 640 * 10**9, flops)
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


@pytest.mark.parametrize(
  "name, n_params", [("ViT-B/16", 86_567_656), ("ResNet-50", 25_557_032)]
)
@pytest.mark.parametrize(
  "variant", mark_slow_params(["float32"], MODELS.VARIANTS)
)
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


# Milliseconds on an H100, as measured: without loss scaling and ours.
ON_H100 = {
  "Adam": ("2.617", "3.001"),
  "AdamW with a clip": ("2.961", "2.976"),
  "Adam, bfloat16 moments": ("2.227", "2.584"),
  "Adam, float16 gradients": ("2.445", "2.664"),
}


def test_the_times_on_a_gpu_are_the_same_on_all_pages():
  rows = re.findall(
    r"^\| (Adam.*?) \| (\S+) \| (\S+) \|", section("Time on an H100"),
    re.MULTILINE,
  )  # fmt: skip
  assert {name: times for name, *times in rows} == {
    name: list(times) for name, times in ON_H100.items()
  }
  own_page = (ROOT / "benchmarks" / "on_gpu" / "README.md").read_text()
  for times in ON_H100.values():
    assert f"| {' | '.join(times)} |" in own_page
  bare, ours = (float(x) for x in ON_H100["Adam"])
  readme = (ROOT / "README.md").read_text()
  assert f"takes {bare:.2f} ms without and {ours:.2f} ms with" in readme
  index = (ROOT / "benchmarks" / "README.md").read_text()
  assert f"time on an H100 | {ours / bare:.2f}x |" in index


MANY_ARRAYS = load_benchmark("cpu/many_arrays")
BY_ARRAYS = json.loads((BENCHMARKS / "many_arrays.json").read_text())["results"]


def test_the_page_of_the_benchmark_has_the_table_by_the_number_of_arrays():
  assert MANY_ARRAYS.table(BY_ARRAYS) in PAGE


def test_the_guide_has_the_ratios_of_that_table():
  ours = BY_ARRAYS["1000"]["ours"]
  trace, compiling = (ours[f"{x}_ratio"][1] for x in ("trace", "compile"))
  words = " ".join(section("Compilation").split())
  assert (
    f"with 1,000 arrays takes {trace:.1f} times as long to trace and"
    f" {compiling:.1f} times as long to compile"
  ) in words
