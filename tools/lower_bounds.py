"""Prints, as pip constraints, the oldest versions that pyproject.toml allows.

    python tools/lower_bounds.py > constraints.txt

The tests run on exactly these with `make test ON=oldest`, so that the bounds
stay true. Only what the package's own promises depend on is held back; tools
and plots may be as new as they like.
"""

import pathlib
import re
import tomllib

HELD_BACK = ("chex", "equinox", "flax", "jax", "optax", "orbax-checkpoint")
PYPROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds(project):
  """Return the oldest versions of the packages that are held back.

  Args:
    project: the `project` table of a pyproject.toml, with one bound for each.
  """
  extras = project["optional-dependencies"].values()
  requirements = sum(extras, start=list(project["dependencies"]))
  bounds = {}
  for name in HELD_BACK:
    found = {r for r in requirements if re.match(r"[^\s;<=>!]+", r)[0] == name}
    # Single releases may be excluded by name: "jax>=0.8.0,!=0.11.0".
    bound = r"[\w.-]+\s*>=\s*([\w.]+)(?:\s*,\s*!=\s*[\w.]+)*"
    matches = [re.fullmatch(bound, r) for r in found]
    if len(matches) != 1 or matches[0] is None:
      raise ValueError(
        f"pyproject.toml must have one bound for {name}, such as"
        f" '{name}>=1.0', got {sorted(found)}."
      )
    bounds[name] = matches[0][1]
  bounds["jaxlib"] = bounds["jax"]  # which requires it
  return bounds


def main():
  """Prints one constraint a line."""
  project = tomllib.loads(PYPROJECT.read_text())["project"]
  for name, version in sorted(lower_bounds(project).items()):
    print(f"{name}=={version}")


if __name__ == "__main__":
  main()
