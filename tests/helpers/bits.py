"""Compares trees, bit for bit or nearly so.

Bit for bit, NaN equals NaN, and 0.0 does not equal -0.0.
"""

import jax
import numpy as np


def has_same_bits(actual, expected):
  """Whether two trees are equal in structure, dtypes, shapes and bits."""
  return not _list_differences(actual, expected)


def assert_same_bits(actual, expected):
  """Fails with a line for each leaf that differs."""
  differences = _list_differences(actual, expected)
  assert not differences, "\n".join(differences)


def assert_close(actual, expected, tolerance=5e-3):
  """Fails unless all leaves differ by little, measured by their largest entry.

  The default is the error that matmuls in float16 may have.
  """

  def check(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, atol=tolerance * np.max(np.abs(b)))

  jax.tree.map(check, actual, expected)


def flatten(tree):
  """Return all entries of a tree as one array of float64."""
  return np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])


def relative_error(expected, actual):
  """Return the norm of the difference of two trees, over that of the first."""
  a, b = flatten(expected), flatten(actual)
  return np.linalg.norm(b - a) / np.linalg.norm(a)


def cosine(expected, actual):
  """Return the cosine of the angle between two trees."""
  a, b = flatten(expected), flatten(actual)
  return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def assert_functions_close(fun, expected_fun, *args, tolerance=5e-3):
  """Fails unless two functions return nearly the same, in one program."""
  run_both = jax.jit(lambda *args: (fun(*args), expected_fun(*args)))
  assert_close(*run_both(*args), tolerance)


def _list_differences(actual, expected):
  structure, expected_structure = map(jax.tree.structure, (actual, expected))
  if structure != expected_structure:
    return [f"The structure is {structure}, and not {expected_structure}."]
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(actual),
    jax.tree.leaves(expected),
    strict=True,
  )
  return [
    f"{jax.tree_util.keystr(path)}: {a!r} is not {b!r}"
    for (path, a), b in pairs
    if not _is_same_leaf(a, b)
  ]


def _is_same_leaf(a, b):
  a, b = map(_as_numpy, (a, b))
  if (a.dtype, a.shape) != (b.dtype, b.shape):
    return False
  # A view and not a copy, since leaves may be large. There is none of float0,
  # whose entries have no bytes.
  return not a.nbytes or np.array_equal(_to_bytes(a), _to_bytes(b))


def _as_numpy(x):
  is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(
    x.dtype, jax.dtypes.prng_key
  )
  return np.asarray(jax.random.key_data(x) if is_key else x)


def _to_bytes(x):
  return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
