# Each target works alone on a fresh clone: Python 3.11+, make, a C++ compiler and the package registries are all it needs.
# The line after `## ` is what `make help` prints.

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
READY := .venv/.ready
# Arguments for train and mutants, for example: make train ARGS="fp32 --train.steps 100"
ARGS ?=
# One thread per test process, so that they share the cores without fighting over them. What is compiled of tests, and of
# our modules for the processes that they start, is kept: an environment that forbids it pays for it again each time.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# On two cores a third process works where tests of ranks wait for each other: 18:56 instead of 21:16.
SPREAD := -n 3 --dist loadfile -q

.PHONY: help train test test-fast test-slow lint types unit again fuzz mutants hooks docs bench reference support constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

train: $(READY) ## train a recipe and print where its report is (ARGS="fp32 --train.steps 100")
	@$(BIN)/tilewright train $(ARGS)

# Pyright has a processor for itself for as long as the test processes import.
test: lint ## lint, import layers, types and all tests
	@$(MAKE) --no-print-directory --keep-going -j2 types unit

# The inner loop: the folders that take seconds, without tests of several processes. `make test` runs everything.
FAST := core formats optim memory report cli contracts
FAST_NOT := tests/contracts/test_settings.py tests/contracts/test_wheel.py
test-fast: lint ## lint and the quick tests, in under 90 s
	@$(PYTEST) -n 2 --dist loadfile -q --durations=5 \
	  -m "not slow and not gpu and not dist" $(FAST:%=tests/%) $(FAST_NOT:%=--ignore=%)

# All of them take hours on two cores. A test is in the same part each time, so ten runs with PART=1/10 to 10/10 are all
# of them; each test has its own limit of time. Property-based tests draw all their cases here.
PART ?= 1/1
test-slow: $(READY) ## the slow tests, and property-based ones with all cases, or a part of them (PART=3/10)
	@HYPOTHESIS_PROFILE=many $(PYTEST) $(SPREAD) -m "(slow or hypothesis) and not gpu" --part $(PART)

lint: $(READY) ## ruff and the import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/lint-imports --no-logo

types: $(READY) ## pyright
	@$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(READY) ## all tests but the slow ones and those for a GPU
	@$(PYTEST) $(SPREAD)

# A test that passes alone and not beside others has a race. More than five failures are no such tests.
again: $(READY) ## run the tests that failed last once more, one at a time
	@$(BIN)/python tools/failed_last.py
	@$(PYTEST) --last-failed --last-failed-no-failures none -v

# TEST_SEED=17 repeats the numbers of a failure.
fuzz: $(READY) ## all tests on random numbers, and property-based ones on cases, that were never drawn before
	@seed=$${TEST_SEED:-$$RANDOM}; echo "TEST_SEED=$$seed"; \
	  TEST_SEED=$$seed HYPOTHESIS_PROFILE=fuzz $(PYTEST) $(SPREAD)

# The tool is an extra of its own: the tests do not need it.
mutants: $(READY) ## change code at random and print which changes no test finds (ARGS="--count 60 --seed 7")
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	@$(BIN)/python tools/mutants.py $(ARGS)

hooks: $(READY) ## check each commit with ruff and the import layers (pre-commit)
	@$(BIN)/pre-commit install

docs: $(READY) ## build the documentation as HTML
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

bench: $(READY) ## time GEMMs and a training step on this machine
	@$(BIN)/tilewright bench matmul
	@$(BIN)/tilewright bench step cpu_50m

# Also what commands print in other pages.
reference: $(READY) ## rewrite the pages of docs/reference that are made from the code
	@$(BIN)/python tools/write_reference.py
	@$(BIN)/python tools/write_outputs.py
	@$(BIN)/python tools/write_flow.py
	@$(BIN)/python tools/write_layers.py
	@$(BIN)/python tools/write_ranks_support.py
	@$(BIN)/python -m benchmarks.pages

support: $(READY) ## run every check of every model family and rewrite the page of it (long)
	@ZOO_RECORD=tests/zoo/outcomes.json $(PYTEST) -q -m "slow or not slow" tests/zoo \
	  --deselect tests/zoo/test_table.py || true
	@$(BIN)/python tools/write_support.py
	@$(PYTEST) -q tests/zoo/test_table.py

constraints: $(READY) ## write the installed versions to constraints.txt
	@$(BIN)/python tools/write_constraints.py

clean: ## remove .venv and everything that is built
	rm -rf .venv build dist docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The environment is made again when the dependencies change.
$(READY): pyproject.toml constraints.txt
	@set -e; found=; \
	for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if command -v $$python >/dev/null && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    found=$$python; break; \
	  fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "tilewright: no Python that is new enough"; \
	  echo "  got    $$(python3 --version 2>&1)"; \
	  echo "  need   Python 3.11 or newer on the PATH"; \
	  echo "  try    make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; \
	  exit 5; \
	fi >&2; \
	echo "setting up .venv with $$($$found --version); the first time takes minutes"; \
	[ -x $(BIN)/pip ] || $$found -m venv .venv; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'; \
	touch $@
