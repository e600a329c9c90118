"""Reports warn of steps that scale gradients wrongly, and of no other step."""

import functools
from typing import NamedTuple
import warnings

from helpers import mark_slow_params, sharding, usual_losses
from helpers.usual_losses import BATCH, PARAMS
import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

DYNAMIC = ols.DynamicLossScale(2.0**6)

NOT_SCALED = "update received gradients of an unscaled loss"
OTHER_STATE = "that the state of another optimizer scaled"
ROUNDED = "that were cast to half precision after they were unscaled"
NEVER = "that were never unscaled"
TWICE = "that double if the loss scale halves"
DEPENDS = "that depend on the loss scale"


def from_precision_report(step, *args):
  return diagnostics.precision_report(step, *args).warnings


def from_find_overflow(step, *args):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert diagnostics.find_overflow(step, *args) is None
  return tuple(str(warning.message) for warning in caught)


def from_compare_precision(step, *args):
  compare = diagnostics.compare_precision
  return compare(step, *args, progress=False).warnings


RUNS = [from_find_overflow, from_compare_precision]
ALL = [from_precision_report, *RUNS]


def sound(loss, params, state):
  return ols.grad(loss, state)(params)


def forgotten(loss, params, state):
  return jax.grad(loss)(params)


def never_unscaled(loss, params, state):
  return jax.grad(lambda params: ols.scale_loss(loss(params), state))(params)


def unscaled_twice(loss, params, state):
  return ols.unscale_grads(sound(loss, params, state), state)


def rounded(loss, params, state):
  grads = sound(loss, params, state)
  return jax.tree.map(lambda g: g.astype(jnp.float16), grads)


def make_step(
  loss_fn, differentiate, policy=DYNAMIC, wrap_tx=lambda tx: tx, **kwargs
):
  """Returns a training step and its arguments."""
  tx = wrap_tx(ols.with_loss_scaling(optax.sgd(0.1), policy, **kwargs))
  cast = ols.autocast(loss_fn)

  def step(params, state, batch):
    grads = differentiate(lambda p: cast(p, batch), params, state)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step), (PARAMS, tx.init(PARAMS), BATCH)


def plain_loss(params, batch):
  return usual_losses.loss_fn("token mask", params, batch)


QUICK = {"token mask", "zero times an fft", "uint8 factor"}
SLOW = {"ctc", "attention", "solve", "dropout", "zero weight", "segments"}
NAMES = mark_slow_params(QUICK, usual_losses.LOSSES, SLOW)


def test_there_are_fifty_usual_losses():
  assert len(usual_losses.LOSSES) >= 50


@pytest.mark.parametrize("name", usual_losses.LOSSES)
def test_precision_report_warns_of_a_usual_loss_only_if_it_is_not_scaled(name):
  loss_fn = functools.partial(usual_losses.loss_fn, name)
  step, args = make_step(loss_fn, sound)
  assert from_precision_report(step, *args) == ()
  step, args = make_step(loss_fn, forgotten)
  (warning,) = from_precision_report(step, *args)
  assert NOT_SCALED in warning


@pytest.mark.parametrize("report", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_reports_that_run_a_step_name_each_mistake_in_its_scaling(name, report):
  loss_fn = functools.partial(usual_losses.loss_fn, name)
  for differentiate, expected in (
    (forgotten, NOT_SCALED),
    (never_unscaled, NEVER),
    (unscaled_twice, TWICE),
  ):
    step, args = make_step(loss_fn, differentiate)
    (warning,) = report(step, *args)
    assert expected in warning


@pytest.mark.parametrize("report", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_reports_that_run_a_step_are_silent_on_sound_steps(name, report):
  loss_fn = functools.partial(usual_losses.loss_fn, name)
  step, args = make_step(loss_fn, sound)
  assert report(step, *args) == ()


@pytest.mark.parametrize("report", ALL)
def test_a_cast_to_float16_after_unscaling_is_reported(report):
  step, args = make_step(plain_loss, rounded)
  (warning,) = report(step, *args)
  assert ROUNDED in warning


def test_a_cast_to_float16_of_scaled_gradients_is_sound():
  def differentiate(loss, params, state):
    grads = never_unscaled(loss, params, state)
    return jax.tree.map(lambda g: g.astype(jnp.float16), grads)

  step, args = make_step(plain_loss, differentiate, grads_are_scaled=True)
  assert from_precision_report(step, *args) == ()


@pytest.mark.parametrize("report", RUNS)
def test_gradients_clipped_while_they_are_scaled_are_reported(report):
  clip = optax.clip_by_global_norm(1e-3)
  step, args = make_step(
    plain_loss,
    never_unscaled,
    wrap_tx=lambda tx: optax.chain(clip, tx),
    grads_are_scaled=True,
  )
  (warning,) = report(step, *args)
  assert TWICE in warning and "clipped while they were scaled" in warning


def test_a_term_added_to_a_scaled_loss_is_reported_with_its_factor():
  def differentiate(loss, params, state):
    scaled = lambda params: (
      ols.scale_loss(loss(params), state) + jnp.sum(params["w"] ** 2)
    )
    return ols.unscale_grads(jax.grad(scaled)(params), state)

  step, args = make_step(plain_loss, differentiate)
  (warning,) = from_compare_precision(step, *args)
  assert DEPENDS in warning and "by a factor of 1." in warning
  # float16 gradients could underflow, and so depend on the scale.
  assert from_find_overflow(step, *args) == ()


def penalty(params):
  return 1e-2 * jnp.sum(params["w"] ** 2)


def unscaled_sum(loss, params, state):
  """The gradients of a penalty are added before the sum is unscaled."""
  scaled = jax.grad(lambda params: ols.scale_loss(loss(params), state))(params)
  total = jax.tree.map(jnp.add, scaled, jax.grad(penalty)(params))
  return ols.unscale_grads(total, state)


def penalty_after_scaling(loss, params, state):
  scaled = lambda params: ols.scale_loss(loss(params), state) + penalty(params)
  return ols.unscale_grads(jax.grad(scaled)(params), state)


def noise_before_unscaling(loss, params, state):
  scaled = jax.grad(lambda params: ols.scale_loss(loss(params), state))(params)
  noise = jax.tree.map(
    lambda x: 1e-2 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
  )
  return ols.unscale_grads(jax.tree.map(jnp.add, scaled, noise), state)


@pytest.mark.parametrize(
  "differentiate", [unscaled_sum, penalty_after_scaling, noise_before_unscaling]
)
def test_what_is_added_to_scaled_values_is_found_at_the_default_scale(
  differentiate,
):
  """It is 2**15 times too small, so half of the scale changes little."""
  default = ols.DynamicLossScale()
  step, args = make_step(plain_loss, differentiate, default)
  (warning,) = from_compare_precision(step, *args)
  assert DEPENDS in warning
  step, args = make_step(plain_loss, sound, default)
  assert from_compare_precision(step, *args) == ()


def forgotten_second_loss(loss, params, state):
  second = jax.grad(lambda params: 0.5 * loss(params))(params)
  return jax.tree.map(jnp.add, sound(loss, params, state), second)


def weighted_forgotten_loss(loss, params, state):
  second = jax.grad(loss)(params)
  first = sound(loss, params, state)
  return jax.tree.map(lambda a, b: a - 0.1 * b, first, second)


def accumulated_forgotten_loss(loss, params, state):
  total = jax.tree.map(jnp.zeros_like, params)
  for grads in sound(loss, params, state), jax.grad(loss)(params):
    total = jax.tree.map(jnp.add, total, grads)
  return total


@pytest.mark.parametrize("report", ALL)
@pytest.mark.parametrize(
  "differentiate",
  [forgotten_second_loss, weighted_forgotten_loss, accumulated_forgotten_loss],
)
def test_gradients_of_an_unscaled_loss_that_are_added_are_reported(
  differentiate, report
):
  step, args = make_step(plain_loss, differentiate)
  (warning,) = report(step, *args)
  assert "to which gradients of an unscaled loss were added" in warning


@pytest.mark.parametrize("report", ALL)
def test_two_scaled_losses_whose_gradients_are_added_are_sound(report):
  def differentiate(loss, params, state):
    first, second = (
      ols.grad(lambda params, k=k: k * loss(params), state)(params)
      for k in (1.0, 0.5)
    )
    # The gradient of a penalty is computed in float32.
    third = jax.grad(penalty)(params)
    return jax.tree.map(lambda *xs: sum(xs), first, second, third)

  step, args = make_step(plain_loss, differentiate)
  assert report(step, *args) == ()


def two_optimizers(swapped):
  """A GAN with two losses, each differentiated with one of two states."""
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  cast = ols.autocast(plain_loss)

  @jax.jit
  def step(ours, theirs, state, other, batch):
    scaled_by, scaled_by_other = (other, state) if swapped else (state, other)
    grads = ols.grad(cast, scaled_by)(ours, batch)
    updates, state = tx.update(grads, state)
    grads = ols.grad(cast, scaled_by_other)(theirs, batch)
    _, other = tx.update(grads, other)
    return optax.apply_updates(ours, updates), state, other

  state = tx.init(PARAMS)
  return step, (PARAMS, PARAMS, state, state, BATCH)


@pytest.mark.parametrize("report", ALL)
def test_gradients_that_the_state_of_another_optimizer_scaled_are_reported(
  report,
):
  step, args = two_optimizers(swapped=True)
  (warning,) = report(step, *args)
  assert OTHER_STATE in warning
  step, args = two_optimizers(swapped=False)
  assert report(step, *args) == ()


@pytest.mark.parametrize("report", ALL)
def test_a_gradient_function_that_closes_over_the_first_state_is_reported(
  report,
):
  """Its scale is a constant of each later step."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC)
  state = tx.init(PARAMS)
  grad_fn = ols.grad(ols.autocast(plain_loss), state)

  @jax.jit
  def step(params, state, batch):
    return tx.update(grad_fn(params, batch), state)

  (warning,) = report(step, PARAMS, state, BATCH)
  assert "that a constant loss scale scaled" in warning


def test_a_state_that_update_closes_over_is_no_mistake_of_the_gradients():
  """Its scale may be the same, as far as the program shows."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC)
  first_state = tx.init(PARAMS)

  def step(params, state, batch):
    grads = ols.grad(ols.autocast(plain_loss), state)(params, batch)
    updates, state = tx.update(grads, first_state)
    return optax.apply_updates(params, updates), state

  args = PARAMS, first_state, BATCH
  assert from_precision_report(step, *args) == ()


def test_a_state_in_a_dict_is_halved_like_any_other():
  """As of Flax NNX's functional interface, or from a checkpoint."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC)
  cast = ols.autocast(plain_loss)
  leaves, structure = jax.tree.flatten(tx.init(PARAMS))

  @jax.jit
  def step(params, leaves, batch):
    state = jax.tree.unflatten(structure, leaves)
    loss = lambda params: cast(params, batch)
    return tx.update(unscaled_twice(loss, params, state), state)

  for report in RUNS:
    (warning,) = report(step, PARAMS, leaves, BATCH)
    assert TWICE in warning


def test_an_object_that_stores_its_state_is_unchanged():
  class Trainer:
    def __init__(self):
      self.step, (self.params, self.state, _) = make_step(plain_loss, sound)

    def fit(self, batch):
      self.params, self.state = self.step(self.params, self.state, batch)

  trainer = Trainer()
  for report in ALL:
    message = r"got Trainer\.fit, which writes them to self\.params"
    with pytest.raises(TypeError, match=message):
      report(trainer.fit, BATCH)
  trainer.fit(BATCH)


def test_one_loss_and_a_list_of_optimizers_is_reported():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  cast = ols.autocast(plain_loss)

  def step(params, states, batch):
    grads = ols.grad(cast, states[0])(params, batch)
    return [tx.update(grads, state) for state in states]

  states = [tx.init(PARAMS)] * 2
  (warning,) = from_precision_report(step, PARAMS, states, BATCH)
  assert OTHER_STATE in warning


def test_a_part_of_the_gradients_is_reported_by_name():
  def differentiate(loss, params, state):
    loss_of = lambda name: lambda x: loss({**params, name: x})
    grads = {"w": ols.grad(loss_of("w"), state)(params["w"])}
    return {**grads, "b": jax.grad(loss_of("b"))(params["b"])}

  def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] @ params["b"]) ** 2)

  tx = ols.with_loss_scaling(optax.sgd(0.1))
  params = {**PARAMS, "b": jnp.ones((4, 2))}
  for cast, expected in (ols.autocast(loss_fn), 1), (loss_fn, 0):

    def step(params, state, batch, cast=cast):
      grads = differentiate(lambda p: cast(p, batch), params, state)
      return tx.update(grads, state, params)

    args = params, tx.init(params), BATCH
    found = from_precision_report(step, *args)
    # In float32 it needs no loss scale.
    assert len(found) == expected
    assert all(f"{NOT_SCALED} (b)" in warning for warning in found)


def by_hand(scale):
  def differentiate(loss, params, state):
    return jax.grad(lambda params: scale * loss(params))(params)

  return make_step(plain_loss, differentiate, scale, grads_are_scaled=True)


def of_a_population():
  """One member of two overflows, and is skipped."""
  step, (params, state, batch) = make_step(plain_loss, sound)
  both = jax.tree.map(lambda x: jnp.stack([x, x]), (params, state))
  batches = jax.tree.map(lambda x: jnp.stack([x, x]), batch | {"key": 0})
  batches["x"] = batches["x"].at[1].multiply(1e6)
  return jax.vmap(step), (*both, batches)


def of_one_task_of_three():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  cast = ols.autocast(plain_loss)

  def update_with(weight):
    def update(params, state, batch):
      weighted = lambda params, batch: weight * cast(params, batch)
      return tx.update(ols.grad(weighted, state)(params, batch), state)

    return update

  @jax.jit
  def step(task, *args):
    return lax.switch(task, [update_with(k) for k in (1.0, 2.0, 3.0)], *args)

  return step, (jnp.int32(1), PARAMS, tx.init(PARAMS), BATCH)


def with_a_frozen_part():
  """The gradient of the frozen part overflows, and is not used."""

  def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + 1e30 * params["frozen"]) ** 2)

  tx = ols.with_loss_scaling(optax.sgd(0.1))

  @jax.jit
  def step(params, state, batch):
    all_params = params | {"frozen": jnp.zeros(4)}
    grads = ols.grad(ols.autocast(loss_fn), state)(all_params, batch)
    return tx.update({"w": grads["w"]}, state)

  return step, (PARAMS, tx.init(PARAMS), BATCH)


def of_gradients_as_arguments():
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  cast = ols.autocast(plain_loss)

  @jax.jit
  def step(grads, params, state, batch):
    return tx.update(grads, state), cast(params, batch)

  return step, (PARAMS, PARAMS, tx.init(PARAMS), BATCH)


def of_a_delayed_update():
  """The gradients of one iteration are applied in the next one."""
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  cast = ols.autocast(plain_loss)

  @jax.jit
  def epoch(params, state, batch):
    def step(carry, _):
      params, state, grads = carry
      new_grads = ols.grad(cast, state)(params, batch)
      updates, state = tx.update(grads, state)
      return (optax.apply_updates(params, updates), state, new_grads), None

    carry = params, state, jax.tree.map(jnp.zeros_like, params)
    return lax.scan(step, carry, length=3)[0]

  return epoch, (PARAMS, tx.init(PARAMS), BATCH)


def of_compressed_gradients():
  """Gradients are exchanged as int8 with a separate scale."""

  def differentiate(loss, params, state):
    def compress(g):
      unit = jnp.max(jnp.abs(g)) / 127
      return jnp.round(g / unit).astype(jnp.int8) * unit

    return jax.tree.map(compress, sound(loss, params, state))

  return make_step(plain_loss, differentiate)


def of_gradients_summed_in_a_while_loop():
  def differentiate(loss, params, state):
    def add(i, total):
      return jax.tree.map(jnp.add, total, sound(loss, params, state))

    zeros = jax.tree.map(jnp.zeros_like, params)
    count = jnp.where(params["w"][0, 0] > -9e9, 3, 2)
    return lax.fori_loop(0, count, add, zeros)

  return make_step(plain_loss, differentiate)


def with_a_sharpness_aware_gradient():
  def differentiate(loss, params, state):
    grads = sound(loss, params, state)
    norm = optax.tree.norm(grads)
    moved = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
    return sound(loss, moved, state)

  return make_step(plain_loss, differentiate)


def with_a_state_of_ones_own():
  """The loss scale is an argument that no name identifies."""
  tx = ols.with_loss_scaling(optax.sgd(0.1))
  cast = ols.autocast(plain_loss)

  @jax.jit
  def step(params, scale, batch):
    state = ols.set_loss_scale(tx.init(params), scale)
    return tx.update(ols.grad(cast, state)(params, batch), state)

  return step, (PARAMS, jnp.float32(64.0), BATCH)


def of_a_delayed_actor():
  """The actor waits in every second step, as in TD3."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC)
  cast = ols.autocast(plain_loss)

  def train(params, state, batch):
    return tx.update(ols.grad(cast, state)(params, batch), state)

  @jax.jit
  def step(actor, critic, state, other, batch, i):
    wait = lambda: (jax.tree.map(jnp.zeros_like, actor), state)
    updated = lax.cond(i % 2 == 0, lambda: train(actor, state, batch), wait)
    return updated, train(critic, other, batch)

  state = tx.init(PARAMS)
  return step, (PARAMS, PARAMS, state, state, BATCH, jnp.int32(1))


def with_an_argument_that_is_called_loss_scale():
  """It is the weight of a loss."""

  class Hyperparameters(NamedTuple):
    loss_scale: jax.Array

  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC)
  cast = ols.autocast(plain_loss)

  @jax.jit
  def step(params, state, hyperparameters, batch):
    weighted = lambda p: hyperparameters.loss_scale * cast(p, batch)
    return tx.update(ols.grad(weighted, state)(params), state)

  weight = Hyperparameters(jnp.float32(0.5))
  return step, (PARAMS, tx.init(PARAMS), weight, BATCH)


def with_a_second_gradient_by_hand():
  """Sharpness-aware, without a tag on the gradients that count."""

  def differentiate(loss, params, state):
    grads = sound(loss, params, state)
    moved = jax.tree.map(lambda p, g: p + 0.05 * g, params, grads)
    scale = ols.get_loss_scale_state(state).loss_scale
    grads = jax.grad(lambda params: scale * loss(params))(moved)
    return jax.tree.map(lambda g: g / scale, grads)

  return make_step(plain_loss, differentiate)


def in_float32():
  """Gradients in float32 need no loss scale."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC)

  @jax.jit
  def step(params, state, batch):
    return tx.update(jax.grad(plain_loss)(params, batch), state)

  return step, (PARAMS, tx.init(PARAMS), BATCH)


def on_a_mesh_that_the_arrays_are_not_on_yet():
  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC, axis_name="d")
  cast = ols.autocast(plain_loss)

  def step(params, state, batch):
    grads = lax.pmean(ols.grad(cast, state)(params, batch), "d")
    updates, state = tx.update(grads, state)
    return optax.apply_updates(params, updates), state

  mesh = sharding.make_mesh((2,), ("d",))
  batch = {name: BATCH[name] for name in ("x", "labels", "mask")}
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P()
  )
  return jax.jit(mapped), (PARAMS, tx.init(PARAMS), batch)


def with_batches_from_a_callback():
  """Each run of the step computes the gradients of another batch."""
  tx = ols.with_loss_scaling(optax.sgd(0.1), DYNAMIC)
  cast = ols.autocast(plain_loss)
  numbers = np.random.default_rng(0)
  shape = jax.ShapeDtypeStruct(BATCH["x"].shape, jnp.float32)
  draw = lambda: numbers.normal(size=shape.shape).astype(np.float32)

  @jax.jit
  def step(params, state, batch):
    x = io_callback(draw, shape, ordered=True)
    grads = ols.grad(cast, state)(params, {**batch, "x": x})
    return tx.update(grads, state)

  return step, (PARAMS, tx.init(PARAMS), BATCH)


SOUND = {
  "a delayed actor": of_a_delayed_actor,
  "an argument called loss_scale": with_an_argument_that_is_called_loss_scale,
  "a second gradient by hand": with_a_second_gradient_by_hand,
  "float32": in_float32,
  "a mesh": on_a_mesh_that_the_arrays_are_not_on_yet,
  "a callback": with_batches_from_a_callback,
  "a fixed scale by hand": functools.partial(by_hand, 1024.0),
  "a population": of_a_population,
  "a switch of tasks": of_one_task_of_three,
  "a frozen part": with_a_frozen_part,
  "gradients as arguments": of_gradients_as_arguments,
  "a delayed update": of_a_delayed_update,
  "compressed gradients": of_compressed_gradients,
  "a while loop": of_gradients_summed_in_a_while_loop,
  "sharpness-aware": with_a_sharpness_aware_gradient,
  "a scale without a name": with_a_state_of_ones_own,
}


QUICK_SOUND = {
  "a mesh",
  "a switch of tasks",
  "a while loop",
  "an argument called loss_scale",
  "gradients as arguments",
}
SLOW_SOUND = {
  "a callback",
  "a delayed actor",
  "a population",
  "a scale without a name",
  "a second gradient by hand",
  "float32",
}


@pytest.mark.parametrize("report", ALL)
@pytest.mark.parametrize(
  "name", mark_slow_params(QUICK_SOUND, SOUND, SLOW_SOUND)
)
def test_a_sound_step_of_an_unusual_kind_causes_no_warning(name, report):
  no_cast_matmul = {"gradients as arguments", "float32"}
  if name in no_cast_matmul and report is from_compare_precision:
    return
  step, args = SOUND[name]()
  if name == "a population" and report is from_find_overflow:
    hit = diagnostics.find_overflow(step, *args)
    assert hit is not None and hit.warnings == ()
  else:
    assert report(step, *args) == ()


@pytest.mark.parametrize("report", ALL)
def test_gradients_in_a_while_loop_are_judged(report):
  def differentiate(loss, params, state):
    grads = forgotten(loss, params, state)
    double = lambda i, grads: jax.tree.map(lambda g: 2 * g, grads)
    return lax.fori_loop(0, jnp.int32(params["w"][0, 0] > -9e9), double, grads)

  step, args = make_step(plain_loss, differentiate)
  if report is not from_compare_precision:  # It cannot enter the loop.
    (warning,) = report(step, *args)
    assert NOT_SCALED in warning


def test_unrelated_checkpoint_names_are_ignored():
  def differentiate(loss, params, state):
    grads = sound(loss, params, state)
    name = jax.ad_checkpoint.checkpoint_name
    return jax.tree.map(lambda g: name(g, "mine"), grads)

  step, args = make_step(plain_loss, differentiate)
  assert from_precision_report(step, *args) == ()
