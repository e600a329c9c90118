"""``find_overflow`` takes some times as long as to compile the step once.

Nearly all of its time goes into compiling, too: an operation for each shape.
"""

import logging
import time

from helpers import jaxprs, looping_steps, overflowing_steps
import jax
from jax import lax
import jax.numpy as jnp
import pytest

from optax_lossscale.diagnostics import find_overflow
from optax_lossscale.diagnostics._overflow import _loops, _taint_interpreter


@pytest.fixture(autouse=True)
def without_caches():
  """Clear the caches, so that no earlier compilation makes a test faster."""
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", enabled)


def time_call(fun):
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
  compiling, _ = time_call(lambda: jax.jit(fun).lower(*args).compile())
  finding, hit = time_call(lambda: find_overflow(fun, *args))
  assert hit.primitive == primitive
  # Measured: 2 to 4 times.
  assert finding < 30 * compiling


LOOPS = {
  "recurrent PPO": looping_steps.recurrent_ppo,
  "xLSTM": looping_steps.xlstm,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loops_in_loops_take_at_most_ten_times_as_long(name):
  fun, *args = LOOPS[name]()
  compiling, _ = time_call(lambda: jax.jit(fun).lower(*args).compile())
  finding, hit = time_call(lambda: find_overflow(fun, *args))
  assert hit.backward
  # Measured: 2.5 to 4 times, in seconds of CPU.
  assert finding < 10 * compiling


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


def test_a_loop_under_vmap_is_compiled_once_and_followed_where_it_overflows(
  monkeypatch,
):
  """However many iterations it has, and however many loops are around it."""
  traced, steps = [], []
  program, step = (
    _loops.CompiledScan._run_loop,
    _taint_interpreter.TaintInterpreter._eval_eqn,
  )

  def tracing(self, *args):
    traced.append(self)
    return program(self, *args)

  def stepping(*args):
    steps.append(args)
    return step(*args)

  monkeypatch.setattr(_loops.CompiledScan, "_run_loop", tracing)
  monkeypatch.setattr(
    _taint_interpreter.TaintInterpreter, "_eval_eqn", stepping
  )
  counts = {}
  for outer, inner in (4, 3), (8, 30):
    traced.clear()
    steps.clear()
    fun, x = make_nested_loops(outer, inner)
    hit = find_overflow(fun, x)
    assert hit.eqn_path == "jit(<lambda>)/scan[3]/scan[2]/mul"
    assert len(traced) == 2
    counts[outer] = len(steps)
  # An iteration of each loop, and what is around them.
  assert counts[4] == counts[8] < len(jaxprs.list_eqns(fun, x))


def test_the_code_around_a_loop_is_not_compiled_again(caplog):
  fun, x = make_nested_loops(4, 3)
  operations = len(jaxprs.list_eqns(fun, x))
  count = count_compilations(caplog, lambda: find_overflow(fun, x))
  # The whole, both loops, and operations of iterations that overflow.
  assert count <= 3 + operations


def count_compilations(caplog, fun):
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
def test_a_finite_program_is_compiled_once(caplog):
  fun, *args = overflowing_steps.layers_of_all_shapes(2)  # The third overflows.
  # The other is of the number 0, with which it begins.
  assert count_compilations(caplog, lambda: find_overflow(fun, *args)) <= 2
  assert find_overflow(fun, *args) is None


@pytest.mark.slow
def test_each_equation_is_compiled_at_most_once(caplog):
  """Nothing is compiled to mark what is not finite, whatever its shape."""
  fun, *args = overflowing_steps.layers_of_all_shapes(4)
  operations = len(jaxprs.list_eqns(fun, *args))
  hits = []
  count = count_compilations(
    caplog, lambda: hits.append(find_overflow(fun, *args))
  )
  assert hits[0].primitive == "square"
  assert 10 < count <= operations
