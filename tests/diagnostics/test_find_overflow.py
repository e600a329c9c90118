"""``find_overflow`` names the operation, the line and the iteration.

The faulty lines are in ``helpers/faulty_models.py``, each with a comment that
names the fault.
"""

import dataclasses
import functools
import html
import itertools
import json
import sys
import warnings

from helpers import faulty_models, find_line_number, hijax, parametrize_slow
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale._jaxprs import _source_info
from optax_lossscale.diagnostics import (
  _tracing,
  find_overflow,
)

pytestmark = pytest.mark.filterwarnings(
  "ignore:find_overflow called the io_callback"
)

FAULTS = faulty_models.FAULTS
QUICK_FAULTS = "in_scan", "in_while", "in_cond", "custom_vjp_backward"


@parametrize_slow("name", QUICK_FAULTS, FAULTS)
def test_a_planted_fault_is_named_with_its_line_primitive_and_iteration(name):
  make, kind, path, backward, function = FAULTS[name]
  fun, *args = make()
  skip_if_jax_cannot(fun, *args)
  if name == "remat_backward" and hijax.is_enabled("jax_remat3"):
    path = "dot_general"  # JAX leaves nothing of the checkpoint there.

  hit = find_overflow(fun, *args)

  assert hit is not None
  assert (hit.kind, hit.eqn_path, hit.backward) == (kind, path, backward)
  assert hit.primitive == path.split("/")[-1]
  number = find_line_number(name, faulty_models.__file__)
  where = f"faulty_models.py:{number} ({function})"
  assert hit.source_line == where
  assert hit.primitive in str(hit) and where in str(hit)


IN_HIJAX = [name for name in FAULTS if "remat" in name or "custom" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_HIJAX)
def test_a_fault_has_the_same_name_and_path_with_hijax(name):
  with hijax.enable_all_flags():
    test_a_planted_fault_is_named_with_its_line_primitive_and_iteration(name)


X = jnp.linspace(-2, 2, 8, dtype=jnp.float16).reshape(2, 4)


def get_names(hit):
  return [hit.primitive, *(other.primitive for other in hit.other_origins)]


@functools.cache
def find_two_origins():
  def fun(x):
    return jnp.exp(x * 20), 1 / (x - x), x

  return find_overflow(jax.jit(fun), X)


def test_the_report_prints_the_operation_its_operands_and_a_fix():
  hit = find_two_origins()
  line = hit.source_line
  assert line.startswith("test_find_overflow.py:") and line.endswith(" (fun)")
  first_line = "exp returned inf (float16) in the forward pass"
  assert str(hit).splitlines() == [
    f"{first_line}, at {line}.",
    "Operands: float16[2,4] (max abs 40)",
    "Equation: jit(fun)/exp",
    f"Fix: {hit.fix}",
    "(+1 more origin: see other_origins)",
  ]
  (other,) = hit.other_origins
  assert str(other).splitlines()[:2] == [
    f"div returned inf (float16) in the forward pass, at {line}.",
    "Operands: float16[] (max abs 1), float16[2,4] (max abs 0)",
  ]
  assert other.inputs[1] == ((2, 4), np.float16, 0.0, True)
  with pytest.raises(dataclasses.FrozenInstanceError):
    hit.kind = "nan"
  named = dataclasses.replace(hit, name="up at model.py:3 (<lambda>)")
  assert str(named).startswith(f"{first_line}, in layer up at model.py:3 (<la")
  assert named._repr_html_() == f"<pre>{html.escape(str(named))}</pre>"
  unknown = dataclasses.replace(hit, name="", source_line="")
  assert str(unknown).startswith(f"{first_line}.\n")


def test_the_overflow_report_converts_to_a_json_dict():
  hit = find_two_origins()
  data = json.loads(json.dumps(hit.as_dict()))
  fields = {field.name for field in dataclasses.fields(hit)}
  assert set(data) == fields - {"_context"} | {"fix"}
  (operand,) = data["inputs"]
  assert operand["shape"] == [2, 4] and operand["dtype"] == "float16"
  assert operand.keys() == hit.inputs[0]._asdict().keys()
  assert data["dtype"] == "float16" and data["fix"] == hit.fix
  assert data["other_origins"][0]["primitive"] == "div"


def test_an_operand_is_printed_with_its_largest_magnitude():
  operand = diagnostics.Operand((8, 64), np.dtype(np.float16), 13400.2, True)
  assert str(operand) == "float16[8,64] (max abs 13400)"
  assert str(operand._replace(amax=65504.0)) == "float16[8,64] (max abs 65504)"
  operand = operand._replace(amax=3.2912, all_finite=False)
  assert str(operand) == "float16[8,64] (max abs 3.29, contains inf or NaN)"
  assert str(operand._replace(amax=None, all_finite=True)) == "float16[8,64]"


@pytest.mark.slow
def test_the_fix_in_the_forward_pass_of_autocast_removes_the_overflow():
  def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["down"])
    with jax.named_scope("head"):
      return jnp.mean((x @ params["up"] @ jnp.eye(4))[:, :4] * hidden)

  params = {"up": 1e3 * jnp.eye(4), "down": jnp.eye(4)}
  x = jnp.full((2, 4), 100.0)
  kept = []
  for layer in ("up", "head at "):
    fun = ols.autocast(loss_fn, keep_float32=kept)
    hit = find_overflow(fun, params, x)
    name = hit.fix.split("'")[1]
    assert name.startswith(layer) and hit.in_autocast
    assert f"ols.autocast(loss_fn, keep_float32={name!r})" in hit.fix
    kept.append(name)
  assert (
    find_overflow(ols.autocast(loss_fn, keep_float32=kept), params, x) is None
  )
  assert not find_overflow(lambda x: x @ x.T, 100 * X).in_autocast


def test_a_loop_without_iterations_is_passed_through():
  fun = lambda c: lax.scan(lambda c, x: (c * 2, x), c, jnp.zeros(0))[0]
  assert find_overflow(fun, X / 0).primitive == "argument"
  assert find_overflow(fun, X) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64])
def test_any_float_dtype_is_checked(dtype):
  with jax.enable_x64():
    hit = find_overflow(lambda x: x.astype(dtype), jnp.full(2, 1e39))
  assert (hit.kind, hit.dtype) == ("inf", np.dtype(dtype))
  assert hit.inputs == (((2,), np.float64, 1e39, True),)


def test_other_arguments_reach_the_function_unchanged():
  def fun(x, n, mode, *, scale, act):
    assert isinstance(n, int) and isinstance(scale, np.ndarray)
    return act(x) / scale if mode == "divide" else x

  zeros = np.zeros(4, np.int32)
  hit = find_overflow(fun, X, 3, "divide", scale=zeros, act=jnp.tanh)
  assert hit.primitive == "div"
  assert find_overflow(fun, X, 3, "no", scale=zeros, act=jnp.tanh) is None


@parametrize_slow("loop", [False], [False, True])
def test_an_inf_that_is_not_reproduced_is_reported_with_its_operands(loop):
  """A callback returns smaller numbers when it is called again."""
  numbers = itertools.chain([X * 20], itertools.repeat(X * 5))

  def fun(x):
    y = io_callback(lambda: next(numbers), jax.typeof(x))
    return lax.map(jnp.exp, y) if loop else jnp.exp(y)

  hit = find_overflow(fun, X)
  assert hit.eqn_path == ("scan[1]/exp" if loop else "exp")
  assert hit.kind == "inf" and "XLA simplifies the compiled" in hit.fix
  assert hit.inputs[0] == (X.shape[loop:], np.float16, 10.0, True)


def test_a_function_without_a_signature_can_be_run():
  class Odd:
    __signature__ = "none"

    def __call__(self, x):
      return x / 0

  assert find_overflow(Odd(), X).primitive == "div"


def test_a_line_of_a_library_is_not_the_users():
  of_python = dataclasses.__file__, "<frozen importlib._bootstrap>"
  for file_name in jax.__file__, ols.__file__, *of_python:
    assert not _source_info.is_user_file(file_name)
  for file_name in __file__, pytest.__file__, "<stdin>":
    assert _source_info.is_user_file(file_name)


def test_a_line_of_a_notebook_names_the_cell():
  line = _source_info.SourceLine("/tmp/ipykernel_12/345.py", 3, "loss_fn")
  assert str(line) == "cell:3 (loss_fn)"


def test_an_equation_that_reads_an_inf_from_a_ref_is_named():
  @jax.jit
  def fun(x, index):
    ref = jax.new_ref(x)
    ref[0] = x[1] * 60000
    jax.ref.addupdate(ref, 1, jnp.exp(x[1]))
    return ref[index] + 1

  hit = find_overflow(fun, jnp.abs(X) + 1, 0)
  assert get_names(hit) == ["get"]
  assert hit.source_line.endswith(" (fun)")
  assert find_overflow(fun, jnp.abs(X) + 1, 1) is None


def test_a_ref_may_be_an_argument():
  def fun(ref, x):
    ref[...] = x * 60000
    return ref[...] + 1

  ref = jax.new_ref(X)
  assert find_overflow(fun, ref, X).primitive == "get"
  assert find_overflow(fun, ref, X / 60000) is None


def test_each_run_calls_a_callback_with_a_result():
  seen = []

  def note(x):
    seen.append(x.shape)
    return np.asarray(x)

  def fun(x, factor):
    return factor * io_callback(note, jax.typeof(x), x)

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert find_overflow(fun, X, 1) is None
  assert len(seen) == 1
  with pytest.warns(UserWarning, match="called the io_callback of this func"):
    assert find_overflow(fun, X, 60000).primitive == "mul"
  assert len(seen) > 2


def test_on_a_terminal_each_line_replaces_the_line_before(capsys, monkeypatch):
  monkeypatch.setattr(_tracing, "_DELAY_SECONDS", -1)
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
  find_overflow(lambda x: x * 60000, X)
  first, second, erased, _ = capsys.readouterr().err.split("\r")
  assert first.startswith("find_overflow: compiling and running the function, ")
  assert second.startswith("find_overflow: measuring 1 operation, ")
  assert len(second) == len(first)
  assert erased == " " * len(second.rstrip())


def test_a_callback_in_the_condition_of_a_loop_is_called_once_each_time():
  calls = []

  def goes_on(state):
    jax.debug.callback(lambda i: calls.append(int(i)), state[0])
    return state[0] < 4

  def fun(x):
    body = lambda state: (state[0] + 1, state[1] * 64)
    return lax.while_loop(goes_on, body, (0, x))[1]

  hit = find_overflow(fun, jnp.ones(3, X.dtype))
  jax.effects_barrier()
  assert hit.eqn_path == "while[2]/mul"
  assert calls == [0, 1, 2, 3, 4]
