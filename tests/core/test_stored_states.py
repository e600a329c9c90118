"""States of each version can be read, and another layout raises an error.

`stored` holds what each release wrote, of all policies. If a field of a policy
state changes, it is recorded again, and the last tests show what happens to a
run that is resumed from a state of another layout. What must be stored is
generated: the classes from the public names, the policies from their
hyperparameters.
"""

import base64
import collections
import dataclasses
import functools
import inspect
import io
import json
import pathlib
import pickle
import typing

from core.stored import record
from flax import serialization
from helpers import parametrize_slow
from helpers.bits import assert_same_bits
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from optax_lossscale import interop

STORED = pathlib.Path(record.__file__).parent
VERSIONS = [x.stem for x in STORED.glob("[0-9]*.json")]


@functools.cache
def make_after_steps(name):
  return record.make(record.POLICIES[name])


def load_stored(version, kind):
  as_text = json.loads((STORED / f"{version}.json").read_text())
  return base64.b64decode(as_text[kind])


def load_stored_fields():
  """The fields of each class of a state, as this version stored their names.

  A pickle knows them by their order, and all others by their names.
  """
  data = serialization.msgpack_restore(load_stored(ols.__version__, "msgpack"))
  fields = {}
  for name, policy in record.POLICIES.items():
    _, state = data[name].values()
    scale_state = state["loss_scale_state"]
    fields[ols.WithLossScalingState] = list(state)
    fields[ols.LossScaleState] = list(scale_state)
    fields[type(policy.init().policy_state)] = list(scale_state["policy_state"])
  del fields[tuple]  # of a policy without memory
  return fields


FIELDS = load_stored_fields()
PUBLIC = [x for x in (vars(ols) | vars(interop)).values() if inspect.isclass(x)]
is_policy = lambda x: dataclasses.is_dataclass(x) and hasattr(x, "adjust")
POLICY_CLASSES = [*filter(is_policy, PUBLIC)]


def test_each_class_of_a_state_is_stored():
  assert {x for x in PUBLIC if hasattr(x, "_fields")} == FIELDS.keys()


@pytest.mark.parametrize("kind", FIELDS, ids=lambda x: x.__name__)
def test_the_fields_of_a_state_are_those_that_are_stored(kind):
  assert list(kind._fields) == FIELDS[kind]
  assert list(inspect.signature(kind).parameters) == FIELDS[kind]
  assert kind.__module__ in ("optax_lossscale", "optax_lossscale.interop")


def other_values(kind, name, value):
  """Other values of a hyperparameter, some of which may be out of range."""
  if isinstance(value, bool):
    return [not value]
  if isinstance(value, (int, float)):
    return [2 * value, value / 2, value + 1]
  return typing.get_args(typing.get_type_hints(kind)[name])


def get_policy_state_types(policy):
  return jax.tree.structure(policy.init().policy_state)


@pytest.mark.parametrize("kind", POLICY_CLASSES, ids=lambda x: x.__name__)
def test_a_state_of_each_policy_is_stored_for_every_kind_of_memory(kind):
  """With each hyperparameter at another value, and at that of a stored one."""
  policies = [x for x in record.POLICIES.values() if type(x) is kind]
  assert policies, "store one of these"
  is_stored = {get_policy_state_types(policy) for policy in policies}
  for policy in policies:
    for field in dataclasses.fields(kind):
      value = getattr(policy, field.name)
      for other in other_values(kind, field.name, value):
        try:
          changed = dataclasses.replace(policy, **{field.name: other})
        except (TypeError, ValueError):
          continue
        assert get_policy_state_types(changed) in is_stored, changed


def test_this_version_is_stored():
  assert ols.__version__ in VERSIONS


@parametrize_slow("name", ["dynamic, hysteresis"], record.POLICIES)
@pytest.mark.parametrize("version", VERSIONS)
def test_training_continues_from_a_state_that_a_version_stored(version, name):
  tx, (params, state) = make_after_steps(name)
  pickled = pickle.loads(load_stored(version, "pickle"))[name]
  fresh = {name: (params, tx.init(params))}
  data = serialization.msgpack_restore(load_stored(version, "msgpack"))
  unpacked = serialization.from_state_dict(fresh, {name: data[name]})[name]
  assert_same_bits(pickled, unpacked)
  assert jax.tree.structure(pickled) == jax.tree.structure((params, state))
  _, after = jax.jit(tx.update)(params, pickled[1], params)
  if version == ols.__version__:
    assert_same_bits(pickled[1], state)  # or it was not recorded again
  assert after.loss_scale_state.total_notfinite == 1


# A state of another layout; docs/how_to/checkpoints.md has the fix.


TX = ols.with_loss_scaling(optax.sgd(0.5, momentum=0.5), "headroom")
PARAMS = {"w": np.arange(3, dtype=np.float32)}
OtherState = collections.namedtuple(
  "OtherState",
  "safe failed_log2_scale credit term steps_without_grads search_delay"
  " amax_history",
)


def check_fixed(state, other):
  """Assert that only the policy state changed, and that the run continues."""
  assert_same_bits(state.inner_state, other.inner_state)
  assert_same_bits(state.loss_scale_state[:5], other.loss_scale_state[:5])
  types = jax.tree.map(jax.typeof, TX.init(PARAMS))
  _, after = jax.jit(TX.update)(PARAMS, state, PARAMS)
  assert jax.tree.map(jax.typeof, after) == types
  assert after.loss_scale_state.last_finite


def with_policy_state(state, policy_state):
  scale_state = state.loss_scale_state._replace(policy_state=policy_state)
  return state._replace(loss_scale_state=scale_state)


def reset_policy_state(state):
  """The fix of docs/how_to/checkpoints.md."""
  fresh = TX.init(PARAMS).loss_scale_state.policy_state
  return with_policy_state(state, fresh)


@pytest.fixture
def other():
  """A state after some steps, whose policy state has other fields."""
  _, (_, state) = make_after_steps("headroom")
  counts = map(np.int32, (12, 20, 3, 5, 0, 8))
  values = *counts, state.loss_scale_state.policy_state.amax_history
  return with_policy_state(state, OtherState(*values))


PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@parametrize_slow("protocol", [0, pickle.HIGHEST_PROTOCOL], PROTOCOLS)
def test_a_pickle_of_another_layout_loses_nothing_and_is_refused(protocol):
  """The stored bytes of today, read by a class that has changed."""
  _, (params, state) = make_after_steps("headroom")
  usual = ols.HeadroomPolicyState
  # Pickles of all protocols call the class by its name.
  fields = [*usual._fields, "more"]
  later = collections.namedtuple("HeadroomPolicyState", fields)

  class Reader(pickle.Unpickler):
    def find_class(self, module, name):
      if name == "HeadroomPolicyState":
        return ols._state.support_old_pickles(later)
      return super().find_class(module, name)

  pickled = pickle.dumps((params, state), protocol)
  read_params, read = Reader(io.BytesIO(pickled)).load()
  assert_same_bits(read_params, params)
  policy_states = (x.loss_scale_state.policy_state for x in (read, state))
  assert_same_bits(*map(tuple, policy_states))
  message = (
    r"fields of HeadroomLossScale \(max_log2_scale, .*\), got 6 values without"
    r" names of another policy, or of an earlier version.*"
    r" state\._replace\(policy_state=policy\.init\(\)\.policy_state\)"
  )
  with pytest.raises(ValueError, match=message):
    ols._state.get_policy_state(record.POLICIES["headroom"], read[0], later)
  # And a class that was made by hand is what it was.
  with pytest.raises(TypeError):
    usual(max_log2_scale=1)
  expected = dict(zip(usual._fields, range(6), strict=True))
  assert usual(*range(6))._asdict() == expected


def test_values_without_names_are_refused(other):
  state = with_policy_state(other, tuple(other.loss_scale_state.policy_state))
  with pytest.raises(ValueError, match="got 7 values without names of"):
    jax.jit(TX.update)(PARAMS, state, PARAMS)
  check_fixed(reset_policy_state(state), other)


def test_msgpack_of_another_layout_is_read_into_its_own_fields(other):
  data = serialization.to_bytes((PARAMS, other))
  fresh = PARAMS, TX.init(PARAMS)
  with pytest.raises(ValueError, match=r"field names .* do not match"):
    serialization.from_bytes(fresh, data)
  read = serialization.msgpack_restore(data)
  policy_state = TX.init(PARAMS).loss_scale_state.policy_state
  read_scale_state = read["1"]["loss_scale_state"]
  read_scale_state["policy_state"] = serialization.to_state_dict(policy_state)
  _, state = serialization.from_state_dict(fresh, read)
  check_fixed(state, other)


@pytest.mark.slow
def test_orbax_reads_another_layout_into_its_own_fields(other, tmp_path):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", other)
    checkpointer.wait_until_finished()
    with pytest.raises(ValueError):
      checkpointer.restore(tmp_path / "state", TX.init(PARAMS))
    read = checkpointer.restore(tmp_path / "state")
    policy_state = ols.get_loss_scale_state(read).policy_state
    target = with_policy_state(TX.init(PARAMS), policy_state)
    state = checkpointer.restore(tmp_path / "state", target)
  # We see it, and say so.
  with pytest.raises(ValueError, match=r"got .*credit.* of another policy, or"):
    TX.update(PARAMS, state, PARAMS)
  check_fixed(reset_policy_state(state), other)
