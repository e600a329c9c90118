"""Every optimizer that Optax exports, and what each needs for an update."""

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
# These wrap an optimizer and take none of the others' arguments; they are
# tested in test_optax_compositions.py.
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

# These take the loss as a function, each by its own name, and nothing that
# the function does not take.
LOSS_FN_KEYWORDS = {"lbfgs": "value_fn", "sophia": "obj_fn"}


def get_factories(module):
  """Name to (factory, arguments), of those that this version exports."""
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
