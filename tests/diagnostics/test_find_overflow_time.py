"""``find_overflow`` takes some times as long as to compile the step once.

Nearly all of its time goes into compiling, too: it compiles the step with
flags, and a second program if a result is not finite.
"""

import logging
import re
import time

from helpers import overflowing_steps, parametrize_slow
import jax
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest

from optax_lossscale.diagnostics import _instrumented_program, find_overflow


@pytest.fixture(autouse=True)
def without_caches():
  """Clear the caches, so that no earlier compilation makes a test faster."""
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  # JAX asks only once whether there is a cache on disk.
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", enabled)
  compilation_cache.reset_cache()


def time_call(fun):
  """Return the CPU seconds of a call, and its result."""
  jax.clear_caches()
  started = time.process_time()
  out = fun()
  return time.process_time() - started, out


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("make", "backward", "limit"),
  [
    (overflowing_steps.layers_of_all_shapes, False, 30),
    # Loops in loops in loops. Measured: 1.3 times.
    (overflowing_steps.recurrent_training, True, 5),
  ],
)
def test_it_takes_some_times_as_long_as_compiling_the_step(
  make, backward, limit
):
  fun, *args = make()
  compiling, _ = time_call(lambda: jax.jit(fun).lower(*args).compile())
  finding, hit = time_call(lambda: find_overflow(fun, *args))
  assert hit.backward == backward
  assert finding < limit * compiling


def make_nested_loops(outer, inner):
  """A scan in a scan under ``vmap``, of which iteration [3][2] overflows."""

  def step(x, i):
    factor = jnp.where((i[0] == 3) & (i[1] == 2), 60000, 1).astype(x.dtype)
    return jnp.tanh(jnp.sin(x)) + 2, jnp.sum(x * factor)

  def loop(x, i):
    pairs = jnp.stack([jnp.full(inner, i), jnp.arange(inner)], 1)
    return lax.scan(step, x, pairs)

  fun = lambda x: lax.scan(loop, x, jnp.arange(outer))
  return jax.jit(jax.vmap(fun)), jnp.ones((3, 4), jnp.float16)


@parametrize_slow("lengths", {(8, 30)}, [(4, 3), (8, 30)])
def test_two_programs_are_compiled_however_long_the_loops_are(caplog, lengths):
  hit, count = count_compilations(caplog, *make_nested_loops(*lengths))
  assert hit.eqn_path == "jit(<lambda>)/scan[3]/scan[2]/mul"
  assert count == 2


def count_compilations(caplog, fun, *args):
  """Return the overflow, and how many instrumented programs are compiled."""
  jax.clear_caches()
  caplog.clear()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    hit = find_overflow(fun, *args)
  name = _instrumented_program.InstrumentedProgram._eval_program.__name__
  pattern = re.compile(f"Finished XLA compilation of .*{name}")
  messages = [record.getMessage() for record in caplog.records]
  return hit, sum(map(bool, map(pattern.match, messages)))


@pytest.mark.slow
def test_a_finite_program_is_compiled_once(caplog):
  step = overflowing_steps.layers_of_all_shapes(2)  # The third overflows.
  assert count_compilations(caplog, *step) == (None, 1)


@pytest.mark.slow
def test_many_overflows_are_measured_by_few_programs(caplog):
  step = overflowing_steps.normalized_layers()
  hit, count = count_compilations(caplog, *step)
  assert hit.primitive == "mul"
  # The step, the first region, and the whole step twice.
  assert count <= 4


@pytest.mark.nightly
def test_overflows_behind_the_first_need_few_further_programs(caplog):
  step = overflowing_steps.layers_of_all_shapes(4)
  hit, count = count_compilations(caplog, *step)
  assert hit.primitive == "square"
  # Without the inf, the next matmul overflows by itself.
  assert count <= 6
