"""What was stored by each version is read, and what no longer fits is told.

`stored` holds what each release wrote, of all policies, and what was written
before the first one, by a headroom rule with other fields. If a field of a
memory changes, it is recorded anew, and the last tests say what those meet who
go on from an older state. What must be stored is generated: the classes from
the public names, the policies from their hyperparameters.
"""

import base64
import collections
import dataclasses
import inspect
import io
import json
import pathlib
import pickle
import typing

from core.stored import record
import equinox as eqx
from flax import serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState
from helpers.bits import assert_same_bits
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols
from optax_lossscale import interop

STORED = pathlib.Path(record.__file__).parent
VERSIONS = [x.stem for x in STORED.glob("[0-9]*.json")]


def stored(version, kind):
  """The bytes that a version wrote."""
  as_text = json.loads((STORED / f"{version}.json").read_text())
  return base64.b64decode(as_text[kind])


def stored_fields():
  """The fields of each class of a state, as this version stored their names.

  A pickle knows them by their order, and all others by their names.
  """
  data = serialization.msgpack_restore(stored(ols.__version__, "msgpack"))
  fields = {}
  for name, policy in record.POLICIES.items():
    _, state = data[name].values()
    scale_state = state["loss_scale_state"]
    fields[ols.LossScalingState] = list(state)
    fields[ols.LossScaleState] = list(scale_state)
    fields[type(policy.init().memory)] = list(scale_state["memory"])
  return fields


FIELDS = {k: fields for k, fields in stored_fields().items() if k is not tuple}
PUBLIC = [x for x in (vars(ols) | vars(interop)).values() if inspect.isclass(x)]
POLICY_CLASSES = [
  x for x in PUBLIC if dataclasses.is_dataclass(x) and hasattr(x, "adjust")
]


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


def remembered(policy):
  return jax.tree.structure(policy.init().memory)


@pytest.mark.parametrize("kind", POLICY_CLASSES, ids=lambda x: x.__name__)
def test_a_state_of_each_policy_is_stored_whatever_makes_it_remember(kind):
  """With each hyperparameter at another value, and at that of a stored one."""
  policies = [x for x in record.POLICIES.values() if type(x) is kind]
  assert policies, "store one of these"
  is_stored = {remembered(policy) for policy in policies}
  for policy in policies:
    for field in dataclasses.fields(kind):
      value = getattr(policy, field.name)
      for other in other_values(kind, field.name, value):
        try:
          changed = dataclasses.replace(policy, **{field.name: other})
        except (TypeError, ValueError):
          continue
        assert remembered(changed) in is_stored, f"store one with {changed}"


def test_this_version_is_stored():
  assert ols.__version__ in VERSIONS


@pytest.mark.parametrize("name", record.POLICIES)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_version_stored_is_read_and_goes_on(version, name):
  tx, (params, state) = record.make(record.POLICIES[name])
  pickled = pickle.loads(stored(version, "pickle"))[name]
  fresh = {name: (params, tx.init(params))}
  data = serialization.msgpack_restore(stored(version, "msgpack"))
  unpacked = serialization.from_state_dict(fresh, {name: data[name]})[name]
  assert_same_bits(pickled, unpacked)
  assert jax.tree.structure(pickled) == jax.tree.structure((params, state))
  _, after = jax.jit(tx.update)(params, pickled[1], params)
  if version == ols.__version__:
    assert_same_bits(pickled[1], state)  # or it was not recorded anew
  assert after.loss_scale_state.total_notfinite == 1


# A state of before. What to do is on docs/composing.md.


TX = ols.with_loss_scaling(optax.adam(1e-2), "headroom")
PARAMS = {"w": jnp.arange(3.0)}
HeadroomMemory = collections.namedtuple(
  "HeadroomMemory", "safe fail credit term quiet_count wait amax_window"
)


def begin_anew(state):
  """The cure of docs/composing.md."""
  fresh = TX.init(PARAMS)
  scale_state = state.loss_scale_state._replace(
    memory=fresh.loss_scale_state.memory
  )
  return state._replace(loss_scale_state=scale_state)


def check_cured(state, before):
  """That all but the memory is as it was, and the run goes on."""
  assert_same_bits(state.inner_state, before.inner_state)
  assert_same_bits(state.loss_scale_state[:5], before.loss_scale_state[:5])
  types = jax.tree.map(jax.typeof, TX.init(PARAMS))
  _, after = jax.jit(TX.update)(PARAMS, state, PARAMS)
  assert jax.tree.map(jax.typeof, after) == types
  assert after.loss_scale_state.last_finite


@pytest.fixture
def before():
  """A state whose memory has the fields and numbers of the earlier rule."""
  _, state = pickle.loads(stored("before-0.1.0", "pickle"))
  memory = HeadroomMemory(*state.loss_scale_state.memory)
  scale_state = state.loss_scale_state._replace(memory=memory)
  return state._replace(loss_scale_state=scale_state)


def test_a_pickle_of_before_loses_nothing_and_update_says_what_to_do(before):
  params, state = pickle.loads(stored("before-0.1.0", "pickle"))
  assert params["w"].tolist() == pytest.approx([-0.02, 0.98, 1.98], abs=0.02)
  assert len(state.loss_scale_state.memory) == 7
  message = (
    "with the fields limit, .*, got 7 values without names of .* earlier"
    r" version.* state\._replace\(memory=policy\.init\(\)\.memory\), where"
    " state is the loss_scale_state"
  )
  for update in (TX.update, jax.jit(TX.update)):
    with pytest.raises(ValueError, match=message):
      update(params, state, params)
  check_cured(begin_anew(state), before)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_later_version_reads_of_a_field_more_is_told(protocol):
  """The stored bytes of today, read by a class that has changed."""
  _, state = record.make(ols.HeadroomLossScale())[1]
  usual = ols.HeadroomMemory
  # Pickles of all protocols call the class by its name.
  later = collections.namedtuple("HeadroomMemory", [*usual._fields, "more"])

  class Reader(pickle.Unpickler):
    def find_class(self, module, name):
      if name == "HeadroomMemory":
        return ols._state.readable_later(later)
      return super().find_class(module, name)

  read = Reader(io.BytesIO(pickle.dumps(state, protocol))).load()
  memory = read.loss_scale_state.memory
  assert_same_bits(tuple(memory), tuple(state.loss_scale_state.memory))
  with pytest.raises(ValueError, match="got 6 values without names of another"):
    ols._state.memory_of(record.POLICIES["headroom"], read[0], later)
  # And a class that was made by hand is what it was.
  with pytest.raises(TypeError):
    usual(limit=1)
  assert usual(*range(6))._asdict() == {
    x: i for i, x in enumerate(usual._fields)
  }


def test_msgpack_of_before_is_read_into_its_own_fields(before):
  data = stored("before-0.1.0", "msgpack")
  fresh = PARAMS, TX.init(PARAMS)
  with pytest.raises(ValueError, match=r"field names .* do not match"):
    serialization.from_bytes(fresh, data)
  read = serialization.msgpack_restore(data)
  state = read["1"]
  memory = TX.init(PARAMS).loss_scale_state.memory
  state["loss_scale_state"]["memory"] = serialization.to_state_dict(memory)
  _, state = serialization.from_state_dict(fresh, read)
  check_cured(state, before)


def target_with(memory):
  """A fresh state with a memory of another structure."""
  fresh = TX.init(PARAMS)
  scale_state = fresh.loss_scale_state._replace(memory=memory)
  return fresh._replace(loss_scale_state=scale_state)


def test_orbax_reads_a_state_of_before_into_its_own_fields(before, tmp_path):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", before)
    checkpointer.wait_until_finished()
    with pytest.raises(ValueError):
      checkpointer.restore(tmp_path / "state", TX.init(PARAMS))
    read = checkpointer.restore(tmp_path / "state")
    memory = ols.get_loss_scale_state(read).memory
    state = checkpointer.restore(tmp_path / "state", target_with(memory))
  # We see it, and say so.
  with pytest.raises(ValueError, match=r"got .*credit.* of another policy, or"):
    TX.update(PARAMS, state, PARAMS)
  check_cured(begin_anew(state), before)


def test_equinox_reads_a_state_of_before_into_its_own_shapes(before, tmp_path):
  file = tmp_path / "state.eqx"
  eqx.tree_serialise_leaves(file, jax.tree.map(jnp.asarray, before))
  with pytest.raises(RuntimeError):
    eqx.tree_deserialise_leaves(file, TX.init(PARAMS))
  memory = (jnp.int32(0),) * 6 + (jnp.zeros(8),)
  state = eqx.tree_deserialise_leaves(file, target_with(memory))
  with pytest.raises(ValueError, match="got 7 values without names"):
    TX.update(PARAMS, state, PARAMS)
  check_cured(begin_anew(state), before)


@pytest.mark.parametrize("legacy", [False, True])
def test_flax_checkpoints_do_not_mix_a_memory_of_before_with_a_new_one(
  before, tmp_path, legacy
):
  make = lambda opt_state: TrainState(
    step=5, apply_fn=None, params=PARAMS, tx=TX, opt_state=opt_state
  )
  if legacy:
    data = serialization.to_bytes(make(before))
    (tmp_path / "checkpoint_5").write_bytes(data)
    with pytest.raises(ValueError, match=r"field names .* do not match"):
      checkpoints.restore_checkpoint(tmp_path, make(TX.init(PARAMS)))
    return
  checkpoints.save_checkpoint(tmp_path, make(before), step=5)
  fresh = make(TX.init(PARAMS))
  state = checkpoints.restore_checkpoint(tmp_path, fresh).opt_state
  # It did mix them, and we see it.
  assert state.loss_scale_state.memory.fail == 20
  assert state.loss_scale_state.memory.limit == 15
  grads = {"w": jnp.full(3, 2.0**-12)}
  _, got = TX.update(grads, state, PARAMS)
  _, expected = TX.update(grads, begin_anew(before), PARAMS)
  assert_same_bits(got, expected)
