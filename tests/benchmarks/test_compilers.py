"""What the benchmark of the compilers knows of GPUs, and of the models."""

from helpers.benchmark import load_benchmark
import jax
import jax.numpy as jnp
import pytest

bounds = load_benchmark("compilers/bounds")
gpus = load_benchmark("compilers/gpus")
trained_models = load_benchmark("compilers/trained_models")
tables = load_benchmark("compilers/training_tables")


@pytest.mark.parametrize("name", gpus.GPUS)
def test_the_peak_of_a_gpu_is_that_of_its_units_at_its_clock(name):
  gpu = gpus.GPUS[name]
  units = gpu.cores * gpu.units * 2 * gpu.clock_ghz * 1e9
  assert gpu.flops["f32"] == pytest.approx(units, rel=0.02)


@pytest.mark.parametrize("name", ["t4", "v100"])
def test_the_tensor_cores_of_both_are_eight_times_as_fast(name):
  flops = gpus.GPUS[name].flops
  assert flops["f16"] / flops["f32"] == pytest.approx(8, rel=0.01)
  assert bounds.AVAILABLE < gpus.GPUS[name].memory < 17e9


def test_a_step_is_bound_by_its_bytes_and_by_its_flops():
  t4 = gpus.GPUS["t4"]
  flops = {"f32": 81 * 10**11, "f16": 65 * 10**12}
  seconds = bounds.least_seconds(t4, 640 * 10**9, flops)
  assert seconds == {"memory": 2.0, "products": 2.0}


@pytest.mark.parametrize("largest", [0, 8, 56, 64, 72, 120, 128, 1000])
def test_the_largest_batch_fits_and_the_next_does_not(largest):
  asked = []

  def needed(batch):  # beyond 100 something is computed again
    asked.append(batch)
    return 10 * batch if batch <= 100 else 1000 + (batch - 100)

  available = needed(largest)
  assert bounds.largest_batch(needed, available) == largest
  assert {b % bounds.MULTIPLE for b in asked} == {0} and len(asked) < 24


@pytest.mark.parametrize(
  "name, n_params", [("ViT-B/16", 86_567_656), ("ResNet-50", 25_557_032)]
)
@pytest.mark.parametrize("variant", trained_models.VARIANTS)
def test_a_model_has_the_parameters_of_the_one_it_is_named_after(
  name, variant, n_params
):
  _, ((params, _), _), (images, _) = trained_models.training_step(
    name, variant, 2
  )
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
  assert tables.calls(products) == (
    "XLA: 3 f32; cuBLAS: 1 f32; cuBLASLt: 40 f16; cuDNN: 3 f16, 1 f32"
  )
