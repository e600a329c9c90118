"""Reading what another system wrote: keys, numbers, and errors that name them.

Input comes out of files and is not trusted: it is only looked at, by the names
that are known, never imported, called or evaluated. Messages quote it through
:func:`show`, since the `repr` of a hostile object may raise, recurse or never
end.
"""

from collections.abc import Collection, Mapping
import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks


@dataclasses.dataclass(frozen=True)
class Values:
  """The values found under known keys, and who asks for them.

  Attributes:
    function: the public function, for the messages.
    what: what was read, for the messages.
    found: value by key.
    known: the default by key, None where there is none.
  """

  function: str
  what: str
  found: Mapping[str, Any]
  known: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __contains__(self, key: str) -> bool:
    """Whether the key was given."""
    return key in self.found

  def require(self, *keys: str) -> None:
    """Raises unless all keys were given."""
    missing = [key for key in keys if key not in self.found]
    if missing:
      raise ValueError(
        f"{self.function}: {self.what} must hold {', '.join(map(repr, keys))},"
        f" but {', '.join(map(repr, missing))} is missing."
      )

  def complete(self) -> "Values":
    """The values, if all known keys were given; raises otherwise."""
    self.require(*self.known)
    return self

  def without_none(self) -> "Values":
    """The values without those that are None."""
    found = {k: v for k, v in self.found.items() if v is not None}
    return dataclasses.replace(self, found=found)

  def fail(self, key: str, rule: str, error: type[Exception]) -> NoReturn:
    """Raises an error that quotes the value."""
    got = show(self.found[key])
    raise error(
      f"{self.function}: {key} in {self.what} must be {rule}, got"
      f" {key} = {got}."
    )

  def number(
    self, key: str, low: float, high: float, *, integer: bool = False
  ) -> float:
    """A finite number within bounds, or its default, held within them."""
    if key not in self.found:
      return float(min(max(self.known[key], low), high))
    rule = _checks.range_rule(low, high, integer=integer)
    value = self._plain(key, rule)
    in_range = low <= value <= high  # False for NaN, too.
    if not in_range or (integer and value != int(value)):
      self.fail(key, rule, ValueError)
    return float(value)

  def integer(self, key: str, low: int, high: int) -> int:
    """An integer within bounds, as a Python int."""
    return int(self.number(key, low, high, integer=True))

  def count(self, key: str) -> int:
    """A positive integer that an int32 can hold."""
    return self.integer(key, 1, _checks.LARGEST_COUNT)

  def scale(self, key: str, low: float = _checks.SMALLEST_SCALE) -> float:
    """A loss scale that float32 and its reciprocal can hold."""
    return self.number(key, low, _checks.LARGEST_SCALE)

  def growth(self, key: str) -> float:
    """A growth factor that float32 can tell from 1."""
    return self.number(key, _checks.SMALLEST_GROWTH, _checks.LARGEST_SCALE)

  def backoff(self, key: str) -> float:
    """A backoff factor that float32 can tell from 1."""
    return self.number(key, _checks.SMALLEST_SCALE, _checks.LARGEST_BACKOFF)

  def hysteresis_left(self, key: str, hysteresis: int) -> int:
    """How many overflows are left, by a tracker that counts them down.

    It goes on counting below zero. Ours stops at zero, which has the same
    effect.
    """
    return max(self.integer(key, -_checks.LARGEST_COUNT, hysteresis), 0)

  def boolean(self, key: str) -> bool:
    """True or False, and nothing that merely counts as one."""
    value = self.found.get(key, self.known[key])
    if not isinstance(value, bool | np.bool_):
      self.fail(key, "True or False", TypeError)
    return bool(value)

  def _plain(self, key: str, rule: str) -> int | float:
    """The value as a Python number; arrays of one element count as one."""
    value = self.found[key]
    if isinstance(value, jax.core.Tracer):
      self.fail(key, f"{rule} that is known outside of jit", TypeError)
    if isinstance(value, int | float) and not isinstance(value, bool):
      return value
    try:
      array = np.asarray(value) if _is_array(value) else None
    except Exception as error:
      raise TypeError(
        f"{self.function}: {key} in {self.what} must be {rule}, got a"
        f" {type(value).__name__} that cannot be read as an array; convert it"
        " to a Python number first."
      ) from error
    if array is None or array.size != 1:
      self.fail(key, rule, TypeError)
    if jnp.issubdtype(array.dtype, jnp.integer):
      return int(array.reshape(())[()])
    if not jnp.issubdtype(array.dtype, jnp.floating):
      self.fail(key, rule, TypeError)
    # In fewer bits it may have been rounded.
    if array.dtype.itemsize < 4:
      self.fail(key, f"{rule}, kept in float32 or wider", TypeError)
    return float(array.reshape(())[()])


def read_mapping(
  function: str,
  what: str,
  source: Any,
  known: Collection[str],
  ignored: Collection[str] = (),
) -> Values:
  """The values of a mapping, in which every key must be known.

  Args:
    function: the public function that reads, for the messages.
    what: what is read, for the messages.
    source: the mapping.
    known: the keys that mean something; with their defaults, if it is a dict.
    ignored: keys that may be there, and are read past.

  Returns:
    The values under known keys.
  """
  if not isinstance(source, Mapping):
    raise TypeError(
      f"{function}: {what} must be a dict, got {show(source)}."
      f" Known keys: {', '.join(known) or 'none'}."
    )
  meant = {*known, *ignored}
  unknown = [k for k in source if not (isinstance(k, str) and k in meant)]
  if unknown:
    past = f" Read past: {', '.join(ignored)}." if ignored else ""
    raise ValueError(
      f"{function}: unknown key {show(unknown[0])} in {what}. Known keys:"
      f" {', '.join(known) or 'none'}.{past}"
    )
  found = {key: source[key] for key in known if key in source}
  defaults = known if isinstance(known, Mapping) else dict.fromkeys(known)
  return Values(function, what, found, defaults)


def read_attributes(
  function: str, what: str, source: Any, known: Collection[str]
) -> Values:
  """The values of an object's known attributes; it may have others."""
  found = {}
  for name in known:
    try:
      found[name] = getattr(source, name)
    except (AttributeError, KeyError):  # Of some, the attributes are keys.
      continue
    except Exception as error:
      raise ValueError(
        f"{function}: the attribute {name} of {what}, {show(source)}, cannot be"
        f" read: it raises {type(error).__name__}."
      ) from error
  return read_mapping(function, what, found, known)


def read_either(
  function: str,
  what: str,
  source: Any,
  known: Collection[str],
  ignored: Collection[str] = (),
) -> Values:
  """The values of a mapping, or of the object that argparse made."""
  plain = str | bytes | int | float | complex | list | tuple | type | None
  if isinstance(source, plain | Mapping) or _is_array(source):
    return read_mapping(function, what, source, known, ignored)
  values = read_attributes(function, what, source, known)
  if not values.found:
    raise TypeError(
      f"{function}: {what} must be a dict, or an object with some of the"
      f" attributes {', '.join(known)}; got {show(source)}, which has none."
    )
  return values


def show(value: Any) -> str:
  """A short text for a message, whatever the value is."""
  if value is None or isinstance(value, bool | float):
    return repr(value)
  if isinstance(value, int):
    if value.bit_length() < 200:
      return int.__repr__(value)
    return f"an integer of {value.bit_length()} bits"
  if isinstance(value, str):
    text = str.__str__(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")
  name = type(value).__name__
  if isinstance(value, type):
    return f"the class {value.__name__}"
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if (
      value.size == 1 and not is_key and not isinstance(value, jax.core.Tracer)
    ):
      return f"{np.asarray(value).reshape(())[()]} ({name} of {value.dtype})"
    return f"a {name} of {value.dtype}, shape {value.shape}"
  if isinstance(value, Mapping):
    keys = [show(key) for key in list(value)[:8] if isinstance(key, str)]
    return f"a {name} of {len(value)} keys ({', '.join(keys)})"
  return f"a {name}"


def _is_array(value: Any) -> bool:
  if isinstance(value, type):
    return False
  try:
    return isinstance(value, np.generic) or hasattr(value, "__array__")
  except Exception:  # Objects whose attributes are keys raise what they like.
    return False
