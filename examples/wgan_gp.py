"""A WGAN with gradient penalty on a ring of points, in float16.

    python examples/wgan_gp.py --steps 1000

The critic's loss contains a gradient of the critic (Gulrajani et al, 2017). The
whole loss is scaled, once, by the scale of its optimizer. The inner gradient is
not scaled: the penalty depends on its true norm, and the norm of a scaled
gradient would be a different penalty.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import optax_lossscale as ols

PENALTY = 1.0
CRITIC_STEPS = 5  # for each step of the generator
BATCH_SIZE = 256

# line 1, twice
G_TX = ols.with_loss_scaling(optax.adam(3e-3, b1=0.5, b2=0.9))
D_TX = ols.with_loss_scaling(optax.adam(3e-3, b1=0.5, b2=0.9))


def init_mlp(key, sizes):
  keys = jax.random.split(key, len(sizes) - 1)
  return [
    (jax.random.normal(k, (m, n)) / m**0.5, jnp.zeros(n))
    for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
  ]


def apply_mlp(params, x):
  """Float32, and it stays so."""
  for w, b in params[:-1]:
    x = jax.nn.softplus(x @ w + b)
  w, b = params[-1]
  return x @ w + b


def critic(d, x):
  return apply_mlp(d, x)[..., 0]


def g_loss_fn(g, d, z):
  return -critic(d, apply_mlp(g, z)).mean()


def d_loss_fn(d, g, real, key):
  keys = jax.random.split(key)
  fake = apply_mlp(g, sample_z(keys[0]))
  share = jax.random.uniform(keys[1], (len(real), 1))
  between = share * real + (1 - share) * fake
  # Compute one gradient for each point: the gradient of a batch mean is smaller
  # by the batch size. It is not scaled, so the penalty sees the true norm. If a
  # critic has slopes below 2**-14, where float16 loses bits, use
  # `ols.grad(critic, d_state, argnums=1)`, which scales and unscales them.
  slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(d, between)
  # A root has no derivative at 0.
  norms = jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12)
  distance = critic(d, real).mean() - critic(d, fake).mean()
  return -distance + PENALTY * jnp.mean((norms - 1) ** 2), distance


def sample_z(key):
  return jax.random.normal(key, (BATCH_SIZE, 4))


def sample_real(key):
  angle = 2 * jnp.pi * jax.random.uniform(key, (BATCH_SIZE,))
  return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


@jax.jit
def train_step(g, d, g_state, d_state, key):
  def d_step(carry, key):
    d, d_state = carry
    keys = jax.random.split(key)
    # line 2; the distance is the auxiliary output, and is not scaled
    d_grads, distance = ols.grad(
      ols.autocast(d_loss_fn), d_state, has_aux=True
    )(d, g, sample_real(keys[0]), keys[1])
    updates, d_state = D_TX.update(d_grads, d_state, d)
    return (optax.apply_updates(d, updates), d_state), distance

  d_key, g_key = jax.random.split(key)
  d_keys = jax.random.split(d_key, CRITIC_STEPS)
  (d, d_state), distances = jax.lax.scan(d_step, (d, d_state), d_keys)

  # line 2, with the scale of the generator's own optimizer
  g_grads = ols.grad(ols.autocast(g_loss_fn), g_state)(g, d, sample_z(g_key))
  updates, g_state = G_TX.update(g_grads, g_state, g)
  return optax.apply_updates(g, updates), d, g_state, d_state, distances[-1]


def mean_distance(g):
  """How far the generator's points are from the ring, on average."""
  points = apply_mlp(g, sample_z(jax.random.key(2)))
  return jnp.abs(jnp.linalg.norm(points, axis=-1) - 1).mean()


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=1000)
  steps = parser.parse_args().steps

  keys = jax.random.split(jax.random.key(0))
  g = init_mlp(keys[0], [4, 64, 64, 2])
  d = init_mlp(keys[1], [2, 64, 64, 1])
  print(f"mean distance from the ring before: {mean_distance(g):.3f}")
  carry = g, d, G_TX.init(g), D_TX.init(d)
  progress = tqdm(range(steps))
  for step in progress:
    key = jax.random.fold_in(jax.random.key(1), step)
    *carry, distance = train_step(*carry, key)
    if step % 50 == 0:
      for opt_state in carry[2:]:
        ols.raise_if_stuck(opt_state)
      progress.set_postfix(wasserstein=f"{distance:.3f}")

  g, _, g_state, d_state = carry
  print(f"mean distance from the ring after: {mean_distance(g):.3f}")
  for name, state in {"generator": g_state, "critic": d_state}.items():
    scale = ols.get_loss_scale_state(state)
    skips = scale.total_notfinite
    print(f"{name}: loss scale {scale.loss_scale:g}, skipped {skips}")


if __name__ == "__main__":
  main()
