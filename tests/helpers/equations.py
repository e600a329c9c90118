"""The equations of a jaxpr, and of all that it calls."""

from collections import Counter

import jax
import jax.numpy as jnp

from helpers import product_flops


def of(fun, *args):
  """All equations of a function, outermost first."""
  return [eqn for _, eqn in product_flops.equations(jax.make_jaxpr(fun)(*args))]


def products(fun, *args):
  """How many products there are, by the name of the dtype of the result."""
  return products_of(jax.make_jaxpr(fun)(*args).jaxpr.eqns)


def products_of(eqns):
  """The same of some equations, and of all that they call."""
  return Counter(
    str(eqn.outvars[0].aval.dtype)
    for _, eqn in product_flops.within(eqns)
    if eqn.primitive.name in product_flops.PRODUCTS
  )


def in_half(fun, *args, dtype=jnp.float16):
  """The names of the primitives that return something in half precision."""
  return {
    eqn.primitive.name
    for eqn in of(fun, *args)
    if any(getattr(v.aval, "dtype", None) == dtype for v in eqn.outvars)
  }
