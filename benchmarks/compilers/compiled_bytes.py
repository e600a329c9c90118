"""Bytes, kernels and memory of a program, by the compilers of TPU and GPU.

Neither device is needed: their compilers come as packages, and run on any
x86-64 machine. What they make of a program decides what it costs, since an
optimizer is bound by the bytes that its kernels move. It is no time.

  pip install "jax[tpu]"            # for the devices named v5e, v6e and v5p
  pip install "jax[cuda12]"         # for t4, v100, h100; no driver is needed

  >>> import compiled_bytes                     # before jax starts a device
  >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
  >>> compiled_bytes.figures(lambda x: x + jnp.sum(x), x, device="v5e")
  Figures(bytes=201326608, kernels=2, temporary=..., peak=..., aliased=0,
          needed=..., products={})

Divide by the number of parameters to compare. To donate, as a training step
should, give ``donate_argnums``.
"""

from collections.abc import Callable, Sequence
import os
from typing import Any, NamedTuple

# JAX reads these when it searches for devices and loads libtpu. With them,
# libtpu doesn't query the metadata of a TPU machine, and can be loaded twice.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_ID"] = "0"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import gpus
import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import scheduled_hlo

# By name: the topology in whose compiler it is, and its options.
DEVICES = {
  "v5e": ("tpu", "v5e:2x2"),
  "v5p": ("tpu", "v5p:2x2x1"),
  "v6e": ("tpu", "v6e:2x2"),
  **{name: ("cuda", "1x1x1") for name in gpus.GPUS},
  "8 h100": ("cuda", "1x1x8"),
}
# Arrays of a real model do not stay in the TPU's fast memory from one kernel to
# the next, as these small ones would.
COMPILER_OPTIONS = {"tpu": {"xla_msa_enable": "false"}, "cuda": {}}


class Figures(NamedTuple):
  """The costs of a compiled program on one device."""

  bytes: int  # that kernels read from and write to memory
  kernels: int  # that run
  temporary: int  # bytes, neither arguments nor results
  peak: int  # the most bytes in use at once
  aliased: int  # bytes of results over donated arguments
  needed: int  # bytes that must be free
  products: dict[str, dict[str, int]]  # on GPU; see scheduled_hlo.count_matmuls


def figures(
  fun: Callable[..., Any],
  *args: Any,
  device: str = "v5e",
  donate_argnums: int | Sequence[int] = (),
) -> Figures:
  """Compile a function for one device, and return its figures.

  Args:
    fun: any function that ``jax.jit`` takes.
    *args: pytrees of arrays, or of ``jax.ShapeDtypeStruct``.
    device: a name in ``DEVICES``.
    donate_argnums: as for ``jax.jit``.
  """
  mesh = jax.sharding.Mesh(np.array(get_topology_devices(device)[:1]), "x")
  placed_args = [place(arg, NamedSharding(mesh, P())) for arg in args]
  compiled = compile_for(
    device, fun, *placed_args, donate_argnums=donate_argnums
  )
  text = compiled.as_text()
  moved = scheduled_hlo.parse(text)
  is_gpu = _platform(device) == "cuda"
  return Figures(
    bytes=moved.bytes,
    kernels=moved.kernels,
    **scheduled_hlo.read_memory(compiled),
    products=scheduled_hlo.count_matmuls(text) if is_gpu else {},
  )


def compile_for(
  device: str, fun: Callable[..., Any], *args: Any, **jit_options: Any
) -> jax.stages.Compiled:
  """Compile for the devices that the shardings of the arguments name.

  Args:
    device: a name in ``DEVICES``, or of a topology such as ``"v5p:8x8x16"``.
    fun: the function.
    *args: pytrees of ``jax.ShapeDtypeStruct`` with shardings.
    **jit_options: for ``jax.jit``.
  """
  lowered = jax.jit(fun, **jit_options).lower(*args)
  return lowered.compile(compiler_options=COMPILER_OPTIONS[_platform(device)])


def get_topology_devices(device: str) -> list[Any]:
  """Return the devices of a topology, a name as for ``compile_for``."""
  platform, topology = DEVICES.get(device, ("tpu", device))
  if platform == "tpu":
    return topologies.get_topology_desc(topology, platform).devices
  gpu = gpus.GPUS[device.split()[-1]]  # of several, as in "8 h100"
  return topologies.get_topology_desc(
    "", platform, topology=topology, target_config=gpu.target_config()
  ).devices


def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """The shapes of a tree of arrays, as if they lay on other devices."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      np.shape(x), jax.dtypes.result_type(x), sharding=sharding
    ),
    tree,
  )


def _platform(device):
  return DEVICES.get(device, ("tpu", device))[0]
