"""State is threaded through every higher-order equation of a program."""

from helpers import hijax, sharding
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from optax_lossscale._jaxprs import _eqns, _state_threading

X = jnp.linspace(0.1, 1.2, 12).reshape(4, 3)


class SineCounter(_state_threading.StateThreader):
  """Counts how often each ``sin`` runs, and scales its result by ``shared``."""

  def __init__(self, shared, keys):
    super().__init__(shared)
    self.keys = keys

  def select_keys(self, visit):
    path = visit.path
    return [key for key in self.keys if key[: len(path)] == path] or None

  def merge_devices(self, device_states):
    return {k: jnp.max(x, 0) for k, x in device_states.items()}

  def eval_eqn(self, visit, inputs, state):
    outs = super().eval_eqn(visit, inputs, state)
    if visit.path in self.keys:
      key = visit.path
      state[key] = state[key] + 1
      outs = [out * self.shared for out in outs]
    return outs


def find_sines(closed_jaxpr, path=()):
  for i, eqn in enumerate(closed_jaxpr.jaxpr.eqns):
    if eqn.primitive.name == "sin":
      yield (*path, i)
    for n, subjaxpr in enumerate(_eqns.subjaxprs(eqn)):
      yield from find_sines(subjaxpr, (*path, i, n))


def count_sines(fun, *args):
  """Return how often each sine runs, after a comparison of the results."""
  closed_jaxpr = jax.make_jaxpr(fun)(*args)
  keys = list(find_sines(closed_jaxpr))

  @jax.jit
  def threaded(factor, *args):
    state = {key: jnp.int32(0) for key in keys}
    frame = _state_threading.Frame(closed_jaxpr)
    outs = SineCounter(factor, keys).eval_jaxpr(frame, args, state)
    return outs, list(state.values())

  outs, counts = threaded(jnp.float32(1), *args)
  for out, expected in zip(outs, jax.tree.leaves(fun(*args)), strict=True):
    np.testing.assert_allclose(out, expected, rtol=1e-6)
  changed, _ = threaded(jnp.float32(2), *args)
  assert any((x != y).any() for x, y in zip(outs, changed, strict=True))
  return [int(count) for count in counts]


def scan(x):
  return lax.scan(lambda c, row: (jnp.sin(c) + row, c), x[0], x, reverse=True)


def while_loop(x):
  body = lambda state: (state[0] + 1, jnp.sin(state[1]))
  is_small = lambda state: state[0] + 0 * jnp.sin(state[1]).sum() < 3
  return lax.while_loop(is_small, body, (0, x))


def cond(x):
  branches = [jnp.cos, jnp.sin, lambda x: jnp.sin(jnp.sin(x))]
  return lax.switch(jnp.int32(x[0, 0] + 1), branches, x)


@jax.custom_vjp
def ruled(x):
  return jnp.sin(x)


ruled.defvjp(lambda x: (ruled(x), x), lambda x, ct: (ct * jnp.cos(x),))


def calls(x):
  return jax.jit(lambda x: ruled(jax.checkpoint(jnp.sin)(x)))(x)


@pytest.mark.parametrize(
  "fun, counts",
  [
    (jnp.sin, [1]),
    (scan, [4]),
    (while_loop, [4, 3]),
    (cond, [1, 0, 0]),
    (calls, [1, 1]),
    # The result of the outer call is not needed.
    (lambda x: jax.grad(lambda x: calls(x).sum())(x), [1, 0]),
    (lambda x: scan(scan(x)[1]), [4, 4]),
  ],
)
def test_the_state_of_each_body_returns_to_the_program(fun, counts):
  skip_if_jax_cannot(fun, X)
  assert count_sines(fun, X) == counts


def test_calls_of_hijax_are_entered():
  with hijax.enable_all_flags():
    assert count_sines(calls, X) == [1, 1]


def test_members_that_have_left_a_mapped_loop_keep_their_carry():
  def loop(count, x):
    body = lambda state: (state[0] + 1, jnp.sin(state[1]))
    return lax.while_loop(lambda state: state[0] < count, body, (0, x))

  assert count_sines(jax.vmap(loop), jnp.array([0, 3, 1, 2]), X) == [3]


@pytest.mark.skipif(
  jax.__version_info__ < (0, 10),
  reason="XLA aborts if devices leave this loop at different iterations",
)
@pytest.mark.parametrize("axis_type", list(AxisType)[:2])
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_states_of_devices_are_merged(check_vma, axis_type):
  mesh = sharding.make_mesh((2, 2), ("a", "b"), axis_type)

  def part(x):
    count = lax.axis_index("a") + 2 * lax.axis_index("b")
    return lax.fori_loop(0, count, lambda i, x: jnp.sin(x), x)

  def fun(x):
    spec = P(("a", "b"))
    mapped = jax.shard_map(
      part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return lax.scan(lambda x, _: (mapped(x), None), x, length=2)[0]

  specs = P(("a", "b"))
  (x,) = sharding.put_on_devices(
    (X,), sharding.to_named_shardings(mesh, (specs,))
  )
  skip_if_jax_cannot(jax.jit(fun), x)
  # The device with the most iterations runs three in each of two steps.
  assert count_sines(fun, x) == [6]


def test_iterations_are_counted_from_the_start_of_the_loop():
  closed_jaxpr = jax.make_jaxpr(scan)(X)

  class IndexRecorder(SineCounter):
    def end_iteration(self, frame, outs, state):
      state["sum"] = 10 * state["sum"] + frame.iterations[0]

    def select_keys(self, visit):
      return ["sum"] if visit.eqn.primitive.name == "scan" else None

  @jax.jit
  def threaded(x):
    state = {"sum": jnp.int32(0)}
    frame = _state_threading.Frame(closed_jaxpr)
    IndexRecorder((), []).eval_jaxpr(frame, [x], state)
    return state["sum"]

  assert threaded(X) == 123
