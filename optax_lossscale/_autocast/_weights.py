"""The names that weights give to products: their paths among the arguments.

Many libraries give their layers no scopes. But a product of a layer has an
operand that is one of its weights, and these have a path in the argument that
they came in, such as ``blocks/2/up``.
"""

from collections.abc import Callable, Sequence
import inspect
import itertools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _in_place, _products

# The path of a weight, or what is left of it within a call that tells the
# beginning; None of what is no weight.
Path = tuple[str, ...] | None

# What these make of a weight is still that weight.
_KEEP = _products.MOVES | {
  "all_gather", "broadcast_in_dim", "convert_element_type", "dynamic_slice",
  "pcast", "pvary", "reshard",
}  # fmt: skip


def paths_of(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Path]:
  """The paths of a function's weights, by the identity of the arrays.

  These are the floats of its first argument that is a tree of such: parameters
  come before batches, and what names a layer must be no data.
  """
  owner = fun.__self__ if inspect.ismethod(fun) else fun  # may be a model
  for argument in [owner, *_in_order(fun, args, kwargs)]:
    try:
      named = _in_place.named_leaves(argument)
    except (TypeError, ValueError):  # Its keys have no order.
      continue
    paths: dict[int, Path] = {
      id(x): path for path, x in named if _is_weight(path, x)
    }
    if paths:
      return paths
  return {}


def _in_order(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
  """The arguments as the function declares them."""
  try:
    bound = inspect.signature(fun).bind(*args, **kwargs)
  except (TypeError, ValueError):
    return [*args, *kwargs.values()]
  return [*bound.args, *bound.kwargs.values()]


def _is_weight(path: Any, x: Any) -> bool:
  is_array = bool(path) and isinstance(x, jax.Array)
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)


class Weights:
  """The variables of a jaxpr that are weights.

  Args:
    variables: its inputs.
    paths: their paths.
  """

  def __init__(self, variables: Sequence[Any], paths: Sequence[Path]) -> None:
    pairs = zip(variables, paths, strict=False)
    self._paths = {v: path for v, path in pairs if path is not None}

  def of(self, atoms: Sequence[Any]) -> list[Path]:
    """The paths of the inputs of an equation."""
    is_literal = lambda x: isinstance(x, core.Literal)
    return [None if is_literal(x) else self._paths.get(x) for x in atoms]

  def follow(self, eqn: core.JaxprEqn) -> None:
    """Notes what an equation makes of a weight."""
    if not self._paths or eqn.primitive.name not in _KEEP:
      return
    # A barrier has an output for each input, and the others have one.
    for path, out in zip(self.of(eqn.invars), eqn.outvars, strict=False):
      if path is not None:
        self._paths[out] = (*path, *_index(eqn))

  def name_of_product(self, eqn: core.JaxprEqn) -> str:
    """The name that weights give to a product; empty if they give none."""
    found = [path for path in self.of(eqn.invars[:2]) if path]
    if not found or _is_named(found[0], _jaxprs.scopes_of(eqn)):
      return ""
    return "/".join(found[0])

  def within_call(
    self, eqn: core.JaxprEqn, scopes_inside: set[str]
  ) -> tuple[str, list[Path]]:
    """What all weights of a call have in common, and what is left of each.

    So calls that share a function go on to share it: what tells them apart
    stands at the call, and what tells their products apart within it.
    """
    scopes = scopes_inside | _jaxprs.scopes_of(eqn)
    paths = self.of(eqn.invars)
    match _jaxprs.part_of(eqn):  # What a loop carries is no weight: it changes.
      case _jaxprs.Scan() as scan:
        consts, carry, slices = scan.split(paths)
        paths = [*consts, *[None] * len(carry), *slices]
      case _jaxprs.While() as loop:
        first, second, carry = loop.split(paths)
        paths = [*first, *second, *[None] * len(carry)]
    weights = [path for path in paths if path is not None]
    if any(path and _is_named(path, scopes) for path in weights):
      return "", [None] * len(paths)
    are_same = lambda names: len(set(names)) == 1
    levels = itertools.takewhile(are_same, zip(*weights, strict=False))
    common = [name for name, *_ in levels]
    rest = [None if path is None else path[len(common) :] for path in paths]
    return "/".join(common), rest


def _is_named(path: tuple[str, ...], scopes: set[str]) -> bool:
  """Whether scopes tell of a layer: those of the library are its path."""
  # Some libraries have a plain list of weights, beside full scopes.
  is_in_list = len(path) == 1 and path[0].isdigit() and bool(scopes)
  return is_in_list or not scopes.isdisjoint(path[-2:-1])


def _index(eqn: core.JaxprEqn) -> tuple[str, ...]:
  """Which part of a stack of weights is taken, if it is one that is known."""
  if eqn.primitive.name != "slice":
    return ()
  whole: Any = eqn.invars[0].aval
  part: Any = eqn.outvars[0].aval
  is_one = part.shape == (1, *whole.shape[1:]) != whole.shape
  return (str(eqn.params["start_indices"][0]),) if is_one else ()


def of_bodies(
  eqn: core.JaxprEqn, paths: Sequence[Path]
) -> dict[core.Jaxpr, Sequence[Path]]:
  """The paths of the inputs of each jaxpr that an equation runs."""
  part = _jaxprs.part_of(eqn)
  given = _jaxprs.given_to_bodies(part, paths) if part else []
  return {body.jaxpr: its for body, its in given}
