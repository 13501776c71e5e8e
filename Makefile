# `make demo` trains with both heads and compares them, `make test` checks everything; each makes its environment first.

PYTHON ?= python3
VENV ?= .venv
# what torch to install; on a machine that has one in its Python already, TORCH= and SYSTEM=--system-site-packages
TORCH ?= torch==2.15.0
SYSTEM ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt

.PHONY: demo test lint environment

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

test: $(READY) lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

environment: $(READY)

# torch first and by itself, so that nothing else decides which build of it comes
$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(SYSTEM) $(VENV)
	$(if $(TORCH),$(INSTALL) $(TORCH))
	$(INSTALL) --editable '.[dev]'
	touch $(READY)
