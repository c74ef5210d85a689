# Everything from a fresh machine. `make` lists the targets.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
QUICKSTART := runs/quickstart
SIMS ?= pusht metaworld robosuite libero
PACKAGES := vla_rl world_models real_robot policies episodes sims

# Bytecode is kept even where the environment says otherwise: the tests start hundreds of processes, and each would
# compile torch again, six seconds of processor time.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow sims isaaclab ros test-ros lint types imports docs package clean

# one thread of tensor arithmetic; one worker per core, each with its own module of tests
ALONE := OMP_NUM_THREADS=1 $(BIN)/pytest --check-types all
PYTEST := $(ALONE) --durations 20 --ignore tests/compiled --numprocesses auto --maxprocesses 8 --dist loadscope --no-loadscope-reorder

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
	$(PYTEST) -m "not slow and not real_time"
	$(ALONE) --ignore tests/compiled -m real_time
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/compiled  # checks of annotations cannot be compiled

test-slow: $(INSTALLED)  ## the tests marked slow: learning, and recovery from faults
	$(PYTEST) -m slow

sims: .venv-sims/.installed  ## .venv-sims: an interpreter for each of SIMS, for their tests (VLA_RL_SIMS=.venv-sims)

.venv-sims/.installed: $(INSTALLED) $(wildcard sims/locks/*.txt)
	@for name in $(SIMS); do VLA_RL_SIMS=$(CURDIR)/.venv-sims $(BIN)/vla-rl sims install $$name || exit; done
	@touch $@

isaaclab: .venv-isaaclab/.installed  ## Isaac Lab's own classes, which import without Isaac Sim, for the test of its adapter

.venv-isaaclab/.installed: $(INSTALLED) tests/sims/isaaclab_requirements.txt
	@rm -rf .venv-isaaclab
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python --target .venv-isaaclab -r tests/sims/isaaclab_requirements.txt
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

docs: .venv/.docs  ## the site in build/site, strict; links, spelling, and the notebooks
	$(BIN)/codespell README.md *.md docs notebooks configs benchmarks tests $(PACKAGES)
	$(BIN)/python -m benchmarks.tables --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m notebooks.execute
	@echo "build/site/index.html"

.venv/.docs: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

package: .venv/.docs  ## build the wheel and use it in an empty environment outside this folder
	PYTHON=$(PYTHON) tests/docs/try_wheel.sh

clean:  ## remove the virtual environment and caches; runs stay
	rm -rf build .venv .venv-sims .venv-isaaclab .venv-ros .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
