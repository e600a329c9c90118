"""``nonfinite_leaves``, and counts of the entries of leaves by exponent."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _grads, _trees

# The smallest and the largest floor(log2) of a float64, subnormals included.
MIN_EXPONENT, MAX_EXPONENT = -1074, 1023
NUM_BINADES = MAX_EXPONENT - MIN_EXPONENT + 1


class NonfiniteLeaf(NamedTuple):
  """A leaf that holds an inf or a NaN.

  Attributes:
    name: its path in the tree, such as ``"layers/0/weight"``.
    shape: its shape.
    dtype: its dtype.
    inf_count: how many entries are infinite, of either sign.
    nan_count: how many are NaN.
    first_index: the index of the first of them, in row-major order.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> leaf, = diagnostics.nonfinite_leaves({"w": jnp.array([1.0, jnp.inf])})
    >>> leaf.name, leaf.inf_count, leaf.first_index
    ('w', 1, (1,))
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  inf_count: int
  nan_count: int
  first_index: tuple[int, ...]

  def __str__(self) -> str:
    index = "".join(f"[{i}]" for i in self.first_index)
    return (
      f"{self.name} {self.dtype}{list(self.shape)}: {self.inf_count} inf,"
      f" {self.nan_count} NaN of {int(np.prod(self.shape))}"
      f"{index and f', first at {index}'}"
    )


@_arrays.allow_transfers
def nonfinite_leaves(grads: Any) -> list[NonfiniteLeaf]:
  """Lists the leaves that hold an inf or a NaN.

  Call it outside ``jit``. Each leaf is reduced where it is, sharded or not, and
  only the counts are read back. :func:`find_overflow` names the operation that
  they come from.

  Args:
    grads: a pytree, such as the gradients that
      :func:`~optax_lossscale.value_and_grad` returns, a Flax NNX state or an
      Equinox model. Leaves that are not floats are left out, and so is Flax's
      ``_overwrite_with_gradient`` collection.

  Returns:
    A list of :class:`NonfiniteLeaf`, in the order of the tree. It is empty if
    all gradients are finite. Each prints as one line.

  Raises:
    TypeError: if called under ``jit``.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> grads = {"w": jnp.array([[1.0, 2.0], [jnp.inf, jnp.nan]]), "b": 0.5}
    >>> for leaf in diagnostics.nonfinite_leaves(grads):
    ...   print(leaf)
    w float32[2, 2]: 1 inf, 1 NaN of 4, first at [1][0]
  """
  leaf_stats = measure_grads(grads, "nonfinite_leaves", _measure_nonfinite)
  return [
    NonfiniteLeaf(
      name, leaf.shape, leaf.dtype, int(infs), int(nans), tuple(map(int, index))
    )
    for name, leaf, (infs, nans, index) in leaf_stats
    if infs or nans
  ]


def reduce_on_device(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Make ``fun(xp, leaf, ...)`` run on the devices of the leaf, or in NumPy.

  Args:
    fun: a function of an array module and of arrays of this module. It receives
      floats of at least 32 bits, since few devices compute with float8.

  Returns:
    A function without the first argument: jitted for JAX arrays, and in NumPy
    for NumPy arrays, whose float64 JAX would cast to float32.
  """

  @functools.wraps(fun)
  def upcast_fun(xp: Any, leaf: Any, *args: Any) -> Any:
    dtype = _arrays.promote_to_float32(leaf.dtype)
    return fun(xp, leaf.astype(dtype, copy=False), *args)

  jitted_fun = jax.jit(upcast_fun, static_argnums=0)

  def wrapper(leaf: Any, *args: Any) -> Any:
    if isinstance(leaf, jax.Array):
      return jitted_fun(jnp, leaf, *args)
    return upcast_fun(np, leaf, *args)

  return wrapper


@reduce_on_device
def _measure_nonfinite(xp: Any, leaf: Any) -> tuple[Any, Any, list[Any]]:
  """Count infs and NaNs, and return the index of the first of them."""
  is_nan, is_inf = xp.isnan(leaf), xp.isinf(leaf)
  mask = is_nan | is_inf
  index = []
  # Find the index axis by axis, since a reshape would gather a sharded array.
  axis_indices = xp.indices(leaf.shape, xp.int32, sparse=True)
  for axis_index, length in zip(axis_indices, leaf.shape, strict=True):
    first_on_axis = xp.min(xp.where(mask, axis_index, length), initial=length)
    mask = mask & (axis_index == first_on_axis)
    index.append(first_on_axis)
  return count_true(xp, is_inf), count_true(xp, is_nan & ~is_inf), index


@reduce_on_device
def count_exponents(xp: Any, leaf: Any) -> tuple[Any, Any, Any]:
  """Return the counts from MIN_EXPONENT on, of zeros, and of infs and NaNs."""
  magnitudes = xp.maximum(xp.abs(leaf.real), xp.abs(leaf.imag))
  finite = xp.isfinite(leaf)
  finite_nonzero = finite & (magnitudes > 0)
  _, exponents = xp.frexp(xp.where(finite_nonzero, magnitudes, 1))
  index = xp.where(finite_nonzero, exponents - 1 - MIN_EXPONENT, -1)
  zeros = count_true(xp, magnitudes == 0)
  nonfinite = count_true(xp, ~finite)
  if xp is np:
    return (
      np.bincount(index[finite_nonzero], minlength=NUM_BINADES),
      zeros,
      nonfinite,
    )

  # Compute one sum for each exponent between the lowest and the highest one
  # that occur. A scatter or a bincount would gather a sharded array.
  def count_binade(i: jax.Array, counts: jax.Array) -> jax.Array:
    return counts.at[i].set(count_true(xp, index == i))

  first = xp.min(
    xp.where(finite_nonzero, index, NUM_BINADES), initial=NUM_BINADES
  )
  last = xp.max(index, initial=-1)
  zero_counts = jnp.zeros(NUM_BINADES, jnp.uint32)
  counts = lax.fori_loop(first, last + 1, count_binade, zero_counts)
  return counts, zeros, nonfinite


def measure_grads(
  tree: Any, caller: str, measure_leaf: Callable[[Any], Any]
) -> list[tuple[str, Any, Any]]:
  """Measure the gradients in a tree, and transfer the results to the host.

  Args:
    tree: any pytree.
    caller: the name of the public function, for the message.
    measure_leaf: a function of a numpy or JAX array that returns a pytree of
      arrays, such as :func:`reduce_on_device` returns.

  Returns:
    A list of names, leaves and results, the results on the host.

  Raises:
    TypeError: if called under ``jit``.
  """
  as_array = lambda x: x if isinstance(x, jax.Array) else np.asarray(x)
  paths_and_leaves = jax.tree_util.tree_leaves_with_path(tree)
  names = _trees.leaf_names(path for path, _ in paths_and_leaves)
  leaves = [
    (name, as_array(leaf))
    for name, (path, leaf) in zip(names, paths_and_leaves, strict=True)
    if _grads.is_grad(path, leaf) and _arrays.is_array_like(leaf)
  ]
  for name, leaf in leaves:
    if isinstance(leaf, jax.core.Tracer):
      raise TypeError(
        f"{caller} must be called outside jit, since it reads values, got a"
        f" tracer at {name!r}. Return the gradients from the jitted function,"
        " or jax.tree.map(optax_lossscale.all_finite, grads)."
      )
  # Measure all leaves before reading the first result, so that devices need not
  # wait for the host.
  stats = jax.device_get([measure_leaf(leaf) for _, leaf in leaves])
  return [(*leaf, x) for leaf, x in zip(leaves, stats, strict=True)]


def count_true(xp: Any, mask: Any) -> Any:
  """Count true entries, in unsigned integers: an int32 would end at 2**31."""
  return xp.sum(mask, dtype=xp.uint32 if xp is jnp else xp.uint64)
