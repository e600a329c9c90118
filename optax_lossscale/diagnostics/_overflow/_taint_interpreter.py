"""Runs a jaxpr one operation at a time, and marks what is not finite."""

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

# Operations whose result stays finite if an input that is not is replaced by
# this number, as long as nothing else is wrong.
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
# A loop may go wrong in each of a million iterations. After as many as this
# that went wrong in the same way, meaning in the same inputs and outputs, what
# is not finite is blamed on what was found before.
_MAX_INTERPRETED_ITERATIONS = 30

_Made = TypeVar("_Made")


class _EqnCall(NamedTuple):
  """An equation that may be entered.

  Attributes:
    eqn: the equation.
    inputs: the values that it reads.
    get_location: tells where it stands: it takes a look at a traceback.
    has_effect: whether it must be carried out only once. If it may be done
      again, the marks of what it returns are asked for, and not the arrays.
    used_outputs: which of its outputs are asked for; all, if not given.
  """

  eqn: core.JaxprEqn
  inputs: list[_taint.TaintedArray]
  get_location: Callable[[], _provenance.EqnLocation]
  has_effect: bool
  used_outputs: list[bool] | None = None

  def get_inner_location(self, call_label: str) -> _provenance.EqnLocation:
    """The place of what it runs in this step."""
    return self.get_location().push_eqn_path(call_label)


class TaintInterpreter:
  """Runs jaxprs one operation at a time.

  Attributes:
    origins: where to note what is found.
    runner: how to run one operation.
    progress: where to tell which operation is run.
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
    self._cache: dict[Any, Any] = {}
    self._loop_search = _walk.EqnSearch(_is_loop, _eqns.subjaxprs)

  def eval_jaxpr(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    inputs: list[_taint.TaintedArray],
    location: _provenance.EqnLocation,
    used_outputs: list[bool] | None = None,
  ) -> list[_taint.TaintedArray]:
    """Runs a jaxpr.

    Args:
      closed_jaxpr: the jaxpr.
      inputs: a value for each of its inputs.
      location: where it stands.
      used_outputs: which of its outputs are asked for; all, if not given. What
        leads to no other is not run, such as the optimizer in a skipped step.

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
      eqn_path = "/".join([*location.eqn_path, _source_info.get_op_name(eqn)])
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
    return [out or _taint.TaintedArray(None) for out in outs]

  def make_constant(
    self, array: Any, primitive: str, location: _provenance.EqnLocation
  ) -> _taint.TaintedArray:
    """A value that no operation has made."""
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
    """Carries out one equation; enters it if its results are not finite."""
    has_effect = self._cached(_eqns.has_effect, eqn)
    eqn_call = _EqnCall(eqn, inputs, get_location, has_effect)
    # To compile what is around a loop, and the loop, takes twice as long.
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
      if taint_bits:
        return self.origins.reconcile(
          outs, finite_mask, inner_values, taint_bits
        )
    name, axis = _source_info.get_op_name(eqn), self.runner.axis
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

  def _cached(self, make: Callable[[Any], _Made], arg: Any) -> _Made:
    """What a function makes of an equation or a jaxpr, made once."""
    key = make, arg
    if key not in self._cache:
      self._cache[key] = make(arg)
    return self._cache[key]

  def _get_run_fn(self, eqn: core.JaxprEqn) -> _runners.RunFn:
    """What runs an equation as a whole."""
    loop = self._get_loop(eqn)
    return self.runner.make_eqn_fun(eqn) if loop is None else loop.whole

  def _get_loop(self, eqn: core.JaxprEqn) -> Any:
    """What runs a loop, as a whole or in parts; None if it is none."""
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
    """Whether this is a call or a branch with a loop inside."""
    return not _is_loop(eqn) and self._loop_search.any_inside(eqn)

  def _eval_subjaxprs(
    self, eqn_call: _EqnCall
  ) -> list[_taint.TaintedArray] | None:
    """Runs the jaxprs of a call, a loop or a branch.

    Returns:
      The values of its outputs; None if it cannot be entered.
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
    index = _get_uniform_value(index_value.array)
    if index is None:
      return None
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
      has_next_iteration = _get_uniform_value(self._reduce_pred(pred))
      if has_next_iteration is None:
        return None
      if not has_next_iteration:
        return list(carry)
      inputs = [*cond_consts, *body_consts, *carry]
      num_iterations, carry, outs = self._advance(
        loop, num_iterations, inputs, eqn_call
      )
      if outs is not None and pred.ndim > self.runner.axis:
        pred = self._eval_while_cond(loop, [*cond_consts, *carry], eqn_call)
      location = eqn_call.get_inner_location(f"while[{num_iterations - 1}]")
      inputs = [*body_consts, *carry]
      new_carry = self._eval_iteration(
        loop.body, inputs, outs, location, budget
      )
      pairs = zip(new_carry, carry, strict=True)
      carry = [self._select_carry(pred, *pair) for pair in pairs]

  def _eval_while_cond(
    self,
    loop: _higher_order.While,
    inputs: list[_taint.TaintedArray],
    eqn_call: _EqnCall,
  ) -> jax.Array:
    """The condition of a loop: one flag, or one for each row of ``vmap``."""
    if self._cached(_has_effects, loop.condition):
      location = eqn_call.get_inner_location("while")
      return self.eval_jaxpr(loop.condition, inputs, location)[0].array
    run_cond = self._cached(self.runner.compile_jaxpr, loop.condition)
    return run_cond(*(value.array for value in inputs))[0]

  def _reduce_pred(self, pred: jax.Array) -> np.ndarray:
    """Whether a row needs another iteration, on each device."""
    axes = tuple(range(self.runner.axis, pred.ndim))
    return np.any(np.asarray(pred), axis=axes)

  def _select_carry(
    self, pred: jax.Array, new: _taint.TaintedArray, old: _taint.TaintedArray
  ) -> _taint.TaintedArray:
    """What comes after an iteration that only some rows still need.

    Such is a loop that was mapped by ``vmap``: each row has a flag.
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
    """What a scan stacks, of the rows by their numbers.

    If the arrays are not needed, those that are missing have no marks.
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
    """Runs a loop up to the next iteration that is to be looked at.

    Returns:
      The number of iterations that have run then; the carry that the last one
      was given; and what its body returned, or None if it has not run, since it
      has effects.
    """
    _, carry, _ = _loops.split_loop_inputs(loop, inputs)
    if eqn_call.has_effect:
      return num_iterations + 1, carry, None
    arrays = [value.array for value in inputs]
    stop_point = self._get_loop(eqn_call.eqn).advance(num_iterations, arrays)
    if (
      stop_point.num_iterations > num_iterations + 1
    ):  # All that came before was finite.
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
    """Follows an iteration of a loop that returned this, step by step."""
    if outs is None:
      return self.eval_jaxpr(closed_jaxpr, inputs, location)
    finite_mask = list(map(_taint_arrays.all_finite, outs))
    if all(finite_mask):
      return list(map(_taint.TaintedArray, outs))
    pattern = (*finite_mask, *(value.taint is None for value in inputs))
    if budget.is_exhausted(pattern):
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
    # An abstract mesh has no devices to run on.
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
    """All values, moved into a ``shard_map`` or out of it."""

    def reshard_value(
      i: int, value: _taint.TaintedArray
    ) -> _taint.TaintedArray:
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
  """How many more iterations of a loop to run step by step.

  An iteration goes wrong in a way: which inputs and outputs are finite.
  """

  def __init__(self, origins: _taint.OriginTable) -> None:
    self._origins = origins
    self._count_by_pattern: collections.Counter[tuple[bool, ...]] = (
      collections.Counter()
    )
    # A value of its own, so that none of its bits is given to another origin.
    self._origin_value = _taint.TaintedArray(None)

  @property
  def taint_bits(self) -> int:
    """The bits of the origins that were found in this loop."""
    return self._origin_value.taint_bits

  def is_exhausted(self, pattern: tuple[bool, ...]) -> bool:
    """Whether it is over for iterations that go wrong in this way."""
    return (
      self.taint_bits > 0
      and self._count_by_pattern[pattern] >= _MAX_INTERPRETED_ITERATIONS
    )

  def record_iteration(self, pattern: tuple[bool, ...], bits: int) -> None:
    """Notes the bits that were found in an iteration."""
    self._count_by_pattern[pattern] += 1
    self._origin_value = self._origins.register_array(
      None, np.array([self.taint_bits | bits])
    )


def _get_uniform_value(array: Any) -> Any:
  """The number in an array, or None if the devices do not agree on it."""
  unique_values = np.unique(np.asarray(array))
  return unique_values.item() if unique_values.size == 1 else None


def _has_effects(closed_jaxpr: _eqns.ClosedJaxpr) -> bool:
  return _eqns.has_effectful_eqn(closed_jaxpr.jaxpr)


def _drop_array(value: _taint.TaintedArray) -> _taint.TaintedArray:
  """The value without its array, which need not be kept."""
  return value if value.taint is not None else _taint.TaintedArray(None)


def _number_eqns(jaxpr: core.Jaxpr) -> dict[core.JaxprEqn, int]:
  return {eqn: i + 1 for i, eqn in enumerate(jaxpr.eqns)}


def _is_loop(eqn: core.JaxprEqn) -> bool:
  return eqn.primitive.name in ("scan", "while")


def _is_literal(atom: _eqns.Atom) -> bool:
  return isinstance(atom, core.Literal)
