"""The public functions `autocast` and `keep_float32`."""

from collections.abc import Callable, Iterable
import functools
import inspect
from typing import Any, overload, ParamSpec, TypeVar

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _checks
from optax_lossscale._autocast import (
  _call_args,
  _calls,
  _float32_filter,
  _matmuls,
)
from optax_lossscale._jaxprs import (
  _eqns,
  _primitives,
  _source_info,
  _walk,
)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_USAGE_HINT = (
  " Wrap the loss function: ols.value_and_grad(ols.autocast(loss_fn),"
  " opt_state)(params, batch), or decorate it with @ols.autocast()."
)


class _AutocastDecorator:
  """The decorator that :func:`autocast` returns if it is called without fun."""

  def __init__(self, dtype: Any, patterns: tuple[str, ...]) -> None:
    self._dtype, self._patterns = dtype, patterns

  def __call__(self, fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    return autocast(fun, self._dtype, keep_float32=self._patterns)

  def __enter__(self) -> None:
    raise TypeError(f"autocast is not a context manager.{_USAGE_HINT}")

  # Python looks up `__exit__` before it calls `__enter__`, which raises the
  # error. Type checkers reject a `with` statement if `__exit__` is None.
  __exit__ = None


@overload
def autocast(
  fun: Callable[_Args, _Result],
  dtype: Any = ...,
  *,
  keep_float32: str | Iterable[str] = ...,
) -> Callable[_Args, _Result]: ...


@overload
def autocast(
  fun: None = None,
  dtype: Any = ...,
  *,
  keep_float32: str | Iterable[str] = ...,
) -> _AutocastDecorator: ...


def autocast(
  fun: Callable[..., Any] | None = None,
  dtype: Any = jnp.float16,
  *,
  keep_float32: str | Iterable[str] = (),
) -> Callable[..., Any]:
  """Run the matmuls and convolutions of a float32 function in half precision.

  Wrap the loss function, ``autocast(loss_fn)``, or decorate it with
  ``@autocast`` or ``@autocast(keep_float32="out")``. You don't edit the model,
  and its parameters stay float32:

  * Matmuls and convolutions that are float32 in ``fun`` run in ``dtype`` and
    accumulate in float32, in the forward and the backward pass. One of the
    operands may be stored in ``dtype``.
  * Operations that only move a matmul result, such as ``reshape``,
    ``transpose`` and ``slice``, stay in ``dtype``.
  * All other operations run in float32, as in ``fun``. No sum, mask, epsilon,
    variance or loss is ever computed in ``dtype``.

  Unchanged are matmuls in other dtypes, products of two vectors, outer
  products, matmuls whose precision is ``HIGHEST`` (by an argument or by
  :func:`jax.default_matmul_precision`), and linear algebra. Matmuls inside
  operations that autocast can't rewrite, such as a Pallas kernel, run
  unchanged, and autocast warns. The report
  ``optax_lossscale.diagnostics.count_flops`` shows the percentage of FLOPs
  in each dtype.

  Args:
    fun: a function that JAX can trace. Its arguments and results may be any
      objects. It may update Flax NNX modules among its arguments. Without
      ``fun``, ``autocast`` returns a decorator.
    dtype: float16, bfloat16 or float32. With float32 ``autocast`` returns
      ``fun``.
    keep_float32: one or several names of matmuls that stay in float32, in the
      forward and the backward pass, as the reports of
      ``optax_lossscale.diagnostics`` print them. A name is one of these:

      * a parameter path among the arguments (``"blocks/2/up"``) or a name scope
        (``"Net/block1"``), with everything below it,
      * a source line, with or without its number
        (``"model.py:32 (Block.__call__)"``, ``"model.py (Block.__call__)"``),
      * a path or a scope with a line (``"Net/block1 at model.py:32 (Block)"``),
      * the matmuls without a parameter on a line
        (``"no weights at model.py:32"``).

      A name may be a pattern of ``fnmatch``, such as ``"*/router"``.

  Returns:
    A function with the arguments, the name and the docstring of ``fun``. Its
    results have the same structure, shapes and dtypes. You can transform and
    compile it like ``fun``. Call it under ``jit``, because each call traces
    ``fun`` again.

  Raises:
    TypeError: if ``fun`` is not a function, ``dtype`` is not one of the three,
      or ``keep_float32`` contains anything but strings.
    ValueError: when the returned function is called, if a name in
      ``keep_float32`` selects no matmul, or only matmuls of another
      ``autocast`` inside ``fun``; or if ``fun`` updates a Flax NNX object that
      must not be updated there.

  Warns:
    UserWarning: if ``fun`` contains nothing to run in ``dtype``; if a name
      selects no matmul, but may select one in a custom derivative rule that
      can't be inspected; or if matmuls are inside an operation that autocast
      can't rewrite, with the lines of up to three of these operations.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def loss_fn(w, x):
    ...   return jnp.mean((x @ w) ** 2)
    >>> state = ols.DynamicLossScale().init()
    >>> w, x = jnp.eye(4), jnp.ones((2, 4))
    >>> loss, grads = ols.value_and_grad(ols.autocast(loss_fn), state)(w, x)
    >>> print(loss, loss.dtype, grads.dtype)
    1.0 float32 float32
  """
  dtype = _check_dtype(dtype)
  float32_filter = _float32_filter.Float32Filter(
    _float32_filter.as_patterns(keep_float32)
  )
  if fun is None:
    return _AutocastDecorator(dtype, float32_filter.patterns)
  if isinstance(fun, type) and jnp.issubdtype(fun, jnp.floating):
    description = _checks.describe_arg("fun", fun)
    raise TypeError(f"fun must be a function, got {description}.{_USAGE_HINT}")
  _checks.check_callable("fun", fun, hint=_USAGE_HINT)
  if dtype == jnp.float32:
    return fun
  seen_messages: set[str] = set()

  def warn_once(message: str) -> None:
    if message and message not in seen_messages:
      seen_messages.add(message)
      _source_info.warn_user(message)

  @functools.wraps(fun, updated=())
  def autocast_fun(*args: Any, **kwargs: Any) -> Any:
    paths_by_id = _call_args.find_weight_paths_by_id(fun, args, kwargs)
    config = _calls.AutocastConfig(dtype, float32_filter, paths_by_id)
    thunk, apply_mutations = _call_args.close_over_args(fun, args, kwargs)
    result = _calls.call_with_autocast(thunk, config)
    out = apply_mutations(result.out)
    log = result.log
    # This walks the whole program, so it is called only for an error message.
    get_cast_names = functools.partial(
      _matmuls.collect_cast_names, result.jaxpr
    )
    warn_once(
      float32_filter.check_matches(
        log.matches, log.has_opaque_rules, get_cast_names
      )
    )
    warn_once(result.message)
    # If a message is about matmuls that stayed in float32, `fun` has matmuls.
    if not result.message and not log.has_matmuls:
      warn_once(_describe_nothing_cast(fun, result.old_jaxpr, dtype))
    return out

  return autocast_fun


def _describe_nothing_cast(
  fun: Callable[..., Any], closed_jaxpr: _eqns.ClosedJaxpr, dtype: Any
) -> str:
  """Return the warning about a function without any matmul to cast.

  Args:
    fun: the function.
    closed_jaxpr: its jaxpr before the rewrite.
    dtype: the half precision.

  Returns:
    The warning, with the dtypes of the matmuls that the function contains;
    empty if one of its custom derivatives contains a matmul to cast.
  """

  # Unlike `subjaxprs_to_search`, this includes `keep_float32` functions.
  def get_subjaxprs(eqn: Any) -> list[_eqns.ClosedJaxpr]:
    subjaxprs: list[Any] = [*_eqns.subjaxprs(eqn)] or [_eqns.lower_hijax(eqn)]
    return [closed_jaxpr for closed_jaxpr in subjaxprs if closed_jaxpr]

  eqns: Any = [visit.eqn for visit in _walk.walk(closed_jaxpr, get_subjaxprs)]
  if any(_matmuls.has_rule_matmuls(eqn, dtype) for eqn in eqns):
    return ""
  matmuls = list(filter(_primitives.is_matmul, eqns))
  name = getattr(fun, "__name__", type(fun).__name__)
  if not matmuls:
    return (
      f"autocast had no effect on {name}: it contains no matmul or convolution"
      f" of JAX arrays. Pass the function whose matmuls should run in {dtype}."
    )
  labels = sorted({_format_operand_dtypes(eqn) for eqn in matmuls})
  message = (
    f"autocast had no effect on {name}: it contains no float32 matmul or"
    f" convolution that autocast may cast to {dtype}, only some in"
    f" {' and '.join(labels)}."
  )
  return message + _explain_dtypes(matmuls, str(dtype))


def _format_operand_dtypes(eqn: core.JaxprEqn) -> str:
  """Return ``float32``, or ``float32 @ bfloat16`` if the operands differ."""
  return " @ ".join(dict.fromkeys(map(str, _matmuls.get_operand_dtypes(eqn))))


def _explain_dtypes(matmuls: list[core.JaxprEqn], dtype: str) -> str:
  """Explain why autocast casts none of some matmuls.

  Args:
    matmuls: the matmuls.
    dtype: the half precision.

  Returns:
    A sentence for each reason, after a space; empty if no reason is known.
  """
  operand_dtypes = [
    set(map(str, _matmuls.get_operand_dtypes(eqn))) for eqn in matmuls
  ]
  explanation = ""
  if any("float32" in x and x <= {"float32", dtype} for x in operand_dtypes):
    explanation += (
      " Matmuls of precision HIGHEST, also by jax.default_matmul_precision, and"
      " matmuls marked with keep_float32 stay in float32."
    )
  if any(x <= {"bfloat16", "float16"} for x in operand_dtypes):
    explanation += (
      " A model that already computes in half precision needs no autocast."
    )
  # The result of a complex or float64 operand is not float32.
  if any(
    "float32" in x
    and not x <= {"float32", dtype}
    and _matmuls.has_float32_result(eqn)
    for eqn, x in zip(matmuls, operand_dtypes, strict=True)
  ):
    explanation += (
      " If one operand is float32 and the other one neither float32 nor"
      f" {dtype}, the matmul is unchanged. Cast the other operand to float32."
    )
  return explanation


def keep_float32(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
  """Keep a part of a model in float32 inside :func:`autocast`.

  Inside :func:`autocast`, all matmuls of the part and of its derivatives run
  unchanged. Outside :func:`autocast`, this has no effect.

  Args:
    fun: a function, a method or a layer.

  Returns:
    A function with the arguments, the name and the docstring of ``fun``.

  Raises:
    TypeError: if ``fun`` is not a function.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> @ols.keep_float32
    ... def router(x, w):
    ...   return jax.nn.softmax(x @ w)
    >>> def model(x, w):
    ...   return router(x, w) @ (x @ w)
    >>> jaxpr = jax.make_jaxpr(ols.autocast(model))(jnp.eye(4), jnp.eye(4))
    >>> [str(e.outvars[0].aval.dtype) for e in jaxpr.eqns
    ...  if e.primitive.name == "dot_general"]
    ['float32', 'float16', 'float16']
  """
  _checks.check_callable("fun", fun)

  # Flax stores attributes on methods, which the wrapper of a method needs. The
  # attributes of a layer are its state, which must not be copied.
  updated = ("__dict__",) if inspect.isfunction(fun) else ()

  @functools.wraps(fun, updated=updated)
  def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    with jax.named_scope(_matmuls.KEEP_FLOAT32_SCOPE):
      return fun(*args, **kwargs)

  return wrapper


def _check_dtype(dtype: Any) -> Any:
  """Return the dtype as a NumPy dtype; raise a TypeError if not supported."""
  allowed_dtypes = jnp.float16, jnp.bfloat16, jnp.float32
  as_dtype = _checks.as_float_dtype(dtype)
  if as_dtype not in allowed_dtypes:
    raise TypeError(
      "dtype must be float16, bfloat16 or float32, got dtype ="
      f" {as_dtype.name}."
    )
  return as_dtype
