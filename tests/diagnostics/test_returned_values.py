"""check_step looks at what a step returns, also after an overflow."""

import functools

import equinox as eqx
from flax import nnx
from flax.training import train_state
from helpers import mark_slow_params
from helpers.sharding import make_mesh, P
from helpers.usual_losses import BATCH, PARAMS
import jax
from jax import lax
from jax.experimental import io_callback
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

check_step = functools.partial(diagnostics.check_step, progress=False)

OLD_STATE = "returns an old loss-scale state"
NO_STATE = "does not return the opt_state that update returns"
NO_PARAMS = "does not return parameters that depend on the updates"
PUT_BACK = "After an overflow the step returns the old loss-scale state"
NO_UPDATE = "update does not run if the gradients overflow"
CONSTANT_SCALE = "returns a constant loss scale"
UNUSED_STATE = "update does not use the loss-scale state among the arguments"
OLD_INNER_STATE = "returns an old state of the inner optimizer"
UNCHANGED_PARAMS = "returns the old parameters, although the updates are not"
HIDDEN = "An overflow is hidden from update"
LOST = "No parameter changes, although the updates are not zero"
RETURNED = "the new parameters and the new loss-scale state are returned"


@ols.autocast
def loss_fn(params, batch):
  return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - 1) ** 2)


def make_step(
  make_result, inner=None, policy="dynamic", params=None, loss=None
):
  """Returns a step and its arguments.

  Args:
    make_result: computes the result from the old parameters and state, the new
      ones, and whether the gradients are finite.
    inner: the optimizer.
    policy: the policy.
    params: the parameters.
    loss: the loss.
  """
  tx = ols.with_loss_scaling(inner or optax.adam(1e-2), policy)
  params = {"w": PARAMS["w"]} if params is None else params

  @jax.jit
  def step(params, state, batch):
    grads = ols.grad(loss or loss_fn, state)(params, batch)
    updates, new_state = tx.update(grads, state, params)
    new_params = optax.apply_updates(params, updates)
    finite = ols.all_finite(grads)
    return make_result((params, state), (new_params, new_state), finite)

  return step, (params, tx.init(params), BATCH)


def list_causes(step, args):
  return [problem.cause for problem in check_step(step, *args).problems]


IDENTITY = optax.identity()


def as_train_state(params, state):
  return train_state.TrainState(0, None, params, IDENTITY, state)


def where(finite, new, old):
  return jax.tree.map(functools.partial(jnp.where, finite), new, old)


def put_back_scale(new_state, state):
  return new_state._replace(loss_scale_state=state.loss_scale_state)


RETURN_NEW = lambda old, new, finite: new
SOUND = {
  "a tuple": RETURN_NEW,
  "a train state": lambda old, new, finite: as_train_state(*new),
  "a dict with metrics": lambda old, new, finite: {
    "params": new[0],
    "opt": [new[1]],
    "metrics": ols.loss_scale_metrics(new[1]),
  },
  "leaves": lambda old, new, finite: jax.tree.leaves(new),
  "selected parameters": lambda old, new, finite: (
    where(finite, new[0], old[0]),
    new[1],
  ),
  "the state of the best step, too": lambda old, new, finite: (
    new,
    where(finite & False, new, old),
  ),
  "a capped scale": lambda old, new, finite: (
    new[0],
    ols.set_loss_scale(
      new[1], jnp.minimum(new[1].loss_scale_state.loss_scale, 2.0**20)
    ),
  ),
  "flat parameters": lambda old, new, finite: (
    jax.flatten_util.ravel_pytree(new[0])[0],
    new[1],
  ),
  "parameters of an ensemble": lambda old, new, finite: (new, old[0]),
}
MISTAKES = {
  "the old state": (lambda old, new, finite: (new[0], old[1]), OLD_STATE),
  "a train state with the old state": (
    lambda old, new, finite: as_train_state(new[0], old[1]),
    OLD_STATE,
  ),
  "the old state, and metrics of the new one": (
    lambda old, new, finite: (
      new[0],
      old[1],
      ols.loss_scale_metrics(new[1]),
    ),
    OLD_STATE,
  ),
  "the old scale in the new state": (
    lambda old, new, finite: (new[0], put_back_scale(new[1], old[1])),
    OLD_STATE,
  ),
  "no state": (lambda old, new, finite: new[0], NO_STATE),
  "a list of parameters": (
    lambda old, new, finite: jax.tree.leaves(new[0]),
    NO_STATE,
  ),
  "the old parameters": (lambda old, new, finite: (old[0], new[1]), NO_PARAMS),
  "a train state with the old parameters": (
    lambda old, new, finite: as_train_state(old[0], new[1]),
    NO_PARAMS,
  ),
  "the old parameters, and the norm of the new ones": (
    lambda old, new, finite: (old[0], new[1], optax.tree.norm(new[0])),
    NO_PARAMS,
  ),
  "the wrong branch of the parameters": (
    lambda old, new, finite: (where(finite, old[0], new[0]), new[1]),
    UNCHANGED_PARAMS,
  ),
  "the old inner state": (
    lambda old, new, finite: (
      new[0],
      new[1]._replace(inner_state=old[1].inner_state),
    ),
    OLD_INNER_STATE,
  ),
  "a constant scale": (
    lambda old, new, finite: (new[0], ols.set_loss_scale(new[1], 2.0**10)),
    CONSTANT_SCALE,
  ),
  "no parameters": (lambda old, new, finite: new[1], NO_PARAMS),
  "all selected": (lambda old, new, finite: where(finite, new, old), PUT_BACK),
  "the state selected by cond": (
    lambda old, new, finite: (
      new[0],
      lax.cond(finite, lambda: new[1], lambda: old[1]),
    ),
    PUT_BACK,
  ),
  "a train state selected by cond": (
    lambda old, new, finite: lax.cond(
      finite, lambda: as_train_state(*new), lambda: as_train_state(*old)
    ),
    PUT_BACK,
  ),
  "select_if_finite of the state": (
    lambda old, new, finite: (
      new[0],
      ols.select_if_finite(new[1], new[1], old[1]),
    ),
    PUT_BACK,
  ),
  "the scale selected": (
    lambda old, new, finite: (
      new[0],
      where(finite, new[1], put_back_scale(new[1], old[1])),
    ),
    PUT_BACK,
  ),
}


@pytest.mark.parametrize("name", mark_slow_params({"a tuple", "leaves"}, SOUND))
def test_a_step_that_returns_what_update_computes_has_no_problem(name):
  check = check_step(*flat(make_step(SOUND[name])))
  assert check.is_sound, str(check)
  assert RETURNED in check.passed


@pytest.mark.parametrize(
  "name",
  mark_slow_params(
    {"the old state", "no state", "the old parameters", "all selected"},
    MISTAKES,
  ),
)
def test_a_step_that_returns_something_else_has_a_problem(name):
  make_result, cause = MISTAKES[name]
  check = check_step(*flat(make_step(make_result)))
  (problem,) = check.problems
  assert cause in problem.cause
  assert problem.fix
  assert RETURNED not in check.passed


def flat(step_and_args):
  step, args = step_and_args
  return step, *args


def test_with_every_policy_a_state_that_is_put_back_is_found():
  select = lambda old, new, finite: where(finite, new, old)
  hesitant = ols.DynamicLossScale(2.0**6, hysteresis=3)
  for policy in "headroom", 64.0, hesitant:
    (cause,) = list_causes(*make_step(select, policy=policy))
    assert PUT_BACK in cause
    assert list_causes(*make_step(RETURN_NEW, policy=policy)) == []


def test_an_overflowing_step_that_puts_its_state_back_is_not_said_to_recover():
  step, args = make_step(MISTAKES["all selected"][0])
  args = args[0], ols.set_loss_scale(args[1], 2.0**60), args[2]
  check = check_step(step, *args)
  assert PUT_BACK in check.problems[0].cause
  assert "decreases on its own" not in str(check)


def make_guarded_step(guard):
  """Returns a step that calls update only if a guard of gradients is true."""
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)

    def apply():
      updates, new_state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), new_state

    return lax.cond(guard(grads), apply, lambda: (params, state))

  params = {"w": PARAMS["w"]}
  return step, (params, tx.init(params), BATCH)


@pytest.mark.parametrize(
  "guard",
  [
    ols.all_finite,
    lambda grads: jnp.isfinite(optax.tree.norm(grads)),
    lambda grads: optax.tree.norm(grads) < 1e6,
  ],
)
def test_a_branch_on_finite_gradients_around_update_is_a_problem(guard):
  check = check_step(*flat(make_guarded_step(guard)))
  (problem,) = check.problems
  assert NO_UPDATE in problem.cause
  assert "whether update runs" not in str(check)


@pytest.mark.parametrize(
  "guard", [lambda grads: ~ols.all_finite(grads), lambda grads: jnp.array(0)]
)
def test_nothing_is_said_of_the_gradients_of_an_update_that_did_not_run(guard):
  check = check_step(*flat(make_guarded_step(guard)))
  assert check.is_sound
  assert "update is in a branch that was not taken" in str(check)
  assert "zero" not in str(check)
  assert "the gradients are finite" not in check.passed


def half_loss(params, batch):
  hidden = jnp.tanh(batch["x"].astype(params["w"].dtype) @ params["w"])
  return jnp.mean((hidden.astype(jnp.float32) - 1) ** 2)


@pytest.mark.parametrize(
  "replace",
  [
    jnp.nan_to_num,
    lambda x: jnp.where(jnp.isfinite(x), x, 0),
    lambda x: jnp.where(jnp.abs(x) < 1e3, x, 0),
  ],
)
def test_an_overflow_that_would_be_hidden_is_found_on_a_finite_batch(replace):
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    updates, state = tx.update(jax.tree.map(replace, grads), state, params)
    return optax.apply_updates(params, updates), state

  params = {"w": PARAMS["w"]}
  (problem,) = check_step(step, params, tx.init(params), BATCH).problems
  assert problem.cause.startswith("An overflow is hidden from update")


def test_a_step_whose_gradients_overflow_with_no_scale_is_sound():
  in_float32 = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
  check = check_step(*flat(make_step(RETURN_NEW, loss=in_float32)))
  assert check.is_sound, str(check)
  assert RETURNED in check.passed


def make_clipped_step(clip):
  """Returns a step that changes its gradients before `update`."""
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state, batch):
    updates, new_state = tx.update(clip(params, state, batch), state, params)
    return optax.apply_updates(params, updates), new_state

  params = {"w": PARAMS["w"]}
  return step, (params, tx.init(params), BATCH)


def test_clipping_that_makes_an_inf_finite_but_no_nan_is_found():
  def clip(params, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    return jax.tree.map(lambda x: jnp.clip(x, -1, 1), grads)

  (cause,) = list_causes(*make_clipped_step(clip))
  assert HIDDEN in cause


def test_a_step_that_hides_its_overflow_is_not_said_to_be_skipped():
  def mask(params, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), grads)

  step, (params, state, batch) = make_clipped_step(mask)
  state = ols.set_loss_scale(state, 2.0**40)
  check = check_step(step, params, state, batch)
  hidden, overflow = check.problems
  assert HIDDEN in hidden.cause
  assert overflow.cause.startswith("The backward pass overflows (loss scale")
  assert "decreases on its own" not in overflow.fix


def test_a_second_attempt_with_a_lower_scale_hides_no_overflow():
  def try_twice(params, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    scale = state.loss_scale_state.loss_scale
    lower = ols.set_loss_scale(state, scale / 2**8)
    others = ols.grad(loss_fn, lower)(params, batch)
    return where(ols.all_finite(grads), grads, others)

  assert list_causes(*make_clipped_step(try_twice)) == []


def test_a_state_that_the_step_makes_anew_is_a_problem():
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state, batch):
    state = tx.init(params)
    grads = ols.grad(loss_fn, state)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = {"w": PARAMS["w"]}
  check = check_step(step, params, tx.init(params), BATCH)
  assert any(UNUSED_STATE in problem.cause for problem in check.problems)
  assert RETURNED not in check.passed


def test_updates_that_are_too_small_for_float32_are_no_problem():
  params = {"w": jnp.full_like(PARAMS["w"], 0.75)}
  step = make_step(RETURN_NEW, optax.sgd(1e-12), params=params)
  check = check_step(*flat(step))
  assert check.is_sound
  assert "the updates of this step are too small for float32" in str(check)


def test_updates_that_are_all_zero_are_no_problem_but_a_fact():
  step = make_step(RETURN_NEW, optax.set_to_zero())
  check = check_step(*flat(step))
  assert check.is_sound
  assert "all updates of this step are zero" in str(check)


def round_by_bits(params):
  bits = lax.bitcast_convert_type(params["w"], jnp.uint32)
  return {"w": lax.bitcast_convert_type(bits & ~jnp.uint32(1), jnp.float32)}


def quantize(params):
  return {"w": jnp.round(params["w"] * 100).astype(jnp.int8)}


@pytest.mark.parametrize("convert", [round_by_bits, quantize])
def test_parameters_that_are_converted_to_integers_are_not_judged(convert):
  make_result = lambda old, new, finite: (convert(new[0]), new[1])
  check = check_step(*flat(make_step(make_result)))
  assert check.is_sound, str(check)
  assert "it converts floats to integers" in str(check)


def test_a_metric_of_the_shape_of_a_parameter_may_be_nan():
  def make_result(old, new, finite):
    return new, {"recall": 0 * jnp.log(-jnp.ones_like(old[0]["w"]))}

  assert list_causes(*make_step(make_result)) == []


def test_a_state_of_the_shape_of_a_parameter_may_not_be_nan():
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, state, statistics, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jnp.log(-statistics)

  params = {"w": PARAMS["w"]}
  args = params, tx.init(params), jnp.ones_like(params["w"]), BATCH
  (cause,) = list_causes(step, args)
  assert "log" in cause


@pytest.mark.parametrize(
  "dtype", mark_slow_params({jnp.float16}, [jnp.float16, jnp.bfloat16])
)
@pytest.mark.parametrize("inner", [optax.sgd(1e-9), optax.adam(1e-7)])
def test_updates_that_are_lost_in_half_precision_are_a_problem(dtype, inner):
  params = {"w": jnp.full_like(PARAMS["w"], 0.75, dtype)}
  check = check_step(
    *flat(make_step(RETURN_NEW, inner, "dynamic", params, half_loss))
  )
  (problem,) = check.problems
  assert LOST in problem.cause and problem.cause.endswith(
    f"{params['w'].dtype}."
  )
  assert "Keep the parameters in float32" in problem.fix


def test_updates_of_zero_in_half_precision_are_sound():
  half = {"w": PARAMS["w"].astype(jnp.float16)}
  warmup = optax.sgd(optax.linear_schedule(0.0, 0.1, 100))
  for inner in (warmup, optax.MultiSteps(optax.sgd(0.1), 4)):
    step, args = make_step(RETURN_NEW, inner, "dynamic", half, half_loss)
    assert list_causes(step, args) == []


LARGE_WEIGHTS = {"w": jnp.full_like(PARAMS["w"], 0.75, jnp.float16)}


@pytest.mark.parametrize("num_lost, is_problem", [(18, True), (6, False)])
def test_updates_of_which_most_are_lost_are_a_problem(num_lost, is_problem):
  size = PARAMS["w"].size
  is_large = jnp.arange(size).reshape(PARAMS["w"].shape) < num_lost
  params = {"w": jnp.where(is_large, 0.75, 0).astype(jnp.float16)}
  step, args = make_step(
    RETURN_NEW, optax.adam(1e-4), "dynamic", params, half_loss
  )
  causes = list_causes(step, args)
  assert len(causes) == is_problem
  if is_problem:
    assert f"{num_lost / size:.0%} of the updates don't change" in causes[0]
    assert "next number of float16" in causes[0]


def test_master_copies_that_a_step_keeps_itself_lose_no_updates():
  tx = ols.with_loss_scaling(optax.adam(1e-5))

  def step(params, state, masters, batch):
    grads = ols.grad(half_loss, state)(params, batch)
    updates, state = tx.update(grads, state, masters)
    masters = optax.apply_updates(masters, updates)
    return optax.tree.cast(masters, jnp.float16), state, masters

  masters = optax.tree.cast(LARGE_WEIGHTS, jnp.float32)
  args = LARGE_WEIGHTS, tx.init(masters), masters, BATCH
  assert list_causes(step, args) == []


def test_rows_of_an_embedding_that_a_batch_does_not_use_are_not_lost():
  def loss(params, batch):
    rows = params["table"][batch["ids"]]
    return jnp.mean((rows.astype(jnp.float32) - 1) ** 2)

  tx = ols.with_loss_scaling(optax.sgd(1.0))

  def step(params, state, batch):
    updates, state = tx.update(ols.grad(loss, state)(params, batch), state)
    return optax.apply_updates(params, updates), state

  params = {"table": jnp.full((64, 4), 0.75, jnp.float16)}
  args = params, tx.init(params), {"ids": jnp.array([3, 5])}
  assert list_causes(step, args) == []


def test_the_stacked_updates_of_a_loop_are_not_counted_as_lost():
  tx = ols.with_loss_scaling(optax.sgd(1e-3))

  def step(params, state, batches):
    def body(carry, batch):
      params, state = carry
      grads = ols.grad(half_loss, state)(params, batch)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    return lax.scan(body, (params, state), batches)[0]

  batches = jax.tree.map(lambda x: jnp.stack([x] * 4), BATCH)
  params = {"w": LARGE_WEIGHTS["w"].at[0].set(0)}
  assert list_causes(step, (params, tx.init(params), batches)) == []


def test_a_scalar_parameter_that_does_not_change_is_found():
  tx = ols.with_loss_scaling(optax.sgd(1e-9))

  def step(scale, state, batch):
    loss = lambda scale: jnp.mean(scale * batch["x"] ** 2).astype(jnp.float32)
    updates, state = tx.update(ols.grad(loss, state)(scale), state, scale)
    return optax.apply_updates(scale, updates), state

  scale = jnp.float16(0.75)
  (cause,) = list_causes(step, (scale, tx.init(scale), BATCH))
  assert LOST in cause


def test_an_nnx_optimizer_that_is_updated_in_place_is_checked():
  def make_model(put_back):
    model = nnx.Linear(6, 2, rngs=nnx.Rngs(0))
    tx = ols.with_loss_scaling(optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
      # A copy, since the variables change in place.
      old = jax.tree.map(lambda x: x, nnx.state(optimizer))
      cast = ols.autocast(lambda model, x: jnp.mean((model(x) - 1) ** 2))
      grads = ols.grad(cast, optimizer, using=nnx.value_and_grad)(model, x)
      optimizer.update(model, grads)
      if put_back:
        new = nnx.state(optimizer)
        finite = ols.all_finite(grads)
        nnx.update(optimizer, where(finite, new, old))

    return step, (model, optimizer, BATCH["x"])

  check = check_step(*flat(make_model(False)))
  assert check.is_sound and RETURNED in check.passed
  (cause,) = list_causes(*make_model(True))
  assert PUT_BACK in cause


def test_a_state_in_an_equinox_module_is_checked():
  class State(eqx.Module):
    params: dict
    opt_state: object

  old = lambda old, new, finite: State(new[0], old[1])
  new = lambda old, new, finite: State(*new)
  (cause,) = list_causes(*make_step(old))
  assert OLD_STATE in cause
  assert list_causes(*make_step(new)) == []


def test_the_state_of_the_second_of_two_optimizers_is_checked():
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def make_gan(returns_old):
    def step(g, d, g_state, d_state, batch):
      updates, new_g_state = tx.update(
        ols.grad(loss_fn, g_state)(g, batch), g_state
      )
      g = optax.apply_updates(g, updates)
      updates, new_d_state = tx.update(
        ols.grad(loss_fn, d_state)(d, batch), d_state
      )
      d = optax.apply_updates(d, updates)
      return g, d, new_g_state, d_state if returns_old else new_d_state

    params = {"w": PARAMS["w"]}
    return step, (params, params, tx.init(params), tx.init(params), BATCH)

  assert list_causes(*make_gan(False)) == []
  (cause,) = list_causes(*make_gan(True))
  assert OLD_STATE in cause


def make_epoch(carry_old, returns_params=True):
  """Returns a scan of training steps, with the norm after each step."""
  step, (params, state, batch) = make_step(RETURN_NEW)

  def epoch(params, state, batch):
    def body(carry, _):
      params, new_state = step(*carry, batch)
      carry = params, carry[1] if carry_old else new_state
      return carry, optax.tree.norm(params)

    carry, norms = lax.scan(body, (params, state), length=3)
    return *(carry if returns_params else (params, carry[1])), norms

  return epoch, (params, state, batch)


@pytest.mark.slow
def test_a_scan_of_steps_and_a_population_are_checked():
  assert list_causes(*make_epoch(False)) == []
  (cause,) = list_causes(*make_epoch(True))
  assert OLD_STATE in cause
  (cause,) = list_causes(*make_epoch(False, returns_params=False))
  assert NO_PARAMS in cause
  for name, expected in ("a tuple", None), ("all selected", PUT_BACK):
    make_result = SOUND.get(name) or MISTAKES[name][0]
    step, args = make_step(make_result)
    params, state = jax.tree.map(lambda x: jnp.stack([x, x]), args[:2])
    population = jax.vmap(step, (0, 0, None))
    causes = list_causes(population, (params, state, BATCH))
    assert len(causes) == bool(expected)
    assert all(expected in cause for cause in causes)


def test_a_part_of_a_step_is_not_judged_by_what_it_returns():
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def loss_only(params, state, batch):
    loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
    tx.update(grads, state)
    return loss

  params = {"w": PARAMS["w"]}
  check = check_step(loss_only, params, tx.init(params), BATCH)
  assert check.is_sound
  assert "neither new parameters nor a new opt_state" in str(check)


@pytest.mark.slow
def test_a_step_with_a_callback_is_run_again_with_an_overflow():
  seen = []

  def note(finite):
    seen.append(bool(finite))
    return np.float32(1)

  def make_result(old, new, finite):
    one = io_callback(note, jax.ShapeDtypeStruct((), "float32"), finite)
    return new, {"metric": one}

  check = check_step(*flat(make_step(make_result)))
  assert check.is_sound and RETURNED in check.passed
  assert "after an overflow, since" not in str(check)
  assert not all(seen)


@pytest.mark.parametrize("checks_grads", [False, True])
def test_a_step_may_raise_an_error_if_an_array_is_not_finite(checks_grads):
  def make_result(old, new, finite):
    is_bad = ~finite if checks_grads else jnp.array(False)
    return eqx.error_if(new, is_bad, "planted")

  check = check_step(*flat(make_step(make_result)))
  assert check.is_sound and RETURNED in check.passed
  is_named = "after an overflow, since it raises an error" in str(check)
  assert is_named == checks_grads


def test_a_step_that_prints_and_loses_its_updates_prints_once():
  seen = []

  def make_result(old, new, finite):
    jax.debug.callback(lambda x: seen.append(bool(x)), finite)
    return new

  inner = optax.sgd(1e-9)
  (cause,) = list_causes(
    *make_step(make_result, inner, "dynamic", LARGE_WEIGHTS, half_loss)
  )
  jax.effects_barrier()
  assert LOST in cause
  assert seen == [True]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_step_that_prints_is_checked_after_an_overflow_and_prints_once(
  ordered,
):
  seen = []

  def make_result(old, new, finite):
    log = lambda finite: seen.append(bool(finite))
    jax.debug.callback(log, finite, ordered=ordered)
    return new[0], where(finite, new[1], old[1])

  check = check_step(*flat(make_step(make_result)))
  (problem,) = check.problems
  assert problem.cause.startswith(PUT_BACK)
  jax.effects_barrier()
  assert seen == [True]


def test_a_state_in_a_ref_is_not_judged():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  params = {"w": PARAMS["w"]}
  refs = jax.tree.map(jax.new_ref, tx.init(params))

  def step(params, refs, batch):
    state = jax.tree.map(lambda ref: ref[...], refs)
    updates, state = tx.update(ols.grad(loss_fn, state)(params, batch), state)
    for ref, x in zip(*map(jax.tree.leaves, (refs, state)), strict=True):
      ref[...] = x
    return optax.apply_updates(params, updates)

  check = check_step(step, params, refs, BATCH)
  assert check.is_sound, str(check)
  assert "what the step returns, since it uses a Ref" in str(check)


def test_a_step_whose_loss_scale_is_a_constant_is_not_run_with_an_overflow():
  tx = ols.with_loss_scaling(optax.sgd(0.1), 64.0)
  params = {"w": PARAMS["w"]}
  state = tx.init(params)

  def step(params, batch):
    updates, new = tx.update(ols.grad(loss_fn, state)(params, batch), state)
    return optax.apply_updates(params, updates), new

  check = check_step(step, params, BATCH)
  assert check.is_sound
  assert "since its loss scale is not among its arguments" in str(check)


@pytest.mark.parametrize(
  "shape, axes", [((4,), ("data",)), ((2, 2), ("data", "model"))]
)
@pytest.mark.parametrize("reduce", [True, False])
def test_gradients_that_are_not_averaged_over_devices_are_a_problem(
  shape, axes, reduce
):
  mesh = make_mesh(shape, axes)
  tx = ols.with_loss_scaling(optax.sgd(0.1), axis_name="data")

  def step(params, state, batch):
    loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
    if reduce:
      grads = lax.pmean(grads, "data")
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  # The loss may differ between devices: it is a metric.
  on_devices = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), P(), P("data")),
    out_specs=P(),
    check_vma=False,
  )
  params, batch = {"w": PARAMS["w"]}, {"x": BATCH["x"]}
  causes = list_causes(on_devices, (params, tx.init(params), batch))
  if reduce:
    assert causes == []
  else:
    (cause,) = causes
    assert cause.startswith("The copies of the result 0/w on different devices")


def average_by_hand(grads, average, opt_state):
  return jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, average, grads)


def selected_average(grads, average, opt_state):
  new = average_by_hand(grads, average, opt_state)
  return ols.select_if_finite(opt_state, new, average)


@pytest.mark.parametrize("average_fn", [average_by_hand, selected_average])
def test_an_average_of_gradients_must_not_keep_an_overflow(average_fn):
  tx = ols.with_loss_scaling(optax.sgd(0.1))

  def step(params, average, opt_state, batch):
    grads = ols.grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    average = average_fn(grads, average, opt_state)
    return optax.apply_updates(params, updates), average, opt_state

  params = {"w": PARAMS["w"]}
  args = params, jax.tree.map(jnp.zeros_like, params), tx.init(params), BATCH
  causes = list_causes(step, args)
  if average_fn is selected_average:
    assert causes == []
  else:
    assert ["is NaN, and stays so" in cause for cause in causes] == [True]


IN_FRONT = {
  "trace": optax.trace(0.9),
  "ema": optax.ema(0.9),
  "scale_by_rms": optax.scale_by_rms(),
}


@pytest.mark.parametrize("name", mark_slow_params(["trace"], IN_FRONT))
def test_a_momentum_in_front_of_the_wrapper_is_a_problem_with_a_cure(name):
  def make(tx):
    def step(params, opt_state, batch):
      grads = ols.grad(loss_fn, opt_state)(params, batch)
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    params = {"w": PARAMS["w"]}
    return step, (params, tx.init(params), BATCH)

  front, inner = IN_FRONT[name], optax.sgd(0.1)
  step, args = make(optax.chain(front, ols.with_loss_scaling(inner)))
  (problem,) = check_step(step, *args).problems
  assert "is NaN, and stays so" in problem.cause
  assert "ols.with_loss_scaling(optax.chain(" in problem.fix
  step, args = make(ols.with_loss_scaling(optax.chain(front, inner)))
  assert check_step(step, *args).is_sound


def test_an_update_that_closes_over_the_first_state_is_a_problem():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  params = {"w": PARAMS["w"]}
  first_state = tx.init(params)

  def step(params, opt_state, batch):
    grads = ols.grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, first_state, params)
    return optax.apply_updates(params, updates), opt_state

  causes = list_causes(step, (params, first_state, BATCH))
  assert any(UNUSED_STATE in cause for cause in causes)


def make_two_layers(make_result):
  """Return a step with two layers, and its arguments."""
  tx = ols.with_loss_scaling(optax.adam(1e-2))

  @ols.autocast
  def two_layers(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"]) @ params["head"]
    return jnp.mean((hidden - 1) ** 2)

  def step(params, opt_state, batch):
    grads = ols.grad(two_layers, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return make_result(params, updates), opt_state

  size = PARAMS["w"].shape[1]
  params = {"w": PARAMS["w"], "head": jnp.eye(size)}
  return step, (params, tx.init(params), BATCH)


def subtract(params, updates):
  return jax.tree.map(jnp.subtract, params, updates)


def keep_one(params, updates):
  return optax.apply_updates(params, updates) | {"head": params["head"]}


def project(params, updates):
  new = optax.apply_updates(params, updates)
  return jax.tree.map(lambda x: x / jnp.linalg.norm(x), new)


def keep_one_back(params, updates):
  """As a schedule does, which another step does not."""
  new = optax.apply_updates(params, updates)
  is_late = jnp.sum(params["w"]) > 1e9
  return new | {"head": jnp.where(is_late, new["head"], params["head"])}


@pytest.mark.parametrize(
  ("make_result", "cause"),
  [
    (subtract, "The updates are subtracted from the parameters (head)"),
    (keep_one, "The step returns the old head, although its update is not"),
    (project, None),
    (keep_one_back, None),
  ],
)
def test_parameters_are_the_old_ones_plus_the_updates(make_result, cause):
  causes = list_causes(*make_two_layers(make_result))
  if cause is None:
    assert causes == []
  else:
    assert len(causes) == 1 and causes[0].startswith(cause)


def test_a_state_that_is_adjusted_twice_is_a_problem():
  policy = ols.DynamicLossScale()

  def adjust_again(old, new, finite):
    params, state = new
    scale_state = policy.adjust(state.loss_scale_state, finite)
    return params, state._replace(loss_scale_state=scale_state)

  causes = list_causes(*make_step(adjust_again, policy=policy))
  assert [
    cause.startswith("After update, the step adj") for cause in causes
  ] == [True]


@pytest.mark.parametrize("axis_name", [None, "i"])
def test_shards_of_an_optimizer_need_one_loss_scale(axis_name):
  """As in ZeRO: each device updates its own rows, one of which overflows."""
  mesh = make_mesh((2,), ("i",))
  tx = ols.with_loss_scaling(optax.sgd(0.1), axis_name=axis_name)
  w = jnp.eye(4)

  def loss_of_rows(rows, x):
    out = x.astype(jnp.float16) @ rows.astype(jnp.float16)
    return jnp.mean(out.astype(jnp.float32) ** 2)

  def update_shard(rows, opt_state, x):
    grads = ols.grad(loss_of_rows, opt_state)(rows, x)
    updates, opt_state = tx.update(grads, opt_state, rows)
    return optax.apply_updates(rows, updates), opt_state

  def step(w, opt_state, x):
    specs = P("i"), P(), P(None, "i")
    return jax.shard_map(
      update_shard,
      mesh=mesh,
      in_specs=specs,
      out_specs=specs[:2],
      check_vma=False,
    )(w, opt_state, x)

  x = jnp.ones((4, 4)).at[:, 0].set(4000.0)
  state = ols.set_loss_scale(tx.init(w), 2.0**5)
  fixes = [x.fix for x in check_step(step, w, state, x).problems]
  is_advised = any("ols.with_loss_scaling(inner, axis_name" in x for x in fixes)
  assert is_advised is (axis_name is None)
