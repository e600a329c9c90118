"""Layers that share a function are told apart; that at fault alone is kept."""

from helpers import quick_alone
from helpers.planted_layers import batch, normal, normalized, WIDTH
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.diagnostics import compare_precision, precision_report

COUNT = 4
BAD = 1
SIZE = 1e6  # of weights in front of a norm
SCALE = ols.FixedLossScale(2.0**6).init()


def product(x, w):
  """All products of a project may stand on one line."""
  return x @ w


def block(params, x):
  x = x + product(normalized(product(x, params["up"])), params["down"])
  return jnp.tanh(x)


@jax.custom_vjp
def ruled(params, x):
  return block(params, x)


ruled.defvjp(
  lambda params, x: jax.vjp(block, params, x), lambda pull_back, g: pull_back(g)
)


def network(wrap):
  layers = [
    {
      "up": normal(WIDTH, WIDTH, seed=i),
      "down": normal(WIDTH, WIDTH, seed=9 + i),
    }
    for i in range(COUNT)
  ]
  layers[BAD]["up"] *= SIZE
  layer = wrap(block)

  def net(params, x):
    for its_params in params["layers"]:
      x = layer(its_params, x)
    return x @ params["head"]

  return net, {"layers": layers, "head": normal(WIDTH, WIDTH)}


WRAPS = {
  "one function": lambda block: block,
  "one jit": jax.jit,
  "one checkpoint": jax.checkpoint,
  "one custom_vjp": lambda block: ruled,
  "one vmap": lambda block: jax.vmap(block, (None, 0)),
}


def share_in_half(trained, *args):
  rows = precision_report(trained, *args).flops
  return sum(row.share for row in rows if row.operands == "float16")


@pytest.mark.parametrize("name", quick_alone(["one jit"], WRAPS))
def test_keeping_what_overflows_cures_and_leaves_the_rest_in_half(name):
  net, params = network(WRAPS[name])
  x, y = batch()
  loss_fn = lambda params: jnp.mean((net(params, x) - y) ** 2)

  def trained(**kwargs):
    return ols.grad(ols.autocast(loss_fn, **kwargs), SCALE)

  report = compare_precision(trained(), params, progress=False)
  assert not np.isfinite(report.error)
  assert len(report.overflowing) == 1
  names = report.overflowing + report.standing_out
  cured = trained(keep_float32=names)
  assert compare_precision(cured, params, progress=False).error < 0.02
  before = share_in_half(trained(), params)
  assert share_in_half(cured, params) > 0.6 * before
