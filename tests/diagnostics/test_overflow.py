"""``find_overflow`` names the operation, the line and the iteration.

The faulty lines are in ``helpers/faulty_models.py``, each with a comment that
names the fault.
"""

from helpers import faulty_models, harmless_models
import pytest

from optax_lossscale.diagnostics import find_overflow

FAULTS = faulty_models.FAULTS


def line_of(name):
  """The line of the helper that is marked as this fault."""
  lines = faulty_models.__file__
  with open(lines) as file:
    marked = [
      i for i, line in enumerate(file, 1) if line.endswith(f"# {name}\n")
    ]
  (line,) = marked
  return line


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_its_line_operation_and_iteration(name):
  make, kind, path, backward, function = FAULTS[name]
  fun, *args = make()

  hit = find_overflow(fun, *args)

  assert hit is not None
  assert (hit.kind, hit.path, hit.backward) == (kind, path, backward)
  assert hit.primitive == path.split("/")[-1]
  where = f"faulty_models.py:{line_of(name)} ({function})"
  assert hit.source == where
  assert hit.primitive in str(hit) and where in str(hit)


@pytest.mark.parametrize("name", harmless_models.PROGRAMS)
def test_a_harmless_program_names_nothing(name):
  fun, *args = harmless_models.PROGRAMS[name]()
  assert find_overflow(fun, *args) is None
