# `make demo` trains with both heads and compares them, `make test` runs the linters and the tests, `make smoke` tests
# what `pip install .` makes, `make floor` does so with the oldest versions; each makes its environment first.

PYTHON ?= python3
VENV ?= .venv
# what torch to install; on a machine that has one in its Python already, TORCH= and SYSTEM=--system-site-packages
TORCH ?= torch==2.15.0
SYSTEM ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS ?= .ci/constraints.txt
# nothing is compiled ahead: that takes as long as the download, and most modules are never imported
PIP := -m pip install --quiet --no-compile --disable-pip-version-check --constraint $(abspath $(CONSTRAINTS))
INSTALL := $(BIN)/python $(PIP)
SMOKE := $(VENV)-smoke

.PHONY: demo test lint environment smoke floor

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

test: $(READY) lint
	$(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile --ignore tests/test_smoke.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

environment: $(READY)

# from a copy, since setuptools leaves a build folder beside its sources; pytest by its own name does not see the checkout
smoke:
	$(PYTHON) -m venv $(SYSTEM) $(SMOKE)
	$(if $(TORCH),$(SMOKE)/bin/python $(PIP) $(TORCH))
	rm -rf $(SMOKE)/source && mkdir $(SMOKE)/source
	cp -r chunked_head kernels pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md $(SMOKE)/source
	cd $(SMOKE)/source && ../bin/python $(PIP) '.[smoke]'
	cd $(SMOKE) && bin/python -VV && bin/python -c "import chunked_head as c; print(c.__version__, c.__file__)"
	$(SMOKE)/bin/pytest -q -o pythonpath=tests -p no:cacheprovider tests/test_smoke.py

floor:
	$(MAKE) smoke TORCH=torch==2.9.0 CONSTRAINTS=.ci/floor.txt VENV=$(VENV)-floor

# torch first and by itself, so that nothing else decides which build of it comes
$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(SYSTEM) $(VENV)
	$(if $(TORCH),$(INSTALL) $(TORCH))
	$(INSTALL) --editable '.[dev]'
	touch $(READY)

# The frameworks of chunked_head/integrations, each in an environment of its own with the versions of its file in
# tests/frameworks; `make test-frameworks FRAMEWORKS=lm_eval` for one. Not in CI: each environment is gigabytes.
FRAMEWORKS ?= $(patsubst tests/frameworks/%.txt,%,$(wildcard tests/frameworks/*.txt))
.PHONY: test-frameworks $(FRAMEWORKS:%=test-framework-%)
test-frameworks: $(FRAMEWORKS:%=test-framework-%)

$(FRAMEWORKS:%=test-framework-%): test-framework-%: $(VENV)-%/.ready
	HF_HUB_OFFLINE=1 $(VENV)-$*/bin/python -m pytest -q tests/frameworks/test_$*.py

$(VENV)-%/.ready: tests/frameworks/%.txt
	$(PYTHON) -m venv $(SYSTEM) $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< pytest pytest-timeout hypothesis psutil rich
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@
