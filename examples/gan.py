"""A GAN with gradient penalty on a ring of points, in float16.

    python examples/gan.py --steps 2000

Two losses, two optimizers, a loss scale for each: one may overflow and be
skipped while the other continues. The penalty has a gradient inside the loss,
which needs no extra code, since the scale multiplies the whole loss.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import optax_lossscale as ols

PENALTY = 0.1

# line 1, twice
G_TX = ols.with_loss_scaling(optax.adam(1e-3, b1=0.5))
D_TX = ols.with_loss_scaling(optax.adam(3e-3, b1=0.5))


def init_mlp(key, sizes):
  keys = jax.random.split(key, len(sizes) - 1)
  return [
    (jax.random.normal(k, (m, n)) / m**0.5, jnp.zeros(n))
    for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
  ]


def apply_mlp(params, x):
  """Float32 params, float16 arithmetic, float32 output."""
  x, params = optax.tree.cast((x, params), jnp.float16)
  for w, b in params[:-1]:
    x = jax.nn.softplus(x @ w + b)
  w, b = params[-1]
  return (x @ w + b).astype(jnp.float32)


def critic(d, x):
  return apply_mlp(d, x)[..., 0]


def g_loss_fn(g, d, z):
  return jax.nn.softplus(-critic(d, apply_mlp(g, z))).mean()


def d_loss_fn(d, g, real, z):
  fake = apply_mlp(g, z)
  losses = jax.nn.softplus(critic(d, fake)) + jax.nn.softplus(-critic(d, real))
  slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(d, real)
  return losses.mean() + PENALTY * jnp.sum(slopes**2, -1).mean()


@jax.jit
def train_step(g, d, g_state, d_state, key):
  keys = jax.random.split(key)
  angle = 2 * jnp.pi * jax.random.uniform(keys[0], (256,))
  real = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
  z = jax.random.normal(keys[1], (256, 4))

  # line 2, twice
  d_grads = ols.grad(d_loss_fn, d_state)(d, g, real, z)
  updates, d_state = D_TX.update(d_grads, d_state, d)
  d = optax.apply_updates(d, updates)

  g_grads = ols.grad(g_loss_fn, g_state)(g, d, z)
  updates, g_state = G_TX.update(g_grads, g_state, g)
  g = optax.apply_updates(g, updates)
  return g, d, g_state, d_state


def mean_distance(g):
  """How far the generator's points are from the ring, on average."""
  points = apply_mlp(g, jax.random.normal(jax.random.key(2), (2000, 4)))
  return jnp.abs(jnp.linalg.norm(points, axis=-1) - 1).mean()


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=2000)
  steps = parser.parse_args().steps

  keys = jax.random.split(jax.random.key(0))
  g = init_mlp(keys[0], [4, 32, 32, 2])
  d = init_mlp(keys[1], [2, 32, 32, 1])
  print(f"mean distance from the ring before: {mean_distance(g):.3f}")
  carry = g, d, G_TX.init(g), D_TX.init(d)
  progress = tqdm(range(steps))
  for step in progress:
    carry = train_step(*carry, jax.random.fold_in(jax.random.key(1), step))
    if step % 100 == 0:
      for opt_state in carry[2:]:
        ols.raise_if_stuck(opt_state)
      progress.set_postfix(distance=f"{mean_distance(carry[0]):.3f}")

  g, _, g_state, d_state = carry
  print(f"mean distance from the ring after: {mean_distance(g):.3f}")
  for name, state in {"generator": g_state, "critic": d_state}.items():
    scale = ols.get_loss_scale_state(state)
    skips = scale.total_notfinite
    print(f"{name}: loss scale {scale.loss_scale:g}, skipped {skips}")


if __name__ == "__main__":
  main()
