"""``with_master_weights``: float32 copies of half-precision parameters."""

from collections.abc import Mapping
import functools
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
import jax.numpy as jnp
import optax

# A bfloat16 number is the upper half of a float32 number. Half a unit in the
# last place of the upper half:
_HALF_ULP = 0x8000
_UPPER_HALF = ~0xFFFF


class MasterWeightsState(NamedTuple):
  """The state of :func:`with_master_weights`.

  Attributes:
    remainder: a tree like the parameters, with what the masters have in
      addition to the parameters. For a bfloat16 parameter, the master minus the
      parameter, as a difference of their bits: int16, of the shape of the
      parameter. For a float16 or float8 parameter, the master: float32, of the
      shape of the parameter. For all others, :class:`optax.MaskedNode`.
    inner_state: the state of the wrapped optimizer.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.with_master_weights(optax.sgd(0.1))
    >>> opt_state = tx.init({"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)})
    >>> print(opt_state.remainder)
    {'b': MaskedNode(), 'w': Array([0, 0], dtype=int16)}
  """

  remainder: Any
  inner_state: Any

  def __getattr__(self, name: str) -> NoReturn:
    raise_missing_attribute(self, name)


def with_master_weights(
  inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer: half-precision parameters train as float32 ones.

  A parameter in bfloat16 has 8 bits of precision, so an update that is smaller
  than 1/512 of the parameter is lost. This wrapper keeps float32 master
  weights, and the parameters are the rounded masters. ``inner`` receives the
  masters, gradients in float32, and extra arguments in float32, so that all of
  its state is float32. Functions among the extra arguments, such as the
  ``value_fn`` of a line search, receive parameters in their own dtypes.

  The state has 2 bytes for a bfloat16 parameter, and 4 bytes for a float16 or
  float8 parameter. Parameters of other dtypes need none, and pass through.

  ``update`` requires ``params``, and returns float32 updates.
  :func:`optax.apply_updates` adds them in float32, and returns the rounded
  masters in the dtypes of the parameters. (bfloat16 rounds ties away from zero,
  other dtypes round them to even.) Entries that don't change have the update
  -0.0. The updates of float8 parameters are float8, since JAX doesn't add
  float32 to float8. This sum may be rounded if an entry changes by more than
  half of its value.

  Make this wrapper the outermost one: what changes the updates afterwards
  changes the parameters, and not the masters. To scale the loss, too, use
  ``with_master_weights(with_loss_scaling(optimizer))``. A step that the loss
  scale skips changes neither parameters nor masters.

  If parameters change outside of the optimizer, such as by a projection, the
  masters follow: a float16 or float8 parameter that changed is its own master,
  and the master of a bfloat16 parameter differs from it by half a unit in the
  last place at most.

  .. warning::
    ``eqx.apply_updates`` and ``params + updates`` return float32 parameters.
    Use :func:`optax.apply_updates`.

  .. note::
    A master that is larger than the dtype can represent makes the parameter
    inf, as a cast does (in a dtype without inf, NaN). An infinite parameter
    can't become finite by the addition of an update, and becomes NaN instead.
    If an update cancels a parameter almost completely, to 2**-16 of it, the
    addition may round. Then the parameter is its own master.

  Args:
    inner: the optimizer to wrap.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` whose state is a
    :class:`MasterWeightsState`.

  Raises:
    TypeError: if ``inner`` is no optimizer; in ``update``, if ``state`` is not
      a :class:`MasterWeightsState`.
    ValueError: in ``update``, if ``params`` is missing, or has other dtypes or
      shapes than in ``init``.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> def train(tx):
    ...   w = jnp.ones((), jnp.bfloat16)
    ...   opt_state = tx.init(w)
    ...   for _ in range(100):
    ...     grad = jnp.ones((), jnp.bfloat16)
    ...     updates, opt_state = tx.update(grad, opt_state, w)
    ...     w = optax.apply_updates(w, updates)
    ...   return w
    >>> print(train(optax.sgd(1e-3)))
    1
    >>> print(train(ols.with_master_weights(optax.sgd(1e-3))))
    0.898438

  References:
    Micikevicius et al, `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018

  .. seealso:: :func:`get_master_weights`
  """
  if isinstance(inner, optax.MultiSteps):
    # inner.gradient_transformation() would drop the extra arguments.
    inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
  if not isinstance(inner, optax.GradientTransformation):
    raise TypeError(
      "inner must be an optimizer such as optax.adam(1e-3), got"
      f" {inner!r} of type {type(inner).__name__}."
    )
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: Any) -> MasterWeightsState:
    # The remainder and the inner state must not share buffers, because a jitted
    # step that donates its state can't donate a shared buffer twice.
    return MasterWeightsState(
      jax.tree.map(_init_remainder, params), inner.init(_to_float32(params))
    )

  def update_fn(
    updates: Any, state: MasterWeightsState, params: Any = None, **extra: Any
  ) -> tuple[Any, MasterWeightsState]:
    _check_update_args(state, params)
    leaves: list[Any] = jax.tree.leaves(params)
    treedef: Any = jax.tree.structure(params)
    remainders = treedef.flatten_up_to(state.remainder)
    _check_remainders(params, remainders)
    masters = list(map(_join, leaves, remainders))
    inner_updates, inner_state = inner.update(
      _to_float32(updates),
      state.inner_state,
      treedef.unflatten(masters),
      **{name: _convert_extra_arg(x, params) for name, x in extra.items()},
    )
    masters_updates = treedef.flatten_up_to(inner_updates)
    pairs = list(map(_split, leaves, remainders, masters, masters_updates))
    return treedef.unflatten(u for u, _ in pairs), MasterWeightsState(
      treedef.unflatten(r for _, r in pairs), inner_state
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def get_master_weights(state: Any, params: Any) -> Any:
  """Returns the float32 master weights.

  Use them for evaluation, averages and export.

  Args:
    state: a :class:`MasterWeightsState`, or any pytree that holds one: an
      optimizer state, Flax's ``TrainState``, or an ``nnx.Optimizer``. If it
      holds several, for parts of the parameters as by :func:`optax.partition`,
      all are used.
    params: the parameters after the last step, in any dtypes.

  Returns:
    A tree like ``params``. Leaves in bfloat16, float16 and float8 are the
    float32 masters, or are cast to float32 if the optimizer has no master for
    them. Other leaves are returned unchanged.

  Raises:
    ValueError: if ``state`` holds no master weights, or those of other
      parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> tx = ols.with_master_weights(optax.sgd(1e-3))
    >>> params = jnp.ones((), jnp.bfloat16)
    >>> opt_state = tx.init(params)
    >>> updates, opt_state = tx.update(params, opt_state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params, ols.get_master_weights(opt_state, params))
    1 0.999
  """
  states = find_master_weights_states(state)
  if not states:
    raise ValueError(
      "state must hold a MasterWeightsState, got a"
      f" {type(state).__name__} that holds none. Pass the state that"
      " `tx.init(params)` returned, with tx = with_master_weights(optimizer),"
      " or the train state or optimizer object that contains it."
    )
  leaves = masters = jax.tree.leaves(params)
  for found in states:
    fields = found if isinstance(found, Mapping) else found._asdict()
    # By the order of the leaves, since Flax NNX has variables of another class
    # in the state than in the parameters.
    remainders = jax.tree.leaves(fields["remainder"], _is_masked)
    if not _has_shapes_of(leaves, remainders):
      raise ValueError(
        "state must hold the master weights of params, got the masters of a"
        " tree with other leaves. Pass the parameters that the optimizer"
        " updates, and only the part of the state that belongs to them."
      )
    masters = [
      m if _is_masked(r) else _join(p, r)
      for m, p, r in zip(masters, leaves, remainders, strict=True)
    ]
  return _to_float32(jax.tree.unflatten(jax.tree.structure(params), masters))


def raise_missing_attribute(state: Any, name: str) -> NoReturn:
  """Say where to find an attribute of the wrapped optimizer's state."""
  raise AttributeError(
    f"{type(state).__name__} has no attribute {name!r}. Use"
    " opt_state.inner_state, which is the state of the wrapped optimizer, or"
    f" optax.tree.get(opt_state, {name!r})."
  )


def find_master_weights_states(tree: Any) -> list[Any]:
  """Return all states of `with_master_weights` in the tree."""
  return [x for x in jax.tree.leaves(tree, _is_state) if _is_state(x)]


def _convert_extra_arg(arg: Any, params: Any) -> Any:
  """Cast an argument to float32; let a function take the params' dtypes."""
  if not callable(arg):
    return _to_float32(arg)

  @functools.wraps(arg)
  def wrapper(masters: Any, *args: Any, **kwargs: Any) -> Any:
    cast = lambda p, m: m.astype(p.dtype) if _is_half(p) else m
    return arg(jax.tree.map(cast, params, masters), *args, **kwargs)

  return wrapper


def _init_remainder(param: Any) -> Any:
  """Return the remainder of a master that equals its parameter."""
  dtype = _remainder_dtype(param)
  if dtype is None:
    return optax.MaskedNode()
  if dtype == jnp.int16:
    return jnp.zeros_like(param, dtype)
  return _to_float32(param)


def _remainder_dtype(param: Any) -> Any:
  """Return the dtype of a parameter's remainder, or None if it has none."""
  if not _is_half(param):
    return None
  return jnp.int16 if param.dtype == jnp.bfloat16 else jnp.float32


def _join(param: Any, remainder: Any) -> Any:
  """Return the master of a parameter, or the parameter if it has none."""
  if _is_masked(remainder):
    return param
  param = jnp.asarray(param)
  if param.dtype == jnp.bfloat16:
    return _add_bits(param, remainder)
  float32_param = param.astype(jnp.float32)
  is_unchanged = _round(remainder, param.dtype) == float32_param
  return jnp.where(is_unchanged, remainder, float32_param)


def _split(
  param: Any, remainder: Any, master: Any, update: Any
) -> tuple[Any, Any]:
  """Return the update of a parameter, and the new remainder.

  Args:
    param: the old parameter.
    remainder: the old remainder.
    master: the old master.
    update: the update of the master. If it is not an array, the optimizer
      doesn't train this parameter.
  """
  if _is_masked(remainder) or not hasattr(update, "dtype"):
    return update, remainder
  param = jnp.asarray(param)
  new_master = master + update.astype(jnp.float32)
  new_param = _round(new_master, param.dtype)
  float32_param = param.astype(jnp.float32)
  new_update = _subtract(new_param, float32_param)
  if param.dtype != jnp.bfloat16:
    # JAX adds float8 numbers only to others of their dtype.
    is_float8 = jnp.finfo(param.dtype).bits < 16
    update_dtype = param.dtype if is_float8 else jnp.float32
    return new_update.astype(update_dtype), new_master
  # The sum may round if the update cancels the parameter almost completely.
  error = _bits(float32_param + new_update) - _bits(new_param)
  is_exact = (error > -_HALF_ULP) & (error < _HALF_ULP)
  # The cast to int16 keeps the lower half.
  return new_update, jnp.where(is_exact, _bits(new_master), 0).astype(jnp.int16)


# The derivatives are those of the float32 numbers that are rounded. Without the
# rules, JAX takes a derivative of zero for all that is computed from bits.


@jax.custom_jvp
def _add_bits(param: jax.Array, remainder: jax.Array) -> jax.Array:
  """Return the float32 number with the bits of a bfloat16, and a remainder."""
  bits = _bits(param.astype(jnp.float32)) + remainder.astype(jnp.int32)
  return lax.bitcast_convert_type(bits, jnp.float32)


_add_bits.defjvps(lambda tangent, *_: tangent.astype(jnp.float32), None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round(x: jax.Array, dtype: Any) -> jax.Array:
  """Round float32 numbers to those that a dtype represents, as float32.

  XLA may omit a cast to half precision that is followed by a cast back, so this
  function doesn't cast. bfloat16 rounds ties away from zero, since a remainder
  is in [-2**15, 2**15) only then. Other dtypes round ties to even, as casts do.
  """
  if dtype == jnp.bfloat16:
    # The sign is apart from the magnitude, so this rounds the magnitude up.
    rounded = (_bits(x) + _HALF_ULP) & _UPPER_HALF
    rounded = lax.bitcast_convert_type(rounded, jnp.float32)
    # The sum overflows for some NaNs.
    return jnp.where(jnp.isnan(x), jnp.nan, rounded)
  info = jnp.finfo(dtype)
  # The unit in the last place of x. The exponent of float32 is biased by 127.
  exponent = jnp.maximum((_bits(x) >> 23) & 0xFF, int(info.minexp) + 127)
  ulp = lax.bitcast_convert_type((exponent - info.nmant) << 23, jnp.float32)
  rounded = lax.round(x / ulp, lax.RoundingMethod.TO_NEAREST_EVEN) * ulp
  overflowed = float(jnp.dtype(dtype).type(float("inf")))  # inf or NaN
  is_too_large = jnp.abs(rounded) > float(info.max)  # not for NaN
  return jnp.where(is_too_large, jnp.copysign(overflowed, x), rounded)


@_round.defjvp
def _round_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
  return _round(*primals, dtype), *tangents


@jax.custom_jvp
def _subtract(new: jax.Array, old: jax.Array) -> jax.Array:
  """Return ``new - old``, and -0.0 where both have the same bits."""
  return jnp.where(_bits(new) == _bits(old), -0.0, new - old)


_subtract.defjvps(lambda tangent, *_: tangent, lambda tangent, *_: -tangent)


def _bits(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.int32)


def _to_float32(tree: Any) -> Any:
  """Cast all half-precision leaves to float32."""

  def cast(leaf: Any) -> Any:
    if not _is_half(leaf):
      return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf.update(dtype=jnp.float32)
    return lax.convert_element_type(leaf, jnp.float32)

  return jax.tree.map(cast, tree)


def _is_half(x: Any) -> bool:
  """Return whether x is an array of floats of fewer than 32 bits."""
  dtype = getattr(x, "dtype", None)
  is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
  return is_float and jnp.finfo(dtype).bits < 32


def _is_masked(x: Any) -> bool:
  return isinstance(x, optax.MaskedNode)


def _is_state(x: Any) -> bool:
  """Return whether x is a MasterWeightsState, or a mapping with its fields."""
  is_mapping = isinstance(x, Mapping)
  has_fields = is_mapping and set(x) == set(MasterWeightsState._fields)
  return has_fields or isinstance(x, MasterWeightsState)


def _has_shapes_of(leaves: list[Any], remainders: list[Any]) -> bool:
  return len(leaves) == len(remainders) and all(
    _is_masked(r) or jnp.shape(p) == jnp.shape(r)
    for p, r in zip(leaves, remainders, strict=True)
  )


def _check_update_args(state: Any, params: Any) -> None:
  if params is None:
    raise ValueError(
      "update of with_master_weights requires the parameters, got params=None."
      " Call tx.update(grads, opt_state, params)."
    )
  if not isinstance(state, MasterWeightsState):
    raise TypeError(
      "update takes a MasterWeightsState, as init returns it, got a"
      f" {type(state).__name__}. To start with the state of the bare optimizer,"
      " use tx.init(params)._replace(inner_state=state), if that state is"
      " float32. If the state comes from a checkpoint, restore it into the"
      " structure of tx.init(params)."
    )


def _check_remainders(params: Any, remainders: list[Any]) -> None:
  """Raise unless the remainders belong to parameters of these types."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for (path, param), remainder in zip(leaves, remainders, strict=True):
    expected_dtype = _remainder_dtype(param)
    shape = jnp.shape(param)
    if expected_dtype != getattr(remainder, "dtype", None) or (
      expected_dtype is not None and shape != remainder.shape
    ):
      raise ValueError(
        "params must have the shapes and dtypes that init received, got"
        f" {jnp.result_type(param)} of shape {shape} at"
        f" {jax.tree_util.keystr(path) or 'the root of the tree'}, and another"
        " remainder in the state. Add updates with optax.apply_updates, which"
        " keeps the dtypes (eqx.apply_updates and params + updates return"
        " float32). After a change of dtypes, call tx.init(params)."
      )
