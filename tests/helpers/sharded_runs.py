"""The problem of ``exact_model`` under sharded jit, and under shard_map."""

import functools

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import optax

from helpers import exact_model, sharding
import optax_lossscale as ols

REPLICATED = {"table": P(), "rows": P(), "bias": P()}
BY_EXAMPLES = {"table": P("data"), "rows": P("data"), "bias": P("data")}

# Name: (shape and names of the mesh, specs of the params, of a batch).
JIT_LAYOUTS = {
  "data parallel": (((8,), ("data",)), REPLICATED, BY_EXAMPLES),
  "fsdp": (((8,), ("data",)), BY_EXAMPLES | {"bias": P(None)}, BY_EXAMPLES),
  "tensor parallel": (
    ((8,), ("model",)),
    {"table": P(None, "model"), "rows": P("model"), "bias": P(None)},
    {
      "table": P(None, None, "model"),
      "rows": P(None, "model"),
      "bias": P(None),
    },
  ),
  "2x4": (
    ((2, 4), ("data", "model")),
    {"table": P("data", "model"), "rows": P("model"), "bias": P(None)},
    {
      "table": P("data", None, "model"),
      "rows": P("data", "model"),
      "bias": P("data"),
    },
  ),
}

# Name: (shape of the mesh, axis_name, specs of the params). Examples are
# sharded over all axes.
SHARD_MAP_LAYOUTS = {
  "replicated": ((8,), "data", REPLICATED),
  "sharded": ((8,), "data", BY_EXAMPLES | {"bias": P()}),
  "two axes, replicated": ((2, 4), ("data", "model"), REPLICATED),
  "two axes, sharded": (
    (2, 4),
    ("data", "model"),
    {"table": P("data", "model"), "rows": P("model"), "bias": P()},
  ),
}


def _differentiate(loss, opt_state):
  """Return the gradient function; without scaling for a bare optimizer."""
  is_scaled = isinstance(opt_state, ols.WithLossScalingState)
  return ols.grad(loss, opt_state) if is_scaled else jax.grad(loss)


class ShardedRun:
  """The exact problem in one layout."""

  def __init__(self, layout, axis_type, tx=None):
    mesh, specs, batch_specs = JIT_LAYOUTS[layout]
    self.tx = tx or exact_model.make_optimizer()
    self.mesh = sharding.make_mesh(*mesh, axis_type)
    self.shardings = sharding.to_named_shardings(self.mesh, specs)
    self.batch_specs = batch_specs
    # How the model computes: params are whole along the axis of the batch.
    self.gathered = jax.tree.map(
      lambda spec: P(*(None if axis == "data" else axis for axis in spec)),
      specs,
      is_leaf=sharding.is_spec,
    )
    self.is_explicit = axis_type == AxisType.Explicit
    self.state_shardings = sharding.to_named_shardings(
      self.mesh,
      sharding.infer_state_specs(self.tx, exact_model.init_params(), specs),
    )

  def start(self):
    params = sharding.put_on_devices(exact_model.init_params(), self.shardings)
    init = jax.jit(self.tx.init, out_shardings=self.state_shardings)
    return params, init(params)

  def step(self, params, opt_state, batch):
    grads = _differentiate(self.loss, opt_state)(params, batch)
    updates, opt_state = self.tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def loss(self, params, batch):
    if self.is_explicit:
      # The compiler does so automatically along axes of type Auto.
      params = jax.sharding.reshard(params, self.gathered)
    return exact_model.loss_fn(params, batch)

  def put(self, batch):
    return sharding.put_on_devices(
      batch, sharding.to_named_shardings(self.mesh, self.batch_specs)
    )

  def train(self, batches):
    stacked = {name: P(None, *s) for name, s in self.batch_specs.items()}
    with jax.set_mesh(self.mesh):
      batches = sharding.put_on_devices(
        batches, sharding.to_named_shardings(self.mesh, stacked)
      )
      run = jax.jit(lambda *args: exact_model.train(self.step, *args))
      return run(*self.start(), batches)


class ShardMapRun:
  """The exact problem in one layout: params are gathered to be used."""

  def __init__(self, layout, check_vma, tx=None, **options):
    shape, axis_name, self.specs = SHARD_MAP_LAYOUTS[layout]
    self.names = ("data", "model")[: len(shape)]
    self.tx = tx or exact_model.make_optimizer(axis_name=axis_name, **options)
    self.mesh = sharding.make_mesh(shape, self.names)
    self.check_vma = check_vma
    # Only P() for the loss-scale state: JAX checks that it is replicated.
    self.carry_specs = (
      self.specs,
      sharding.infer_state_specs(
        self.tx, exact_model.init_params(), self.specs
      ),
    )

  def start(self):
    params = exact_model.init_params()
    return params, self.tx.init(params)

  def train(self, batches):
    batch_specs = dict.fromkeys(self.specs, P(None, self.names))
    in_specs = (*self.carry_specs, batch_specs)
    train = self.shard_map(
      functools.partial(exact_model.train, self.step),
      in_specs=in_specs,
      out_specs=(*self.carry_specs, P()),
    )
    args = sharding.put_on_devices(
      (*self.start(), batches), sharding.to_named_shardings(self.mesh, in_specs)
    )
    return jax.jit(train)(*args)

  def shard_map(self, fun, in_specs, out_specs):
    return jax.shard_map(
      fun,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=self.check_vma,
    )

  def sharded_update(self):
    """``update`` of gradients that are sharded as the params are."""
    in_specs = self.specs, *self.carry_specs
    return self.shard_map(self.update, in_specs, self.carry_specs)

  def step(self, params, opt_state, batch):
    grads = _differentiate(self.loss, opt_state)(params, batch)
    if not self.check_vma:
      grads = {name: self.psum_missing(name, g) for name, g in grads.items()}
    return self.update(grads, params, opt_state)

  def update(self, grads, params, opt_state):
    updates, opt_state = self.tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def loss(self, params, batch):
    """This device's part; differentiated, gathering becomes scattering."""
    return exact_model.loss_fn(
      {name: self.gather(name, param) for name, param in params.items()}, batch
    )

  def gather(self, name, param):
    for dim, axis in enumerate(self.specs[name]):
      if axis is not None:
        param = lax.all_gather(param, axis, axis=dim, tiled=True)
    return param

  def psum_missing(self, name, grad):
    """Sum over axes that hold replicas, as check_vma does automatically."""
    axes = tuple(axis for axis in self.names if axis not in self.specs[name])
    return lax.psum(grad, axes) if axes else grad
