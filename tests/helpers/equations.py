"""The equations of a jaxpr, and of all that it calls."""

from collections import Counter

import jax
from jax.extend import core
import jax.numpy as jnp

PRODUCTS = ("dot_general", "conv_general_dilated")


def of(fun, *args):
  """All equations of a function, outermost first."""
  return list(within(jax.make_jaxpr(fun)(*args).jaxpr))


def within(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn
    for param in jax.tree.leaves(list(eqn.params.values())):
      if isinstance(param, (core.Jaxpr, core.ClosedJaxpr)):
        yield from within(getattr(param, "jaxpr", param))


def products(fun, *args):
  """How many products there are, by the name of the dtype of the result."""
  return Counter(
    str(eqn.outvars[0].aval.dtype)
    for eqn in of(fun, *args)
    if eqn.primitive.name in PRODUCTS
  )


def in_half(fun, *args, dtype=jnp.float16):
  """The names of the primitives that return something in half precision."""
  return {
    eqn.primitive.name
    for eqn in of(fun, *args)
    if any(getattr(v.aval, "dtype", None) == dtype for v in eqn.outvars)
  }
