"""``find_overflow`` takes some times as long as to compile the step once.

Nearly all of its time goes into compiling, too: an operation for each shape.
"""

import logging
import time

from helpers import equations, overflowing_steps
import jax
import pytest

from optax_lossscale.diagnostics import find_overflow


@pytest.fixture(autouse=True)
def without_caches():
  """What was compiled before must not make one of the two faster."""
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", enabled)


def seconds(fun):
  jax.clear_caches()
  started = time.perf_counter()
  out = fun()
  return time.perf_counter() - started, out


PROGRAMS = {
  "graph_network": (overflowing_steps.graph_network, "mul"),
  "layers": (overflowing_steps.layers_of_all_shapes, "square"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_takes_at_most_thirty_times_as_long_as_compiling_the_step(name):
  make, primitive = PROGRAMS[name]
  fun, *args = make()
  compiling, _ = seconds(lambda: jax.jit(fun).lower(*args).compile())
  finding, hit = seconds(lambda: find_overflow(fun, *args))
  assert hit.primitive == primitive
  # Measured: 2 to 4 times.
  assert finding < 30 * compiling


def compilations(caplog, fun):
  """How many programs a function compiles."""
  jax.clear_caches()
  caplog.clear()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    fun()
  return sum(
    record.getMessage().startswith("Finished XLA compilation")
    for record in caplog.records
  )


@pytest.mark.slow
def test_what_is_finite_is_compiled_once(caplog):
  fun, *args = overflowing_steps.layers_of_all_shapes(2)  # The third overflows.
  # The other is of the number 0, with which it begins.
  assert compilations(caplog, lambda: find_overflow(fun, *args)) <= 2
  assert find_overflow(fun, *args) is None


@pytest.mark.slow
def test_no_more_is_compiled_than_there_are_operations(caplog):
  """Nothing is compiled to mark what is not finite, whatever its shape."""
  fun, *args = overflowing_steps.layers_of_all_shapes(4)
  operations = len(equations.of(fun, *args))
  hits = []
  count = compilations(caplog, lambda: hits.append(find_overflow(fun, *args)))
  assert hits[0].primitive == "square"
  assert 10 < count <= operations
