"""Which gradients are not finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _grads, _host
from optax_lossscale.diagnostics import _leaves


def finite_per_leaf(grads: Any) -> Any:
  """Says of each leaf whether it is finite; works under ``jit``.

  Use it inside a step that should return only the flags and not the gradients.
  Outside of ``jit``, :func:`nonfinite_leaves` says more.

  Args:
    grads: any pytree.

  Returns:
    A pytree of the same structure, whose leaves are bools of shape ``()``. They
    are True for leaves that are not gradients, such as integers.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> grads = {"a": jnp.ones(3), "b": jnp.array(jnp.nan)}
    >>> flags = diagnostics.finite_per_leaf(grads)
    >>> print(flags["a"], flags["b"])
    True False
  """

  def is_finite(path: Any, leaf: Any) -> jax.Array:
    if _grads.is_overwritten(path) or not _arrays.is_array_like(leaf):
      return jnp.bool_(True)
    return _grads.all_finite(leaf)

  return jax.tree_util.tree_map_with_path(is_finite, grads)


class NonfiniteLeaf(NamedTuple):
  """A leaf that holds an inf or a NaN.

  Attributes:
    name: its path in the tree, such as ``"layers/0/weight"``.
    shape: its shape.
    dtype: its dtype.
    inf_count: how many entries are infinite, of either sign.
    nan_count: how many are NaN.
    first_index: the index of the first of them, in row-major order.
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
      f" {self.nan_count} NaN of {int(np.prod(self.shape))}, first at"
      f" {index or 'the scalar itself'}"
    )


@_host.may_transfer
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
  measured = _leaves.measure_grads(grads, "nonfinite_leaves", _find_nonfinite)
  return [
    NonfiniteLeaf(
      name, leaf.shape, leaf.dtype, int(infs), int(nans), tuple(map(int, index))
    )
    for name, leaf, (infs, nans, index) in measured
    if infs or nans
  ]


@_leaves.reduce_on_device
def _find_nonfinite(xp: Any, leaf: Any) -> tuple[Any, Any, list[Any]]:
  """The counts of infs and NaNs, and the index of the first of them."""
  is_nan, is_inf = xp.isnan(leaf), xp.isinf(leaf)
  mask = is_nan | is_inf
  index = []
  # One axis after another, since a reshape would gather a sharded array.
  positions = xp.indices(leaf.shape, xp.int32, sparse=True)
  for position, length in zip(positions, leaf.shape, strict=True):
    first = xp.min(xp.where(mask, position, length), initial=length)
    mask = mask & (position == first)
    index.append(first)
  return _leaves.count(xp, is_inf), _leaves.count(xp, is_nan & ~is_inf), index
