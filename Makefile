# The same targets serve people and CI. Each sets up what it needs; `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The job that `make train` runs, and further arguments of its command (or of pytest and the bench).
JOB ?= workloads/digits/job.yaml
ARGS ?=
# Integration first: those with a Ray cluster take longest (who runs which: tests/conftest.py).
TESTS ?= tests/integration tests/unit tests/chaos
# Those marked `root`, which `make test` leaves to `make test-system`.
ROOT_TESTS := tests/integration/test_memory_monitor.py tests/integration/test_cut_node.py \
	tests/integration/test_full_storage.py tests/unit/cluster/test_links.py
# Tests run in two processes, file by file, in this order; ARGS="-n 0" runs them in one (for --pdb).
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder

# Used only when .venv has to be made: the first interpreter that works and is 3.11 or newer.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$name"; break; }; done)
# An extra index for torch, such as the one of its CPU builds; empty: what pip finds by itself.
TORCH_INDEX_URL ?=

# Packages that no worker, command or recorder imports.
NOT_COMPILED := moto|matplotlib|fontTools|mypy|mypyc|networkx|setuptools|rllib|tune|serve

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile

.PHONY: help venv train test chaos packages test-system bench lint fmt

help: ## Lists the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

venv: .venv/.installed ## Sets up .venv with the command .venv/bin/samestep

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make venv: no Python 3.11 or newer on PATH; install one or \
	give it: make venv PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -c '' || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) --no-deps --retries 1 \
	-c constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) torch
	$(PIP) -c constraints.txt -e '.[workloads,test,dev]'
	@# pip would compile the 20,000 files on one core alone. Some are templates, which nobody can compile,
	@# and most are imported by nothing here: what is left out is compiled by who imports it first.
	@$(BIN)/python -m compileall -qq -j 0 -x '/(tests|$(NOT_COMPILED))/' \
	.venv/lib/python3*/site-packages >/dev/null 2>&1 || true
	@touch $@

train: venv ## Trains JOB (workloads/digits/job.yaml); ARGS are passed on
	$(BIN)/samestep train $(JOB) $(ARGS)

test: venv ## Runs TESTS (unit, integration, chaos), which need nothing but what pip installs
	$(BIN)/python -m pytest $(IN_TWO) -m 'not root' $(TESTS) $(ARGS)

chaos: venv ## Runs the drill of tests/chaos for 60 rounds of random faults (SAMESTEP_CHAOS_ROUNDS)
	SAMESTEP_CHAOS_ROUNDS=$${SAMESTEP_CHAOS_ROUNDS:-60} $(BIN)/python -m pytest tests/chaos $(ARGS)

packages: ## Installs the Debian packages that test-system needs, where they are missing
	tests/system/install

test-system: venv packages ## Runs the tests that need Debian packages, root or another user
	$(BIN)/python -m pytest $(IN_TWO) tests/system $(ROOT_TESTS) $(ARGS)

bench: venv ## Measures step times against stock DDP; with ARGS="--parts NAMES" what else there is
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

lint: venv ## Checks style, types and the layers of the code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: venv ## Formats the code, mends what ruff can, and makes anew what is made from code
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(BIN)/python -m samestep.cli.specdoc > docs/spec.md.new
	mv docs/spec.md.new docs/spec.md
	$(BIN)/python -m samestep.cli.metricsdoc > docs/metrics.md.new
	mv docs/metrics.md.new docs/metrics.md
	$(BIN)/python dashboards/build.py
