"""Versions of installed packages."""

import importlib.metadata
import importlib.util


def version(package: str) -> str | None:
  """The version of a package, or None if it is not installed."""
  if importlib.util.find_spec(package) is None:
    return None
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "of unknown version"
