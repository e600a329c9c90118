"""Puts an equation between conversions to half precision and back."""

from collections.abc import Set
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs


def in_half(eqn: core.JaxprEqn, dtype: Any) -> list[core.JaxprEqn]:
  """An equation between conversions, which leaves its variables as they are.

  Values are narrowed for each use, even where one equation uses a value twice:
  the cotangents of a shared copy would be added in half.
  """
  eqn = _jaxprs.marked(eqn, dtype)
  half = lambda atom: _half_of(atom, dtype) if _is_float32(atom) else atom
  inputs, outputs = list(map(half, eqn.invars)), list(map(half, eqn.outvars))
  before = [
    _jaxprs.conversion(*pair, eqn) for pair in _changed(eqn.invars, inputs)
  ]
  after = [
    _jaxprs.conversion(*pair, eqn) for pair in _changed(outputs, eqn.outvars)
  ]
  return [*before, eqn.replace(invars=inputs, outvars=outputs), *after]


def come_from(eqn: core.JaxprEqn, half: Set[Any]) -> bool:
  """Whether there are float32 inputs, all of which are in the set."""
  floats = [atom for atom in eqn.invars if _is_float32(atom)]
  return bool(floats) and all(_jaxprs.is_one_of(atom, half) for atom in floats)


def _changed(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
  return [(a, b) for a, b in zip(old, new, strict=True) if a is not b]


def _is_float32(atom: Any) -> bool:
  return getattr(atom.aval, "dtype", None) == jnp.float32


def _half_of(atom: Any, dtype: Any) -> Any:
  return core.Var(atom.aval.update(dtype=dtype, weak_type=False))
