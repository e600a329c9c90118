# Every target makes the environment it needs; `make clean` removes them.

# A command or a path, in place of the newest Python that works; and what takes
# its place in the targets that are for Python 3.11.
PYTHON ?=
PYTHON_3_11 ?=
# The lowest and the highest version that may be taken: tools/newest_python.sh.
PYTHON_BOUNDS ?= 3.11
VENV ?= .venv
BIN = $(VENV)/bin
# As many as there are cores, up to 8: each takes some gigabytes of memory.
PYTEST_WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); \
  echo $$((n > 8 ? 8 : n)))
PIP_OPTIONS ?=
# The quick and the slow tests, with three times the random programs of `make test`.
ALL = -m 'not nightly' --hypothesis-profile=ci
IN_3_11 = $(MAKE) --no-print-directory PYTHON='$(PYTHON_3_11)' \
  PYTHON_BOUNDS='3.11 3.11'
OLDEST = .venv-oldest
JAX_NIGHTLY = .venv-jax-nightly
# Where JAX's developers publish a build of each day, as options of pip: their
# installation page names the index. Without, the newest pre-release, if any.
JAX_NIGHTLY_OPTIONS ?=
# What JAX will do by default one day, and does today if it is asked for: each
# makes one primitive of what was several. JAX has them since 0.11.1, and an
# older one ignores those that it does not have. JAX_FLAGS=JAX_REMAT3=1 turns one
# on alone. The fourth, jax_scan3, is left out: with it, a scan that is not in a
# `jit` or a `checkpoint` has neither gradient nor vmap in JAX 0.12 itself.
JAX_FLAGS ?= JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1
CORE = _arrays _checks \
  _grads _state _axes \
  _policies._log2_scales _policies._base _policies._dynamic \
  _policies._search _policies._headroom _policies._policy_like \
  _grad_stats _scaling _select _wrapper
# Folders of which a random sample of mutants is tried.
SAMPLED = _autocast _jaxprs diagnostics
SAMPLE =
# A page that loads this from another server is broken without a network.
FROM_ELSEWHERE = <(script|img|iframe|link rel="stylesheet")[^>]* (src|href)="(https?:)?//
# Outside of the folders that pytest looks into by itself.
BENCHMARK_TESTS = benchmarks/compilers/test_scheduled_hlo.py \
  benchmarks/on_gpu/test_on_gpu.py
# Left out on all but the newest Python and JAX, since it tells nothing new there.
ONLY_NEWEST = $(addprefix --ignore=tests/, \
  diagnostics/test_plots.py pages policies/test_starving.py \
  $(addprefix package/, test_package.py test_release.py) \
  $(addprefix interop/, test_fuzz.py test_golden.py))
# And on the oldest: what counts the equations or the instructions of a step,
# of which there are others, and Flax 0.12.0 earns a warning.
ONLY_LATER = --ignore=tests/core/test_cost.py \
  --deselect=tests/core/test_skips.py::test_subnormal_params_are_kept_or_flushed_as_the_pages_say \
  --deselect='tests/core/test_select.py::test_state_and_updates_from_one_inner_jaxpr_are_selected_after_it[scan]' \
  -W 'ignore:jax.:DeprecationWarning'
# What can fail on the oldest for a reason of its own: the core, the parts that
# read jaxprs, and whole steps with a library of each kind and on a mesh.
OF_ALL_KINDS = $(addprefix tests/, core autocast diagnostics \
  package/test_jax.py frameworks/test_flax_nnx.py frameworks/test_equinox.py \
  devices/test_shard_map.py)
# Of these, what judges the results of the parts that read jaxprs.
JUDGE_RESULTS = $(addprefix --ignore=tests/diagnostics/, test_check_step.py \
  test_compare_precision_arrays.py test_numeric_problems.py test_reports.py)
# The parts that read jaxprs, which any version of JAX may change.
READ_JAXPRS = tests/autocast tests/diagnostics \
  tests/core/test_optax_battery.py::test_wrapped_optimizers_equal_bare_ones_bit_for_bit
# Of these, the gradients of thirteen models, random names, and the time of a
# diagnosis.
TAKE_LONGEST = $(addprefix --ignore=tests/, autocast/test_models.py \
  autocast/test_random_provenance.py diagnostics/test_find_overflow_time.py)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow coverage test-3.11 test-oldest \
  test-oldest-all test-jax-nightly test-jax-flags nightly mutants mutants-check \
  check compile-costs bench bench-autocast docs dist clean FORCE

help: ## Show this list
	@grep -hE '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

demo: $(VENV)/installed-examples ## Train the digits autoencoder in float32 and float16
	$(BIN)/python examples/digits.py

test: $(VENV)/installed-test ## Run the quick tests, as before each commit
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS)

test-slow: $(VENV)/installed-test $(VENV)/installed-tpu ## Run the other tests: notebooks, processes, releases
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m 'slow and not nightly' \
	  tests optax_lossscale $(BENCHMARK_TESTS)

coverage: $(VENV)/installed-test ## Run both; fail unless they take every branch and the quick tests are quick
	COVERAGE_CORE=sysmon $(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(ALL) \
	  --quick-budget --cov --cov-report=term-missing

test-3.11: ## Run the quick tests on Python 3.11, with the last JAX for it
	$(IN_3_11) VENV=.venv-3.11 .venv-3.11/installed-test
	.venv-3.11/bin/python -m pytest -n $(PYTEST_WORKERS) $(ONLY_NEWEST)

test-oldest: $(OLDEST)/installed ## Run the quick tests that can fail there, on the oldest versions that are allowed
	$(OLDEST)/bin/python -m pytest -n $(PYTEST_WORKERS) $(ONLY_NEWEST) \
	  $(ONLY_LATER) $(JUDGE_RESULTS) $(OF_ALL_KINDS)

test-oldest-all: $(OLDEST)/installed ## Run all quick tests there, and the slow ones of what reads jaxprs
	$(OLDEST)/bin/python -m pytest -n $(PYTEST_WORKERS) $(ONLY_NEWEST) \
	  $(ONLY_LATER) tests
	$(OLDEST)/bin/python -m pytest -n $(PYTEST_WORKERS) $(ONLY_NEWEST) \
	  $(ONLY_LATER) $(TAKE_LONGEST) -m 'slow and not nightly' $(READ_JAXPRS)

test-jax-nightly: ## Run the quick and the slow tests on today's build of JAX
	$(MAKE) --no-print-directory VENV=$(JAX_NIGHTLY) $(JAX_NIGHTLY)/installed-test
	$(JAX_NIGHTLY)/bin/python -m pip install --quiet --upgrade --pre jax jaxlib \
	  $(JAX_NIGHTLY_OPTIONS)
	$(JAX_NIGHTLY)/bin/python -m pytest -n $(PYTEST_WORKERS) $(ALL)

test-jax-flags: $(VENV)/installed-test ## Run the tests of what reads jaxprs with what JAX will do one day; JAX_FLAGS="JAX_REMAT3=1"
	$(JAX_FLAGS) $(BIN)/python -m pytest -n $(PYTEST_WORKERS) \
	  tests/autocast tests/diagnostics tests/core

nightly: $(VENV)/installed-test ## Run what takes two hours more: 10,000 random programs
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m nightly tests $(BENCHMARK_TESTS)
	$(BIN)/python -m pytest -m 'not nightly' --hypothesis-profile=nightly \
	  tests/policies/test_random_programs.py tests/interop/test_fuzz.py

mutants: $(addprefix mutants-,$(CORE) $(SAMPLED)) ## Break the package in one place at a time; tests must fail. Hours: -j2

$(addprefix mutants-,$(SAMPLED)): SAMPLE = --sample 200

mutants-check: $(VENV)/installed-mutants ## Break one place in each module; the tests of the module in tests/README.md must fail
	$(BIN)/python tools/mutants.py --check

mutants-%: $(VENV)/installed-mutants
	$(BIN)/python tools/mutants.py $* $(SAMPLE)

check: $(VENV)/installed-test ## Run the linter, the formatter's check and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compile-costs: ## Ask the compilers of TPU and GPU what steps cost; ARGS="--help"
	$(MAKE) --no-print-directory VENV=.venv-compile-costs \
	  .venv-compile-costs/installed-compile-costs
	.venv-compile-costs/bin/python benchmarks/compilers/compile_costs.py $(ARGS)

bench: ## Measure speed against other loss scalers; ARGS="--help" lists options
	$(MAKE) --no-print-directory VENV=.venv-bench .venv-bench/installed-bench
	.venv-bench/bin/python benchmarks/cpu/run.py $(ARGS)

bench-autocast: $(VENV)/installed-test ## Measure autocast on the models of the tests, and by the compilers of TPU and GPU
	$(BIN)/python benchmarks/autocast/autocast.py
	$(BIN)/python benchmarks/autocast/reports.py
	$(MAKE) --no-print-directory VENV=.venv-compile-costs \
	  .venv-compile-costs/installed-compile-costs
	.venv-compile-costs/bin/python benchmarks/compilers/compile_costs.py \
	  --parts autocast

docs: ## Build the pages in docs/_build/html
	$(MAKE) --no-print-directory VENV=.venv-docs .venv-docs/installed-docs
	.venv-docs/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@! grep -rnE --include='*.html' '$(FROM_ELSEWHERE)' docs/_build/html

dist: $(VENV)/installed-dist ## Build the source and the binary distribution, and check them
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove what the targets made
	rm -rf .venv* build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(OLDEST)/installed: FORCE
	$(IN_3_11) VENV=$(OLDEST) $(OLDEST)/made
	$(OLDEST)/bin/python tools/lower_bounds.py > $(OLDEST)/constraints.txt
	$(IN_3_11) VENV=$(OLDEST) $(OLDEST)/installed-test \
	  PIP_OPTIONS='--constraint $(OLDEST)/constraints.txt'

# After that for the tests, since two must not install at once.
$(VENV)/installed-tpu: $(VENV)/installed-test

$(VENV)/installed-%: $(VENV)/made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(PIP_OPTIONS) --editable '.[$*]'
	touch $@

# Looked at each time: another Python may be asked for, or be the newest now.
$(VENV)/made: FORCE
	@PYTHON='$(PYTHON)' tools/make_venv.sh $(VENV) $(PYTHON_BOUNDS)
