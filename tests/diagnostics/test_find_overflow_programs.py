"""``find_overflow`` compiles few programs, which takes nearly all of its time.

It compiles the step with flags, and a second program if a result is not finite.
"""

from helpers import parametrize_slow, quick_budget
import jax
from jax import lax
import jax.numpy as jnp
import pytest

from optax_lossscale.diagnostics import find_overflow


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


def count_programs(fun, *args):
  """Return the overflow, and how many instrumented programs are compiled."""
  jax.clear_caches()
  num_compiled = len(quick_budget.compiled)
  hit = find_overflow(fun, *args)
  return hit, quick_budget.compiled[num_compiled:].count("_eval_program")


@parametrize_slow("lengths", {(8, 30)}, [(4, 3), (8, 30)])
def test_two_programs_are_compiled_however_long_the_loops_are(lengths):
  hit, count = count_programs(*make_nested_loops(*lengths))
  assert hit.eqn_path == "jit(<lambda>)/scan[3]/scan[2]/mul"
  assert count == 2


@pytest.mark.slow
def test_a_finite_program_is_compiled_once():
  assert count_programs(*make_nested_loops(3, 3)) == (None, 1)


@pytest.mark.slow
def test_overflows_behind_the_first_need_no_further_program():
  """Without the inf of one layer, the next layer overflows by itself."""

  def loss_fn(w, x):
    for i in range(4):
      x = jnp.tanh(x) @ w
      x = jnp.square(x * 400) if i > 1 else x
    return jnp.mean(x.astype(jnp.float32) ** 2)

  args = jnp.eye(4, dtype=jnp.float16), jnp.ones((2, 4), jnp.float16)
  hit, count = count_programs(jax.value_and_grad(loss_fn), *args)
  assert hit.primitive == "square"
  assert count == 2
