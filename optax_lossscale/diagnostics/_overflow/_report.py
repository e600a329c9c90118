"""The report of ``find_overflow``: an operation, its operands, and the fix."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import (
  _dtype_limits,
  _eqn_stats,
  _reports,
)
from optax_lossscale.diagnostics._overflow import _domains

MATMULS = {"conv_general_dilated", "dot_general", "ragged_dot_general"}
_EXPONENTIALS = set(_dtype_limits.OVERFLOW_THRESHOLDS)
_SUMS = {
  "add_any", "cumsum", "psum", "psum_invariant", "reduce_scatter",
  "reduce_sum", "reduce_window_sum", "scatter-add",
}  # fmt: skip


class Context(NamedTuple):
  """Facts about an overflow that only its fix depends on.

  Attributes:
    is_reproduced: whether the operation by itself returns the inf or NaN.
    is_written: whether it only reads the inf or NaN, which is written in the
      program.
    function: JAX's name of the function whose derivative the operation
      computes: ``"acos"`` if it divides by the root of 1 - x**2 there;
      otherwise ``primitive``. Empty for an argument.
    after_backward: whether the operation processes gradients: it is in the
      optimizer, or between the backward pass and ``update``, as clipping.
    has_loss_scale: whether the program has a loss scale.
    has_zero_grads: whether all gradients are zero with ``scale_factor``.
  """

  is_reproduced: bool = True
  is_written: bool = False
  function: str = ""
  after_backward: bool = False
  has_loss_scale: bool = False
  has_zero_grads: bool = False


@dataclasses.dataclass(frozen=True)
class Overflow(_reports.PrintedReport):
  """The operation that first returned an inf or a NaN, and how to fix it.

  Attributes:
    primitive: JAX's name of the operation; ``"argument"`` for an argument that
      is not finite.
    dtype: the dtype of the result.
    kind: ``"inf"`` or ``"nan"``; ``"inf"`` if the result contains both.
    name_scope: the ``jax.named_scope`` stack of the operation, such as
      ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    name: the layer and the line, as ``keep_float32=`` of
      :func:`optax_lossscale.autocast` takes it: the path of the parameter or
      the scope, and the line.
    source_line: the user's line, ``"model.py:32 (Block.__call__)"``; empty if
      it is unknown. In the backward pass it is the line that is differentiated.
    eqn_path: the path of the equation in the program,
      ``"jit(block)/scan[3]/dot_general"``. Iterations are counted from 0. In
      the backward pass of a scan, they have the numbers of the forward pass.
      For an argument, it is the name of the argument.
    backward: whether the operation is in the backward pass, where a lower loss
      scale helps. A derivative inside the loss is part of the forward pass.
    inputs: an :class:`Operand` for each operand.
    other_origins: further origins, in the order of their discovery; origins
      that reach an ``update`` are first. Their ``other_origins`` are empty.
    in_autocast: whether ``autocast`` runs this operation in half precision, so
      that ``keep_float32=`` applies to it.
    scale_factor: for an operation in the backward pass of a training step, the
      factor on the loss scale with which all gradients are finite, a power of
      two; 0.0 if no loss scale helps; None if this was not measured.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> hit = diagnostics.find_overflow(jnp.exp, jnp.float16(12))
    >>> hit.primitive, hit.kind, hit.backward
    ('exp', 'inf', False)
  """

  primitive: str
  dtype: np.dtype
  kind: str
  name_scope: str
  param_path: str
  name: str
  source_line: str
  eqn_path: str
  backward: bool
  inputs: tuple[_eqn_stats.Operand, ...]
  other_origins: tuple["Overflow", ...] = ()
  in_autocast: bool = False
  scale_factor: float | None = None
  _context: Context = dataclasses.field(default_factory=Context, repr=False)

  @property
  def fix(self) -> str:
    """The fix, in a sentence or two, with a line of code if possible."""
    template = next(fix for applies, fix in _FIXES if applies(self))
    function = self._context.function or self.primitive
    may_underflow = _has_narrow_range(self) and (
      self.kind == "inf" or self.primitive == "div"
    )
    if may_underflow and template in _domains.UNDERFLOW_FIXES:
      template = _domains.FLOAT32_FIRST + template
    layer = self.name.removesuffix(f" at {self.source_line}")
    return template.format(
      dtype=self.dtype,
      primitive=self.primitive,
      argument=self.eqn_path,
      # The path of a parameter selects the layer. A scope may hold others.
      layer=layer if self.param_path else self.name,
      top=_eqn_stats.format_number(float(jnp.finfo(self.dtype).max)),
      exponent=_dtype_limits.format_overflow_threshold(
        self.primitive, self.dtype
      ),
      lower=(
        "ols.set_loss_scale(opt_state, scale /"
        f" {1 / (self.scale_factor or 1 / 16):g})"
      ),
      forward=""
      if self.backward or not self._context.has_loss_scale
      else " No loss scale helps in the forward pass.",
      function=function,
    )

  def as_dict(self) -> dict[str, Any]:
    """Returns the report, and ``"fix"``, as dicts and lists, for machines."""
    return super().as_dict() | {"fix": self.fix}

  def __str__(self) -> str:
    lines = [self.format_conclusion()]
    if self.inputs:
      lines.append(f"Operands: {', '.join(map(str, self.inputs))}")
    if "/" in self.eqn_path and self.primitive != "argument":
      lines.append(f"Equation: {self.eqn_path}")
    lines.append(f"Fix: {self.fix}")
    if self.other_origins:
      num_others = len(self.other_origins)
      lines.append(
        f"(+{num_others} more origin{'s' * (num_others > 1)}: see"
        " other_origins)"
      )
    return "\n".join(lines)

  def format_conclusion(self) -> str:
    """Return what was not finite, and where, in a sentence."""
    kind = {"inf": "inf", "nan": "NaN"}[self.kind]
    if self.primitive == "argument":
      return f"The argument {self.eqn_path} contains {kind} ({self.dtype})."
    location_text = ""
    if self.name:
      has_layer = self.name != self.source_line
      location_text = f", {'in layer' if has_layer else 'at'} {self.name}"
    return (
      f"{self.primitive} returned {kind} ({self.dtype})"
      f" {self._format_stage()}{location_text}."
    )

  def _format_stage(self) -> str:
    """Return the part of the step as text: ``in the forward pass``."""
    if self._context.after_backward:
      return "after the backward pass"
    return f"in the {'backward' if self.backward else 'forward'} pass"


def add_context(origin: Overflow, **facts: Any) -> Overflow:
  """Return an overflow with further facts of its context."""
  context = origin._context._replace(**facts)
  return dataclasses.replace(origin, _context=context)


def has_zero_grads(origin: Overflow) -> bool:
  """Return whether all gradients are zero with a scale that is low enough."""
  return origin._context.has_zero_grads


def _is_primitive_in(primitives: set[str]) -> Callable[[Overflow], bool]:
  return lambda origin: origin.primitive in primitives


def _has_narrow_range(origin: Overflow) -> bool:
  """Return whether float32 has a larger range than the dtype of the result."""
  return float(jnp.finfo(origin.dtype).max) < 1e38


def _has_nonfinite_operand(origin: Overflow) -> bool:
  return not all(operand.all_finite for operand in origin.inputs)


def _is_nan_from_infs(origin: Overflow) -> bool:
  return origin.kind == "nan" and _has_nonfinite_operand(origin)


def _has_small_operand(origin: Overflow) -> bool:
  """Return whether only a small divisor or base explains a result.

  The dividend, or the base of a usual power, is too small to overflow.
  """
  amax = origin.inputs[0].amax or 0.0
  top = float(jnp.finfo(origin.dtype).max)
  if origin.primitive == "div":
    is_small = amax < top * (1e-2 if _has_narrow_range(origin) else 1e-6)
    return is_small or origin.scale_factor == 0
  is_nan_of_pow = origin.primitive == "pow" and origin.kind == "nan"
  return is_nan_of_pow or amax < top**0.25


def _is_undefined(origin: Overflow) -> bool:
  """Return whether an operation is undefined for its operands.

  A matmul or a sum may also return NaN if it overflows inside: inf - inf. In a
  dtype without inf, any overflow is NaN.
  """
  return (
    origin.kind == "nan"
    and origin.primitive not in MATMULS | _SUMS
    and bool(jnp.isinf(jnp.asarray(jnp.inf, origin.dtype)))
  )


def _is_index_out_of_bounds(origin: Overflow) -> bool:
  return (
    origin.primitive in {"gather", "dynamic_slice"}
    and origin.kind == "nan"
    and not _has_nonfinite_operand(origin)
  )


_LOWER_SCALE = (
  "the loss scale is too high. A dynamic loss scale decreases automatically"
  " after each skipped step; lower a fixed one: {lower}. If the scale is at"
  " min_scale, lower min_scale."
)
_MASK_HINT = (
  "if it is a mask, write jnp.where(keep, scores, jnp.finfo(scores.dtype).min)."
)

# The fix of each case. The first predicate that is true selects the fix, so
# special cases come before general ones, and the backward pass before advice on
# dtypes, since a lower loss scale is the fix there.
_FIXES: tuple[tuple[Callable[[Overflow], bool], str], ...] = (
  (
    _is_primitive_in({"argument"}),
    "clean the data, or leave this batch out. If {argument} is a parameter or"
    " an optimizer state, restore the last finite checkpoint.",
  ),
  (
    lambda x: x._context.is_written,
    "an inf or a NaN is written in the program, or is in an array that the"
    " function closes over. Write a number that {dtype} holds instead of it;"
    f" {_MASK_HINT}",
  ),
  (
    lambda x: not x._context.is_reproduced,
    "each operation is finite on its own, but XLA simplifies the compiled"
    " program. For example, it multiplies by the number of equal terms instead"
    " of adding them, and this number may be inf in {dtype}. Compute in float32"
    " here. Without jit, the step is not affected.",
  ),
  (
    _is_index_out_of_bounds,
    "an index is out of bounds, and {primitive} fills its entry with NaN. Check"
    " the indices: labels must be below the number of classes, and token ids"
    " below the size of the vocabulary.",
  ),
  (
    _is_primitive_in({"get"}),
    "the Ref contains an inf or a NaN. Look for the operation that writes it:"
    " writes into a Ref are not followed.",
  ),
  (
    # A softmax subtracts the maximum, which is -inf in a masked row.
    lambda x: x.primitive == "sub" and _is_nan_from_infs(x),
    "a row of a softmax is masked completely, and exp(-inf - -inf) is NaN. Mask"
    " with jnp.where(keep, scores, jnp.finfo(scores.dtype).min), or leave such"
    " rows out. A recursion begins at this number, too, in place of -inf.",
  ),
  (
    _is_nan_from_infs,
    "an operand contains inf, and 0 * inf and inf - inf are NaN. Select with"
    " jnp.where instead of multiplying by or adding a mask, and write"
    " jnp.finfo(x.dtype).min instead of -inf.",
  ),
  (
    lambda x: x._context.has_zero_grads,
    "the loss scale is too high, but a lower one is not enough: with {lower},"
    " all gradients are zero. Either a value in the forward pass overflows, or"
    " they underflow: check_step names the value, and compute it in float32.",
  ),
  (lambda x: bool(x.scale_factor), _LOWER_SCALE),
  (
    lambda x: (
      x._context.after_backward
      and x.primitive == "div"
      and float(jnp.finfo(x.dtype).eps) > 1e-6
      and x.inputs[-1].amax == 0
    ),
    _domains.HYPERPARAMETER_FIX,
  ),
  *(
    (lambda x, name=name: (x._context.function or x.primitive) == name, fix)
    for name, fix in _domains.FIXES.items()
  ),
  *(
    (lambda x, name=name: x.primitive == name and _has_small_operand(x), fix)
    for name, fix in _domains.SMALL_OPERAND_FIXES.items()
  ),
  (
    _is_undefined,
    "{primitive} is not defined for some of its operands. Replace them before"
    " the operation, with jnp.where.",
  ),
  (
    lambda x: x.scale_factor == 0,
    "{primitive} is not finite at lower loss scales either. Replace what causes"
    " it before the operation, with jnp.where, or add an epsilon.",
  ),
  (lambda x: x.backward and x._context.has_loss_scale, _LOWER_SCALE),
  (
    lambda x: x._context.after_backward and _has_narrow_range(x),
    "the largest number of {dtype} is {top}. Compute {primitive} in float32:"
    " x.astype(jnp.float32). For the optimizer, keep the parameters in float32;"
    " ols.autocast(loss_fn) casts them for the matmuls.",
  ),
  (
    lambda x: x._context.after_backward,
    "the result is outside the range of {dtype}. Normalize the operands. If"
    " they are gradients, clip them inside of the wrapper:"
    " ols.with_loss_scaling(optax.chain(optax.clip(1.0), optimizer)).",
  ),
  (
    lambda x: x.in_autocast,
    "ols.autocast(loss_fn, keep_float32={layer!r}) runs this layer in"
    " float32.{forward}",
  ),
  (
    lambda x: x.primitive in _EXPONENTIALS and _has_narrow_range(x),
    "{primitive} overflows above {exponent} in {dtype}. Compute it in float32:"
    " jnp.{primitive}(x.astype(jnp.float32)), or limit the operand:"
    " jnp.minimum(x, {exponent}). A softmax subtracts the maximum:"
    " jax.nn.softmax.",
  ),
  (
    _is_primitive_in(_EXPONENTIALS),
    "{primitive} overflows above {exponent} in {dtype}. Limit the operand:"
    " jnp.minimum(x, {exponent}). A softmax subtracts the maximum:"
    " jax.nn.softmax.",
  ),
  (
    lambda x: not _has_narrow_range(x),
    "the result is outside the range of {dtype}, so a wider dtype does not"
    " help. Normalize the operands. If the parameters diverge, lower the"
    " learning rate.",
  ),
  (
    _is_primitive_in(MATMULS),
    "compute this layer in float32, or normalize its operands. In a model that"
    " is written in float32, ols.autocast(loss_fn, keep_float32={layer!r}) does"
    " so.",
  ),
  (
    _is_primitive_in(_SUMS),
    "add up in float32: jnp.sum(x, dtype=jnp.float32), or x.astype(jnp.float32)"
    " before the sum.",
  ),
  (
    _is_primitive_in({"convert_element_type"}),
    "the largest number of {dtype} is {top}. Keep this value in float32, a sum"
    f" with jnp.sum(x, dtype=jnp.float32), or normalize it; {_MASK_HINT}",
  ),
  (
    lambda x: True,
    "compute {primitive} in float32: x.astype(jnp.float32), or normalize its"
    " operands. The largest number of {dtype} is {top}.",
  ),
)
