"""Programs with one fault each, on a line that a comment marks."""

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from helpers import sharding

F16 = jnp.float16
X = jnp.full((2, 4), 2, F16)
W = jnp.eye(4, dtype=F16)
BIG = jnp.full((4, 4), 30000, F16)


# For each fault: its maker, the expected report (inf or NaN, the path, whether
# it is in the backward pass), and the function that contains the line.
FAULTS = {}


def register_fault(nonfinite, path, *args, function_name=None, backward=False):
  """Add a function of these arguments; or, without any, a maker of both."""

  def register(fun):
    make = (lambda: (fun, *args)) if args else fun
    FAULTS[fun.__name__] = (
      make,
      nonfinite,
      path,
      backward,
      function_name or fun.__name__,
    )
    return fun

  return register


def as_loss(x):
  return jnp.sum(x.astype(jnp.float32))


@register_fault("inf", "scan[3]/mul", X, function_name="body")
def in_scan(x):
  def body(x, i):
    x = x * (30 * i).astype(F16)  # in_scan
    return x, None

  return lax.scan(body, x, jnp.arange(6), reverse=True)[0]


@register_fault("inf", "while[2]/mul", X, function_name="body")
def in_while(x):
  def body(state):
    i, x = state
    return i + 1, x * 32  # in_while

  return lax.while_loop(lambda state: state[0] < 5, body, (0, x))[1]


@register_fault("nan", "cond(branch 1)/sqrt", X, function_name="<lambda>")
def in_cond(x):
  return lax.cond(
    x.sum() > 0,
    lambda x: jnp.sqrt(x - 5),  # in_cond
    lambda x: x,
    x,
  )


@register_fault("inf", "dot_general", X, BIG, function_name="one")
def in_vmap(xs, w):
  def one(x):
    return jnp.dot(x, w)  # in_vmap

  return jax.vmap(one)(xs)


@register_fault("inf", "checkpoint/square", function_name="block")
def in_remat():
  @jax.checkpoint
  def block(x):
    return jnp.square(x * 200)  # in_remat

  return (lambda x: as_loss(block(x))), X


@register_fault(
  "inf", "scan[2]/dot_general", X * 0, function_name="body", backward=True
)
@jax.grad
def scan_backward(x):
  def body(x, w):
    x = jnp.tanh(x) @ w  # scan_backward
    return x, None

  ws = jnp.stack([W, W, W * 4000, W])
  return as_loss(lax.scan(body, x, ws)[0]) * 20


@register_fault(
  "inf", "checkpoint/dot_general", function_name="block", backward=True
)
def remat_backward():
  @jax.checkpoint
  def block(x, w):
    return x @ w  # remat_backward

  return jax.grad(lambda w: as_loss(block(X, w)) * 40000), W


@jax.custom_vjp
def clipped(x):
  return jnp.clip(x, 0, 1)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, ct: (ct / (x - 2),))


@register_fault("inf", "div", X, backward=True)
@jax.grad
def custom_vjp_backward(x):
  return as_loss(clipped(x))  # custom_vjp_backward


@jax.custom_vjp
def powers(x):
  return jnp.exp(7 * x)  # custom_vjp_forward


powers.defvjp(lambda x: (powers(x), x), lambda x, ct: (ct,))


@register_fault("inf", "custom_vjp_call/exp", X, function_name="powers")
def custom_vjp_forward(x):
  return powers(x) + 1


@jax.custom_jvp
def cubed(x):
  return x * x * x  # custom_jvp_forward


cubed.defjvp(lambda x, t: (cubed(*x), 3 * x[0] * x[0] * t[0]))


@register_fault("inf", "custom_jvp_call/mul", X, function_name="cubed")
def custom_jvp_forward(x):
  return cubed(x * 50)


@register_fault("inf", "jit(_where)/convert_element_type", function_name="fun")
def where_of_a_library():
  jnp.where(X > 1, X, -70000.0)  # traced here first

  def fun(x):
    return jnp.where(x > 2, x, 70000.0)  # where_of_a_library

  return fun, X


@register_fault("inf", "shard_map/square", function_name="part")
def in_shard_map():
  mesh = sharding.make_mesh((4,), ("data",))

  def part(x):
    i = lax.axis_index("data")
    x = x * jnp.where(i == 2, 300, 1).astype(F16)
    return lax.psum(jnp.square(x), "data")  # in_shard_map

  fun = jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P())
  return fun, jnp.ones((8, 4), F16)


@register_fault(
  "inf", "jit(<lambda>)/dot_general", function_name="Block.__call__"
)
def in_linen():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(4, dtype=F16)(x)
      x = x * 30000
      return nn.Dense(4, dtype=F16)(x)  # in_linen

  model = Block()
  params = model.init(jax.random.key(0), X)
  params = jax.tree.map(jnp.ones_like, params)
  params["params"]["Dense_0"]["kernel"] /= 8
  loss_fn = lambda params, x: as_loss(model.apply(params, x))
  return jax.jit(jax.value_and_grad(loss_fn)), params, X
