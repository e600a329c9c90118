"""Steps with optimizers that do more than to scale gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from helpers.train_steps import (
  BATCH,
  compute_grads,
  half_loss_fn,
  loss_fn,
  make_step,
  PARAMS,
  prepare_result,
  prepare_step,
  prepare_two_layers,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)
NOISE = optax.add_noise(0.01, 0.55, 0)  # The state has a random key.
# Half of Adam's state is stored in bfloat16.
BFLOAT16_MOMENTS = optax.adamw(1e-2, mu_dtype=jnp.bfloat16)
PLATEAU = contrib.reduce_on_plateau(patience=2, accumulation_size=2)
ASCENT = optax.chain(contrib.normalize(), optax.sgd(0.05))
SEARCH = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 10, 100)
ADAMW = optax.adamw(SCHEDULE, weight_decay=0.1, mask={"w": True, "head": False})
PRIVATE = contrib.differentially_private_aggregate(1.0, 0.1, 0)
# A condition of the user's own, inside of the wrapper.
SMALL_NORMS_ONLY = optax.transforms.conditionally_mask(
  optax.adamw(1e-2),
  lambda step, *, is_wanted, **_: is_wanted,
  forward_extra_args=True,
)
LAYER_CLIP = optax.masked(
  optax.clip_by_block_rms(0.01), {"w": True, "head": False}
)
# Statistics of all steps, skipped ones as well.
MONITOR = optax.monitor(
  {"grad_norm": lambda updates, **_: optax.tree.norm(updates)}
)


def _prepare_inner(*transformations):
  return prepare_step(inner=optax.chain(*transformations))


def _prepare_extra_args(make_extra_args, *transformations):
  """The optimizer receives more than the gradients."""
  inner = optax.chain(*transformations)
  return prepare_step(inner=inner, update_kwargs=make_extra_args)


def _pass_value(loss, params, opt_state, grads):
  return {"value": loss(params)}


def _pass_search_args(loss, params, opt_state, grads):
  return {"value": loss(params), "grad": grads, "value_fn": loss}


def _pass_grad_fn(loss, params, opt_state, grads):
  return {"grad_fn": lambda params, _: compute_grads(loss, params, opt_state)}


def _pass_condition(loss, params, opt_state, grads):
  return {"is_wanted": optax.tree.norm(grads) < 10}


def _pass_finite_loss(loss, params, opt_state, grads):
  return {"grads_finite": jnp.isfinite(loss(params))}


def _compute_grads_of_examples(loss, params, opt_state):
  grad_fn = ols.grad(loss_fn, opt_state)
  return jax.vmap(grad_fn, (None, 0))(params, BATCH[:, None])


def _add_learning_rate(old, new):
  return *new, new[1].inner_state.hyperparams["learning_rate"]


def _restart_moments(old, new, count):
  """The state of Adam, but not the loss scale, restarts now and then."""
  inner_state = jax.tree.map(
    lambda fresh, x: jnp.where(count % 10 == 9, fresh, x),
    ADAM.init(new[0]),
    new[1].inner_state,
  )
  return new[0], new[1]._replace(inner_state=inner_state), count + 1


def _add_average(old, new, average):
  """An average of the parameters outside of the optimizer."""
  new_average = optax.incremental_update(new[0], average, 0.01)
  return *new, ols.select_if_applied(new[1], new_average, average)


def _add_metrics(old, new):
  """Metrics of the loss scale, and NaN as the loss of a skipped step."""
  loss = loss_fn(old[0], BATCH)
  loss = ols.select_if_applied(new[1], loss, jnp.full_like(loss, jnp.nan))
  return *new, ols.loss_scale_metrics(new[1], policy="dynamic"), loss


def _add_best_loss(old, new, best_loss):
  """The best loss so far is inf before the first step."""
  loss = loss_fn(old[0], BATCH)
  new_best_loss = jnp.minimum(loss, best_loss)
  return *new, ols.select_if_applied(new[1], new_best_loss, best_loss), loss


STEPS = {
  "adamw_with_decay_mask": prepare_two_layers(
    inner=optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
  ),
  "partition_with_frozen_layer": prepare_two_layers(
    inner=optax.partition(
      {"trained": ADAM, "frozen": optax.set_to_zero()},
      {"w": "frozen", "head": "trained"},
    )
  ),
  "masked_clipping": prepare_two_layers(inner=optax.chain(LAYER_CLIP, ADAM)),
  "schedule_free": _prepare_inner(contrib.schedule_free_adamw(1e-2)),
  "adafactor": _prepare_inner(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
  "lion": _prepare_inner(optax.lion(3e-3)),
  "muon": _prepare_inner(contrib.muon(1e-2)),  # Its matmuls are in float32.
  "noisy_gradients": _prepare_inner(NOISE, optax.sgd(0.1)),
  "prodigy": _prepare_inner(contrib.prodigy()),
  "adaptive_clipping_by_layer": _prepare_inner(
    optax.adaptive_grad_clip(0.1), optax.lamb(1e-2)
  ),
  "half_precision_moments": _prepare_inner(BFLOAT16_MOMENTS),
  "flattened": prepare_two_layers(inner=optax.flatten(ADAM)),
  # Their states have copies of parameters.
  "sharpness_aware": _prepare_inner(contrib.sam(optax.sgd(0.1), ASCENT)),
  "distance_over_gradients": _prepare_inner(contrib.dog(1.0)),
  "distance_over_weighted_gradients": _prepare_inner(contrib.dowg()),
  "monitored": prepare_step(wrap_tx=lambda tx: optax.chain(MONITOR, tx)),
  "reduce_on_plateau": _prepare_extra_args(_pass_value, ADAM, PLATEAU),
  "polyak_sgd": _prepare_extra_args(_pass_value, optax.polyak_sgd(0.1)),
  "backtracking_line_search": _prepare_extra_args(
    _pass_search_args, optax.sgd(1.0), SEARCH
  ),
  "lbfgs": _prepare_extra_args(
    _pass_search_args, optax.lbfgs(memory_size=2, linesearch=SEARCH)
  ),
  "sam_inside": _prepare_extra_args(
    _pass_grad_fn, contrib.sam(ADAM, ASCENT, opaque_mode=True)
  ),
  "skipping_large_norms": _prepare_extra_args(
    _pass_condition, SMALL_NORMS_ONLY
  ),
  # A step whose loss is not finite is skipped, too.
  "finite_loss_required": _prepare_extra_args(_pass_finite_loss, ADAM),
  "lookahead": prepare_step(
    lambda loss, params, state: compute_grads(loss, params.fast, state),
    inner=optax.lookahead(ADAM, 3, 0.5),
    params=optax.LookaheadParams.init_synced(PARAMS),
  ),
  # Differentially private: the gradient of each example is clipped.
  "per_example_clipping": prepare_step(
    _compute_grads_of_examples, inner=optax.chain(PRIVATE, optax.sgd(0.1))
  ),
  "inject_hyperparams": prepare_result(
    _add_learning_rate, inner=optax.inject_hyperparams(optax.adam)(SCHEDULE)
  ),
  "restarted_moments": prepare_result(
    _restart_moments, inner=ADAM, extra=(np.int32(9),)
  ),
  "ema_of_params": prepare_result(_add_average, inner=ADAM, extra=(PARAMS,)),
  "best_loss_that_starts_at_inf": prepare_result(
    _add_best_loss, extra=(np.float32(np.inf),)
  ),
  # Without a loss scale, most gradients underflow.
  "small_gradients": prepare_step(
    loss_fn=ols.autocast(lambda *args: 1e-5 * half_loss_fn(*args)),
    inner=ADAM,
    policy=ols.DynamicLossScale(),
  ),
  "logged": prepare_result(_add_metrics, inner=ADAM),
}


def multi_steps_inside_at_the_last_micro_batch():
  inner = optax.MultiSteps(optax.adamw(1e-2), 2)
  step, (params, opt_state, batch) = make_step(inner=inner)
  return step, (*step(params, opt_state, batch), batch)
