"""The cost of loss scaling in figures that do not depend on a clock."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

ADAM = optax.adam(1e-3)
SIDE = 1024
BYTES_OF_STATE = 12  # A parameter and the two moments of Adam, in float32.


def make_leaves(count=4, side=SIDE, dtype=jnp.float32):
  return {f"w{i:03}": jnp.zeros((side, side), dtype) for i in range(count)}


def trace_step(tx, params, grads):
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.eval_shape(tx.init, params)
  return jax.jit(step, donate_argnums=(0, 1)).trace(params, state, grads)


def measure_cost(tx):
  """Bytes accessed, temporary and aliased, each for one parameter."""
  params = make_leaves()
  compiled = trace_step(tx, params, params).lower().compile()
  memory = compiled.memory_analysis()
  figures = (
    compiled.cost_analysis()["bytes accessed"],
    memory.temp_size_in_bytes,
    memory.alias_size_in_bytes,
  )
  return [figure / (4 * SIDE**2) for figure in figures]


def wrap_optimizer(inner=ADAM, loss_scale="dynamic", **options):
  return ols.with_loss_scaling(inner, loss_scale, **options)


OPTAX_CLIP = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


# A check that all gradients are finite reads them one more time. A clip does so
# too, and costs Optax a third more.
BYTES_ACCESSED = {
  "Optax": (ADAM, 40),
  "Optax, clipped": (OPTAX_CLIP, 60),
  "dynamic": (wrap_optimizer(), 44),
  "clipped": (wrap_optimizer(optax.adamw(1e-3), max_norm=1.0), 44),
  "fixed": (wrap_optimizer(loss_scale=8.0), 44),
  "fixed, scaled": (wrap_optimizer(loss_scale=8.0, grads_are_scaled=True), 44),
  # The largest gradient is computed only if the policy needs it.
  "headroom": (wrap_optimizer(loss_scale="headroom"), 48),
}


@pytest.mark.parametrize("name", BYTES_ACCESSED)
def test_a_step_reads_the_gradients_one_more_time_and_copies_no_state(name):
  tx, expected = BYTES_ACCESSED[name]
  accessed, temporary, aliased = measure_cost(tx)
  assert accessed == pytest.approx(expected, abs=0.01)
  if not name.startswith("Optax"):
    assert temporary < 0.01
    assert aliased == pytest.approx(BYTES_OF_STATE, abs=0.01)


def test_checking_updates_in_the_dtype_of_the_params_makes_no_copy_of_them():
  """XLA tests a cast update in the pass that makes it."""

  def figures(**options):
    tx = wrap_optimizer(optax.sgd(0.1), **options)
    params = make_leaves(dtype=jnp.float16)
    compiled = trace_step(tx, params, params).lower().compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    accessed = compiled.cost_analysis()["bytes accessed"]
    return accessed / (4 * SIDE**2), temporary / (4 * SIDE**2)

  accessed, temporary = figures()
  checked, temporary_checked = figures(check_updates=True)
  assert checked < accessed + 4.1
  assert temporary_checked < temporary + 0.1


def compile_step(tx, count, side=64):
  params = make_leaves(count, side)
  return trace_step(tx, params, params).lower().compile().as_text()


@pytest.mark.skipif(
  jax.__version_info__ < (0, 12),
  reason="XLA fuses operations before and after an optimization_barrier",
)
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"loss_scale": "headroom", "grads_are_scaled": True},
    {"loss_scale": "headroom", "max_norm": 1.0, "check_updates": True},
    {"max_norm": 1.0},
    {"check_updates": True},
  ],
  ids=str,
)
def test_no_kernel_combines_the_scalars_of_all_leaves(options):
  """On CPU, such a kernel's compile time is quadratic in the leaves."""
  tx = wrap_optimizer(optax.sgd(0.1), **options)
  kernels = compile_step(tx, count=64, side=4).split("\n\n")
  scalar_op = re.compile(r"= f32\[\]\S* (?:add|maximum)\(")
  assert max(len(scalar_op.findall(kernel)) for kernel in kernels) <= 12


def float16_loss(params, x):
  for w in params.values():
    x = jnp.tanh(x @ w.astype(jnp.float16))
  return jnp.mean(x.astype(jnp.float32) ** 2)


def compile_full_step(tx, value_and_grad):
  def step(params, state, x):
    _, grads = value_and_grad(state)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = make_leaves(3, side=256)
  args = params, tx.init(params), jnp.ones((8, 256), jnp.float16)
  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
  return lowered.compile().as_text()


def count_kernels(text, operation):
  """How many kernels do it to a matrix of the size of a parameter."""
  return len(re.findall(rf"\[256,256\]\S* {operation}\(", text))


def test_gradients_of_a_model_are_computed_once_and_not_in_every_kernel():
  tx = wrap_optimizer()
  ours = compile_full_step(tx, lambda s: ols.value_and_grad(float16_loss, s))
  bare = compile_full_step(ADAM, lambda s: jax.value_and_grad(float16_loss))
  transposes = [count_kernels(text, "transpose") for text in (ours, bare)]
  assert transposes[0] == 3 < transposes[1]
  assert count_kernels(ours, "convert") < count_kernels(bare, "convert")


def test_no_operation_is_in_a_branch_so_a_skipped_step_costs_no_more():
  params = make_leaves(2, side=8)
  # Before it, there is one on the platform.
  step = trace_step(wrap_optimizer(), params, params)
  text = step.lower().compile().as_text()
  assert "fusion(" in text and "conditional(" not in text
