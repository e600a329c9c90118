"""How XLA compiles the programs of reports."""

import jax
import jax.numpy as jnp

from optax_lossscale.diagnostics import _eqn_stats, _instrumented_program

X = jnp.ones((2, 2), jnp.float16)


def test_programs_are_compiled_without_autotuning_on_gpu(monkeypatch):
  options = _instrumented_program.make_compiler_options([X])
  assert "xla_gpu_autotune_level" not in options
  gpu = type("GPU", (), {"platform": "gpu"})()
  monkeypatch.setattr(jax, "devices", lambda: [gpu])
  options = _instrumented_program.make_compiler_options([])
  assert options["xla_gpu_autotune_level"] == 0


def test_xla_does_not_interpret_a_eqn_stats_of_a_large_constant():
  """It would take ten seconds for these million numbers."""

  def measure():
    return _eqn_stats.measure(jnp.full((1_000, 1_000), 3.0))

  options = _instrumented_program.make_compiler_options([])
  program = jax.jit(measure, compiler_options=options).lower().compile()
  assert " reduce(" in program.as_text()
  assert program() == (False, False, 3)


def test_a_conversion_to_float16_and_back_keeps_its_overflow():
  def fun(x):
    return x.astype(jnp.float16).astype(jnp.float32)

  options = _instrumented_program.make_compiler_options([])
  assert jnp.isinf(jax.jit(fun, compiler_options=options)(1e5))
