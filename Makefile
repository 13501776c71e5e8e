# `make help` lists what there is; each command makes its environment first.

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
SOURCES := chunked_head kernels pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md
# Python keeps what it has compiled, whatever the shell says: tests start some hundred processes that import torch
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist worksteal

.PHONY: help demo test test-all test-part lint environment smoke floor dist report hub docs docs-serve
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small model with both heads and compare loss, memory and time (two to three minutes)
	$(BIN)/python -m benchmarks.demo

test: $(READY) lint  ## linters, type checks and the tests that find mistakes; none needs a GPU
	$(PYTEST)

# What `make test` leaves out, in four parts that take about the same time: compiling for other GPUs; all combinations of
# parameters; packaging, benchmarks and frameworks. With each a quarter of the fuzzing and of the mutations.
PARTS := 1 2 3 4
PART_1 := tests/kernels
PART_2 := tests/functions tests/compile tests/losses tests/plan
PART_3 := tests/ranks tests/huggingface tests/frameworks
PART_4 := tests/docs tests/benchmarks
FUZZ_SECONDS ?= 150
test-all: test $(PARTS:%=test-part-%)  ## all that a release needs: make test, and what it leaves out

test-part: test-part-$(PART)  ## a quarter of what make test leaves out: PART=1, 2, 3 or 4

.PHONY: $(PARTS:%=test-part-%)
$(PARTS:%=test-part-%): test-part-%: $(READY)
	$(PYTEST) -m 'exhaustive and not gpu and not multigpu and not deepspeed' $(PART_$*)
	TRITON_INTERPRET=1 PYTHONPATH=tests:tests/helpers $(BIN)/python -m fuzz --part $* --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.mutate --part $*
	$(if $(filter 3,$*),$(MAKE) test-frameworks FRAMEWORKS="fast $(HF)")
	$(if $(filter 4,$*),$(MAKE) docs $(MACHINES:%=test-machine-%))

# What other processors would give: other instructions of ATen, MKL and oneDNN, other numbers of threads, and a BLAS that
# sums in another order (tests/helpers/other_blas.py); on tests of values, which such things change. CI sets MACHINES.
MACHINES ?= 1 2 3 4
MACHINE_1 := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=AVX2 CHUNKED_HEAD_THREADS=2
MACHINE_2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 CHUNKED_HEAD_THREADS=4
MACHINE_3 := MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=AVX2
MACHINE_4 := PYTHONPATH=tests/helpers PYTEST_PLUGINS=other_blas
MACHINE_TESTS := tests/functions/test_logprobs.py tests/losses/test_properties.py tests/losses/test_reference.py \
	tests/functions/test_divergence.py tests/functions/test_gradients.py tests/losses/test_peers.py
.PHONY: $(MACHINES:%=test-machine-%)
test-machine: $(MACHINES:%=test-machine-%)  ## tests of values as other processors would run them; MACHINES=1, 2, 3 or 4

$(MACHINES:%=test-machine-%): test-machine-%: $(READY)
	$(MACHINE_$*) $(PYTEST) $(MACHINE_TESTS)

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

environment: $(READY)  ## only make .venv

# every public function, loss and kind of model, ranks and graphs
SMOKE_TESTS := tests/losses/test_properties.py tests/ranks/test_every_loss.py::test_the_plain_call_is_the_oracle \
	tests/functions/test_streams.py::test_two_ranks tests/compile/test_fullgraph.py::test_fullgraph \
	tests/compile/test_fullgraph.py::test_handed_over_without_a_copy tests/huggingface/test_explain.py \
	tests/functions/test_modes.py::test_anomaly_mode_names_a_nan tests/functions/test_modes.py::test_refused_in_words \
	tests/functions/test_modes.py::test_in_every_order tests/losses/test_sums.py::test_divergence
# from a copy, since setuptools leaves a build folder beside its sources; pytest by its own name does not see the checkout
smoke:  ## test what `pip install .` makes, in an environment of its own
	$(PYTHON) -m venv $(SYSTEM) $(SMOKE)
	$(if $(TORCH),$(SMOKE)/bin/python $(PIP) $(TORCH))
	rm -rf $(SMOKE)/source && mkdir $(SMOKE)/source
	cp -r $(SOURCES) $(SMOKE)/source
	cd $(SMOKE)/source && ../bin/python $(PIP) '.[smoke]'
	cd $(SMOKE) && bin/python -VV && bin/python -c "import chunked_head as c; print(c.__version__, c.__file__)"
	$(SMOKE)/bin/pytest -q -o "pythonpath=tests tests/helpers" -p no:cacheprovider $(SMOKE_TESTS)

floor:  ## the same with the oldest versions
	$(MAKE) smoke TORCH=torch==2.9.0 CONSTRAINTS=.ci/floor.txt VENV=$(VENV)-floor

# from a copy and in environments of their own, as smoke: the wheel is imported where torch and nothing else is
DIST := $(VENV)-dist
dist:  ## build wheel and sdist into dist/ and check them (twine, check-wheel-contents, an import of what is installed)
	rm -rf dist $(DIST)/source
	$(PYTHON) -m venv $(SYSTEM) $(DIST)
	$(DIST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check build twine check-wheel-contents
	mkdir $(DIST)/source && cp -r $(SOURCES) $(DIST)/source
	$(DIST)/bin/python -m build --outdir dist $(DIST)/source
	$(DIST)/bin/twine check --strict dist/*
	$(DIST)/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv $(SYSTEM) $(DIST)-empty
	$(if $(TORCH),$(DIST)-empty/bin/python $(PIP) $(TORCH))
	$(DIST)-empty/bin/python $(PIP) dist/*.whl
	$(DIST)-empty/bin/python $(PIP) --force-reinstall --no-deps dist/*.whl
	cd $(DIST)-empty && bin/chunked-head --version && bin/chunked-head plan --tokens 4k --hidden 4096 --vocab 128256 --device sm_90 | tail -1
	cd $(DIST)-empty && bin/python -c "import chunked_head as c, chunked_head.kernels; print(c.__version__, c.__file__)"

report: $(READY)  ## make tables and plots of README and docs/ from benchmarks/results
	$(BIN)/python -m benchmarks report

hub:  ## build the folder for HuggingFace's `kernels` in hub/dist (docs/frameworks/kernels.md)
	$(PYTHON) hub/build.py

docs: $(VENV)/.docs  ## build the documentation into site/, strictly, and look at what was built
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest -q -n 0 tests/docs/test_site.py

docs-serve: $(VENV)/.docs  ## serve the documentation at http://127.0.0.1:8000 and rebuild it as you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

$(VENV)/.docs: $(READY)
	$(INSTALL) --editable '.[docs]'
	touch $@

# torch first and by itself, so that nothing else decides which build of it comes
$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(SYSTEM) $(VENV)
	$(if $(TORCH),$(INSTALL) $(TORCH))
	$(INSTALL) --editable '.[dev]'
	touch $(READY)

# The frameworks of chunked_head/integrations, in environments above .venv: each has only what a file of tests/frameworks/real
# asks for and .venv lacks or has in another version. A file that begins with "# --no-deps" names all of that itself; a line
# "# tests:" names other tests than those of that folder. HF: of versions of transformers and TRL, those that CI tests now.
HF ?= hf-newest
FRAMEWORKS ?= $(patsubst tests/frameworks/real/%.txt,%,$(wildcard tests/frameworks/real/*.txt))
.PHONY: test-frameworks $(FRAMEWORKS:%=test-framework-%)
test-frameworks: $(FRAMEWORKS:%=test-framework-%)  ## test integrations with the real frameworks; FRAMEWORKS=fast as CI does

$(FRAMEWORKS:%=test-framework-%): test-framework-%: $(VENV)-%/.ready
	HF_HUB_OFFLINE=1 $(VENV)-$*/bin/python -m pytest -q \
		$(or $(shell sed -n 's/^# tests: //p' tests/frameworks/real/$*.txt),tests/frameworks/real)

PACKAGES := bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(VENV)-%/.ready: tests/frameworks/real/%.txt $(READY)
	$(BIN)/python -m venv --without-pip $(SYSTEM) $(VENV)-$*
	echo "import site; site.addsitedir('$$($(VENV)/$(PACKAGES))')" >"$$($(VENV)-$*/$(PACKAGES))/below.pth"
	$(VENV)-$*/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
		$$(grep -om1 -e --no-deps -e --upgrade $<) --requirement $<
	touch $@
