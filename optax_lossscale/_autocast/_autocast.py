"""`autocast`, and what keeps a part of a model out of it."""

from collections.abc import Callable, Iterable
import functools
import inspect
from typing import Any, overload, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from optax_lossscale import _checks, _warnings
from optax_lossscale._autocast import (
  _call_args,
  _calls,
  _float32_filter,
  _matmuls,
  _messages,
)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_USAGE_HINT = (
  " Wrap the loss function: ols.value_and_grad(ols.autocast(loss_fn),"
  " opt_state)(params, batch), or decorate it with @ols.autocast()."
)


class _AutocastDecorator:
  """What :func:`autocast` returns without a function: it takes the function."""

  def __init__(self, dtype: Any, patterns: tuple[str, ...]) -> None:
    self._dtype, self._patterns = dtype, patterns

  def __call__(self, fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    return autocast(fun, self._dtype, keep_float32=self._patterns)

  def __enter__(self) -> None:
    raise TypeError(f"autocast is not a context manager.{_USAGE_HINT}")

  # Python looks for it before it calls the other, and checkers refuse it.
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
  """Runs the matrix products of a float32 function in half precision.

  Put it around the loss, ``autocast(loss_fn)``, or above its definition,
  ``@autocast`` or ``@autocast(keep_float32="out")``. The function, its model
  and its parameters stay as they are:

  * Matrix products and convolutions run in ``dtype``, and accumulate in
    float32, if they are float32 in ``fun``.
  * What only moves the result of one product stays in ``dtype``: ``reshape``,
    ``transpose``, ``slice`` and the like.
  * All else runs in float32, as it is written. So no sum, mask, epsilon,
    variance or loss is ever computed in ``dtype``.

  These are left alone: products of other dtypes, products of two vectors, outer
  products, products whose precision is ``HIGHEST`` (by an argument or by
  :func:`jax.default_matmul_precision`), and linear algebra. Products inside of
  what it does not know, such as a Pallas kernel, run as written, too, and a
  warning says so. ``optax_lossscale.diagnostics.precision_report`` tells how
  much runs in which dtype.

  Args:
    fun: any function that JAX can trace. Its arguments and results may be any
      objects. It may change Flax NNX modules among its arguments. If it is not
      given, what is returned takes it: a decorator.
    dtype: float16, bfloat16 or float32. With float32 this is ``fun`` itself.
    keep_float32: names of products that stay in float32, forward and backward:
      one or several, as the reports of ``optax_lossscale.diagnostics`` print
      them. A name is the path of weights among the arguments
      (``"blocks/2/up"``), or a scope (``"Net/block1"``), with all that is
      inside of either, or a line, with or without its number
      (``"model.py:32 (Block.__call__)"``, ``"model.py (Block.__call__)"``), or
      one of the former and a line (``"Net/block1 at model.py:32 (Block)"``), or
      what has no path of weights on a line (``"no weights at model.py:32"``).
      It may be a pattern of ``fnmatch``, such as ``"*/router"``.

  Returns:
    A function of the same arguments, with the name and docstring of ``fun``.
    Its results have the same structure, shapes and dtypes. It can be
    transformed and compiled as ``fun`` can. Call it in a compiled function:
    each call traces ``fun`` again.

  Raises:
    TypeError: if ``fun`` is not a function, ``dtype`` is not one of these, or
      ``keep_float32`` is not made of strings.
    ValueError: by the returned function, if a name in ``keep_float32`` selects
      no product, or only products of another ``autocast`` inside of ``fun``,
      and no rule hides any; or if ``fun`` changes a Flax NNX object
      that may not be changed where it is called.

  Warns:
    UserWarning: if there is nothing to run in ``dtype``, if a name selects no
      product that can be looked at, or if products stand in something that it
      cannot enter: with their share of the flops, and their lines. And at the
      third call with the same shapes outside of ``jit``.

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
      _warnings.warn(message)

  @functools.wraps(fun, updated=())
  def autocast_fun(*args: Any, **kwargs: Any) -> Any:
    paths_by_id = _call_args.find_weight_paths_by_id(fun, args, kwargs)
    config = _calls.AutocastConfig(dtype, float32_filter, paths_by_id)
    thunk, apply_mutations = _call_args.close_over_args(fun, args, kwargs)
    result = _calls.call_with_autocast(thunk, config)
    out = apply_mutations(result.out)
    log = result.log
    get_cast_names = functools.partial(
      _matmuls.collect_cast_names, result.jaxpr
    )
    warn_once(
      float32_filter.check_matches(
        log.matches, log.has_opaque_rules, get_cast_names
      )
    )
    warn_once(result.message)
    if not result.message and not log.has_matmuls:
      warn_once(_messages.describe_nothing_cast(fun, thunk, dtype))
    warn_once(_messages.describe_unjitted_calls(fun, (args, kwargs), out))
    return out

  return autocast_fun


def keep_float32(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
  """Keeps a part of a model in float32 within :func:`autocast`.

  It changes nothing outside of :func:`autocast`. Inside, all products of the
  part run as written, and so do those of its derivatives.

  Args:
    fun: the part: a function, a method or a layer.

  Returns:
    A function of the same arguments, with the name and docstring of ``fun``.

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

  # What Flax noted of a method stays with it. What is in a layer is its own.
  updated = ("__dict__",) if inspect.isfunction(fun) else ()

  @functools.wraps(fun, updated=updated)
  def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    with jax.named_scope(_matmuls.KEEP_FLOAT32_SCOPE):
      return fun(*args, **kwargs)

  return wrapper


def _check_dtype(dtype: Any) -> Any:
  allowed_dtypes = jnp.float16, jnp.bfloat16, jnp.float32
  as_dtype = _checks.as_float_dtype(dtype)
  if as_dtype not in allowed_dtypes:
    raise TypeError(
      "dtype must be float16, bfloat16 or float32, got dtype ="
      f" {as_dtype.name}."
    )
  return as_dtype
