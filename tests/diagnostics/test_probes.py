"""Probes: they change nothing, count everything once, and are heard."""

import itertools
import math

from helpers import load_example, parametrize_slow, sharding
from helpers.devices import require_devices
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _checks, diagnostics

BINS = 43
X = jnp.asarray(
  np.random.default_rng(0).normal(size=(16, 4, 8)).astype(np.float16)
)
COUNTER = diagnostics.probe_counters()
STATE = ols.FixedLossScale(1.0).init()


def loss_fn(x, counter):
  """Its cotangent, x / 64, is of many sizes."""
  y = diagnostics.probe(x, counter).astype(jnp.float32)
  return jnp.sum(y**2) / 128


@jax.jit
def get_counts(x, counter=COUNTER):
  """The counts of a cotangent that is x itself."""
  fun = lambda counter: diagnostics.probe(x, counter)
  return jax.vjp(fun, counter)[1](x)[0]


get_metrics = jax.jit(diagnostics.probe_metrics)


def count_with_numpy(x):
  """The counts, by numpy's frexp."""
  counts = np.zeros(BINS)
  for value in np.asarray(x, np.float64).ravel():
    if not math.isfinite(value):
      counts[42] += 1
    elif abs(value) < 2.0**-24:
      counts[0] += 1
    else:
      counts[min(math.frexp(abs(value))[1] + 24, 41)] += 1
  return counts


EVERY_FLOAT16 = np.arange(2**16, dtype=np.uint16).view(np.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
  "x, expected",
  [
    (EVERY_FLOAT16, EVERY_FLOAT16),
    # Both parts of complex numbers are counted.
    (np.complex64([1 + 2j, 3 + 0j]), [1, 2, 3, 0]),
  ],
  ids=["float16", "complex64"],
)
def test_every_number_is_counted_in_its_binade(x, expected):
  np.testing.assert_array_equal(get_counts(x), count_with_numpy(expected))


@pytest.mark.slow
@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e5m2, jnp.float64]
)
def test_other_dtypes_are_counted_as_float16_would_see_them(dtype):
  info = jnp.finfo(dtype)
  special = [0.0, -0.0, math.inf, -math.inf, math.nan, float(info.max)]
  special += [float(info.smallest_subnormal), -float(info.smallest_normal)]
  with jax.enable_x64(dtype == jnp.float64):
    x = jnp.exp2(jnp.linspace(-30, 15.9, 301)).astype(dtype)
    x = jnp.concatenate([-x, jnp.array(special, dtype)])
    counts = get_counts(x, diagnostics.probe_counters())
    assert counts.dtype == jnp.float32
    np.testing.assert_array_equal(counts, count_with_numpy(x))


def test_values_and_cotangents_pass_through_bit_for_bit():
  @jax.jit
  def apply(x):
    out, vjp = jax.vjp(diagnostics.probe, x, COUNTER)
    return out, vjp(x)[0]

  for x in apply(EVERY_FLOAT16):
    assert np.asarray(x).tobytes() == EVERY_FLOAT16.tobytes()


def make_counters_grad(fun):
  return jax.grad(fun, argnums=1)


def shared_scan(x, counter):
  add = lambda s, row: (s + loss_fn(row, counter), None)
  return jax.lax.scan(add, 0.0, x)[0]


def own_scan(x, counters):
  add = lambda s, row_and_slot: (s + loss_fn(*row_and_slot), None)
  return jax.lax.scan(add, 0.0, (x, counters))[0]


def shared_vmap(x, counter):
  return jnp.sum(jax.vmap(loss_fn, (0, None))(x, counter))


def in_three_parts(x, counter):
  return sum(loss_fn(part, counter) for part in (x[:1], x[1:7], x[7:]))


EXPECTED = count_with_numpy(np.float32(X) / 64)
SIXTEEN = diagnostics.probe_counters(16)
WAYS = {
  "remat": (jax.jit(make_counters_grad(jax.checkpoint(loss_fn))), COUNTER),
  "reuse": (jax.jit(make_counters_grad(in_three_parts)), COUNTER),
  "scan, one counter": (make_counters_grad(shared_scan), COUNTER),
  "scan, a counter each": (make_counters_grad(own_scan), SIXTEEN),
  "scan and remat": (make_counters_grad(jax.checkpoint(shared_scan)), COUNTER),
  "vmap, one counter": (make_counters_grad(shared_vmap), COUNTER),
  "vmap, a counter each": (jax.vmap(make_counters_grad(loss_fn)), SIXTEEN),
  "vmap of gradients": (
    jax.vmap(make_counters_grad(loss_fn), (0, None)),
    COUNTER,
  ),
  "pmap": (jax.pmap(make_counters_grad(loss_fn), in_axes=(0, None)), COUNTER),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_counts_add_up_to_the_same(way):
  fun, counters = WAYS[way]
  if "scan" in way:
    double = lambda x, _: (x * 2, None)
    scan = lambda x: jax.lax.scan(double, x, length=2)[0]
    skip_if_jax_cannot(jax.grad(scan), 1.0)
  x = X
  if way == "pmap":
    require_devices(8)
    x = X.reshape(8, 2, 4, 8)
  counts = fun(x, counters).reshape(-1, BINS).sum(axis=0)
  np.testing.assert_array_equal(counts, EXPECTED)


@parametrize_slow("kind", [AxisType.Auto], [AxisType.Auto, AxisType.Explicit])
def test_counts_add_up_under_sharded_jit_by_one_small_all_reduce(kind):
  mesh = sharding.make_mesh((4, 2), ("data", "model"), kind)
  with jax.set_mesh(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
    fun = jax.jit(make_counters_grad(loss_fn)).lower(x, COUNTER).compile()
    counts = fun(x, jax.device_put(COUNTER, NamedSharding(mesh, P())))
  np.testing.assert_array_equal(counts, EXPECTED)
  assert "all-gather" not in fun.as_text()


WAYS_IN_SHARD_MAP = [*itertools.product((True, False), repeat=2)]


@parametrize_slow(
  "way", [(True, True), (False, False)], WAYS_IN_SHARD_MAP, ids=str
)
def test_counts_add_up_under_shard_map(way):
  inside, check_vma = way
  mesh = sharding.make_mesh((8,), ("data",))

  def on_each(x, counter):
    if not inside:
      return jax.lax.psum(loss_fn(x, counter), "data")
    counts = make_counters_grad(loss_fn)(x, counter)
    # With check_vma a counter that all share has got the sum already.
    return counts if check_vma else jax.lax.psum(counts, "data")

  fun = jax.shard_map(
    on_each,
    mesh=mesh,
    in_specs=(P("data"), P()),
    out_specs=P(),
    check_vma=check_vma,
  )
  counts = jax.jit(fun if inside else make_counters_grad(fun))(X, COUNTER)
  np.testing.assert_array_equal(counts, EXPECTED)


def test_under_shard_map_each_device_may_have_its_own_slot():
  mesh = sharding.make_mesh((8,), ("data",))

  def on_each(x, counters):
    return make_counters_grad(loss_fn)(x, counters[0])[None]

  for spec, factor in ((P("data"), 1), (P(), 8)):
    fun = jax.shard_map(
      on_each, mesh=mesh, in_specs=(spec, P("data")), out_specs=P("data")
    )
    counts = jax.jit(fun)(X, diagnostics.probe_counters(8)).sum(axis=0)
    np.testing.assert_array_equal(counts, factor * EXPECTED)


@pytest.mark.slow
def test_counts_are_exact_beyond_what_float32_can_count_one_by_one():
  counts = get_counts(jnp.ones(2**24 + 4, jnp.float16))
  assert counts.sum() == 2**24 + 4


@pytest.mark.slow
def test_more_numbers_than_an_int32_counts_are_counted_in_parts(monkeypatch):
  monkeypatch.setattr(_checks, "MAX_COUNT", 20)
  np.testing.assert_array_equal(get_counts(X[:, 0]), count_with_numpy(X[:, 0]))


def test_a_probe_is_exported_with_a_symbolic_batch_size():
  x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4, 2*b"), jnp.float16)
  exported = export.export(jax.jit(make_counters_grad(loss_fn)))(x, COUNTER)
  x = np.resize(X, (6, 4, 12))
  counts = jax.jit(exported.call)(x, COUNTER)
  np.testing.assert_array_equal(counts, count_with_numpy(np.float32(x) / 64))


def test_a_slot_that_is_not_differentiated_costs_nothing():
  def flops(fun):
    compiled = jax.jit(jax.grad(fun)).lower(X, COUNTER).compile()
    return compiled.cost_analysis()["flops"], compiled.as_text().count("fusion")

  plain = lambda x, counter: jnp.sum(x.astype(jnp.float32) ** 2) / 128
  assert flops(loss_fn) == flops(plain)


@pytest.mark.slow
def test_functions_that_read_counts_are_exact():
  x = jnp.array([0, 0, 0.75, 40000, -20000, jnp.inf, jnp.nan, 1], jnp.float16)
  metrics = diagnostics.probe_metrics(
    {"a": get_counts(x), "b": diagnostics.probe_counters((2,))}
  )
  assert {k: v.item() for k, v in metrics["a"].items()} == {
    "amax": 65504.0,
    "zero_fraction": 2 / 8,
    "near_overflow_fraction": 2 / 8,
    "nonfinite_fraction": 2 / 8,
  }
  assert all((v == jnp.zeros(2)).all() for v in metrics["b"].values())


@pytest.mark.parametrize(
  "x, largest",
  [
    (2.0**-24, 2.0**-24),
    (1.0, 2 - 2**-10),
    (3 * 2.0**-16, 2.0**-14 - 2.0**-24),
    (3 * 2.0**-15, 2.0**-13 - 2.0**-24),
    (3 * 2.0**-14, 2.0**-12 - 2.0**-23),
    (-60000.0, 65504.0),
    (2.0**30, 65536.0),
  ],
)
def test_the_maximum_is_the_largest_float16_of_its_binade(x, largest):
  counts = count_with_numpy([x, 0.0]).astype(np.float32)
  assert get_metrics(counts)["amax"] == largest


@jax.jit
def get_unscaled_metrics(counts, state):
  return diagnostics.probe_metrics(ols.unscale_grads(counts, state))


@pytest.mark.parametrize("x", [[0, 0.75, 40000, jnp.inf], [0]])
@pytest.mark.parametrize("scale", [1000.0, 2.0**-100, 2.0**126])
def test_it_does_not_matter_that_counts_are_unscaled(scale, x):
  state = ols.FixedLossScale(scale).init()
  counts = count_with_numpy(x).astype(np.float32)
  metrics = get_metrics(counts)
  assert metrics["zero_fraction"] == 1 / len(x)
  of_unscaled = get_unscaled_metrics(counts, state)
  for name, share in metrics.items():
    np.testing.assert_allclose(of_unscaled[name], share, rtol=1e-6)


# The behavior of the wrapper with probes.


def test_headroom_respects_the_hottest_probe():
  """A cotangent of 2**-2 behind a gradient of 2**-12: x is that small."""
  tx = ols.with_loss_scaling(optax.sgd(2.0**-10), ols.HeadroomLossScale())
  x = np.full(4, 2.0**-10, np.float16)

  def loss_fn(w, counter):
    y = diagnostics.probe(w.astype(jnp.float16) * x, counter)
    return jnp.sum(y.astype(jnp.float32)) / 4

  def step(carry, _):
    w, opt_state = carry
    grad_fn = ols.grad(loss_fn, opt_state, argnums=(0, 1))
    grad, counts = grad_fn(w, COUNTER)
    extra = diagnostics.probe_update_kwargs({"y": counts}, opt_state)
    updates, opt_state = tx.update(grad, opt_state, w, **extra)
    return (optax.apply_updates(w, updates), opt_state), None

  @jax.jit
  def train(w):
    return jax.lax.scan(step, (w, tx.init(w)), length=50)[0][1]

  opt_state = train(np.ones(4, np.float32))
  state = opt_state.loss_scale_state
  # 0.25 is in the binade whose top is 0.49976; 2**13 brings that to 4094.
  assert (state.total_notfinite, state.loss_scale) == (0, 2.0**13)


@pytest.mark.slow
@pytest.mark.parametrize(
  "x, scale, finite, amax",
  [
    ([0.5], 1.0, True, 0.999512),
    ([0.5], 2.0, True, 0.499756),
    ([0.0], 1.0, True, 0.0),
    ([math.nan, 0.5], 1.0, False, 0.999512),
    ([2.0**15], 2.0**-126, True, 3.4028235e38),
    ([2.0**-24], 2.0**126, True, 0.0),
  ],
)
def test_evidence_is_finiteness_and_the_unscaled_maximum(
  x, scale, finite, amax
):
  counts = {"a": get_counts(jnp.asarray(x)), "none": None}
  state = ols.FixedLossScale(scale).init()
  evidence = diagnostics.probe_update_kwargs(counts, state)
  assert set(evidence) == {"grads_finite", "grads_amax"}
  assert evidence["grads_finite"] == finite
  np.testing.assert_allclose(evidence["grads_amax"], amax, rtol=1e-5)


@pytest.mark.parametrize(
  "x, counter, error, message",
  [
    (jnp.array([1]), COUNTER, TypeError, "x must be a float or complex array"),
    ("x", COUNTER, TypeError, "got x = 'x'"),
    (X, jnp.zeros(42), ValueError, r"counter must be of shape \(..., 43\)"),
    (X, 0.0, ValueError, r"got shape \(\). Counters come from probe_counters"),
    (X, SIXTEEN, ValueError, "Pass one counter to each probe"),
    (X, COUNTER.astype(jnp.float16), TypeError, "counter must be float32"),
  ],
)
def test_a_wrong_call_says_what_to_do(x, counter, error, message):
  with pytest.raises(error, match=message):
    diagnostics.probe(x, counter)


def get_update_kwargs(counts):
  return diagnostics.probe_update_kwargs(counts, STATE)


def test_cotangents_that_are_not_counts_are_refused():
  for reader in (diagnostics.probe_metrics, get_update_kwargs):
    with pytest.raises(ValueError, match=r"counts must be of shape"):
      reader({"a": jnp.zeros(3)})


def test_probes_work_under_strict_promotion():
  with jax.numpy_dtype_promotion("strict"):
    counts = jax.eval_shape(get_counts, X)
    jax.eval_shape(diagnostics.probe_metrics, counts)
    jax.eval_shape(get_update_kwargs, counts)


@pytest.mark.slow
def test_the_transformer_of_the_examples_learns_and_loses_no_step(tmp_path):
  transformer = load_example("transformer")
  vars(transformer).update(LAYERS=2, WIDTH=32, CONTEXT=32, BATCH_SIZE=8)
  text = transformer.load_text()
  policy = ols.HeadroomLossScale(init_scale=1.0)
  run = transformer.train(text, policy, steps=40)
  assert run.losses[-5:].mean() < run.losses[0] - 0.5
  assert not run.skipped.any()
  assert run.scales[-1] > 2.0**8
  assert "largest cotangent" in transformer.make_table(run)
  transformer.plot(run).savefig(tmp_path / "curves.png")
  assert transformer.sample(run.params, "def ", 5, seed=0)[:4] == "def "
