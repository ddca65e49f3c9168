# make train   set up .venv and train the default recipe on real text; prints where the report is
# make test    set up .venv, then lint, layers, types and tests
# Each works alone on a fresh clone: Python 3.11+, make, a C++ compiler and the package registries are all it needs.

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
READY := .venv/.ready
# Arguments for train, for example: make train ARGS="fp32 --train.steps 100"
ARGS ?=

.PHONY: help train test lint types unit fuzz docs bench reference support constraints clean

help:
	@sed -n 's/^# //p' Makefile | head -3

train: $(READY)
	@$(BIN)/tilewright train $(ARGS)

test: lint types unit

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/lint-imports --no-logo

types: $(READY)
	@$(BIN)/pyright --pythonpath $(BIN)/python

# One thread a test process: two processes share the cores without fighting over them.
unit: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -q

# Property-based tests on cases that nobody has drawn yet.
fuzz: $(READY)
	@HYPOTHESIS_PROFILE=fuzz OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -q -m hypothesis

docs: $(READY)
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

bench: $(READY)
	@$(BIN)/tilewright bench matmul
	@$(BIN)/tilewright bench step cpu_50m

# The pages in docs/reference that are made from the code, and what commands print in other pages.
reference: $(READY)
	@$(BIN)/python tools/write_reference.py
	@$(BIN)/python tools/write_outputs.py
	@$(BIN)/python tools/write_flow.py
	@$(BIN)/python -m benchmarks.pages

# Every check of every family of models, which takes long, and the page that is made of what came out.
support: $(READY)
	@ZOO_RECORD=tests/zoo/outcomes.json OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow or not slow" tests/zoo \
	  --deselect tests/zoo/test_table.py || true
	@$(BIN)/python tools/write_support.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/zoo/test_table.py

constraints: $(READY)
	@$(BIN)/python tools/write_constraints.py

clean:
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
