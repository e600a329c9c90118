"""A wrong call is answered with what is wrong, what came, and what to do."""

import copy
import pickle

import equinox as eqx
from flax import nnx
from helpers.policy_models import run_policy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

NAN, INF = float("nan"), float("inf")
TX, STATE = optax.sgd(1.0), ols.FixedLossScale(8.0).init()
SCALED = ols.with_loss_scaling(TX)
NOT_NUMBERS = ["8", True, [8.0], np.ones(2), 1j, jnp.bool_(True), object]


def get_message(error, call):
  with pytest.raises(error) as info:
    call()
  return str(info.value)


SCALES = [0, -1.0, NAN, INF, 2.0**127]
OUT_OF_RANGE = {
  "init_scale": [*SCALES, 2.0**-127, 10**400],
  "min_scale": [*SCALES, 1e-45],
  "max_scale": SCALES,
  "growth_factor": [1, 1.0, 0.5, 0, -2, NAN, INF, 1 + 2**-24],
  "backoff_factor": [1, 1.0, 0.0, -0.5, 2, NAN, INF, 1 - 2**-25],
  "growth_interval": [0, -1, 1.5, NAN, INF, 2**31],
  "hysteresis": [0, -1, 1.5, NAN, INF, 2**31],
  "scale": SCALES,
  "loss_scale": SCALES,
  "value": SCALES,
  "max_norm": [0.0, -1.0, NAN, INF, 2.0**-127, 2.0**128],
}
# The functions that take these arguments. DynamicLossScale takes the others.
TAKES = {
  "scale": ols.FixedLossScale,
  "loss_scale": lambda x: ols.with_loss_scaling(TX, x),
  "value": lambda x: ols.set_loss_scale(STATE, x),
  "max_norm": lambda x: ols.with_loss_scaling(TX, max_norm=x),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_number_out_of_range_is_named_and_quoted(name):
  make_dynamic = lambda value: ols.DynamicLossScale(**{name: value})
  take = TAKES.get(name, make_dynamic)
  not_numbers = NOT_NUMBERS if name == "max_norm" else [None, *NOT_NUMBERS]
  cases = (ValueError, OUT_OF_RANGE[name]), (TypeError, not_numbers)
  for error, wrong in cases:
    for value in wrong:
      text = get_message(error, lambda v=value: take(v))
      assert f"{name} must be" in text
      assert f"got {name} = {value!r}" in text


@pytest.mark.parametrize(
  "name, values",
  [
    ("min_scale", [2.0**-126, 2.0**15]),
    ("max_scale", [2.0**15, 2.0**126]),
    ("growth_factor", [1 + 2**-23, 2.0**126]),
    ("backoff_factor", [2.0**-126, 1 - 2**-24]),
    ("growth_interval", [1, 2**31 - 1]),
    ("hysteresis", [1, 2**31 - 1]),
  ],
)
def test_the_bounds_of_a_hyperparameter_are_allowed_values(name, values):
  for value in values:
    policy = ols.DynamicLossScale(**{name: value})
    (scale,) = run_policy(policy, [True]).loss_scale
    assert 2.0**-126 <= scale <= 2.0**126
    if name.endswith("factor"):
      assert np.float32(value) != 1


def test_bounds_are_printed_in_readable_form():
  for call, bounds in {
    lambda: ols.DynamicLossScale(growth_interval=0): "[1, 2147483647]",
    lambda: ols.DynamicLossScale(growth_factor=0): "[1.0000001, 2**126]",
    lambda: ols.DynamicLossScale(min_scale=0): "[2**-126, 2**126]",
    lambda: ols.HeadroomLossScale(amax_history_len=0): "[1, 1048576]",
  }.items():
    assert bounds in get_message(ValueError, call)


def test_an_integer_hyperparameter_may_have_a_float_type():
  for value in (2, 2.0, np.float32(2), jnp.int32(2)):
    assert ols.DynamicLossScale(growth_interval=value).growth_interval == 2


# A function, arguments that it refuses, the error, and parts of its message.
REFUSED = {
  "bounds": (
    lambda bounds: ols.DynamicLossScale(init_scale=4.0, **bounds),
    [{"min_scale": 8.0}, {"max_scale": 2.0}],
    ValueError,
    ["min_scale <= init_scale <= max_scale"],
  ),
  "hysteresis_refill": (
    lambda refill: ols.DynamicLossScale(hysteresis_refill=refill),
    ["never", None, 1, "GROWTH"],
    ValueError,
    ["'growth', 'finite', 'backoff'", "{value!r}"],
  ),
  "loss_scale": (
    lambda loss_scale: ols.with_loss_scaling(TX, loss_scale),
    [ols.DynamicLossScale, "static", {}],
    TypeError,
    ["loss_scale must be a policy", "headroom' or a positive", "{value!r}"],
  ),
  "a policy class": (
    lambda loss_scale: ols.with_loss_scaling(TX, loss_scale),
    [ols.DynamicLossScale, ols.HeadroomLossScale],
    TypeError,
    ["got loss_scale = {value!r}", "Call it to create the policy."],
  ),
  "no optimizer": (
    ols.with_loss_scaling,
    [True, None, ols.FixedLossScale(1.0), 1e-3],
    TypeError,
    ["must be an optimizer such as optax.adam", "got inner = {value!r}"],
  ),
  "a factory": (
    ols.with_loss_scaling,
    [optax.adam, optax.GradientTransformation],
    TypeError,
    ["got inner = {value!r}", "Call it to create the optimizer."],
  ),
  "scaled twice": (
    lambda inner: ols.with_loss_scaling(inner).init(np.ones(2)),
    [SCALED, optax.chain(optax.clip(1.0), SCALED)],
    ValueError,
    ["inner must be an optimizer without loss scaling", "only once, as the"],
  ),
}


@pytest.mark.parametrize(
  "call, values, error, parts", REFUSED.values(), ids=REFUSED
)
def test_an_argument_that_is_refused_is_explained(call, values, error, parts):
  for value in values:
    text = get_message(error, lambda v=value: call(v))
    for part in parts:
      assert part.format(value=value) in text


def test_update_says_how_to_adopt_the_state_of_a_bare_optimizer():
  inner = optax.sgd(1.0, momentum=0.9)
  tx = ols.with_loss_scaling(inner)
  w = jnp.ones(2)
  old = inner.init(w)
  text = get_message(TypeError, lambda: tx.update(w, old, w))
  assert "tx.init(params)._replace(inner_state=state)" in text
  jax.eval_shape(tx.update, w, tx.init(w)._replace(inner_state=old), w)


def test_update_refuses_the_pair_that_value_and_grad_returns():
  pair = np.ones(2), np.ones(2)
  for params in pair[0], {"w": pair}, pair:
    opt_state = SCALED.init(params)
    for loss in np.float32(1), (np.float32(1), {}):
      wrong = lambda loss=loss, p=params, s=opt_state: SCALED.update(
        (loss, p), s, p
      )
      text = get_message(TypeError, wrong)
      assert "update takes the gradients, got a pair" in text
      assert "loss, grads = value_and_grad(loss_fn, opt_state)(" in text
    jax.eval_shape(SCALED.update, params, opt_state, params)
  frozen = np.ones(2), None
  jax.eval_shape(SCALED.update, frozen, SCALED.init(frozen))


each_wrapper = pytest.mark.parametrize(
  "wrap", [ols.with_loss_scaling, ols.with_master_weights]
)


@each_wrapper
def test_a_missing_attribute_of_a_state_leads_to_the_inner_state(wrap):
  params = np.ones(2, np.float32)
  for inner, name in {
    optax.inject_hyperparams(optax.sgd)(0.5): "hyperparams",
    optax.MultiSteps(TX, 2): "gradient_step",
    optax.contrib.schedule_free_sgd(0.5): "b1",
  }.items():
    opt_state = wrap(inner).init(params)
    text = get_message(
      AttributeError, lambda s=opt_state, n=name: getattr(s, n)
    )
    assert f"{type(opt_state).__name__} has no attribute {name!r}" in text
    assert "opt_state.inner_state" in text
    assert f"optax.tree.get(opt_state, {name!r})" in text
    # The advice, followed.
    value = optax.tree.get(opt_state, name)
    assert value is getattr(opt_state.inner_state, name)


@each_wrapper
def test_a_missing_attribute_of_a_state_is_missing_for_all_protocols(wrap):
  opt_state = wrap(optax.adam(1.0)).init(np.ones(2, np.float32))
  for name in "__array__", "__jax_array__", "dtype":
    assert not hasattr(opt_state, name)
  treedef = jax.tree.structure(opt_state)
  for copied in (
    pickle.loads(pickle.dumps(opt_state)),
    copy.copy(opt_state),
    copy.deepcopy(opt_state),
    opt_state._replace(inner_state=opt_state.inner_state),
  ):
    assert jax.tree.structure(copied) == treedef


BOTH = ols.value_and_grad, ols.grad
each_function = pytest.mark.parametrize("differentiate", BOTH)


@pytest.mark.parametrize(
  "loss, error, text",
  [
    (jnp.int32(1), TypeError, "float dtype, got a loss of int32"),
    (True, TypeError, "float dtype, got a loss of bool"),
    (jnp.complex64(1), TypeError, "float dtype, got a loss of complex64"),
    (jnp.ones(3), ValueError, r"scalar loss, got a loss of shape (3,)"),
    (jnp.ones((1,)), ValueError, r"scalar loss, got a loss of shape (1,)"),
    (None, TypeError, "scalar loss, got NoneType"),
    ((1.0, {}), TypeError, "pass has_aux=True"),
  ],
)
@each_function
def test_a_loss_that_is_no_scalar_is_refused(differentiate, loss, error, text):
  got = get_message(error, lambda: differentiate(lambda w: loss, STATE)(1.0))
  assert "fun must return a" in got
  assert text in got


@each_function
def test_has_aux_without_a_pair_is_refused(differentiate):
  w = np.float32(1)
  for out in w, (w,), (w, 1, 2), {0: w}:
    fun = differentiate(lambda w, out=out: out, STATE, has_aux=True)
    text = get_message(TypeError, lambda f=fun: f(w))
    got = "float32[]" if out is w else type(out).__name__
    assert f"return a pair (loss, aux) when has_aux=True, got {got}." in text
    assert "Leave out has_aux, or return (loss, aux)." in text
  fun = differentiate(lambda w: ((w, w), w), STATE, has_aux=True)
  text = get_message(TypeError, lambda: fun(w))
  assert "fun must return a scalar loss, got tuple" in text
  assert "pass has_aux" not in text


def loss_of(w):
  return jnp.sum(w**2)


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_an_axis_that_is_not_mapped_is_named(options):
  for axis_name, unbound in ("batch", "batch"), (("dat", "data"), "dat"):
    tx = ols.with_loss_scaling(TX, axis_name=axis_name, **options)
    update = jax.vmap(
      lambda w, tx=tx: tx.update(w, tx.init(w)), axis_name="data"
    )
    text = get_message(
      NameError, lambda u=update: jax.eval_shape(u, np.ones(2))
    )
    assert "axis_name must be an axis of the pmap, shard_map or vmap" in text
    assert f"got axis_name = {unbound!r}" in text


@pytest.mark.parametrize(
  "fun",
  [
    jax.grad(loss_of),
    jax.jit(jax.value_and_grad(loss_of)),
    jax.value_and_grad(loss_of, argnums=(0,)),
    eqx.filter_value_and_grad(loss_of),
    nnx.value_and_grad(loss_of),
    nnx.jit(nnx.value_and_grad(loss_of)),
  ],
  ids=["grad", "jit", "argnums", "equinox", "nnx", "nnx.jit"],
)
@each_function
def test_a_function_differentiated_already_is_refused(differentiate, fun):
  fun = differentiate(fun, STATE)
  text = get_message((TypeError, ValueError), lambda: fun(jnp.ones(2)))
  assert "fun must return a scalar loss, got" in text
  assert "If fun is already differentiated" in text
  assert "pass the loss function itself" in text


@each_function
def test_missing_and_swapped_arguments_are_named(differentiate):
  """The most common mistakes: swapped arguments, or params as the state."""
  call = lambda *args: lambda: differentiate(*args)
  for wrong in 3.0, STATE:
    text = get_message(TypeError, call(wrong, loss_of))
    assert "fun must be a function, got fun " in text
  text = get_message(ValueError, call(loss_of, {"w": np.ones(2)}))
  assert "state must hold a loss-scale state, got a dict" in text
  call = lambda: differentiate(loss_of, STATE, using="jax")
  text = get_message(TypeError, call)
  assert "using must be a function like jax.value_and_grad" in text
  text = get_message(ValueError, lambda: ols.scale_loss(STATE, np.float32(1)))
  assert "state must hold a loss-scale state" in text


LARGE = {"w": jnp.ones((100, 100))}, [0.1] * 100


def test_values_longer_than_a_line_are_shown_by_their_type():
  for name, call in {
    "fun": lambda x: ols.value_and_grad(x, loss_of),
    "inner": ols.with_loss_scaling,
    "loss_scale": lambda x: ols.with_loss_scaling(TX, x),
    "policy": lambda x: ols.loss_scale_metrics(STATE, policy=x),
    "value": lambda x: ols.set_loss_scale(STATE, x),
  }.items():
    text = get_message(TypeError, lambda c=call: c(LARGE))
    assert f"got {name} of type tuple." in text
  for report in "find_overflow", "count_flops", "compare_precision":
    call = lambda name=report: getattr(ols.diagnostics, name)(LARGE[0])
    text = get_message(TypeError, call)
    assert "got fun of type dict." in text
    assert f"Write {report}(fun, *args)" in text


@each_function
@pytest.mark.parametrize(
  "argnums",
  [
    *("w", True, 1.5, {}, {"w": 1}, LARGE, LARGE[0]["w"], (0, True)),
    nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
    eqx.nn.Linear(2, 2, key=jax.random.key(0)),
  ],
  ids=[
    *("str", "bool", "float", "empty", "dict", "large", "array", "tuple"),
    *("nnx", "equinox"),
  ],
)
def test_loss_arguments_as_argnums_raise_an_error(differentiate, argnums):
  call = lambda: differentiate(loss_of, STATE, argnums, LARGE)
  text = get_message(TypeError, call)
  assert "argnums must be an integer or a sequence of integers, got" in text
  assert "Write value_and_grad(loss_fn, opt_state)(params, batch)." in text


def test_argnums_may_be_any_integers_or_diff_states_of_flax_nnx():
  for argnums in (np.int64(1), jnp.int32(1), [1], (1,)):
    fun = ols.grad(lambda x, w: x * loss_of(w), STATE, argnums)
    grads = jax.jit(fun)(1.0, 3.0)
    assert jax.tree.leaves(grads) == [6.0]
  loss_fn = lambda model: jnp.sum(model(jnp.ones((1, 2))))
  part = nnx.DiffState(0, nnx.PathContains("bias"))
  fun = ols.grad(loss_fn, STATE, part, using=nnx.value_and_grad)
  (grad,) = jax.tree.leaves(nnx.jit(fun)(nnx.Linear(2, 1, rngs=nnx.Rngs(0))))
  assert grad.tolist() == [1.0]


def test_a_state_that_changes_its_structure_is_refused():
  grow = lambda updates, state, params=None: (updates, {"new": updates})
  inner = optax.GradientTransformation(lambda params: (), grow)
  tx = ols.with_loss_scaling(inner)
  for update in (tx.update, jax.jit(tx.update)):
    call = lambda u=update: u(jnp.ones(2), tx.init(1.0))
    text = get_message(ValueError, call)
    assert "The state of inner must keep its structure" in text
