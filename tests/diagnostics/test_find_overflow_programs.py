"""``find_overflow`` compiles few programs, which takes nearly all of its time.

It compiles the step with flags, and a second program if a result is not finite.
"""

from helpers import parametrize_slow, quick_budget
import jax
from jax import lax
import jax.numpy as jnp
import pytest

from optax_lossscale.diagnostics import find_overflow

F16 = jnp.float16


def layers_of_all_shapes(depth=12):
  """Dense layers of which no two have the same shape; the third overflows."""
  widths = range(20, 21 + depth)
  keys = jax.random.split(jax.random.key(0), depth)
  params = [
    jax.random.normal(key, (n, n + 1)) / n**0.5
    for key, n in zip(keys, widths, strict=False)
  ]
  x = jax.random.normal(jax.random.key(1), (8, widths[0]))

  def loss_fn(params, x):
    x = x.astype(F16)
    for i, w in enumerate(params):
      x = jax.nn.gelu(x @ w.astype(F16))
      if i == 2:
        x = jnp.square(x * 400)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return jax.value_and_grad(loss_fn), params, x


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
def test_two_programs_are_compiled_however_long_the_loops_are(lengths):
  hit, count = count_programs(*make_nested_loops(*lengths))
  assert hit.eqn_path == "jit(<lambda>)/scan[3]/scan[2]/mul"
  assert count == 2


def count_programs(fun, *args):
  """Return the overflow, and how many instrumented programs are compiled."""
  jax.clear_caches()
  num_compiled = len(quick_budget.compiled)
  hit = find_overflow(fun, *args)
  return hit, quick_budget.compiled[num_compiled:].count("_eval_program")


@pytest.mark.slow
def test_a_finite_program_is_compiled_once():
  step = layers_of_all_shapes(2)  # The third overflows.
  assert count_programs(*step) == (None, 1)


@pytest.mark.nightly
def test_overflows_behind_the_first_need_few_further_programs():
  step = layers_of_all_shapes(4)
  hit, count = count_programs(*step)
  assert hit.primitive == "square"
  # Without the inf, the next matmul overflows by itself.
  assert count <= 6
