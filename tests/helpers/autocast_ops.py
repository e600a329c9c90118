"""The operations of docs/reference/autocast_ops.md, by what `autocast` does.

Each function takes two arrays of shape (4, 4), or the matmul of two.
"""

import jax
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import optax

import optax_lossscale as ols

X = 1.0 + jnp.eye(4)
MESH = jax.make_mesh(
  (1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1]
)


def on_devices(fun):
  """Return a function of two arrays that calls another inside shard_map."""
  return jax.shard_map(
    fun, mesh=MESH, in_specs=(P(), P()), out_specs=P(), check_vma=False
  )


def attention(x, w):
  q, k = x[None, :, None], w[None, :, None]
  return jax.nn.dot_product_attention(q, k, k)


RUN_IN_FLOAT16 = {
  "jnp.matmul": jnp.matmul,
  "jnp.dot": jnp.dot,
  "jnp.tensordot": lambda x, w: jnp.tensordot(x, w, 1),
  "jnp.einsum": lambda x, w: jnp.einsum("ij,j->i", x, w[0]),
  "lax.dot_general": lambda x, w: lax.dot_general(
    x, w, (((1,), (0,)), ((), ()))
  ),
  "jnp.linalg.multi_dot": lambda x, w: jnp.linalg.multi_dot([x, w, x]),
  "jnp.linalg.matrix_power": lambda x, w: jnp.linalg.matrix_power(x, 3),
  "jnp.cov": lambda x, w: jnp.cov(x),
  "lax.conv_general_dilated": lambda x, w: lax.conv_general_dilated(
    x[None, None], w[None, None, :2, :2], (1, 1), "SAME"
  ),
  "jnp.convolve": lambda x, w: jnp.convolve(x[0], w[0]),
  "lax.ragged_dot": lambda x, w: lax.ragged_dot(
    x, w[None], jnp.array([4], jnp.int32)
  ),
  "jax.nn.dot_product_attention": attention,
}
# Functions that only move a matmul `h`, by the name of their primitive: all
# that may follow a matmul in half precision.
DATA_MOVEMENT = {
  "copy": jnp.copy,
  "name": lambda h: checkpoint_name(h, "h"),
  "optimization_barrier": lax.optimization_barrier,
  "reshape": lambda h: h.reshape(2, 8),
  "rev": lambda h: h[::-1],
  "sharding_constraint": lambda h: lax.with_sharding_constraint(
    h, NamedSharding(MESH, P())
  ),
  "slice": lambda h: h[1:3],
  "squeeze": lambda h: jnp.squeeze(h[:1], 0),
  "transpose": lambda h: h.T,
}
# Primitives that move data between devices; they need `shard_map`.
EXCHANGES = {
  "ppermute": lambda h: lax.ppermute(h, "data", [(0, 0)]),
  "all_to_all": lambda h: lax.all_to_all(h, "data", 0, 0, tiled=True),
}
FOLLOW = {
  "jnp.reshape": "reshape",
  "jnp.transpose": "transpose",
  "jnp.squeeze": "squeeze",
  "jnp.copy": "copy",
  "lax.slice": "slice",
  "lax.rev": "rev",
  "checkpoint_name": "name",
  "lax.optimization_barrier": "optimization_barrier",
  "lax.with_sharding_constraint": "sharding_constraint",
  "lax.ppermute": "ppermute",
  "lax.all_to_all": "all_to_all",
}
RUN_IN_FLOAT32 = {
  "jax.nn.softmax": jax.nn.softmax,
  "jax.nn.log_softmax": jax.nn.log_softmax,
  "jax.nn.logsumexp": jax.nn.logsumexp,
  "jnp.exp": jnp.exp,
  "jnp.log": jnp.log,
  "jnp.sum": jnp.sum,
  "jnp.mean": jnp.mean,
  "jnp.var": jnp.var,
  "jnp.cumsum": jnp.cumsum,
  "jnp.linalg.norm": jnp.linalg.norm,
  "jax.nn.standardize": jax.nn.standardize,
  "jnp.add": lambda y: y + y,
  "jnp.multiply": lambda y: y * y,
  "jnp.divide": lambda y: y / y,
  "jnp.sqrt": jnp.sqrt,
  "jax.nn.relu": jax.nn.relu,
  "jax.nn.gelu": jax.nn.gelu,
  "jnp.where": lambda y: jnp.where(y > 0, y, y),
  "jnp.concatenate": lambda y: jnp.concatenate([y, y]),
  "jnp.split": lambda y: jnp.split(y, 2),
  "jnp.pad": lambda y: jnp.pad(y, 1),
  "jnp.broadcast_to": lambda y: jnp.broadcast_to(y, (2, 4, 4)),
  "jnp.take": lambda y: jnp.take(y, jnp.array([0, 1]), axis=0),
  "lax.dynamic_slice": lambda y: lax.dynamic_slice(
    y, (jnp.int32(1), 0), (2, 2)
  ),
  "lax.psum": lambda y: lax.psum(y, "data"),
  "lax.all_gather": lambda y: lax.all_gather(y, "data"),
  "optax.softmax_cross_entropy": lambda y: optax.softmax_cross_entropy(y, X),
  "optax.l2_loss": optax.l2_loss,
}
MATMULS_IN_FLOAT32 = {
  "jnp.vdot": jnp.vdot,
  "jnp.inner": lambda x, w: jnp.inner(x[0], w[0]),
  "jnp.vecdot": jnp.vecdot,
  "jnp.outer": lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]),
  "jnp.kron": jnp.kron,
  'precision="highest"': lambda x, w: jnp.matmul(x, w, precision="highest"),
  "jnp.linalg.solve": jnp.linalg.solve,
  "jnp.linalg.inv": lambda x, w: jnp.linalg.inv(x),
  "jnp.linalg.svd": lambda x, w: jnp.linalg.svd(x)[1],
  "jnp.linalg.eigh": lambda x, w: jnp.linalg.eigh(x)[0],
  "jnp.linalg.cholesky": lambda x, w: jnp.linalg.cholesky(x),
  "jnp.linalg.pinv": lambda x, w: jnp.linalg.pinv(x),
  "ols.keep_float32": ols.keep_float32(jnp.matmul),
}


def kernel(x, w, out):
  out[...] = x[...] @ w[...]


@custom_vmap
def with_rule_for_vmap(x, w):
  return x @ w


@with_rule_for_vmap.def_vmap
def batched(axis_size, in_batched, x, w):
  return jnp.matmul(x, w), True


def solve_by_matmuls(x, w):
  by_matmul = lambda matvec, b: x @ b
  return lax.custom_linear_solve(
    lambda v: x @ v, w, by_matmul, transpose_solve=by_matmul
  )


LEFT_UNCHANGED = {
  "pl.pallas_call": pl.pallas_call(kernel, out_shape=X),
  "jax.export": export.export(jax.jit(jnp.matmul))(X, X).call,
  "custom_vmap": with_rule_for_vmap,
  "linear_call": lambda x, w: linear_call(
    lambda w, x: x @ w, lambda w, x: x @ w.T, w, x
  ),
  "lax.custom_linear_solve": solve_by_matmuls,
}

# By the heading of the page that has a table of these.
TABLES = {
  "## Ops that run in float16": RUN_IN_FLOAT16,
  "## Ops that follow their input": FOLLOW,
  "## Ops that run in float32": RUN_IN_FLOAT32,
  "## Matmuls that stay in float32": MATMULS_IN_FLOAT32,
  "## Ops that autocast leaves unchanged": LEFT_UNCHANGED,
}
