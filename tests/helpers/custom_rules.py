"""Gives functions custom derivatives, as libraries and users do."""

import jax


def add_custom_vjp(fun):
  """A ``custom_vjp`` whose residuals are what JAX keeps for the function."""
  custom_fun = jax.custom_vjp(fun)
  custom_fun.defvjp(
    lambda *args: jax.vjp(fun, *args), lambda vjp_fun, ct: vjp_fun(ct)
  )
  return custom_fun


def add_recomputing_vjp(fun):
  """A ``custom_vjp`` that keeps its arguments, and computes all of it again."""
  custom_fun = jax.custom_vjp(fun)
  custom_fun.defvjp(
    lambda *args: (fun(*args), args),
    lambda args, ct: jax.vjp(fun, *args)[1](ct),
  )
  return custom_fun


def add_custom_jvp(fun):
  """A ``custom_jvp`` whose tangent is that of the function."""
  custom_fun = jax.custom_jvp(fun)
  custom_fun.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
  return custom_fun


def make_matmul_with_vjp():
  """A new function that multiplies, with its ``custom_vjp`` written out."""
  fun = jax.custom_vjp(lambda x, w: x @ w)
  fun.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda residuals, g: (g @ residuals[1].T, residuals[0].T @ g),
  )
  return fun


def make_matmul_with_jvp():
  """A new function that multiplies, with its ``custom_jvp`` written out."""
  fun = jax.custom_jvp(lambda x, w: x @ w)
  fun.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))
  return fun
