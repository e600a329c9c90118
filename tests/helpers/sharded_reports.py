"""Reports on steps whose arrays are sharded over eight devices.

One process or several may hold the devices. An overflow is in the last row of
a batch, which the last device has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from helpers import sharding
import optax_lossscale as ols
from optax_lossscale import diagnostics

SIZE = 8
OVERFLOWING = 4e4  # twice that is not in float16
SPECS = {"first": P(), "second": P("data")}


def loss_fn(params, x):
  hidden = jax.nn.relu(x @ params["first"])
  return jnp.mean((hidden @ params["second"]) ** 2)


def make_step(*, returns_old_state=False, gather=None, axis_name=None):
  """Return an optimizer, and a training step.

  Args:
    returns_old_state: whether the step returns the state that it received.
    gather: a function that gathers the params before they are used, if any.
    axis_name: an axis of a `shard_map`.
  """
  policy = ols.DynamicLossScale(init_scale=2.0**10)
  tx = ols.with_loss_scaling(optax.sgd(1e-3), policy, axis_name=axis_name)
  gather = gather or (lambda params: params)

  def train_step(params, opt_state, x):
    loss = lambda params: loss_fn(gather(params), x)
    grads = ols.grad(ols.autocast(loss), opt_state)(params)
    updates, new_state = tx.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    return new_params, opt_state if returns_old_state else new_state

  return tx, train_step


def make_shard_map_step(mesh):
  """Return an optimizer, and a training step under `shard_map`."""
  gather = lambda params: {
    "first": params["first"],
    "second": jax.lax.all_gather(params["second"], "data", tiled=True),
  }
  tx, train_step = make_step(gather=gather, axis_name="data")
  specs = SPECS, P()
  return tx, jax.shard_map(
    train_step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs
  )


def make_nnx_step(mesh, tx, last_row):
  """Return a training step of Flax NNX, and its arguments."""
  params, _, x = make_args(mesh, tx, last_row)
  model = nnx.Module()
  for name, param in params.items():
    setattr(model, name, nnx.Param(param))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def train_step(model, optimizer, x):
    loss = lambda model: loss_fn(nnx.to_pure_dict(nnx.state(model)), x)
    grads = ols.grad(ols.autocast(loss), optimizer)(model)
    optimizer.update(model, grads)

  return train_step, (model, optimizer, x)


def make_ref_step(step):
  """Return a training step that writes to Refs of its params."""

  def train_step(refs, opt_state, x):
    params = jax.tree.map(lambda ref: ref[...], refs)
    new_params, opt_state = step(params, opt_state, x)
    for name, ref in refs.items():
      ref[...] = new_params[name]
    return opt_state

  return train_step


def make_pmap_step(last_row):
  """Return a training step under `pmap`, and its arguments."""
  tx, step = make_step(axis_name="data")
  params = {"first": 2 * np.eye(SIZE, dtype=np.float32)}
  params["second"] = params["first"] / 8
  tree = params, jax.device_get(tx.init(params)), make_batch(last_row)
  repeat = lambda x: np.stack([x] * jax.local_device_count())
  return jax.pmap(step, axis_name="data"), jax.tree.map(repeat, tree)


def make_args(mesh, tx, last_row):
  """Return params, the state of the optimizer and a batch."""
  x = make_batch(last_row)
  eye = np.eye(SIZE, dtype=np.float32)
  params = shard(mesh, {"first": 2 * eye, "second": eye / 4}, SPECS)
  return params, jax.jit(tx.init)(params), shard(mesh, x, P("data"))


def make_batch(last_row):
  x = np.linspace(0.5, 1.5, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
  x[-1] = last_row
  return x


def make_member_args(mesh, tx, last_row):
  """Return the arguments of a model on each device; the last has the row."""
  local_mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])
  members = [make_args(local_mesh, tx, 1.0)] * (SIZE - 1)
  members.append(make_args(local_mesh, tx, last_row))
  tree = jax.tree.map(lambda *leaves: np.stack(leaves), *members)
  return shard(mesh, tree, jax.tree.map(lambda _: P("data"), tree))


def shard(mesh, tree, specs):
  return sharding.put_on_devices(tree, sharding.to_named_shardings(mesh, specs))


def make_mesh():
  return sharding.make_mesh((SIZE,), ("data",))


def prepare_report(name):
  """Return a function that returns the text of a report."""
  case = CASES[name]
  step, args = make_step_with_args(case.kind, case.last_row)
  return lambda: str(case.report(step, *args, progress=False))


def make_step_with_args(kind, last_row):
  """Return a training step of a kind, and its arguments."""
  mesh = make_mesh()
  tx, step = make_step(returns_old_state=kind == "old state")
  match kind:
    case "shard_map":
      tx, step = make_shard_map_step(mesh)
    case "vmap":
      return jax.vmap(step), make_member_args(mesh, tx, last_row)
    case "nnx":
      return make_nnx_step(mesh, tx, last_row)
    case "pmap":
      return make_pmap_step(last_row)
    case "ref":
      params, *others = make_args(mesh, tx, last_row)
      return make_ref_step(step), (jax.tree.map(jax.new_ref, params), *others)
  return step, make_args(mesh, tx, last_row)


class Case(NamedTuple):
  """A report on a kind of step; a text in it, and the last row of the batch."""

  report: Callable[..., Any]
  kind: str
  text: str
  last_row: float = 1.0


CHECK = diagnostics.check_step
FIRST_OVERFLOWS = "1. first overflows in the forward pass"
CASES = {
  "sound": Case(CHECK, "jit", "No problems."),
  "overflow": Case(CHECK, "jit", FIRST_OVERFLOWS, OVERFLOWING),
  "old state": Case(
    CHECK, "old state", "1. The step does not return the opt_state"
  ),
  "sound in shard_map": Case(CHECK, "shard_map", "No problems."),
  "overflow in shard_map": Case(
    CHECK, "shard_map", FIRST_OVERFLOWS, OVERFLOWING
  ),
  "sound members": Case(CHECK, "vmap", "No problems."),
  "overflow of a member": Case(CHECK, "vmap", "The backward pass", 200.0),
  "sound in NNX": Case(CHECK, "nnx", "No problems."),
  "overflow in NNX": Case(CHECK, "nnx", FIRST_OVERFLOWS, OVERFLOWING),
  "sound with Refs": Case(CHECK, "ref", "No problems."),
  "overflow with Refs": Case(CHECK, "ref", FIRST_OVERFLOWS, OVERFLOWING),
  "sound in pmap": Case(CHECK, "pmap", "No problems."),
  "overflow in pmap": Case(CHECK, "pmap", FIRST_OVERFLOWS, OVERFLOWING),
  "find_overflow": Case(
    diagnostics.find_overflow, "jit", "in layer first", OVERFLOWING
  ),
  "compare_precision": Case(
    diagnostics.compare_precision, "jit", "No single layer dominates"
  ),
}
