"""Run a program in float32, or with some layers in half precision.

The input is the jaxpr of a function, after any transformations. Three programs
are made from it:

* The program as trained.
* The *reference*: all arrays in half precision are in float32: float16,
  bfloat16 and float8. An equation is evaluated with float32 operands, and with
  float32 in place of each half-precision dtype among its parameters. A run can
  perturb operands in the last bits, which shows by how much the program
  amplifies roundings. It costs about as much to compile as the first.
* The *measuring* program: the reference with a flag for each layer. If the flag
  is set, the layer rounds to half precision. So one compiled program serves all
  runs. XLA takes several times as long to compile it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import (
  _eqns,
  _primitives,
  _provenance,
  _state_threading,
  _walk,
)
from optax_lossscale.diagnostics import (
  _dtype_limits,
  _instrumented_program,
  _tracing,
)
from optax_lossscale.diagnostics._precision import _layers

# The fourth last bit of the mantissa: flipping it changes a number by a
# relative 2**-20 at most.
_PERTURBED_BIT = 8
PERTURBATION = 2.0**-20
# These add or multiply many numbers, and may round after each of them.
_ACCUMULATING = _primitives.SCATTER_REDUCTIONS | {
  "cumlogsumexp", "cumprod", "cumsum", "psum", "psum_invariant", "reduce",
  "reduce_prod", "reduce_scatter", "reduce_sum", "reduce_window",
  "reduce_window_sum", "select_and_scatter_add",
}  # fmt: skip
# These depend on the bits or the spacing of their operands, or call code that
# JAX does not trace.
_OPAQUE = {
  "bitcast_convert_type", "ffi_call", "io_callback", "nextafter",
  "pure_callback", "reduce_precision",
}  # fmt: skip
# The jaxprs of these combine two numbers, so they can be traced for float32.
_REDUCERS = {
  "reduce", "reduce_window", "scatter", "scatter-add", "scatter-mul",
  "scatter-max", "scatter-min", "scatter-sub", "select_and_scatter",
}  # fmt: skip


class RunResult(NamedTuple):
  """The result of a run.

  Attributes:
    outs: the outputs, in float32 instead of half precision, by their indices.
    stats: the statistics of each layer, by its index.
  """

  outs: dict[int, Any]
  stats: dict[int, _layers.LayerStats]


class ReferenceProgram:
  """A program that runs in float32, or with some layers in half precision.

  Args:
    traced: the function; the devices of its inputs run the program.
    output_indices: the indices of the outputs that it computes.
    layers: the layers to measure.
    has_flags: whether each layer can run in half precision.

  Attributes:
    limitations: after the first run, what was not evaluated in float32, in
      sentences.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    output_indices: Sequence[int],
    layers: Sequence[_layers.Layer],
    *,
    has_flags: bool = False,
  ) -> None:
    self._num_flags = len(layers) if has_flags else 0
    self.limitations: dict[str, None] = {}
    closed_jaxpr = traced.restrict_outputs(output_indices).closed_jaxpr

    def run(inputs: Sequence[Any], run_inputs: _RunInputs) -> RunResult:
      stats = {i: _layers.make_empty_stats() for i, _ in enumerate(layers)}
      evaluator = _ReferenceEvaluator(run_inputs, layers, self.limitations)
      frame = _state_threading.Frame(closed_jaxpr)
      inputs = list(map(_upcast, inputs))
      outs = evaluator.eval_jaxpr(frame, inputs, stats)
      return RunResult(dict(zip(output_indices, outs, strict=True)), stats)

    options = _instrumented_program.make_compiler_options(traced.inputs)
    self._run = jax.jit(run, compiler_options=options)

  def run(
    self,
    inputs: Sequence[Any],
    half_layers: Sequence[int] = (),
    *,
    is_perturbed: bool = False,
  ) -> RunResult:
    """Run the program.

    Args:
      inputs: the inputs of the jaxpr.
      half_layers: the layers that run in half precision.
      is_perturbed: whether operands are perturbed, in a program without flags.

    Returns:
      A :class:`RunResult`.
    """
    half_flags = np.zeros(self._num_flags, bool)
    half_flags[list(half_layers)] = True
    flipped_bits = np.uint32(_PERTURBED_BIT if is_perturbed else 0)
    return self._run(inputs, _RunInputs(half_flags, flipped_bits))


class _RunInputs(NamedTuple):
  """The inputs of a program that control a run.

  Attributes:
    half_flags: whether each layer runs in half precision; bool[layers], or
      bool[0] if none can.
    flipped_bits: the bits that are flipped in the first operand of each matmul;
      uint32[].
  """

  half_flags: Any
  flipped_bits: Any


class _ReferenceEvaluator(_state_threading.StateThreader):
  """Evaluates a program in float32, under a trace.

  The state has the statistics of the layers, and ``shared`` is a
  :class:`_RunInputs`.

  Args:
    run_inputs: the inputs that control the run.
    layers: the layers to measure.
    limitations: receives what can't be evaluated in float32, in sentences.
  """

  def __init__(
    self,
    run_inputs: _RunInputs,
    layers: Sequence[_layers.Layer],
    limitations: dict[str, None],
  ) -> None:
    super().__init__(run_inputs)
    self._layers, self._limitations = layers, limitations
    self._has_flags = bool(run_inputs.half_flags.size)
    self._half_search = _walk.EqnSearch(_layers.has_half, _eqns.subjaxprs)
    self._layer_by_path = {
      visit.path: i for i, x in enumerate(layers) for visit in x.visits
    }
    # The layers inside of each equation.
    self._inner_layers: dict[_state_threading.Path, dict[int, None]] = {}
    for path, index in self._layer_by_path.items():
      for i in range(1, len(path), 2):
        self._inner_layers.setdefault(path[:i], {})[index] = None

  def select_keys(self, visit: _state_threading.Visit) -> list[Any] | None:
    # Enter only calls and loops that may contain half precision. All others run
    # as one equation, which is traced faster.
    if self._contains_half(visit.eqn):
      return list(self._inner_layers.get(visit.path, ()))
    return None

  def merge_devices(
    self, device_states: _state_threading.State
  ) -> _state_threading.State:
    return jax.tree.map(lambda x: jnp.max(x, 0), device_states)

  def lift_const(self, value: Any) -> Any:
    return _upcast(value)

  def eval_eqn(
    self,
    visit: _state_threading.Visit,
    inputs: list[Any],
    state: _state_threading.State,
  ) -> Sequence[Any]:
    eqn = visit.eqn
    is_entered = self.parse_higher_order(eqn) is not None
    if is_entered or not self._contains_half(eqn):
      return super().eval_eqn(visit, inputs, state)
    layer = self._layer_by_path.get(visit.path)
    if _primitives.is_matmul(eqn):
      inputs = self._change_operands(eqn, layer, inputs, state)
    outs = _eval_in_float32(eqn, inputs)
    if outs is None:
      self._report_opaque(visit)
      return _eval_as_written(eqn, inputs)
    half_outs: Sequence[Any] = [None] * len(outs)
    if eqn.primitive.name in _ACCUMULATING and self._has_flags:
      half_outs = _eval_as_written(eqn, inputs)
    return [
      self._round(x, v.aval, layer, state, half_out)
      for x, v, half_out in zip(outs, eqn.outvars, half_outs, strict=True)
    ]

  def _change_operands(
    self,
    eqn: core.JaxprEqn,
    layer: int | None,
    inputs: list[Any],
    state: _state_threading.State,
  ) -> list[Any]:
    """Return the operands of a matmul, perturbed or rounded if asked for."""
    lhs, rhs, *others = inputs
    if layer is not None and self._layers[layer].in_autocast:
      # `autocast` casts the operands for this matmul alone.
      pairs = zip((lhs, rhs), eqn.invars, strict=False)
      lhs, rhs = (self._round(x, v.aval, layer, state) for x, v in pairs)
    if not self._has_flags and _is_float32(lhs):
      lhs = _flip_bits(lhs, self.shared.flipped_bits)
    return [lhs, rhs, *others]

  def _round(
    self,
    x: Any,
    aval: Any,
    layer: int | None,
    state: _state_threading.State,
    rounded: Any = None,
  ) -> Any:
    """Measure a float32 array, and round it if the flag of its layer is set.

    Args:
      x: the array.
      aval: its type as trained.
      layer: the index of its layer; None if it has none.
      state: the statistics.
      rounded: the array as trained, if it is not the rounded array.

    Returns:
      The array.
    """
    if layer is None or not _layers.is_half(aval):
      return x
    limits = _dtype_limits.get_cast_thresholds(aval.dtype)
    state[layer] = _layers.add_array(state[layer], x, limits)
    if not self._has_flags:
      return x
    if rounded is None:
      rounded = round_to_dtype(x, aval.dtype)
    # A select is cheaper to compile than a branch around each operation.
    return jnp.where(self.shared.half_flags[layer], rounded, x)

  def _contains_half(self, eqn: core.JaxprEqn) -> bool:
    """Return whether an equation has half precision, or contains some."""
    return _layers.has_half(eqn) or self._half_search.any_inside(eqn)

  def _report_opaque(self, visit: _state_threading.Visit) -> None:
    """Record that an equation was evaluated in half precision."""
    eqn, frame = visit.eqn, visit.frame
    is_bitcast = eqn.primitive.name == "bitcast_convert_type"
    if is_bitcast and not any(_layers.is_half(v.aval) for v in eqn.invars):
      return  # Random bits, for example, which are not rounded.
    location = frame.location.locate(eqn, frame.closed_jaxpr.jaxpr)
    name = _eqns.get_primitive_name(eqn)
    label = _provenance.format_location(name, location.label)
    sentence = (
      f"Not analyzed: {label}, which runs in half precision in every run."
    )
    self._limitations[sentence] = None


# Each matmul calls this function. It is jitted, so that JAX traces it once for
# each shape instead of once for each matmul.
@jax.jit
def _flip_bits(x: Any, flipped_bits: Any) -> Any:
  """Flip bits of each entry; 0, inf and NaN stay.

  It is deterministic, so all readers of an array read equal values.
  """
  is_changeable = (x != 0) & jnp.isfinite(x)
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  bits = bits ^ jnp.where(is_changeable, flipped_bits, jnp.uint32(0))
  return lax.bitcast_convert_type(bits, jnp.float32)


def _upcast(x: Any) -> Any:
  """Cast an array to float32 if it is in half precision."""
  return jnp.asarray(x, jnp.float32) if _layers.is_half(x) else x


def _eval_in_float32(
  eqn: core.JaxprEqn, inputs: Sequence[Any]
) -> Sequence[Any] | None:
  """Evaluate an equation of half precision in float32.

  Args:
    eqn: the equation.
    inputs: its operands, in float32 in place of half precision.

  Returns:
    Its results, likewise; None if the equation can't be evaluated in float32:
    see :func:`_eval_as_written`.
  """
  name = eqn.primitive.name
  # JAX inserts one before values that a checkpoint saves.
  if _primitives.is_noop_reduce_precision(eqn):
    return inputs
  if name in _OPAQUE:
    return None
  if _primitives.is_matmul(eqn) and all(_is_float32(x) for x in inputs[:2]):
    # With the default precision, TPUs multiply in bfloat16 and some GPUs in
    # TensorFloat-32.
    highest = lax.Precision.HIGHEST, lax.Precision.HIGHEST
    eqn = _primitives.replace_result_dtype(eqn, jnp.float32, precision=highest)
  elif name in _REDUCERS:
    eqn = _eqns.map_subjaxprs(eqn, _retrace_in_float32)
  elif next(_eqns.subjaxprs(eqn), None) or _eqns.get_hi_primitive(eqn):
    return None
  as_float32 = lambda dtype: (
    jnp.float32 if _layers.is_half_dtype(dtype) else dtype
  )
  return _eqns.eqn_as_fun(_primitives.map_dtypes(eqn, as_float32))(*inputs)


def _is_float32(x: Any) -> bool:
  """Return whether an array is in float32."""
  return getattr(x, "dtype", None) == jnp.float32


def _retrace_in_float32(jaxpr: _eqns.AnyJaxpr) -> _eqns.AnyJaxpr:
  closed_jaxpr = _eqns.close_jaxpr(jaxpr)
  invars: list[Any] = closed_jaxpr.jaxpr.invars
  avals = [
    jax.ShapeDtypeStruct(v.aval.shape, jnp.float32)
    if _layers.is_half(v.aval)
    else v.aval
    for v in invars
  ]
  new_jaxpr: Any = jax.make_jaxpr(core.jaxpr_as_fun(closed_jaxpr))(*avals)
  return new_jaxpr if isinstance(jaxpr, _eqns.ClosedJaxpr) else new_jaxpr.jaxpr


def _eval_as_written(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
  """Evaluate an equation in the half precision that it is written in.

  Args:
    eqn: the equation.
    inputs: its operands, in float32 in place of half precision.

  Returns:
    Its results, likewise.
  """
  pairs: Any = zip(inputs, eqn.invars, strict=True)
  args = [
    x.astype(v.aval.dtype) if _layers.is_half(v.aval) else x for x, v in pairs
  ]
  return list(map(_upcast, _eqns.eqn_as_fun(eqn)(*args)))


def round_to_dtype(x: Any, dtype: np.dtype) -> Any:
  """Round a float32 array to a dtype.

  The program must be compiled without excess precision, since XLA drops a cast
  to the dtype and back otherwise.
  """
  return lax.convert_element_type(
    lax.convert_element_type(x, dtype), jnp.float32
  )
