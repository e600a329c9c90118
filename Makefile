# Every target makes the environment it needs; `make clean` removes them.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PYTEST_WORKERS ?= 2
PIP_OPTIONS ?=
# The quick and the slow tests, with ten times the random programs of `make test`.
ALL = -m 'not nightly' --hypothesis-profile=ci
OLDEST = .venv-oldest
JAX_NIGHTLY = .venv-jax-nightly
# Where JAX's developers publish a build of each day, as options of pip: their
# installation page names the index. Without, the newest pre-release, if any.
JAX_NIGHTLY_OPTIONS ?=
CORE = _arrays _checks _powers_of_two _jaxprs _grads _state _axes \
  _measurement _loss _scaling _search _headroom _policies _select _updates \
  _wrapper
# Not the pages, notebooks and plots, which are made with the newest versions,
# nor what counts the equations or the instructions of a step: others there.
OLDEST_TESTS ?= tests $(addprefix --ignore=tests/, \
  core/test_bit_identity.py core/test_cost.py core/test_kill.py \
  core/test_soak.py core/test_subnormal.py diagnostics/test_plots.py \
  package/test_package.py package/test_release.py pages/test_digits.py \
  pages/test_docs.py pages/test_notebooks.py pages/test_pages.py) \
  --deselect=tests/core/test_select.py::test_a_loop_that_makes_the_updates_too_is_selected_behind

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow coverage test-oldest test-jax-nightly nightly \
  mutants check compile-costs bench bench-autocast docs dist clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

demo: $(VENV)/installed-examples ## Train the digits autoencoder in float32 and float16
	$(BIN)/python examples/digits.py

test: $(VENV)/installed-test ## Run the quick tests, as before each commit
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS)

test-slow: $(VENV)/installed-test $(VENV)/installed-tpu ## Run the other tests: notebooks, processes, kills, releases
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m 'slow and not nightly'

coverage: $(VENV)/installed-test ## Run both; fail unless they take every branch
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(ALL) \
	  --cov --cov-report=term-missing

test-oldest: ## Run both on the oldest versions that pyproject.toml allows
	mkdir -p $(OLDEST)
	$(PYTHON) tools/lower_bounds.py > $(OLDEST)/constraints.txt
	$(MAKE) --no-print-directory VENV=$(OLDEST) \
	  PIP_OPTIONS='--constraint $(OLDEST)/constraints.txt' \
	  $(OLDEST)/installed-test
	$(OLDEST)/bin/python -m pytest -n $(PYTEST_WORKERS) $(ALL) \
	  -W 'ignore:jax.:DeprecationWarning' $(OLDEST_TESTS) # Flax 0.12.0 earns it

test-jax-nightly: ## Run both on today's build of JAX
	$(MAKE) --no-print-directory VENV=$(JAX_NIGHTLY) $(JAX_NIGHTLY)/installed-test
	$(JAX_NIGHTLY)/bin/python -m pip install --quiet --upgrade --pre jax jaxlib \
	  $(JAX_NIGHTLY_OPTIONS)
	$(JAX_NIGHTLY)/bin/python -m pytest -n $(PYTEST_WORKERS) $(ALL)

nightly: $(VENV)/installed-test ## Run what takes hours: 50 kills, 10,000 random programs
	$(BIN)/python -m pytest -m nightly
	$(BIN)/python -m pytest --hypothesis-profile=nightly \
	  tests/policies/test_random_programs.py tests/interop/test_fuzz.py

mutants: $(addprefix mutants-,$(CORE)) ## Break the core in one place at a time; tests must fail. An hour or more: -j2

mutants-%: $(VENV)/installed-mutants
	$(BIN)/python tools/mutants.py $*

check: $(VENV)/installed-test ## Run the linter, the formatter's check and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compile-costs: ## Ask the compilers of TPU and GPU what steps cost; ARGS="--help"
	$(MAKE) --no-print-directory VENV=.venv-compile-costs \
	  .venv-compile-costs/installed-compile-costs
	.venv-compile-costs/bin/python benchmarks/compile_costs.py $(ARGS)

bench: ## Measure speed against other loss scalers; ARGS="--help" lists options
	$(MAKE) --no-print-directory VENV=.venv-bench .venv-bench/installed-bench
	.venv-bench/bin/python benchmarks/run.py $(ARGS)

bench-autocast: $(VENV)/installed-test ## Measure autocast on the models of the tests, and by the compilers of TPU and GPU
	$(BIN)/python benchmarks/autocast.py
	$(MAKE) --no-print-directory VENV=.venv-compile-costs \
	  .venv-compile-costs/installed-compile-costs
	.venv-compile-costs/bin/python benchmarks/autocast_bytes.py v5e
	.venv-compile-costs/bin/python benchmarks/autocast_bytes.py h100

docs: ## Build the pages in docs/_build/html, with the notebooks executed
	$(MAKE) --no-print-directory VENV=.venv-docs .venv-docs/installed-docs
	.venv-docs/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html
	.venv-docs/bin/python tools/offline.py docs/_build/html

dist: $(VENV)/installed-dist ## Build the source and the binary distribution, and check them
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove what the targets made
	rm -rf .venv* build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# After that for the tests, since two must not install at once.
$(VENV)/installed-tpu: $(VENV)/installed-test

$(VENV)/installed-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(PIP_OPTIONS) --editable '.[$*]'
	touch $@
