"""The histogram and the pictures show what is there."""

import builtins
import sys

from helpers import parametrize_slow
from helpers.comparisons import make_comparison, make_layer
from helpers.leaves import AS_ARRAYS, make_bad_weight
import jax
from jax import lax
import jax.numpy as jnp
import matplotlib
import matplotlib.colors
import matplotlib.figure
import matplotlib.pyplot
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import plots

INF = float("inf")

matplotlib.use("agg")


@parametrize_slow("kind", ["numpy", "jax", "sharded"], list(AS_ARRAYS))
def test_the_histogram_counts_entries_by_their_power_of_two(kind):
  x = make_bad_weight(
    [(0, 0), (0, 1), (0, 2), (3, 7), (2, 2)], [0.0, 0.25, -0.4, INF, 2.0]
  )
  found = plots.exponent_histogram([AS_ARRAYS[kind](x)])
  assert found.exponents.tolist() == [-2, -1, 0, 1]
  assert found.counts.tolist() == [2, 0, 27, 1]
  assert (found.zero_count, found.nonfinite_count) == (1, 1)


def test_the_histogram_holds_the_whole_range_of_float32_and_float64():
  x = np.array([2.0**-126, 2.0**127, 1.5 * 2.0**127], np.float32)
  for leaf in x, jnp.asarray(x):
    found = plots.exponent_histogram(leaf)
    assert (found.exponents[0], found.exponents[-1]) == (-126, 127)
    assert (found.counts[0], found.counts[-1]) == (1, 2)
  found = plots.exponent_histogram(np.array([5e-324, 1e308]))
  assert (found.exponents[0], found.exponents[-1]) == (-1074, 1023)


def test_the_histogram_of_nothing_is_empty():
  found = plots.exponent_histogram([np.zeros(3), np.zeros((0, 2))])
  assert found.counts.size == found.exponents.size == 0
  assert found.zero_count == 3


def test_the_plot_of_exponents_shows_the_gradients_and_the_scaled_ones():
  grads = {"w": np.float32([2.0**-30, 2.0**-28, 2.0**-28, 0])}
  state = ols.FixedLossScale(2.0**15).init()
  ax = plots.plot_exponents(grads, loss_scale=state)
  bars, scaled = ax.containers
  heights = {bar.get_x(): bar.get_height() for bar in bars}
  assert heights == {-30: 25.0, -29: 0.0, -28: 50.0}
  assert [bar.get_x() for bar in scaled] == [-15, -14, -13]
  labels = ax.get_legend_handles_labels()[1]
  assert "zero in float16" in labels
  assert "multiplied by the loss scale, $2^{15}$" in labels
  assert ax.get_title() == "25.0% of the unscaled entries are zero"
  matplotlib.pyplot.close("all")


@pytest.mark.parametrize(
  "kwargs, error, message",
  [
    ({"dtype": jnp.int32}, TypeError, "dtype must be a float dtype"),
    ({"dtype": np.float64}, TypeError, "at most 32 bits"),
    ({"loss_scale": 0.0}, ValueError, "loss_scale must be"),
    ({"loss_scale": "dynamic"}, TypeError, "loss_scale must be"),
  ],
)
def test_a_plot_for_wrong_arguments_is_refused(kwargs, error, message):
  with pytest.raises(error, match=message):
    plots.plot_exponents([np.ones(2)], **kwargs)


def test_the_plots_draw_on_the_axes_that_are_passed():
  axes = matplotlib.figure.Figure().subplots(2)
  grads = [np.zeros(2), np.float32([1e30])]
  assert plots.plot_exponents(grads, jnp.bfloat16, ax=axes[0]) is axes[0]
  assert plots.plot_loss_scale([1.0, 2.0], ax=axes[1]) is axes[1]
  assert not matplotlib.pyplot.get_fignums()


def test_the_plot_of_the_scale_takes_what_a_loop_or_a_scan_collected():
  tx = ols.with_loss_scaling(
    optax.sgd(1.0), ols.DynamicLossScale(init_scale=64.0, growth_interval=2)
  )

  @jax.jit
  def train(grads):
    def step(state, grad):
      _, state = tx.update(grad, state)
      metrics = ols.loss_scale_metrics(state)
      return state, (metrics, state, state[0], {"state": state}, ((), state))

    return lax.scan(step, tx.init(grads[0]), grads)[1]

  stacked = jax.device_get(train(np.float32([1, 1, INF, 1])))
  listed = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(4)]
  histories = [*zip(*listed, strict=True), *stacked]
  histories += map(list, histories[:5])

  for history in histories:
    ax = plots.plot_loss_scale(
      history, ax=matplotlib.figure.Figure().subplots()
    )
    scale, skipped = ax.lines
    assert scale.get_ydata().tolist() == [64, 128, 64, 64]
    assert skipped.get_xdata().tolist() == [2]
    assert skipped.get_label() == "skipped steps: 1 of 4"


FIRST = ols.DynamicLossScale().init()


@pytest.mark.parametrize(
  "history", [[], {}, {"loss": [1.0]}, 3.0, [{"a": 1}], FIRST]
)
def test_a_history_without_scales_is_refused(history):
  with pytest.raises(ValueError, match="history must hold"):
    plots.plot_loss_scale(history)


def test_the_plot_of_matmuls_shows_the_bad_ones_in_red_with_their_names():
  rows = [
    make_layer("c", error=INF, headroom=-2.0, index=2),
    make_layer("b", error=0.5, headroom=3.0, index=4, backward=True),
    make_layer("b", error=0.1, headroom=5.0, index=1),
    make_layer("d", error=2e-3, headroom=INF, index=3, backward=True),
    make_layer("a", error=1e-3, headroom=9.0, index=0),
  ]
  report = make_comparison(rows, outliers=("b",))
  top, bottom = plots.plot_precision(report)
  red, gray = map(matplotlib.colors.to_rgba, ("tab:red", "tab:gray"))
  for ax in top, bottom:
    colors = [bar.get_facecolor() for bar in ax.patches[:5]]
    assert colors == [gray, red, red, gray, red]
  heights = [bar.get_height() for bar in top.patches]
  assert heights == [1e-3, 0.1, max(heights), 2e-3, 0.5]
  assert [bar.get_hatch() for bar in top.patches] == ["", "", "//", "", ""]
  assert top.get_title() == "hatched: inf or NaN in the results"
  assert [b.get_height() for b in bottom.patches[:5]] == [9, 5, -2, 40, 3]
  assert [(text.get_text(), text.xy[0]) for text in top.texts] == [
    ("b", 4),
    ("c", 2),
  ]
  assert bottom.get_legend_handles_labels()[1] == ["backward"]


def test_the_plot_of_matmuls_omits_missing_values():
  axes = matplotlib.pyplot.subplots(2)[1]
  assert plots.plot_precision(make_comparison(), axes=axes) is axes
  row = make_layer("a", headroom=-INF)
  top, bottom = plots.plot_precision(make_comparison([row]))
  assert top.get_title() == ""
  assert bottom.patches[0].get_height() == -40
  with pytest.raises(TypeError, match="report must be a PrecisionComparison"):
    plots.plot_precision([row])


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch):
  for name in [name for name in sys.modules if name.startswith("matplotlib")]:
    monkeypatch.delitem(sys.modules, name)
  real_import = builtins.__import__

  def no_matplotlib(name, *args, **kwargs):
    if name.startswith("matplotlib"):
      raise ImportError(name)
    return real_import(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", no_matplotlib)
  for plot, argument in (
    (plots.plot_exponents, [np.ones(2)]),
    (plots.plot_loss_scale, [1.0]),
    (plots.plot_precision, make_comparison()),
  ):
    with pytest.raises(ImportError, match=f"{plot.__name__} needs matplotlib"):
      plot(argument)
  assert plots.exponent_histogram([np.ones(2)]).counts.tolist() == [2]
