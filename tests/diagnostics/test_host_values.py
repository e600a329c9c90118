"""Reports read only small arrays, even if processes share the large ones."""

from helpers import parametrize_slow, sharded_reports
import jax.numpy as jnp
import pytest

# A flag of each of eight devices, and a few counts.
MAX_READ_SIZE = 16
# The other cases run at night.
SLOW = {
  "old state",
  "overflow in shard_map",
  "overflow in NNX",
  "overflow of a member",
  "find_overflow",
  "compare_precision",
}


@pytest.fixture
def read_sizes(monkeypatch):
  """The sizes of arrays that are read; those on several devices cannot be.

  devices/test_processes.py has real processes.
  """
  array_type = type(jnp.zeros(()))
  read_array = array_type._value.fget
  sizes = []

  def read_and_record(array):
    sizes.append(array.size)
    return read_array(array)

  is_local = lambda array: len(array.sharding.device_set) == 1
  monkeypatch.setattr(array_type, "is_fully_addressable", property(is_local))
  monkeypatch.setattr(array_type, "_value", property(read_and_record))
  return sizes


@pytest.mark.slow
@parametrize_slow("name", {"sound", "overflow"}, sharded_reports.CASES, SLOW)
def test_reports_read_only_small_arrays(name, read_sizes):
  run_report = sharded_reports.prepare_report(name)
  read_sizes.clear()
  assert sharded_reports.CASES[name].text in run_report()
  assert read_sizes
  assert max(read_sizes) <= MAX_READ_SIZE
