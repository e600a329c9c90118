"""``find_overflow`` names the origins whose inf or NaN reaches the result."""

import re

from helpers import parametrize_slow
import jax
from jax import lax
import jax.numpy as jnp
import pytest

from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import _tracing, find_overflow
from optax_lossscale.diagnostics._overflow import _origins

X = jnp.linspace(-2, 2, 8, dtype=jnp.float16).reshape(2, 4)
LARGE = jnp.full((2, 4), 300, jnp.float16)


def get_names(hit):
  return [hit.primitive, *(other.primitive for other in hit.other_origins)]


# Programs, and the paths of the equations that make their infs and NaNs.
ORIGINS = {}


def register_origins(*paths, arg=X):
  def register(fun):
    ORIGINS[fun.__name__] = fun, arg, list(paths)
    return fun

  return register


@register_origins("mul", arg=jnp.abs(X) + 1)
def mask_of_infs_that_is_not_blamed(x):
  logits = x @ x.T + jnp.log(jnp.eye(2, dtype=x.dtype))
  return jax.nn.softmax(logits * jnp.array([[1], [3e4]], x.dtype))


@register_origins("mul")
def mask_that_an_overflow_depends_on(x):
  """Without the mask, the probabilities are too small to overflow."""
  mask = jnp.log(jnp.array([1, 0, 0, 0], x.dtype))
  return jax.nn.softmax(x * 0 + mask) * 60000 * 2


def set_first_entry(x, first):
  x = x.at[0, 0].set(first(x[1, 3] * 20))
  return x * jnp.array([1, 1, 1, 6e4], x.dtype) + 0.5


@register_origins("exp")
def fault_before_another(x):
  return set_first_entry(x, jnp.exp)


@register_origins("mul")
def second_fault_if_the_first_is_mended(x):
  return set_first_entry(x, jnp.tanh)


@register_origins(*["exp"] * 31)
def more_faults_than_runs(x):
  x = x * 20
  return [jnp.exp(x) for _ in range(40)]


@register_origins("exp", arg=jnp.array([[0, 1], [0, 0]], X.dtype))
def infs_in_a_slice_of_a_scan(x):
  ys = jnp.exp(x * 20)
  return lax.scan(lambda c, y: (c, y + 1), 0.0, ys)[1][:1]


@register_origins("dot_general", "dot_general", arg=LARGE)
def two_matmuls_of_a_sum(x):
  ones = jnp.ones((2, 2), x.dtype)
  mask = jnp.log(jnp.array([1, 0], x.dtype)) @ ones
  masked = jax.nn.relu(mask) + (x @ x.T) * 600 @ ones
  return masked + (LARGE @ x.T) @ ones


@register_origins("x", "exp", arg=jnp.array([1, jnp.nan], X.dtype))
def nan_argument_and_another_fault(x):
  return x + jnp.exp(jnp.full(2, 20, X.dtype))


@register_origins("exp", arg=jnp.array([1, jnp.nan], X.dtype))
def nan_argument_that_is_replaced(x):
  return jnp.where(jnp.isnan(x), 0, x) + jnp.exp(jnp.full(2, 20, X.dtype))


@register_origins("add", arg=LARGE)
def inf_of_the_program_that_matmuls_read(x):
  infs = jnp.array([jnp.inf] * 4, X.dtype)
  return ((jnp.abs(x) + infs) @ (jnp.ones((4, 4), X.dtype))) @ x.T


@register_origins("exp")
def inf_literal_next_to_a_fault(x):
  return jnp.where(x > 0, x, -jnp.inf), jnp.exp(x * 20)


@register_origins("jit(_where)/convert_element_type")
def inf_literal_alone(x):
  return jnp.where(x > 0, x, -jnp.inf), jnp.exp(x)


@register_origins("square")
def masks_that_are_kept(x):
  """Their infs are all alive when the fault happens."""
  kept = []
  for factor in [1] * 38 + [30000]:
    logits = x + jnp.log(jnp.array([1, 0, 1, 1], x.dtype))
    x = jnp.square(jax.nn.softmax(logits) * factor)
    kept.append(logits)
  return x, jnp.stack(kept)[..., 2:].sum()


@register_origins("scan[200]/square", arg=jnp.abs(X))
def late_fault_in_a_loop_that_always_makes_infs(x):
  """The infs are distinguished by the outputs of the body."""

  def body(x, i):
    return jnp.where(i == 200, jnp.square(x * 200), x), x + jnp.log(x * 0)

  x, ys = lax.scan(body, x, jnp.arange(201))
  return x, jax.nn.relu(ys)


@register_origins("scan[0]/log")
def fault_of_all_iterations(x):
  body = lambda x, i: (x, jnp.log(-jnp.abs(x) - 1))
  return lax.scan(body, x, jnp.arange(200))[1]


@register_origins("scan[2]/mul")
def loop_that_carries_and_stacks_keys(x):
  def step(carry, i):
    x, key = carry
    key, own = jax.random.split(key)
    return (x * jnp.where(i == 2, 60000, 1).astype(x.dtype), key), (x, own)

  carry = x, jax.random.key(0)
  (x, _), (rows, keys) = lax.scan(step, carry, jnp.arange(4))
  return x, rows, jax.random.normal(keys[3])


@register_origins("div", arg=jnp.ones(3, X.dtype))
def inf_that_a_loop_makes_finite(x):
  undo = lambda i, x: jnp.where(i == 3, x * 60000, jnp.minimum(x, 4))
  return lax.fori_loop(0, 9, undo, x * 2) / (x - x)


@register_origins("while[2]/mul", arg=jnp.array([60000, 2], X.dtype))
def fault_of_a_row_whose_loop_goes_on(x):
  """The row whose loop has ended would overflow before."""

  def loop(count, x):
    body = lambda state: (state[0] + 1, state[1] * 32)
    return lax.while_loop(lambda state: state[0] < count, body, (0, x))[1]

  return jax.vmap(loop)(jnp.array([0, 3]), x)


# Programs that meet an inf or a NaN on the way to a finite result.
ROWS = jnp.linspace(-2, 2, 12, dtype=X.dtype).reshape(3, 4)
CAUSAL = jnp.tril(jnp.ones((4, 4), bool))


def total(x):
  return jnp.sum(x.astype(jnp.float32))


@register_origins(arg=ROWS)
@jax.value_and_grad
def masked_softmax(x):
  logits = jnp.where(CAUSAL, x.T @ x, -jnp.inf)
  return total(jax.nn.softmax(logits) ** 2)


@register_origins(arg=jnp.where(CAUSAL, 0, -jnp.inf).astype(X.dtype))
def mask_among_the_arguments(mask):
  return jax.nn.softmax(ROWS.T @ ROWS + mask)


@register_origins(arg=jnp.ones(3, X.dtype))
def scan_that_recovers(x):
  def body(x, i):
    x = jnp.where(i == 2, jnp.inf, x).astype(X.dtype)
    return jnp.minimum(x, 10), 1 / x

  return lax.scan(body, x, jnp.arange(5))


@register_origins(arg=ROWS)
def infs_of_which_only_integers_are_made(x):
  return jnp.argmax(jnp.exp(x * 20), axis=-1) * 1.5


@register_origins(arg=jnp.arange(3))
def nothing_but_integers(x):
  return x + 1


QUICK_ORIGINS = (
  "fault_of_a_row_whose_loop_goes_on",
  "inf_literal_alone",
  "inf_literal_next_to_a_fault",
  "infs_of_which_only_integers_are_made",
  "masked_softmax",
  "nothing_but_integers",
  "scan_that_recovers",
)


@parametrize_slow("name", QUICK_ORIGINS, ORIGINS)
def test_the_origins_that_matter_are_named(name):
  fun, arg, paths = ORIGINS[name]
  hit = find_overflow(fun, arg)
  found = [] if hit is None else [hit, *hit.other_origins]
  assert [origin.eqn_path for origin in found] == paths


def attend(boost):
  """Attention with a running maximum, which is -inf after the first block."""

  def body(carry, block):
    largest, total, out, i = carry
    key, value = block
    scores = jnp.where(i < 1, -jnp.inf, (QUERY @ key.T).astype(jnp.float32))
    new = jnp.maximum(largest, scores.max(-1))
    shift = jnp.where(jnp.isinf(new), 0, new)
    weights = jnp.exp(scores - shift[:, None])
    keep = jnp.exp(largest - shift)
    value = value * jnp.where(i == 2, boost, 1).astype(value.dtype)
    out = out * keep[:, None] + weights.astype(value.dtype) @ value
    return (new, total * keep + weights.sum(-1), out, i + 1), None

  def fun(keys):
    zeros = jnp.zeros(3)
    init = zeros - jnp.inf, zeros, jnp.zeros((3, 4)), 0
    (_, total, out, _), _ = lax.scan(body, init, (keys, keys + 1))
    return out / total[:, None]

  return fun


QUERY = jnp.linspace(-1, 1, 12, dtype=X.dtype).reshape(3, 4)


@pytest.mark.slow
def test_a_carry_that_begins_as_inf_hides_no_fault():
  keys = jnp.stack([QUERY] * 4)
  assert find_overflow(attend(1), keys) is None
  assert find_overflow(attend(60000), keys).eqn_path == "scan[2]/mul"


@pytest.mark.slow
def test_a_limited_number_of_later_operations_is_measured(monkeypatch, capsys):
  """It would take long to compile otherwise."""
  monkeypatch.setattr(_origins, "_MAX_MEASURED", 20)
  monkeypatch.setattr(_tracing, "_DELAY_SECONDS", -1)
  hit = find_overflow(attend(60000), jnp.stack([QUERY] * 4))
  assert hit.eqn_path == "scan[2]/mul"
  (count,) = re.findall(r"measuring (\d+) op", capsys.readouterr().err)
  assert 1 < int(count) <= 20


@pytest.mark.slow
def test_a_while_loop_that_is_mapped_three_times_is_entered():
  """Rows that have ended keep what they have, and are not blamed."""

  def loop(count, x):
    body = lambda state: (state[0] + 1, state[1] * 32)
    return lax.while_loop(lambda s: s[0] < count, body, (0, x))[1]

  counts = jnp.broadcast_to(jnp.array([0, 2, 5, 1]), (2, 2, 4))
  x = jnp.full((2, 2, 4, 3), 2, jnp.float16)
  fun = jax.vmap(jax.vmap(jax.vmap(loop)))
  hit = find_overflow(fun, counts, x)
  assert (hit.eqn_path, hit.other_origins) == ("while[2]/mul", ())
  # Nor for what they would have become.
  hit = find_overflow(fun, counts, x.at[..., 0, :].set(60000))
  assert (hit.eqn_path, hit.other_origins) == ("while[2]/mul", ())
  assert find_overflow(fun, counts, x / 4000) is None
  x = (x / 4000).at[..., 0, :].set(jnp.inf)
  assert get_names(find_overflow(fun, counts, x)) == ["argument"]


@pytest.mark.slow
def test_an_uninitialized_value_is_named_only_if_it_reaches_the_result(
  monkeypatch,
):
  if "empty" not in str(jax.make_jaxpr(lambda: jnp.empty(4))()):
    pytest.skip("this JAX fills `jnp.empty` with zeros")
  eqn_as_fun = _eqns.eqn_as_fun

  def with_garbage(eqn):
    if eqn.primitive.name == "empty":
      return lambda *_: [jnp.full(4, jnp.nan)]
    return eqn_as_fun(eqn)

  monkeypatch.setattr(_eqns, "eqn_as_fun", with_garbage)
  fun = lambda x: jnp.empty(4).at[:2].set(x)
  x = jnp.ones(2)
  assert find_overflow(lambda x: fun(x)[:2], x) is None
  assert get_names(find_overflow(fun, x)) == ["empty"]
  assert get_names(find_overflow(lambda x: fun(x)[:2] / 0, x)) == ["div"]


def test_an_inf_of_the_program_is_named_where_it_is_read():
  @jax.custom_jvp
  def fun(x):
    return jnp.float32(jnp.inf)

  fun.defjvp(lambda x, t: (fun(*x), t[0]))
  assert find_overflow(jax.jit(fun), jnp.float32(1)) is None
  hit = find_overflow(lambda x: fun(x) + x, jnp.float32(1))
  assert hit.primitive == "add" and "written in the program" in hit.fix
