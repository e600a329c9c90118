"""The primitives that `autocast` enters, and its warnings about the others."""

import functools

from helpers import autocast_ops, custom_rules, hijax, jaxprs, parametrize_slow
from helpers.bits import assert_close, assert_functions_close
from helpers.jax_limits import skip_if_jax_cannot
from helpers.planted_layers import normal
import jax
from jax import export, lax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale._autocast import _calls, _matmuls
from optax_lossscale._jaxprs import _eqns, _weights

A = normal(4, 4) / 2 + jnp.eye(4)
B = jnp.ones((4, 4))


linear = autocast_ops.LEFT_UNCHANGED["linear_call"]


def test_an_opaque_call_without_a_matmul_is_not_reported():
  """It contains a rule, which may have matmuls."""
  sin = jax.custom_vjp(jnp.sin)
  sin.defvjp(lambda a: (jnp.sin(a), a), lambda a, g: (g * jnp.cos(a),))
  fun = jax.custom_batching.custom_vmap(lambda a: sin(a))
  fun.def_vmap(lambda size, batched, a: (sin(a), True))
  half = ols.autocast(lambda a, b: fun(a) @ b)
  assert jaxprs.count_matmuls_by_dtype(half, A, B) == {"float16": 1}


def test_an_opaque_matmul_with_an_operand_in_half_precision_is_reported():
  mapped = autocast_ops.LEFT_UNCHANGED["custom_vmap"]
  half = ols.autocast(lambda a, b: mapped(a, b) + a @ b)
  with pytest.warns(UserWarning, match="left custom_vmap_call"):
    jax.jit(half)(A, B.astype("float16"))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_warning_lists_the_first_three_locations(count):
  call = jax.custom_derivatives.linear_call
  times = functools.partial(call, lambda a, b: a @ b, lambda a, g: a.T @ g)
  call_sites = [
    lambda a: times(a, B),
    lambda a: times(a, B),
    lambda a: times(a, B),
    lambda a: times(a, B),
    lambda a: times(a, B),
  ]
  half = ols.autocast(lambda a: [x(a) for x in call_sites[:count]])
  with pytest.warns(UserWarning) as caught:
    jax.make_jaxpr(half)(A)
  (warning,) = caught
  message = str(warning.message)
  assert message.count("linear_call at") == min(count, 3)
  assert (" and 2 more unchanged: " in message) == (count == 5)
  assert (" more" in message) == (count == 5)
  first = call_sites[0].__code__.co_firstlineno
  assert f"left linear_call at test_reach.py:{first}" in message


def test_a_function_with_other_results_cannot_replace_an_equation():
  (eqn,) = jax.make_jaxpr(lambda a: jnp.sin(a))(A).eqns
  ((new,), _) = _eqns.trace_replacement_eqns(lambda a: [jnp.cos(a)], eqn)
  assert new.outvars == eqn.outvars and new.invars == eqn.invars
  for fun in (lambda a: [a], lambda a: [jnp.ones(())]):
    assert _eqns.trace_replacement_eqns(fun, eqn) is None
  # With this flag, JAX writes an array into the equation that reads it.
  if not getattr(jax.config, "jax_use_simplified_jaxpr_constants", False):
    assert _eqns.trace_replacement_eqns(lambda a: [a + B], eqn) is None


def test_the_warning_is_given_once_and_not_at_each_call():
  half = ols.autocast(lambda a, b: linear(a, b) + a @ b)
  with pytest.warns(UserWarning) as caught:
    for _ in range(2):
      half(A, B)
  assert len(caught) == 1


def test_primitives_that_a_rule_runs_are_reported_too():
  fun = jax.custom_vjp(lambda a, b: a @ b)
  fun.defvjp(
    lambda a, b: (a @ b, (a, b)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
    optimize_remat=True,
  )
  half = ols.autocast(lambda a: jnp.sum(fun(a, B)))
  if getattr(jax.config, "jax_custom_vjp3", False):
    assert set(jaxprs.count_matmuls_by_dtype(jax.grad(half), A)) == {"float16"}
    return
  with pytest.warns(UserWarning, match="left remat_opt"):
    counts = jaxprs.count_matmuls_by_dtype(jax.grad(half), A)
  # The forward pass of the gradient is hidden, and its backward pass is not.
  assert counts == {"float32": 1, "float16": 2}


def exported(fun):
  return export.export(jax.jit(fun))(jax.ShapeDtypeStruct((4, 4), jnp.float32))


def test_exported_matmuls_are_reported_at_the_line_of_the_call():
  call = exported(lambda a: a @ a).call
  fun = lambda a, b: jax.checkpoint(call)(a) @ b
  with pytest.warns(UserWarning, match=r"exported at test_reach.py:\d+ \("):
    counts = jaxprs.count_matmuls_by_dtype(ols.autocast(fun), A, B)
  assert counts == {"float16": 1}
  with pytest.warns(UserWarning, match="call_exported unchanged: the matmuls"):
    jax.make_jaxpr(jax.grad(lambda a: jnp.sum(ols.autocast(call)(a))))(A)


NOT_TOLD = {
  "no matmul": jnp.sin,
  "in float16": lambda a: jnp.float32(jnp.float16(a) @ jnp.float16(a)),
  "highest precision": lambda a: jnp.matmul(a, a, precision="highest"),
  "marked": lambda a: a @ a,
}


@pytest.mark.parametrize("name", NOT_TOLD)
def test_exported_functions_without_float32_matmuls_are_not_reported(name):
  call = exported(NOT_TOLD[name]).call
  call = ols.keep_float32(call) if name == "marked" else call
  half = ols.autocast(lambda a, b: call(a) @ b)
  assert jaxprs.count_matmuls_by_dtype(half, A, B) == {"float16": 1}


def rename_params(eqn):
  """An equation whose parameters all have names of another JAX."""
  return eqn.replace(params={f"new_{k}": v for k, v in eqn.params.items()})


def make_unknown_eqn(eqn):
  primitive = type(eqn.primitive)("no_such_primitive")
  return eqn.replace(primitive=primitive)


def duplicate_jaxpr(eqn):
  """An equation that holds one jaxpr more than it does today."""
  more = jax.make_jaxpr(lambda a: a @ a)(A)
  return eqn.replace(params={**eqn.params, "another": more})


HOLDERS = {
  "scan": lambda a, b: lax.scan(lambda c, x: (c @ a, c @ a), b, b),
  "while": lambda a, b: lax.while_loop(
    lambda c: jnp.sum(c @ a) < 9, lambda c: c @ a, b
  ),
  "cond": lambda a, b: lax.cond(b[0, 0] > 0, lambda: a @ b, lambda: a),
  "jit": jax.jit(lambda a, b: a @ b),
  "checkpoint": lambda a, b: jax.checkpoint(lambda a, b: jnp.sin(a @ b))(a, b),
  "custom_jvp": lambda a, b: custom_rules.make_matmul_with_jvp()(a, b),
  "custom_vjp": lambda a, b: custom_rules.make_matmul_with_vjp()(a, b),
  "shard_map": autocast_ops.on_devices(lambda a, b: a @ b),
}


CHANGES = rename_params, make_unknown_eqn, duplicate_jaxpr


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", HOLDERS)
def test_an_equation_of_another_jax_is_rewritten_or_reported(name, change):
  closed = jax.make_jaxpr(HOLDERS[name])(A, B)
  eqns = list(closed.jaxpr.eqns)
  (i,) = [i for i, eqn in enumerate(eqns) if _matmuls.subjaxprs_to_search(eqn)]
  if change is make_unknown_eqn and _eqns.get_hi_primitive(eqns[i]) is not None:
    pytest.skip("What an unknown primitive hides in an object is not seen.")
  eqns[i] = change(eqns[i])
  new_jaxpr = _eqns.replace_jaxpr_fields(closed, eqns=eqns)
  found, warning_text, new = rewrite(new_jaxpr)
  if any(eqn is eqns[i] for eqn in new):  # Unchanged and reported.
    assert not found
    assert _eqns.get_primitive_name(eqns[i]) in warning_text
  else:
    assert found and change is not make_unknown_eqn
    assert jaxprs.count_eqn_matmuls_by_dtype(new)["float32"] == 0


def rewrite(closed_jaxpr):
  """Return whether there are matmuls, the warning, and the new equations."""
  config = _calls.AutocastConfig(jnp.dtype("float16"))
  rewritten = _calls.rewrite_program(closed_jaxpr, _weights.NO_PATHS, config)
  result, _, warning = rewritten
  return result.log.has_matmuls, warning, result.jaxpr.eqns


IN_HIJAX = [
  (name, flag)
  for name in ("scan", "checkpoint", "custom_jvp", "custom_vjp")
  for flag in hijax.FLAGS
]


@parametrize_slow(
  "case",
  [
    ("checkpoint", "jax_remat3"),
    ("custom_jvp", "jax_custom_jvp3"),
    ("custom_vjp", "jax_custom_vjp3"),
  ],
  IN_HIJAX,
  ids=str,
)
def test_matmuls_in_hijax_primitives_and_their_gradients_run_in_float16(case):
  name, flag = case
  if flag == f"jax_{name}3" and not hijax.HAS_RULES:
    pytest.skip(f"The objects of JAX {jax.__version__} are reported below.")
  fun = HOLDERS[name]

  def loss(a, b, cast=lambda fun: fun):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(cast(fun)(a, b)))

  with hijax.enable_flags(flag):
    half = ols.autocast(fun)
    assert set(jaxprs.count_matmuls_by_dtype(half, A, B)) == {"float16"}
    assert_functions_close(half, fun, A, B, tolerance=0.01)
    skip_if_jax_cannot(jax.eval_shape, jax.grad(loss), A, B)
    half = jax.grad(lambda a, b: loss(a, b, ols.autocast), (0, 1))
    assert set(jaxprs.count_matmuls_by_dtype(half, A, B)) == {"float16"}
    full = jax.grad(loss, (0, 1))
    assert_functions_close(half, full, A, B, tolerance=0.02)


def test_a_tangent_in_a_hijax_primitive_runs_in_half_precision():
  if not hijax.HAS_RULES:
    pytest.skip(f"The objects of JAX {jax.__version__} are reported below.")
  fun = HOLDERS["custom_vjp"]

  def transposed(cotangent, cast=lambda fun: fun):
    derivative = lambda t: jax.jvp(lambda a: fun(a, B), (A,), (t,))[1]
    return jax.linear_transpose(cast(derivative), A)(cotangent)

  with hijax.enable_flags("jax_custom_vjp3"):
    skip_if_jax_cannot(transposed, A)
    half = lambda cotangent: transposed(cotangent, ols.autocast)
    assert set(jaxprs.count_matmuls_by_dtype(half, A)) == {"float16"}
    assert_close(half(A), transposed(A), 0.01)


@pytest.mark.parametrize(
  "name, gone",
  [
    ("custom_jvp", "jvp_rule"),
    ("custom_vjp", "bwd"),
    ("custom_vjp", "remat_rules"),
  ],
)
def test_a_hijax_primitive_of_another_jax_is_reported(monkeypatch, name, gone):
  with hijax.enable_flags(f"jax_{name}3"):
    closed = jax.make_jaxpr(HOLDERS[name])(A, B)
    hidden = [_eqns.get_hi_primitive(eqn) for eqn in closed.jaxpr.eqns]
    (changed,) = [x for x in hidden if x is not None]
    if hijax.HAS_RULES:
      monkeypatch.delattr(changed, gone)
      monkeypatch.delitem(changed.params, gone)
    found, warning_text, _ = rewrite(closed)
  assert not found
  assert f"left {name}_call at test_reach.py" in warning_text
