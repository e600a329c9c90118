"""Evaluate a jaxpr eqn by eqn, and track the origins of nonfinite entries.

For each eqn: run it on concrete arrays. If all outputs are finite, continue. If
it is a call, a branch or a loop, evaluate its jaxpr in the same way, so that
the origin is as deep as possible. If it is a plain eqn, ``_taint`` attributes
the nonfinite entries of its outputs to this eqn or to earlier origins.

Loops run compiled up to the next iteration with a nonfinite output
(``_loops``), and only this iteration is evaluated eqn by eqn.
"""

import collections
from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core
from jax.sharding import Mesh
import numpy as np

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _interpret,
  _provenance,
  _source_info,
  _walk,
)
from optax_lossscale.diagnostics import _progress
from optax_lossscale.diagnostics._overflow import (
  _loops,
  _report,
  _runners,
  _taint,
  _taint_arrays,
)

# For each primitive, a number that may replace tainted entries of any operand:
# then the result is nonfinite only if the other entries make it so. Outputs of
# all other primitives are attributed to the origins of their operands, if the
# operands are tainted.
_NEUTRAL_VALUES = {
  **dict.fromkeys(("div", "log", "log2", "pow", "integer_pow", "rsqrt"), 1.0),
  **dict.fromkeys(
    (
      "add", "add_any", "concatenate", "conv_general_dilated",
      "convert_element_type", "cosh", "cumsum", "dot_general", "exp", "exp2",
      "expm1", "log1p", "mul", "psum", "psum_invariant", "reduce_sum",
      "reduce_window_sum", "scatter-add", "select_n", "sinh", "sqrt", "square",
      "stack", "sub", "tan",
    ),
    0.0,
  ),
}  # fmt: skip
# A loop may have nonfinite values in each of a million iterations. After this
# many iterations with the same pattern of nonfinite inputs and outputs, further
# ones are not evaluated eqn by eqn, and their nonfinite entries are attributed
# to the origins that were already found in the loop.
_MAX_INTERPRETED_ITERATIONS = 30

_T = TypeVar("_T")


class _EqnCall(NamedTuple):
  """An eqn whose jaxprs may be evaluated.

  Attributes:
    eqn: the eqn.
    inputs: its operands.
    get_location: returns the location of the eqn. It reads the traceback, which
      is slow.
    has_effect: whether the eqn must run only once. If not, it has already run
      compiled, and only the taint of its outputs is needed, not the arrays.
    used_outputs: whether each output is needed; None if all are.
  """

  eqn: core.JaxprEqn
  inputs: list[_taint.TaintedArray]
  get_location: Callable[[], _provenance.EqnLocation]
  has_effect: bool
  used_outputs: list[bool] | None = None

  def get_inner_location(self, call_label: str) -> _provenance.EqnLocation:
    """Return the location of the jaxpr that the eqn runs."""
    return self.get_location().push_eqn_path(call_label)


class TaintInterpreter:
  """Evaluates jaxprs eqn by eqn on :class:`TaintedArray` values.

  Attributes:
    origins: the table to which origins are added.
    runner: runs single eqns.
    progress: shows which eqn is run.
  """

  def __init__(
    self,
    origins: _taint.OriginTable,
    runner: _runners.Runner,
    progress: _progress.ProgressLine,
  ):
    self.origins = origins
    self.runner = runner
    self.progress = progress
    # By function and eqn or jaxpr. The body of a loop is evaluated many times,
    # and its eqns must be compiled and parsed only once.
    self._cache: dict[Any, Any] = {}
    self._loop_search = _walk.EqnSearch(_is_loop, _eqns.subjaxprs)

  def eval_jaxpr(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    inputs: list[_taint.TaintedArray],
    location: _provenance.EqnLocation,
    used_outputs: list[bool] | None = None,
  ) -> list[_taint.TaintedArray]:
    """Evaluate a jaxpr.

    Args:
      closed_jaxpr: the jaxpr.
      inputs: a value for each of its inputs.
      location: the location from which it is called.
      used_outputs: whether each output is needed; None if all are. Eqns that
        lead to no needed output are not run, such as the optimizer in a skipped
        step.

    Returns:
      A value for each of its outputs.
    """

    @functools.cache
    def get_location(eqn: core.JaxprEqn | None) -> _provenance.EqnLocation:
      return (
        location if eqn is None else location.locate(eqn, closed_jaxpr.jaxpr)
      )

    def lift_const(
      x: Any, atom: _eqns.Atom, eqn: core.JaxprEqn | None
    ) -> _taint.TaintedArray:
      array = self.runner.lift_const(x, atom)
      return self.make_constant(array, "constant", get_location(eqn))

    eqn_numbers = self._cached(_number_eqns, closed_jaxpr.jaxpr)

    def eval_eqn(
      eqn: core.JaxprEqn, inputs: list[_taint.TaintedArray]
    ) -> list[_taint.TaintedArray]:
      eqn_path = "/".join(
        [*location.eqn_path, _source_info.get_primitive_name(eqn)]
      )
      self.progress.set_description(
        f"{eqn_path}, operation {eqn_numbers[eqn]} of {len(eqn_numbers)}"
      )
      return self._eval_eqn(eqn, inputs, functools.partial(get_location, eqn))

    outs = _interpret.interpret_jaxpr(
      closed_jaxpr,
      inputs,
      eval_eqn,
      lift_const=lift_const,
      used_outputs=used_outputs,
    )
    # Outputs that are not needed were not computed.
    return [out or _taint.TaintedArray(None) for out in outs]

  def make_constant(
    self, array: Any, primitive: str, location: _provenance.EqnLocation
  ) -> _taint.TaintedArray:
    """Return the value of an argument, a constant or a literal.

    A nonfinite one becomes an origin; an inf counts as intended.
    """
    if _taint_arrays.all_finite(array):
      return _taint.TaintedArray(array)
    is_own = _taint_arrays.nonfinite_mask(array)
    origin = _report.describe_origin(
      primitive, [], location, self.runner.axis, array, is_own
    )
    bit = self.origins.add_origin(
      origin, is_constant=not _taint_arrays.has_nan(array)
    )
    return self.origins.register_array(
      array, _taint_arrays.fill_untainted(None, array, bit)
    )

  def _eval_eqn(
    self,
    eqn: core.JaxprEqn,
    inputs: list[_taint.TaintedArray],
    get_location: Callable[[], _provenance.EqnLocation],
  ) -> list[_taint.TaintedArray]:
    """Evaluate one eqn, and its jaxprs if its outputs are not finite."""
    has_effect = self._cached(_eqns.has_effect, eqn)
    eqn_call = _EqnCall(eqn, inputs, get_location, has_effect)
    # An eqn with effects must not run twice. And if a call with a loop inside
    # ran compiled first, XLA would compile the loop twice.
    is_entered = has_effect or self._has_inner_loop(eqn)
    inner_values = self._eval_subjaxprs(eqn_call) if is_entered else None
    if inner_values is not None:
      return inner_values
    run_eqn = self._cached(self._get_run_fn, eqn)
    arrays = [value.array for value in inputs]
    outs = run_eqn(*arrays)
    finite_mask = list(map(_taint_arrays.all_finite, outs))
    if all(finite_mask):
      return list(map(_taint.TaintedArray, outs))
    if not has_effect:
      used_outputs = [not is_finite for is_finite in finite_mask]
      inner_values = (
        self._eval_subjaxprs(eqn_call._replace(used_outputs=used_outputs)) or []
      )
      taint_bits = _taint.join_taint_bits(inner_values)
      # Without taint, the nonfinite value exists only in the compiled eqn, and
      # is attributed to the eqn as a whole below.
      if taint_bits:
        return self.origins.reconcile(
          outs, finite_mask, inner_values, taint_bits
        )
    name, axis = _source_info.get_primitive_name(eqn), self.runner.axis
    describe_origin = functools.partial(
      _report.describe_origin, name, arrays, get_location(), axis
    )
    atoms = zip(inputs, eqn.invars, strict=True)
    op = _taint.ExecutedEqn(
      run=None if has_effect else run_eqn,
      inputs=[
        _taint.TaintedArray(v.array) if _is_literal(x) else v for v, x in atoms
      ],
      neutral_value=_NEUTRAL_VALUES.get(name),
      describe_origin=describe_origin,
    )
    return self.origins.taint_outputs(op, outs, finite_mask)

  def _cached(self, make: Callable[[Any], _T], arg: Any) -> _T:
    """Call a function of an eqn or a jaxpr, and cache the result."""
    key = make, arg
    if key not in self._cache:
      self._cache[key] = make(arg)
    return self._cache[key]

  def _get_run_fn(self, eqn: core.JaxprEqn) -> _runners.RunFn:
    """Return a function that evaluates an eqn, or all of a loop."""
    loop = self._get_loop(eqn)
    return self.runner.make_eqn_fun(eqn) if loop is None else loop.run_all

  def _get_loop(self, eqn: core.JaxprEqn) -> _loops.StoppableLoop | None:
    """Return a loop that can stop; None if the eqn is not a loop."""
    return self._cached(self._make_loop, eqn)

  def _make_loop(self, eqn: core.JaxprEqn) -> _loops.StoppableLoop | None:
    if not _is_loop(eqn) or self._cached(_eqns.has_effect, eqn):
      return None
    match self._cached(_higher_order.parse_higher_order, eqn):
      case _higher_order.While() as loop:
        return self.runner.make_loop(eqn, loop)
      case _higher_order.Scan() as scan if scan.length:
        return self.runner.make_loop(eqn, scan)
      case _:
        return None

  def _has_inner_loop(self, eqn: core.JaxprEqn) -> bool:
    """Return whether this eqn is a call or a branch with a loop inside."""
    return not _is_loop(eqn) and self._loop_search.any_inside(eqn)

  def _eval_subjaxprs(
    self, eqn_call: _EqnCall
  ) -> list[_taint.TaintedArray] | None:
    """Evaluate the jaxprs of a call, a loop or a branch.

    Returns:
      The outputs of the eqn; None if it has no jaxprs, or if they cannot be
      evaluated.
    """
    match self._cached(_higher_order.parse_higher_order, eqn_call.eqn):
      case _higher_order.Call(body):
        location = eqn_call.get_inner_location(
          _source_info.format_call(eqn_call.eqn)
        )
        return self.eval_jaxpr(
          body, eqn_call.inputs, location, eqn_call.used_outputs
        )
      case _higher_order.Cond(branches):
        return self._eval_cond(branches, eqn_call)
      case _higher_order.While() as loop:
        return self._eval_while(loop, eqn_call)
      case _higher_order.Scan() as scan if scan.length:
        return self._eval_scan(scan, eqn_call)
      case _higher_order.ShardMap() as mapped:
        return self._eval_shard_map(mapped, eqn_call)
      case _:
        return None

  def _eval_cond(
    self, branches: tuple[_eqns.ClosedJaxpr, ...], eqn_call: _EqnCall
  ) -> list[_taint.TaintedArray] | None:
    index_value, *operands = eqn_call.inputs
    # Inside shard_map, devices may take different branches: then do not enter.
    index = _get_uniform_value(index_value.array)
    if index is None:
      return None
    # lax.switch clamps an index that is out of range, too.
    index = min(max(int(index), 0), len(branches) - 1)
    location = eqn_call.get_inner_location(f"cond(branch {index})")
    return self.eval_jaxpr(
      branches[index], operands, location, eqn_call.used_outputs
    )

  def _eval_while(
    self, loop: _higher_order.While, eqn_call: _EqnCall
  ) -> list[_taint.TaintedArray] | None:
    cond_consts, body_consts, carry = loop.split(eqn_call.inputs)
    budget = _IterationBudget(self.origins)
    num_iterations = 0
    while True:
      pred = self._eval_while_cond(loop, [*cond_consts, *carry], eqn_call)
      has_next_iteration = _get_uniform_value(
        self._reduce_pred_per_device(pred)
      )
      if has_next_iteration is None:
        return None
      if not has_next_iteration:
        return list(carry)
      inputs = [*cond_consts, *body_consts, *carry]
      num_iterations, carry, outs = self._advance(
        loop, num_iterations, inputs, eqn_call
      )
      # ``_advance`` may have run several iterations. The predicate of each row
      # must be the one before the last of them.
      if outs is not None and pred.ndim > self.runner.axis:
        pred = self._eval_while_cond(loop, [*cond_consts, *carry], eqn_call)
      location = eqn_call.get_inner_location(f"while[{num_iterations - 1}]")
      inputs = [*body_consts, *carry]
      new_carry = self._eval_iteration(
        loop.body, inputs, outs, location, budget
      )
      # The taint of rows that have ended is the old one, as is their carry.
      pairs = zip(new_carry, carry, strict=True)
      carry = [self._select_carry(pred, *pair) for pair in pairs]

  def _eval_while_cond(
    self,
    loop: _higher_order.While,
    inputs: list[_taint.TaintedArray],
    eqn_call: _EqnCall,
  ) -> jax.Array:
    """Return the predicate of a loop: a scalar, or under ``vmap`` a vector."""
    if self._cached(_has_effects, loop.condition):
      location = eqn_call.get_inner_location("while")
      return self.eval_jaxpr(loop.condition, inputs, location)[0].array
    run_cond = self._cached(self.runner.compile_jaxpr, loop.condition)
    return run_cond(*(value.array for value in inputs))[0]

  def _reduce_pred_per_device(self, pred: jax.Array) -> np.ndarray:
    """Return whether any row needs another iteration, on each device."""
    axes = tuple(range(self.runner.axis, pred.ndim))
    return np.any(np.asarray(pred), axis=axes)

  def _select_carry(
    self, pred: jax.Array, new: _taint.TaintedArray, old: _taint.TaintedArray
  ) -> _taint.TaintedArray:
    """Return the carry after an iteration that only some rows still need.

    The predicate of a loop under ``vmap`` has a value for each row. Rows that
    have ended keep the old carry.
    """
    if pred.ndim == self.runner.axis:
      return new
    array = _runners.select_rows(pred, new.array, old.array)
    row_pred = np.expand_dims(pred, tuple(range(pred.ndim, array.ndim)))
    select_taint = lambda new, old: np.where(row_pred, new, old)
    return self.origins.derive_array(array, [new, old], select_taint)

  def _eval_scan(
    self, scan: _higher_order.Scan, eqn_call: _EqnCall
  ) -> list[_taint.TaintedArray]:
    consts, carry, slices = scan.split(eqn_call.inputs)
    budget = _IterationBudget(self.origins)
    rows: dict[int, list[_taint.TaintedArray]] = {}
    num_iterations = 0
    while num_iterations < scan.length:
      inputs = [*consts, *carry, *slices]
      num_iterations, carry, outs = self._advance(
        scan, num_iterations, inputs, eqn_call
      )
      i = _loops.get_iteration_index(scan, num_iterations - 1)
      inputs = [*consts, *carry, *slices]
      body_inputs = _loops.get_body_inputs(
        scan, num_iterations - 1, inputs, self._take_slice
      )
      location = eqn_call.get_inner_location(f"scan[{i}]")
      body_outs = self._eval_iteration(
        scan.body, body_inputs, outs, location, budget
      )
      carry, row = body_outs[: scan.num_carry], body_outs[scan.num_carry :]
      # Drop the arrays of finite rows: the outputs of the compiled scan replace
      # them, and the rows of all iterations may not fit in memory twice.
      rows[i] = row if eqn_call.has_effect else list(map(_drop_array, row))
    ys = []
    for n in range(len(scan.body.jaxpr.outvars) - scan.num_carry):
      column = {i: row[n] for i, row in rows.items()}
      ys.append(self._stack_rows(column, scan.length, eqn_call.has_effect))
    return [*carry, *ys]

  def _take_slice(
    self, value: _taint.TaintedArray, i: int
  ) -> _taint.TaintedArray:
    array = self.runner.take_slice(value.array, i)
    take_taint = lambda taint: np.take(taint, i, self.runner.axis)
    return self.origins.derive_array(array, [value], take_taint)

  def _stack_rows(
    self, rows: dict[int, _taint.TaintedArray], length: int, has_arrays: bool
  ) -> _taint.TaintedArray:
    """Stack the rows that a scan returns from its iterations.

    Args:
      rows: the row of each iteration, by index. Finite iterations may be
        missing if the arrays are not needed.
      length: the number of iterations.
      has_arrays: whether to stack the arrays, in addition to the taint.

    Returns:
      The stacked rows.
    """
    axis = self.runner.axis
    array = None
    if has_arrays:
      array = _runners.stack_in_chunks(
        [rows[i].array for i in range(length)], axis
      )
    taint_by_row = {i: x.taint for i, x in rows.items() if x.taint is not None}
    if not taint_by_row:
      return _taint.TaintedArray(array)
    empty_taint = _taint_arrays.empty_taint(next(iter(taint_by_row.values())))
    taints = [taint_by_row.get(i, empty_taint) for i in range(length)]
    return self.origins.register_array(array, np.stack(taints, axis))

  def _advance(
    self,
    loop: _loops.AnyLoop,
    num_iterations: int,
    inputs: list[_taint.TaintedArray],
    eqn_call: _EqnCall,
  ) -> tuple[int, Sequence[_taint.TaintedArray], list[Any] | None]:
    """Run a loop up to its next iteration with a nonfinite output.

    Returns:
      The number of iterations that have run then; the carry before the last
      one; and the outputs of the body in the last one. Nothing runs if the loop
      has effects: the outputs are None, and the caller evaluates the iteration.
    """
    _, carry, _ = _loops.split_loop_inputs(loop, inputs)
    if eqn_call.has_effect:
      return num_iterations + 1, carry, None
    arrays = [value.array for value in inputs]
    loop_fun = self._get_loop(eqn_call.eqn)
    assert loop_fun is not None  # It is a loop without effects.
    stop_point = loop_fun.advance(num_iterations, arrays)
    # All iterations before the last one were finite, so its carry has no taint.
    if stop_point.num_iterations > num_iterations + 1:
      carry = list(map(_taint.TaintedArray, stop_point.carry))
    return stop_point.num_iterations, carry, stop_point.outs

  def _eval_iteration(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    inputs: list[_taint.TaintedArray],
    outs: list[Any] | None,
    location: _provenance.EqnLocation,
    budget: "_IterationBudget",
  ) -> list[_taint.TaintedArray]:
    """Return the outputs of an iteration with their taint.

    Args:
      closed_jaxpr: the body of the loop.
      inputs: the inputs of the body.
      outs: the outputs of the compiled body; None if it has effects.
      location: the location of the iteration.
      budget: the number of iterations that may still be evaluated eqn by eqn.
    """
    if outs is None:
      return self.eval_jaxpr(closed_jaxpr, inputs, location)
    finite_mask = list(map(_taint_arrays.all_finite, outs))
    if all(finite_mask):
      return list(map(_taint.TaintedArray, outs))
    # All inputs without taint are finite, so the pattern needs no look at
    # arrays.
    pattern = (*finite_mask, *(value.taint is None for value in inputs))
    if budget.is_exhausted(pattern):
      # Prefer the origins that reach this iteration through its inputs.
      taint_bits = _taint.join_taint_bits(inputs) or budget.taint_bits
      values = [_taint.TaintedArray(None)] * len(outs)
    else:
      used_outputs = [not is_finite for is_finite in finite_mask]
      values = self.eval_jaxpr(closed_jaxpr, inputs, location, used_outputs)
      budget.record_iteration(pattern, _taint.join_taint_bits(values))
      taint_bits = budget.taint_bits
    return self.origins.reconcile(outs, finite_mask, values, taint_bits)

  def _eval_shard_map(
    self, shard_map: _higher_order.ShardMap, eqn_call: _EqnCall
  ) -> list[_taint.TaintedArray] | None:
    is_nested = isinstance(self.runner, _runners.ShardRunner)
    # An abstract mesh has no devices to run on. A nested shard_map would need
    # an additional axis for each level.
    if is_nested or not isinstance(shard_map.mesh, Mesh):
      return None
    runner = _runners.ShardRunner(shard_map)
    location = eqn_call.get_inner_location("shard_map")
    values = self._reshard(runner.shard_input, eqn_call.inputs)
    inner_interpreter = TaintInterpreter(self.origins, runner, self.progress)
    outs = inner_interpreter.eval_jaxpr(shard_map.body, values, location)
    return self._reshard(runner.gather_output, outs)

  def _reshard(
    self,
    reshard_array: Callable[[int, jax.Array], jax.Array],
    values: list[_taint.TaintedArray],
  ) -> list[_taint.TaintedArray]:
    """Move all values into a ``shard_map``, or out of it."""

    def reshard_value(
      i: int, value: _taint.TaintedArray
    ) -> _taint.TaintedArray:
      # The taint takes the same route as the array, so its entries stay
      # aligned.
      put_taint = lambda taint: _taint_arrays.device_put_like(
        taint, value.array
      )
      reshard_taint = lambda taint: np.asarray(
        reshard_array(i, put_taint(taint))
      )
      return self.origins.derive_array(
        reshard_array(i, value.array), [value], reshard_taint
      )

    return [reshard_value(i, value) for i, value in enumerate(values)]


class _IterationBudget:
  """Limits how many iterations of a loop are evaluated eqn by eqn.

  Iterations are counted by pattern: which of their inputs and outputs are
  finite. A new pattern may have a new origin, so each pattern has its own
  limit.
  """

  def __init__(self, origins: _taint.OriginTable) -> None:
    self._origins = origins
    self._count_by_pattern: collections.Counter[tuple[bool, ...]] = (
      collections.Counter()
    )
    # Registered as a value, so that the table reuses none of its bits for
    # another origin while the loop runs.
    self._origin_value = _taint.TaintedArray(None)

  @property
  def taint_bits(self) -> int:
    """The bits of all origins that were found in this loop."""
    return self._origin_value.taint_bits

  def is_exhausted(self, pattern: tuple[bool, ...]) -> bool:
    """Return whether enough iterations of this pattern were evaluated."""
    return (
      self.taint_bits > 0
      and self._count_by_pattern[pattern] >= _MAX_INTERPRETED_ITERATIONS
    )

  def record_iteration(self, pattern: tuple[bool, ...], bits: int) -> None:
    """Count an iteration, and add the bits that were found in it."""
    self._count_by_pattern[pattern] += 1
    self._origin_value = self._origins.register_array(
      None, np.array([self.taint_bits | bits])
    )


def _get_uniform_value(array: Any) -> Any:
  """Return the scalar that all devices agree on; None if they differ."""
  unique_values = np.unique(np.asarray(array))
  return unique_values.item() if unique_values.size == 1 else None


def _has_effects(closed_jaxpr: _eqns.ClosedJaxpr) -> bool:
  return _eqns.has_effectful_eqn(closed_jaxpr.jaxpr)


def _drop_array(value: _taint.TaintedArray) -> _taint.TaintedArray:
  """Drop the array, unless the value has taint, to free its memory."""
  return value if value.taint is not None else _taint.TaintedArray(None)


def _number_eqns(jaxpr: core.Jaxpr) -> dict[core.JaxprEqn, int]:
  return {eqn: i + 1 for i, eqn in enumerate(jaxpr.eqns)}


def _is_loop(eqn: core.JaxprEqn) -> bool:
  return eqn.primitive.name in ("scan", "while")


def _is_literal(atom: _eqns.Atom) -> bool:
  return isinstance(atom, core.Literal)
