"""Every optimizer that Optax exports, its wrappers, and what each needs."""

import inspect

import jax
import jax.numpy as jnp
import optax
from optax import contrib

# The arguments of some optimizers. Optax exports others in addition, and the
# two without arguments are partial functions, which do not look like one.
OPTAX = {
  "adadelta": {"learning_rate": 1.0},
  "adagrad": {"learning_rate": 0.1},
  "lars": {"learning_rate": 1.0},
  "nadam": {},
  "nadamw": {},
  "noisy_sgd": {"key": 0},
  "optimistic_adam": {"optimism": 0.1},
  "rmsprop": {"momentum": 0.9},
  "sgd": {"momentum": 0.9, "nesterov": True},
  "sm3": {"learning_rate": 0.1},
}
CONTRIB = {
  "dog": {"learning_rate": 1.0},
  "dowg": {"learning_rate": 1.0},
  "dpsgd": {
    "learning_rate": 0.1,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "seed": 0,
  },
  "galore": {"rank": 2},
  "mechanize": {"base_optimizer": optax.sgd(0.1)},
  "momo": {"learning_rate": 1.0},
  "prodigy": {"learning_rate": 1.0},
  "schedule_free": {"base_optimizer": optax.sgd(0.1), "learning_rate": 0.1},
  "schedule_free_sgd": {"learning_rate": 0.1},
}
# These wrap an optimizer and take none of the others' arguments.
_WRAPPERS = {"lookahead", "sam", "selective_transform"}
_OPTIMIZER_PARAMS = {
  "learning_rate",
  "max_learning_rate",
  "optimizer",
  "base_optimizer",
}


def _find_optimizers(module, kwargs):
  """Each optimizer of a module, with its arguments."""
  exported = {
    name
    for name, factory in vars(module).items()
    if inspect.isfunction(factory)
    and not name.startswith(("_", "scale_by_"))
    and _OPTIMIZER_PARAMS & set(inspect.signature(factory).parameters)
  }
  names = sorted((exported | set(kwargs)) - _WRAPPERS)
  return {name: kwargs.get(name, {}) for name in names}


MODULES = {
  "optax": (optax, _find_optimizers(optax, OPTAX)),
  "optax.contrib": (contrib, _find_optimizers(contrib, CONTRIB)),
}


def _accumulate(inner):
  multi_steps = optax.MultiSteps(inner, 2)
  # Unlike gradient_transformation(), this takes extra arguments.
  return optax.GradientTransformationExtraArgs(
    multi_steps.init, multi_steps.update
  )


ADAM, SGD = optax.adam(0.01), optax.sgd(0.1)
ONLY_B = {"b": True, "v": False, "w": False}
SCHEDULE = optax.linear_schedule(0.1, 0.01, transition_steps=10)
# Wrappers around an optimizer, and chains.
WRAPPERS = {
  "apply_if_finite": optax.apply_if_finite(ADAM, 5),
  "chain": optax.chain(optax.clip_by_global_norm(0.1), ADAM),
  "ema": optax.chain(SGD, optax.ema(0.9)),
  "filter": optax.transforms.conditionally_mask(
    ADAM, lambda step, **_: step % 2 == 0, forward_extra_args=True
  ),
  "freeze": optax.chain(ADAM, optax.freeze(ONLY_B)),
  "inject_hyperparams": optax.inject_hyperparams(optax.adam)(SCHEDULE),
  "line search": optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
  ),
  "masked": optax.masked(ADAM, {"b": False, "v": True, "w": True}),
  "MultiSteps": _accumulate(ADAM),
  "MultiSteps with a loss": _accumulate(optax.polyak_sgd(0.1)),
  "partition": optax.partition(
    {"adam": ADAM, "sgd": SGD}, {"b": "adam", "v": "sgd", "w": "sgd"}
  ),
  "reduce_on_plateau": optax.chain(SGD, contrib.reduce_on_plateau(patience=1)),
  # As a plain transformation, it receives no extra arguments.
  "sam": optax.GradientTransformation(
    *contrib.sam(SGD, optax.sgd(0.05), sync_period=2)
  ),
  "schedule": optax.sgd(SCHEDULE, momentum=0.9),
  "selective_transform": optax.selective_transform(ADAM, freeze_mask=ONLY_B),
}

# These take the loss as a function, each by its own name, and nothing that
# the function does not take.
LOSS_FN_KEYWORDS = {
  "lbfgs": "value_fn",
  "line search": "value_fn",
  "sophia": "obj_fn",
}


def get_factories(module):
  """Name to (factory, arguments), of those that this version exports."""
  if module == "wrappers":
    return {name: (lambda tx=tx: tx, {}) for name, tx in WRAPPERS.items()}
  namespace, table = MODULES[module]
  result = {}
  for name, kwargs in table.items():
    factory = getattr(namespace, name, None)
    if factory is None:
      continue
    parameters = inspect.signature(factory).parameters
    learning_rate = parameters.get("learning_rate")
    if learning_rate and learning_rate.default is inspect.Parameter.empty:
      kwargs = {"learning_rate": 0.01} | kwargs
    result[name] = factory, kwargs
  return result


def get_all_factories():
  """The same for both modules, by names such as `optax.adam`."""
  return {
    f"{module}.{name}": factory
    for module in MODULES
    for name, factory in get_factories(module).items()
  }


def sum_of_squares(params):
  return sum(jnp.vdot(x, x).real for x in jax.tree.leaves(params))


def update(name, tx, value, grads, state, params):
  """An update by a name such as `optax.adam`, with all that it may need."""
  _, name = name.rsplit(".", 1)
  true_grads = jax.grad(sum_of_squares)(params)
  if name == "dpsgd":  # of each example
    grads = jax.tree.map(lambda x: x[None], grads)
  extra = extra_args(name, value, true_grads, sum_of_squares)
  return tx.update(grads, state, params, **extra)


def extra_args(name, value, grads, fun):
  """Return the extra arguments that some of the optimizers need."""
  extra = {"value": value, "grad": grads}
  if name in LOSS_FN_KEYWORDS:
    return extra | {LOSS_FN_KEYWORDS[name]: fun}
  return extra | {"not_expected": value}


def compute_loss_and_grads(name, value_and_grad_fn, params, batch):
  if name != "dpsgd":
    return value_and_grad_fn(params, batch)
  # It wants the gradients of each example.
  examples = jax.tree.map(lambda x: x[:, None], batch)
  values, grads = jax.vmap(value_and_grad_fn, (None, 0))(params, examples)
  return jnp.mean(values), grads
