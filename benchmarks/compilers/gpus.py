"""The GPUs that are compiled for without one, by NVIDIA's data sheets.

A compiler wants to know the clock, the units, the memory and the limits of a
GPU.

Sources, all by NVIDIA:

* T4: product brief "NVIDIA T4 70W Low Profile PCIe GPU Accelerator",
  PB-09256-001 (16 GB, up to 320 GB/s), data sheet "NVIDIA T4 Tensor Core GPU"
  (2,560 units, 8.1 teraflops in float32, 65 in mixed precision) and whitepaper
  "NVIDIA Turing GPU Architecture", WP-09183-001 (64 units in a core, L2 of
  4,096 KB, shared memory of 64 KB). The clock of 1,590 MHz is the highest, as
  `deviceQuery` of CUDA's samples prints it: with 40 cores x 64 units x 2 flops
  it makes the 8.1 teraflops.
* V100: whitepaper "NVIDIA Tesla V100 GPU Architecture", WP-08608-001 (80 cores,
  64 units, 1,530 MHz, L2 of 6,144 KB, shared memory of up to 96 KB, 16 GB, 900
  GB/s, 15.7 teraflops in float32, 125 of the tensor cores). It is the SXM2
  module; the data sheet gives a V100 for PCIe 14 and 112.
* H100: data sheet "NVIDIA H100 Tensor Core GPU", the SXM module (80 GB, 3.35
  TB/s, 67 teraflops in float32, 989 in float16 without sparsity), and
  whitepaper "NVIDIA H100 Tensor Core GPU Architecture" (132 cores, 128 units,
  L2 of 50 MB).
* Threads, registers and shared memory of a core: CUDA C++ Programming Guide,
  "Technical Specifications per Compute Capability", 7.0, 7.5 and 9.0.
* The bytes of memory are what CUDA reports: not quite 16 and 80 GB.
"""

import dataclasses

KB = 1024


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU, as far as a compiler wants to know it."""

  name: str  # as CUDA prints it
  compute_capability: tuple[int, int]  # major and minor version
  cores: int  # streaming multiprocessors
  units: int  # float32 units of a core
  clock_ghz: float  # the highest
  memory: int  # bytes
  bandwidth: int  # bytes in a second
  l2_cache: int  # bytes
  shared_memory: int  # bytes of a core
  shared_memory_of_block: int  # bytes, at most
  threads: int  # of a core

  def target_config(self) -> str:
    """Return the compilation target, as the text of a GpuTargetConfigProto."""
    major, minor = self.compute_capability
    return f"""
      platform_name: "CUDA"
      device_description_str: "{self.name}"
      dnn_version_info {{ major: 9 minor: 10 }}
      gpu_device_info {{
        cuda_compute_capability {{ major: {major} minor: {minor} }}
        core_count: {self.cores}
        fpus_per_core: {self.units}
        clock_rate_ghz: {self.clock_ghz}
        device_memory_size: {self.memory}
        memory_bandwidth: {self.bandwidth}
        l2_cache_size: {self.l2_cache}
        shared_memory_per_core: {self.shared_memory}
        shared_memory_per_block: {48 * KB}
        shared_memory_per_block_optin: {self.shared_memory_of_block}
        registers_per_core_limit: 65536
        registers_per_block_limit: 65536
        threads_per_warp: 32
        threads_per_core_limit: {self.threads}
        threads_per_block_limit: 1024
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535
        block_dim_limit_z: 65535
      }}
    """


GPUS = {
  "t4": Gpu(
    name="Tesla T4",
    compute_capability=(7, 5),
    cores=40,
    units=64,
    clock_ghz=1.59,
    memory=15835660288,
    bandwidth=320 * 10**9,
    l2_cache=4096 * KB,
    shared_memory=64 * KB,
    shared_memory_of_block=64 * KB,
    threads=1024,
  ),
  "v100": Gpu(
    name="Tesla V100-SXM2-16GB",
    compute_capability=(7, 0),
    cores=80,
    units=64,
    clock_ghz=1.53,
    memory=16935682048,
    bandwidth=900 * 10**9,
    l2_cache=6144 * KB,
    shared_memory=96 * KB,
    shared_memory_of_block=96 * KB,
    threads=2048,
  ),
  "h100": Gpu(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    cores=132,
    units=128,
    clock_ghz=1.98,
    memory=84942979072,
    bandwidth=3352320000000,
    l2_cache=50 * KB * KB,
    shared_memory=228 * KB,
    shared_memory_of_block=227 * KB,
    threads=2048,
  ),
}
