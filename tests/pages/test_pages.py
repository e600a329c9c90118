"""The code on each page runs, and does what the page says."""

import math

import equinox as eqx
from flax import nnx
from helpers import markdown, pages_below, parametrize_slow, relative_name, ROOT
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import matplotlib
import matplotlib.pyplot as plt
import numpy as np

import optax_lossscale as ols

PAGES = [
  path
  for path in [
    *sorted(ROOT.glob("*.md")),
    *pages_below(ROOT / "benchmarks"),
    *pages_below(ROOT / "docs"),
  ]
  if markdown.find_code_blocks(path)
]


# Each page takes seconds. The quick tests run what most people read.
@parametrize_slow("path", [ROOT / "README.md"], PAGES, ids=relative_name)
def test_the_code_on_a_page_runs_from_top_to_bottom(
  path, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  matplotlib.use("Agg")
  names = markdown.run_page(path)
  plt.close("all")
  if relative_name(path) in AFTERWARDS:
    AFTERWARDS[relative_name(path)](names, capsys.readouterr().out)


def the_scale_is_shown(names, out):
  assert "32768.0" in out


def the_loss_that_is_only_defined_can_be_differentiated(names, out):
  grad = jax.shard_map(
    ols.grad(names["loss_of_part"], names["opt_state"]),
    mesh=names["mesh"],
    in_specs=(P(), P("data")),
    out_specs=P(),
  )
  assert ols.all_finite(jax.jit(grad)(names["params"], names["x"]))


def spikes_stand_out_and_a_new_level_is_accepted(names, out):
  watch = jax.jit(names["watch"])
  stats = (jnp.float32(0),) * 3
  found = []
  for i in range(600):
    usual = (1 if i < 300 else 5) * (1 + 0.1 * math.sin(i))
    is_spike, stats = watch(20 * usual if i % 50 == 10 else usual, stats)
    found += [i] if is_spike else []
  planted = [i for i in range(600) if i % 50 == 10]
  assert set(found) >= {i for i in planted if i > 50}
  # The new level looks like spikes for some steps, and then never again.
  assert set(found) - set(planted) <= set(range(300, 325))


def a_skipped_step_of_each_framework_keeps_the_other_state(names, out):
  batch = names["x"], names["y"]
  state = ols.set_loss_scale(names["state"], 2.0**40)
  after, logged = names["linen_step"](state, *batch)
  assert np.isnan(logged) and after.step == state.step + 1
  for name in ("params", "batch_stats", "average"):
    assert_same(getattr(after, name), getattr(state, name))

  model, optimizer = names["model"], names["optimizer"]
  nnx.update(optimizer, ols.set_loss_scale(nnx.state(optimizer), 2.0**40))
  old = jax.tree.map(jnp.copy, nnx.state(model))
  names["nnx_step"](model, optimizer, *batch)
  assert not ols.get_loss_scale_state(optimizer).last_finite
  assert_same(nnx.state(model), old)

  for step, carry in (
    (names["haiku_step"], names["carry"]),
    (names["eqx_step"], names["eqx_carry"]),
  ):
    *old_model, opt_state = carry
    opt_state = ols.set_loss_scale(opt_state, 2.0**40)
    *new_model, opt_state, _ = step(*old_model, opt_state, *batch)
    assert not ols.get_loss_scale_state(opt_state).last_finite
    assert_same(*(eqx.filter(x, eqx.is_array) for x in (new_model, old_model)))


def assert_same(tree, other):
  jax.tree.map(np.testing.assert_array_equal, tree, other)


# What the code on a page leaves behind, or has printed.
AFTERWARDS = {
  "README.md": the_scale_is_shown,
  "docs/how_to/batch_statistics.md": (
    a_skipped_step_of_each_framework_keeps_the_other_state
  ),
  "docs/how_to/clipping_and_accumulation.md": (
    spikes_stand_out_and_a_new_level_is_accepted
  ),
  "docs/how_to/many_devices.md": (
    the_loss_that_is_only_defined_can_be_differentiated
  ),
}


def test_each_page_with_code_is_among_those_that_run():
  names = {relative_name(path) for path in PAGES}
  how_to = {relative_name(path) for path in ROOT.glob("docs/how_to/*.md")}
  others = {"README.md", "docs/index.md", "docs/tutorial.md"}
  assert names >= {*others, *how_to, *AFTERWARDS}
