"""Saves a tree, and restores it into the structure of another one."""

from flax import serialization
import jax
import orbax.checkpoint as ocp


def restore_by_msgpack(tree, target, folder):
  return serialization.from_bytes(target, serialization.to_bytes(tree))


def restore_by_orbax(tree, target, folder):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", tree)
    checkpointer.wait_until_finished()
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
    return checkpointer.restore(folder / "state", shapes)
