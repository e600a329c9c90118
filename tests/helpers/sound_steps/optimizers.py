"""Steps with optimizers that do more than to scale gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from helpers.train_steps import (
  ADAM,
  apply_updates,
  BATCH,
  compute_grads,
  half_loss_fn,
  jit_step,
  loss_fn,
  make_step,
  make_tx,
  PARAMS,
  prepare_result,
  prepare_step,
  prepare_two_layers,
  TX,
)
import optax_lossscale as ols

ASCENT = optax.chain(contrib.normalize(), optax.sgd(0.05))
SEARCH = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 10, 100)
ONE_OF_TWO = {"w": True, "head": False}
ADAM_TX = make_tx(ADAM)

# Optimizers that need nothing else, for one layer and for two.
INNER = {
  "schedule-free": contrib.schedule_free_adamw(1e-2),
  "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
  "lion": optax.lion(3e-3),
  "muon": contrib.muon(1e-2),  # Its matmuls are in float32.
  # The state has a random key.
  "noise": optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(0.1)),
  "prodigy": contrib.prodigy(),
  "clipping by layer": optax.chain(
    optax.adaptive_grad_clip(0.1), optax.lamb(1e-2)
  ),
  "bfloat16 moments": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
  # Their states have copies of parameters.
  "sharpness-aware": contrib.sam(optax.sgd(0.1), ASCENT),
  "distance over gradients": contrib.dog(1.0),
  "distance over weighted gradients": contrib.dowg(),
  "schedule that begins later": optax.sgd(
    optax.join_schedules(
      [optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [10]
    )
  ),
}
INNER_OF_TWO = {
  "mask of weight decay": optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(SCHEDULE, weight_decay=0.1, mask=ONE_OF_TWO),
  ),
  "frozen layer": optax.partition(
    {True: ADAM, False: optax.set_to_zero()}, ONE_OF_TWO
  ),
  "masked clipping": optax.chain(
    optax.masked(optax.clip_by_block_rms(0.01), ONE_OF_TWO), ADAM
  ),
  "flattened": optax.flatten(ADAM),
}


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


EXTRA_ARGS = {
  "reduce on plateau": (
    _pass_value,
    optax.chain(
      ADAM, contrib.reduce_on_plateau(patience=2, accumulation_size=2)
    ),
  ),
  "polyak": (_pass_value, optax.polyak_sgd(0.1)),
  "line search": (_pass_search_args, optax.chain(optax.sgd(1.0), SEARCH)),
  "lbfgs": (_pass_search_args, optax.lbfgs(memory_size=2, linesearch=SEARCH)),
  "sharpness-aware in update": (
    _pass_grad_fn,
    contrib.sam(ADAM, ASCENT, opaque_mode=True),
  ),
  # A condition of the user's own, inside of the wrapper.
  "no large norms": (
    _pass_condition,
    optax.transforms.conditionally_mask(
      ADAM, lambda step, *, is_wanted, **_: is_wanted, forward_extra_args=True
    ),
  ),
  # A step whose loss is not finite is skipped, too.
  "finite loss": (_pass_finite_loss, ADAM),
}


def _make_extra_args_step(make_extra_args, inner):
  """Return a step whose optimizer receives more than the gradients."""
  tx = make_tx(inner)

  def step(params, opt_state, batch):
    loss = lambda params: loss_fn(params, batch)
    grads = compute_grads(loss, params, opt_state)
    kwargs = make_extra_args(loss, params, opt_state, grads)
    return apply_updates(tx, grads, params, opt_state, **kwargs)

  return jit_step(step, tx=tx)


def _compute_grads_of_examples(loss, params, opt_state):
  grad_fn = ols.grad(loss_fn, opt_state)
  return jax.vmap(grad_fn, (None, 0))(params, BATCH[:, None])


def _restart_moments(old, new, count):
  """The state of Adam, but not the loss scale, restarts now and then."""
  inner_state = jax.tree.map(
    lambda fresh, x: jnp.where(count % 10 == 9, fresh, x),
    ADAM.init(new[0]),
    new[1].inner_state,
  )
  return new[0], new[1]._replace(inner_state=inner_state), count + 1


def _add_metrics(old, new, average, best_loss):
  """Metrics, an average of the parameters, and the best loss so far.

  The best loss is inf before the first step. The loss of a skipped step is NaN.
  """
  loss = loss_fn(old[0], BATCH)
  new_results = (
    optax.incremental_update(new[0], average, 0.01),
    jnp.minimum(loss, best_loss),
    loss,
  )
  old_results = average, best_loss, jnp.full_like(loss, jnp.nan)
  results = ols.select_if_applied(new[1], new_results, old_results)
  return *new, *results, ols.loss_scale_metrics(new[1], policy="dynamic")


def _make_last_micro_batch_step():
  inner = optax.MultiSteps(optax.adamw(1e-2), 2)
  step, (params, opt_state, batch) = make_step(tx=make_tx(inner))
  return step, (*step(params, opt_state, batch), batch)


STEPS = {
  **{name: prepare_step(tx=make_tx(inner)) for name, inner in INNER.items()},
  **{
    name: prepare_two_layers(tx=make_tx(inner))
    for name, inner in INNER_OF_TWO.items()
  },
  **{
    name: functools.partial(_make_extra_args_step, *row)
    for name, row in EXTRA_ARGS.items()
  },
  "lookahead": prepare_step(
    lambda loss, params, state: compute_grads(loss, params.fast, state),
    tx=make_tx(optax.lookahead(ADAM, 3, 0.5)),
    params=optax.LookaheadParams.init_synced(PARAMS),
  ),
  # Differentially private: the gradient of each example is clipped.
  "clipped examples": prepare_step(
    _compute_grads_of_examples,
    tx=make_tx(
      optax.chain(
        contrib.differentially_private_aggregate(1.0, 0.1, 0), optax.sgd(0.1)
      )
    ),
  ),
  "injected hyperparameters": prepare_result(
    lambda old, new: (*new, new[1].inner_state.hyperparams["learning_rate"]),
    tx=make_tx(optax.inject_hyperparams(optax.adam)(SCHEDULE)),
  ),
  "restarted moments": prepare_result(
    _restart_moments, tx=ADAM_TX, extra=(np.int32(9),)
  ),
  "metrics": prepare_result(
    _add_metrics, tx=ADAM_TX, extra=(PARAMS, np.float32(np.inf))
  ),
  # Without a loss scale, most gradients underflow.
  "small gradients": prepare_step(
    loss_fn=ols.autocast(lambda *args: 1e-5 * half_loss_fn(*args)),
    tx=make_tx(ADAM, "dynamic"),
  ),
  "last micro-batch": _make_last_micro_batch_step,
}
if hasattr(optax, "monitor"):  # Remove the condition once optax >= 0.2.7.
  # Statistics of all steps, skipped ones as well.
  MONITOR = optax.monitor(
    {"norm": lambda updates, **_: optax.tree.norm(updates)}
  )
  STEPS["monitored"] = prepare_step(tx=optax.chain(MONITOR, TX))
