"""Faults of programs for four devices."""

import functools

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from helpers import sharding
from helpers.planted_layers import Model
from helpers.planted_layers.plain_jax import make_network, subtract


def shard_args(args, mesh):
  specs = {name: P() for name in args[0]}, P("data"), P("data")
  return jax.device_put(args, sharding.to_named_shardings(mesh, specs))


def make_shard_map_model(axis_type, fault):
  mesh = sharding.make_mesh((4,), ("data",), axis_type)
  layer = lambda params, x: subtract(params["w"], x, fault)
  shard_loss_fn, args = make_network(layer, "w")
  loss_fn = jax.shard_map(
    lambda *args: lax.pmean(shard_loss_fn(*args), "data"),
    mesh=mesh,
    in_specs=(P(), P("data"), P("data")),
    out_specs=P(),
  )
  return Model(loss_fn, shard_args(args, mesh))


in_shard_map = functools.partial(make_shard_map_model, AxisType.Auto)
in_shard_map_of_explicit_axes = functools.partial(
  make_shard_map_model, AxisType.Explicit
)
