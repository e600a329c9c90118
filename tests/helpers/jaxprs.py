"""The equations of a jaxpr, and of all that it calls."""

from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from optax_lossscale._jaxprs import _eqns, _primitives, _walk
from optax_lossscale.diagnostics._precision import _layers


class Matmul(NamedTuple):
  """A matmul with the names that reports print."""

  name: str  # of its weights or its scope, whichever is more specific
  weights: str
  scope: str
  backward: bool
  dtype: str  # of the result


def iter_eqns(eqns):
  """Yield each of some equations, outermost first, and all that they call."""
  for eqn in eqns:
    yield eqn
    for inner in _eqns.subjaxprs(eqn):
      yield from iter_eqns(inner.eqns)


def list_eqns(fun, *args):
  """All equations of a function, outermost first."""
  return list(iter_eqns(jax.make_jaxpr(fun)(*args).eqns))


def count_matmuls_by_dtype(fun, *args):
  """Count the matmuls by the name of the dtype of their result."""
  return count_eqn_matmuls_by_dtype(jax.make_jaxpr(fun)(*args).eqns)


def list_named_matmuls(fun, *args, only_live=False):
  """Return each matmul of a function, in order, as a :class:`Matmul`.

  Only those whose results are read, if that is requested: JAX leaves others
  next to them, which XLA removes.
  """
  visits = _walk.walk(
    jax.make_jaxpr(fun)(*args),
    _eqns.subjaxprs,
    only_live=only_live,
  )
  matmuls = []
  for visit in visits:
    if _primitives.is_matmul(visit.eqn):
      names, dtype = visit.location.names, visit.eqn.outvars[0].aval.dtype
      labels = names.candidate_labels()[0], names.param_path, names.name_scope
      matmuls.append(Matmul(*labels, visit.location.is_backward, str(dtype)))
  return matmuls


def list_layers(fun, *args):
  """Return the layers of a function that `autocast` cast, as reports do."""
  layers = _layers.list_rounding_layers(jax.make_jaxpr(fun)(*args))
  return [layer for layer in layers if layer.in_autocast]


def assert_each_name_keeps_its_rows(loss, *args):
  """Assert that a name which is kept removes its rows from the layers."""

  def rows(**kwargs):
    layers = list_layers(jax.grad(ols.autocast(loss, **kwargs)), *args)
    return {(x.location.names, x.location.is_backward): x.name for x in layers}

  before = rows()
  for name in set(before.values()):
    left = {row for row in before if before[row] != name}
    assert rows(keep_float32=name).keys() == left, name


def count_eqn_matmuls_by_dtype(eqns):
  """The same of some equations, and of all that they call."""
  return Counter(
    str(eqn.outvars[0].aval.dtype)
    for eqn in iter_eqns(eqns)
    if eqn.primitive.name in ("dot_general", "conv_general_dilated")
  )


def list_half_primitives(fun, *args, dtype=jnp.float16):
  """The names of the primitives that return something in half precision."""
  return {
    eqn.primitive.name
    for eqn in list_eqns(fun, *args)
    if any(getattr(v.aval, "dtype", None) == dtype for v in eqn.outvars)
  }
