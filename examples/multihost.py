"""Trains the digits autoencoder in float16 on the devices of many processes.

On one machine, with a CPU device for each process::

    python examples/multihost.py --processes 2

On a cluster, started once for each host or task by its scheduler::

    srun python examples/multihost.py

Nothing in the training loop knows how many processes there are. Parameters and
optimizer state are sharded over all devices, and each process loads its own
part of a batch. The loss scale is a replicated scalar like any other: an
overflow anywhere makes all processes skip the step.
"""

import argparse
import functools
import socket
import subprocess
import sys
import time

import digits
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import tqdm

import optax_lossscale as ols

BATCH_SIZE = 512  # of all processes together
LOG_EVERY = 25  # steps; each time process 0 waits for the devices


def main():
  args = parse_args()
  if args.processes is None:
    # On Slurm, Open MPI, Kubernetes and TPU pods it finds the other processes.
    jax.distributed.initialize()
    train(args.steps, args.seed)
  elif args.process_id is None:
    sys.exit(start_processes(args.processes))
  else:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      args.coordinator, args.processes, args.process_id
    )
    train(args.steps, args.seed)


def train(steps, seed):
  mesh = jax.make_mesh(
    (jax.device_count(),),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
  )
  tx = optax.adam(digits.LEARNING_RATE)
  tx = ols.with_loss_scaling(tx)  # The first changed line.

  def init(key):
    params = digits.init_params(key)
    return params, tx.init(params)

  # What is large is sharded, what is not divisible is replicated; the scalars
  # of the loss scale are among the latter.
  shapes = jax.eval_shape(init, jax.random.key(seed))
  shardings = jax.tree.map(functools.partial(choose_sharding, mesh), shapes)
  carry = jax.jit(init, out_shardings=shardings)(jax.random.key(seed))

  @functools.partial(jax.jit, donate_argnums=0)
  def step(carry, batch):
    params, opt_state = carry
    # The second changed line.
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  train_set, test_set = map(np.asarray, digits.load_data(seed))
  rng = np.random.default_rng([seed, jax.process_index()])
  is_first = jax.process_index() == 0
  with tqdm.tqdm(total=steps, unit=" steps", disable=not is_first) as progress:
    for i in range(steps):
      batch = load_batch(rng, train_set, NamedSharding(mesh, P("data")))
      carry, loss = step(carry, batch)
      if i % LOG_EVERY == 0:
        ols.raise_if_stuck(carry)  # on all processes, or on none
        scale = ols.get_loss_scale_state(carry).loss_scale
        progress.set_postfix(loss=f"{loss:.4f}", scale=f"{scale:g}")
      progress.update()
  report(carry, test_set)


# A float32 model, whose matmuls run in float16.
loss_fn = ols.autocast(digits.reconstruction_loss)


def choose_sharding(mesh, leaf):
  is_divisible = leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
  return NamedSharding(mesh, P("data") if is_divisible else P())


def load_batch(rng, images, sharding):
  """Noisy and clean images; each process draws the images of its devices."""
  n = BATCH_SIZE // jax.device_count() * jax.local_device_count()
  clean = rng.choice(images, n)
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, x),
    (add_noise(rng, clean), clean),
  )


def add_noise(rng, images):
  noise = rng.normal(size=images.shape)
  return (images + digits.NOISE * noise).astype(np.float32)


def report(carry, test_set):
  params, opt_state = carry
  noisy = add_noise(np.random.default_rng(0), test_set)
  # All processes compute it, since each holds a part of the parameters.
  loss = jax.jit(loss_fn)(params, noisy, test_set)
  state = ols.get_loss_scale_state(opt_state)
  if jax.process_index() == 0:
    print(
      f"{jax.process_count()} processes, {jax.device_count()} devices:"
      f" test MSE {loss:.4f}, {state.total_notfinite} skipped steps,"
      f" scale {state.loss_scale:g}"
    )


def start_processes(n):
  """Runs this script n times on this machine; returns an exit code."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    coordinator = f"127.0.0.1:{s.getsockname()[1]}"
  command = [sys.executable, *sys.argv, "--coordinator", coordinator]
  processes = [
    subprocess.Popen([*command, "--process-id", str(i)]) for i in range(n)
  ]
  try:
    # If one fails, the others would wait for it until JAX's time-out.
    while None in (codes := [p.poll() for p in processes]) and not any(codes):
      time.sleep(0.1)
  finally:
    for process in processes:
      process.terminate()
      process.wait()
  return int(any(codes))


def parse_args():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--processes",
    type=int,
    help="start so many on this machine; without it, the cluster did",
  )
  parser.add_argument("--steps", type=int, default=1200)
  parser.add_argument("--seed", type=int, default=0)
  # What the script tells the processes that it starts.
  parser.add_argument("--coordinator", help=argparse.SUPPRESS)
  parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
  return parser.parse_args()


if __name__ == "__main__":
  main()
