# Needs Python >= 3.10 (with venv) and make; everything else is installed into .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt

# Two workers with one thread each: more threads on two cores only wait for each other.
export OMP_NUM_THREADS := 1
WORKERS ?= 2

.PHONY: help demo test lint acceptance bench bench-peers docs clean

help:
	@echo "make demo         install the package and diagnose a planted incident"
	@echo "make test         every test that needs no downloaded model"
	@echo "make lint         ruff, mypy, import contracts"
	@echo "make acceptance   tests on SmolLM2-135M (downloads its weights once; minutes)"
	@echo "make bench        verdicts on planted incidents, audit recall, speed and memory"
	@echo "make docs         writes docs/rules.md from the rules' own text"
	@echo "make bench-peers  other tools on the same incidents (installs them)"

demo: $(VENV)/.demo
	$(BIN)/probe demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "not real_model"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

acceptance: $(VENV)/.acceptance
	$(BIN)/python fixtures/smollm2.py
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m real_model

bench: $(VENV)/.acceptance
	@set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python -m benchmarks.$$(basename $$script .py); done

docs: $(VENV)/.dev
	PYTHONUTF8=1 $(BIN)/probe rules --format markdown > docs/rules.md

# Apart from `bench`, and in a set-up of its own: what the other tools bring along must not reach the tests.
bench-peers: $(PEERS)/.peers
	$(PEERS)/bin/python -m benchmarks.peers

clean:
	rm -rf $(VENV) $(PEERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.12 …" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of extras, renewed when what it was made from is newer.
$(VENV)/.demo: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV) (torch is large: minutes on the first run)"
	$(PIP) --editable ".[hf]"
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV) (torch is large: minutes on the first run)"
	$(PIP) --editable ".[hf,dev]"
	@touch $@ $(VENV)/.demo

$(VENV)/.acceptance: $(INPUTS) | $(BIN)/python
	@echo "installing into $(VENV) (torch is large: minutes on the first run)"
	$(PIP) --editable ".[hf,dev,acceptance]"
	@touch $@ $(VENV)/.dev $(VENV)/.demo

$(PEERS)/.peers: $(INPUTS)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf,dev,peers]"
	@touch $@
