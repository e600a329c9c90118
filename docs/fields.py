"""Types and defaults of fields, for the API pages.

A docstring lists the fields of a class under "Attributes". Their types and
defaults are in the annotations of the class, so the pages take them from there.
"""

import dataclasses
import inspect
import math
import re

_FIELD = re.compile(r"^(\s*)(\w+): ")


def add_types(app, what, name, obj, options, lines):
  """Write types and defaults into the "Attributes" section of a docstring.

  Connect it to `autodoc-process-docstring` ahead of napoleon, which turns
  ``name (type): text`` into a typed field.
  """
  del app, name, options
  if what != "class" or "Attributes:" not in lines:
    return
  types, defaults = _types_of(obj), _defaults_of(obj)
  first = lines.index("Attributes:") + 1
  for i, line in enumerate(lines[first:], first):
    if line and not line.startswith(" "):  # The next section.
      return
    match = _FIELD.match(line)
    if match is None or match[2] not in types:
      continue
    field = match[2]
    text = types[field]
    if field in defaults:
      text += f", default {defaults[field]}"
    lines[i] = f"{match[1]}{field} ({text}): {line[match.end() :]}"


def _types_of(kind):
  """Return the annotations of a class, in short."""
  return {
    name: _short(annotation)
    for name, annotation in inspect.get_annotations(kind).items()
  }


def _defaults_of(kind):
  """Return the defaults of the fields of a named tuple or a dataclass."""
  if not dataclasses.is_dataclass(kind):
    defaults = getattr(kind, "_field_defaults", {})
  else:
    defaults = {x.name: x.default for x in dataclasses.fields(kind)}
  return {
    name: _text(value)
    for name, value in defaults.items()
    if value is not dataclasses.MISSING
  }


def _text(value):
  """Return the text of a default, such as ``2^15`` or ``float16``."""
  if isinstance(value, type):
    return _short(value)
  if isinstance(value, float) and value > 0:
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and abs(exponent) > 8:
      return f"2^{exponent - 1}"
  return repr(value)


def _short(annotation):
  """Return the text of a type without the names of modules."""
  if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
    return annotation.__name__
  return re.sub(r"\b(?:\w+\.)+", "", str(annotation)).replace("'", "")
