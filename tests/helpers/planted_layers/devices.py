"""Faults of programs for four devices."""

import functools

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from helpers import sharding
from helpers.planted_layers import Model
from helpers.planted_layers.plain_jax import make_network, subtract


def _make_loss_and_args(fault):
  return make_network(lambda params, x: subtract(params["w"], x, fault), "w")


def shard_args(args, mesh):
  specs = {name: P() for name in args[0]}, P("data"), P("data")
  return jax.device_put(args, sharding.to_named_shardings(mesh, specs))


def make_shard_map_model(axis_type, check_vma, fault):
  mesh = sharding.make_mesh((4,), ("data",), axis_type)
  shard_loss_fn, args = _make_loss_and_args(fault)
  loss_fn = jax.shard_map(
    lambda *args: lax.pmean(shard_loss_fn(*args), "data"),
    mesh=mesh,
    in_specs=(P(), P("data"), P("data")),
    out_specs=P(),
    check_vma=check_vma,
  )
  return Model(loss_fn, shard_args(args, mesh))


def make_sharded_model(axis_type, fault):
  loss_fn, args = _make_loss_and_args(fault)
  return Model(
    loss_fn, shard_args(args, sharding.make_mesh((4,), ("data",), axis_type))
  )


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
in_shard_map = functools.partial(make_shard_map_model, AUTO, True)
in_shard_map_unchecked = functools.partial(make_shard_map_model, AUTO, False)
in_shard_map_of_explicit_axes = functools.partial(
  make_shard_map_model, EXPLICIT, True
)
on_auto_axes = functools.partial(make_sharded_model, AUTO)
on_explicit_axes = functools.partial(make_sharded_model, EXPLICIT)
