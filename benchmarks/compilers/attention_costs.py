"""Costs of attention by cuDNN, in half precision, in a float32 model."""

import functools

import compiled_bytes  # Before others import jax.
import jax
import jax.numpy as jnp

import optax_lossscale as ols

BATCH, LENGTH, HEADS, HEAD_WIDTH = 4, 1024, 8, 64
WIDTH = HEADS * HEAD_WIDTH


def attend_in_half(q, k, v):
  """Cast the operands by hand, as the pages recommend."""
  q_half, k_half, v_half = (x.astype(jnp.float16) for x in (q, k, v))
  y = jax.nn.dot_product_attention(
    q_half, k_half, v_half, implementation="cudnn"
  )
  return y.astype(q.dtype)


ATTENTIONS = {
  name: functools.partial(jax.nn.dot_product_attention, implementation=library)
  for name, library in {"XLA": "xla", "cuDNN": "cudnn"}.items()
} | {"cuDNN, in half": attend_in_half}


def attention(device: str) -> dict[str, dict]:
  """Return the costs of a layer's gradient with ``autocast``, by attention.

  cuDNN's kernels need an Ampere or later, which the compiler does not check.
  """
  results = {}
  shape = jax.ShapeDtypeStruct
  params = {n: shape((WIDTH, WIDTH), jnp.float32) for n in "qkvo"}
  x = shape((BATCH, LENGTH, WIDTH), jnp.float32)
  for name, attend in ATTENTIONS.items():
    grad_fn = jax.value_and_grad(ols.autocast(_loss_fn(attend)))
    try:
      figures = compiled_bytes.figures(grad_fn, params, x, device=device)
      results[name] = figures._asdict()
    except NotImplementedError as error:
      results[name] = {"error": str(error)}
  return results


def _loss_fn(attend):
  def loss_fn(params, x):
    split = lambda y: y.reshape(*y.shape[:2], HEADS, HEAD_WIDTH)
    q, k, v = (split(x @ params[name]) for name in "qkv")
    return jnp.mean((attend(q, k, v).reshape(x.shape) @ params["o"]) ** 2)

  return loss_fn
