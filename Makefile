# Every target makes the environment it needs; `make clean` removes them.

# The tests of each environment. `make test ON=oldest` runs those of one of them:
# the quick ones, unless the line has another -m.
#
#                 folder             Python    tests
ON_newest       = .venv              3.11
ON_3.11         = .venv-3.11         3.11-3.11 $(JAX_CAN_BREAK)
ON_oldest       = .venv-oldest       3.11-3.11 $(JAX_CAN_BREAK) $(EXCEPTIONS)
ON_oldest-all   = .venv-oldest       3.11-3.11 tests $(NOT_PAGES) $(EXCEPTIONS)
ON_oldest-slow  = .venv-oldest       3.11-3.11 $(READ_JAXPRS) $(EXCEPTIONS)
ON_jax-flags    = .venv              3.11      tests/core tests/autocast tests/diagnostics
ON_jax-nightly  = .venv-jax-nightly  3.11      -m 'not nightly'

# What can fail on another version of JAX or Python for a reason of its own. The
# other folders show what these prove, or test plain Python.
JAX_CAN_BREAK = tests/core tests/autocast tests/diagnostics tests/devices \
  tests/frameworks tests/package/test_jax.py
NOT_PAGES = --ignore=tests/pages --ignore=tests/package/test_package.py \
  --ignore=tests/diagnostics/test_plots.py
# The slow tests of what reads jaxprs, which any version of JAX may change,
# without those that take longest.
READ_JAXPRS = -m 'slow and not nightly' tests/autocast tests/diagnostics \
  tests/core/test_optax_battery.py::test_wrapped_optimizers_equal_bare_ones_bit_for_bit \
  --ignore=tests/autocast/test_models.py \
  --ignore=tests/autocast/test_random_provenance.py
# Two steps have other equations there, and Flax 0.12.0 earns a warning.
EXCEPTIONS = \
  --deselect=tests/core/test_skips.py::test_subnormal_params_are_kept_or_flushed_as_the_pages_say \
  --deselect='tests/core/test_select.py::test_state_and_updates_from_one_inner_jaxpr_are_selected_after_it[scan]' \
  -W 'ignore:jax.:DeprecationWarning'
# Outside of the folders that pytest looks into by itself.
BENCHMARK_TESTS = benchmarks/compilers/test_scheduled_hlo.py \
  benchmarks/on_gpu/test_on_gpu.py

# What JAX will do by default one day, and does today if it is asked for: each
# makes one primitive of what was several. JAX has them since 0.11.1, and an
# older one ignores those that it does not have. JAX_FLAGS=JAX_REMAT3=1 turns one
# on alone. The fourth, jax_scan3, is left out: with it, a scan that is not in a
# `jit` or a `checkpoint` has neither gradient nor vmap in JAX 0.12 itself.
JAX_FLAGS ?= JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1
SETTINGS_jax-flags = $(JAX_FLAGS)
# Where JAX's developers publish a build of each day, as options of pip: their
# installation page names the index. Without, the newest pre-release, if any.
JAX_NIGHTLY_OPTIONS ?=
PREPARE_jax-nightly = $(BIN)/python -m pip install --quiet --upgrade --pre \
  jax jaxlib $(JAX_NIGHTLY_OPTIONS)

# Each kind of measurement: make bench OF=autocast.
#
#                 folder             extra         script
OF_cpu          = .venv-bench        bench         benchmarks/cpu/run.py
OF_autocast     = .venv              test          benchmarks/autocast/autocast.py
OF_reports      = .venv              test          benchmarks/autocast/reports.py
OF_compilers    = .venv-compilers    compile-costs benchmarks/compilers/compile_costs.py

# A command or a path, in place of the newest Python that works; and what takes
# its place in the environments that are for Python 3.11.
PYTHON ?=
PYTHON_3_11 ?=
ON ?= newest
OF ?= cpu
ROW := $(or $(ON_$(ON)),$(error ON=$(ON) has no line at the top of the Makefile))
VENV ?= $(word 1,$(ROW))
# The lowest and the highest version that may be taken: tools/newest_python.sh.
PYTHON_BOUNDS = $(subst -, ,$(word 2,$(ROW)))
TESTS = $(wordlist 3,99,$(ROW))
BIN = $(VENV)/bin
# As many as there are cores, up to 8: each takes some gigabytes of memory.
PYTEST_WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); \
  echo $$((n > 8 ? 8 : n)))
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS)
# A page that loads this from another server is broken without a network.
FROM_ELSEWHERE = <(script|img|iframe|link rel="stylesheet")[^>]* (src|href)="(https?:)?//

.DEFAULT_GOAL := help
.PHONY: help demo check test test-slow coverage nightly mutants bench parity docs \
  clean FORCE

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: $(VENV)/installed-examples ## Train the digits autoencoder in float32 and float16
	$(BIN)/python examples/digits.py

check: $(VENV)/installed-test ## Run the linter, the formatter's check and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/installed-test ## Run the quick tests, or with ON=oldest those of a line at the top of the Makefile
	$(PREPARE_$(ON))
	@echo "Collecting the tests: half a minute the first time."
	$(SETTINGS_$(ON)) $(PYTEST) $(TESTS)

test-slow: $(VENV)/installed-test $(VENV)/installed-tpu ## Run the other tests: notebooks, processes, releases
	$(PYTEST) -m 'slow and not nightly' tests optax_lossscale $(BENCHMARK_TESTS)

coverage: $(VENV)/installed-test ## Run both; fail unless they take every branch and the quick tests are quick
	COVERAGE_CORE=sysmon $(PYTEST) -m 'not nightly' --hypothesis-profile=ci \
	  --quick-budget --cov --cov-report=term-missing

nightly: $(VENV)/installed-test ## Run what takes two hours more: 10,000 random programs
	$(PYTEST) -m nightly tests $(BENCHMARK_TESTS)
	$(BIN)/python -m pytest -m 'not nightly' --hypothesis-profile=nightly \
	  tests/policies/test_random_programs.py

mutants: $(VENV)/installed-mutants ## Break the package in one place at a time; tests must fail; ARGS="--help"
	$(BIN)/python tools/mutants.py $(ARGS)

bench: ## Measure speed; OF=cpu, autocast, reports or compilers; ARGS="--help"
	$(MAKE) --no-print-directory VENV=$(word 1,$(OF_$(OF))) \
	  $(word 1,$(OF_$(OF)))/installed-$(word 2,$(OF_$(OF)))
	$(word 1,$(OF_$(OF)))/bin/python $(word 3,$(OF_$(OF))) $(ARGS)

parity: $(VENV)/installed-examples ## Train five tasks in eight variants, and compare each with float32
	$(BIN)/python benchmarks/parity/parity.py

docs: ## Build the pages in docs/_build/html
	$(MAKE) --no-print-directory VENV=.venv-docs .venv-docs/installed-docs
	.venv-docs/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@! grep -rnE --include='*.html' '$(FROM_ELSEWHERE)' docs/_build/html

clean: ## Remove what the targets made
	rm -rf .venv* build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifeq ($(word 2,$(ROW)),3.11-3.11)
PYTHON = $(PYTHON_3_11)
endif

ifeq ($(VENV),.venv-oldest)
PIP_OPTIONS = --constraint $(VENV)/constraints.txt
$(VENV)/installed-test: $(VENV)/constraints.txt
endif

$(VENV)/constraints.txt: $(VENV)/made pyproject.toml
	$(BIN)/python tools/lower_bounds.py > $@

# After that for the tests, since two must not install at once.
$(VENV)/installed-tpu: $(VENV)/installed-test

$(VENV)/installed-%: $(VENV)/made pyproject.toml
	@echo "Installing what '$*' needs into $(VENV), once: a minute or two."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(PIP_OPTIONS) --editable '.[$*]'
	touch $@

# Looked at each time: another Python may be asked for, or be the newest now.
$(VENV)/made: FORCE
	@PYTHON='$(PYTHON)' tools/make_venv.sh $(VENV) $(PYTHON_BOUNDS)
