"""``find_overflow``: which operation an inf or a NaN comes from."""

from collections.abc import Callable
import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import _tracing
from optax_lossscale.diagnostics._overflow import (
  _bits,
  _marks,
  _runners,
  _stepper,
)


class Operand(NamedTuple):
  """What an operation read.

  Attributes:
    shape: the shape, under ``shard_map`` that on one device.
    dtype: the dtype.
    largest: the largest magnitude of what is finite; 0.0 if nothing is, None
      if these are no numbers.
    finite: whether all of it is.
  """

  shape: tuple[int, ...]
  dtype: Any
  largest: float | None
  finite: bool

  def __str__(self) -> str:
    text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
    if self.largest is not None:
      text += f" up to {float(f'{self.largest:.3g}'):g}"
    return text if self.finite else f"{text} beside inf or nan"


@dataclasses.dataclass(frozen=True)
class Overflow:
  """Where an inf or a NaN in a result comes from.

  Attributes:
    primitive: the operation: JAX's name of the primitive. ``"argument"`` and
      ``"constant"`` stand for a number that was not finite to begin with.
    dtype: the dtype of its result.
    kind: ``"inf"`` or ``"nan"``. An inf is told before a NaN.
    source: the user's line, ``"model.py:32 (Block.__call__)"``; empty if none
      is known. In the backward pass it is the line that is differentiated.
    path: the way to it, ``"jit(block)/scan[3]/dot_general"``. Iterations are
      counted from 0. In the backward pass over a scan, they have the numbers of
      the forward pass. For an argument, it is its name.
    backward: whether it belongs to a backward pass.
    inputs: an :class:`Operand` for each of its inputs.
    others: further origins, in the order in which they were found. Theirs is
      empty.
  """

  primitive: str
  dtype: Any
  kind: str
  source: str
  path: str
  backward: bool
  inputs: tuple[Operand, ...]
  others: tuple["Overflow", ...] = ()

  def __str__(self) -> str:
    within = self.path.rpartition("/")[0]
    if self.primitive in ("argument", "constant"):
      within = self.path if self.primitive == "argument" else within
    parts = [
      f"{self.kind} in {self.dtype} from {self.primitive}",
      f"in {within}" if within else "",
      self.source,
      "backward" if self.backward else "",
    ]
    text = ", ".join(part for part in parts if part)
    if self.inputs:
      text += f":\n  inputs {', '.join(map(str, self.inputs))}"
    if self.others:
      text += f"\n  and from {len(self.others)} more: see others"
    return text


def find_overflow(
  fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> Overflow | None:
  """Finds the operation that the infs and NaNs in a result come from.

  Runs the function once, operation by operation, on the host. From there it
  follows each inf and NaN: what never reaches a result is not named, such as a
  masked logit of -inf, or the branch of a ``where`` that is not taken. A
  function that is called, a loop or a branch is run at once, and walked into
  only if its result is not finite.

  Args:
    fun: any function that ``jax.jit`` could take, also one that is jitted or
      differentiated: ``ols.grad(loss_fn, opt_state)``.
    *args: its arguments. Among them may be whatever ``fun`` takes: models of
      Flax NNX or Equinox, functions, strings.
    **kwargs: its keyword arguments.

  Returns:
    None if all floats in the result are finite. Otherwise an
    :class:`Overflow`: the first operation, in the order of the program, that
    had finite inputs and a result that was not finite, and that reached the
    result. There may be others in its field ``others``. An inf that is written
    in the program is named only if there is nothing else.

  Raises:
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, x):
    ...   hidden = jnp.exp(x @ w)
    ...   return jnp.mean(jnp.where(x > 0, hidden, 0).astype(jnp.float32))
    >>> w = jnp.full((2, 2), 4, jnp.float16)
    >>> x = jnp.array([[1, 1], [1, 2]], jnp.float16)
    >>> hit = diagnostics.find_overflow(jax.value_and_grad(loss_fn), w, x)
    >>> print(hit.kind, hit.primitive, hit.inputs[0])
    inf exp float16[2,2] up to 12
    >>> diagnostics.find_overflow(loss_fn, w, x / 2) is None
    True
  """
  # NaNs are what is looked for, and loops are entered on purpose.
  with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
    traced = _tracing.trace("find_overflow", fun, args, kwargs, shapes=False)
    origins = _marks.Origins()
    stepper = _stepper.Stepper(origins, _describe, _runners.Runner())
    inputs = [
      stepper.constant(jnp.asarray(x), "argument", _jaxprs.Place((name,)))
      for x, name in zip(traced.inputs, traced.names, strict=True)
    ]
    with _mesh_of(traced.inputs):
      outs = stepper.run(traced.closed, inputs, _jaxprs.Place())
    first, *others = origins.named(outs) or [None]
  return first and dataclasses.replace(first, others=tuple(others))


def _mesh_of(arrays: list[Any]) -> contextlib.AbstractContextManager[Any]:
  """The mesh that an operation without inputs would have in a ``jit``."""
  for array in arrays:
    mesh = getattr(getattr(array, "sharding", None), "mesh", None)
    types = getattr(mesh, "axis_types", ())
    if jax.sharding.AxisType.Explicit in types:
      return jax.set_mesh(mesh)
  return contextlib.nullcontext()


def _describe(
  primitive: str,
  inputs: list[_marks.Value],
  place: _jaxprs.Place,
  out: Any,
  own: Any,
  runner: _runners.Runner,
) -> Overflow:
  is_argument = primitive == "argument"
  path = place.path if is_argument else (*place.path, primitive)
  return Overflow(
    primitive=primitive,
    dtype=np.dtype(out.dtype),
    kind="inf" if (np.isinf(_bits.as_numbers(out)) & own).any() else "nan",
    source=place.source,
    path="/".join(path),
    backward=place.backward,
    inputs=tuple(_operand(value.array, runner) for value in inputs),
  )


def _operand(array: Any, runner: _runners.Runner) -> Operand:
  shape = runner.shape(array)
  is_number = isinstance(array, jax.Array) and jnp.issubdtype(
    array.dtype, jnp.number
  )
  if not is_number or array.size == 0:
    return Operand(shape, array.dtype, None, True)
  numbers = _bits.as_numbers(array)
  finite = np.isfinite(numbers)
  sizes = np.abs(np.where(finite, numbers, np.zeros_like(numbers)))
  return Operand(shape, array.dtype, float(sizes.max()), bool(finite.all()))
