"""Gives functions derivatives of their own, as libraries and users do."""

import jax


def pulling_back(fun):
  """A ``custom_vjp`` whose residuals are what JAX keeps for the function."""
  ruled = jax.custom_vjp(fun)
  ruled.defvjp(lambda *args: jax.vjp(fun, *args), lambda pull, ct: pull(ct))
  return ruled


def remembering(fun):
  """A ``custom_vjp`` that keeps its arguments, and computes all of it again."""
  ruled = jax.custom_vjp(fun)
  ruled.defvjp(
    lambda *args: (fun(*args), args),
    lambda args, ct: jax.vjp(fun, *args)[1](ct),
  )
  return ruled


def pushing_forward(fun):
  """A ``custom_jvp`` whose tangent is that of the function."""
  ruled = jax.custom_jvp(fun)
  ruled.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
  return ruled


def product_with_vjp():
  """A new function that multiplies, with its ``custom_vjp`` written out."""
  fun = jax.custom_vjp(lambda x, w: x @ w)
  fun.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
  )
  return fun


def product_with_jvp():
  """A new function that multiplies, with its ``custom_jvp`` written out."""
  fun = jax.custom_jvp(lambda x, w: x @ w)
  fun.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))
  return fun
