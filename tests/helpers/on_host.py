"""Runs a part of a program on the host of a device."""

import inspect

import jax
from jax.experimental.compute_on import compute_on

# A context up to JAX 0.10, where each equation knows where it runs. Since 0.11
# it takes a function, and is an equation that holds what runs on the host.
IS_CONTEXT = "out_memory_spaces" not in inspect.signature(compute_on).parameters


def run_on_host(fun):
  if not IS_CONTEXT:
    return compute_on(
      fun,
      compute_type="device_host",
      out_memory_spaces=jax.memory.Space.Device,
    )

  def run(*args):
    with compute_on("device_host"):
      return fun(*args)

  return run
