# Two commands matter: `make demo` and `make test`. Everything is installed into .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
# They need a GPU, or a text.
OTHER_BENCHES := bench/bench_topologies.py bench/bench_gpu_kernels.py bench/bench_parity.py bench/bench_shakespeare.py

.DEFAULT_GOAL := help
.PHONY: help demo test chaos test-gpu sanitize-gpu check bench bench-gpu fmt clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "DCNR needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,parity,dev]'
	@touch $@ $(RUN)

demo: $(RUN)  ## a whole cluster, a network and a text sample, in a few minutes
	@$(BIN)/dcnr demo

# What needs no timing, the kernels of the GPU run by the CPU above all, goes beside everything else.
BESIDE := tests/backends/cupy tests/acceptance tests/integration tests/simulation tests/storage tests/parity

test: $(DEV)  ## everything: style, types, the whole suite
	@mkdir -p build
	@$(BIN)/python -m pytest -p no:cacheprovider $(BESIDE) >build/beside.log 2>&1 & beside=$$!; \
	trap 'kill $$beside' INT TERM; \
	$(MAKE) --no-print-directory check && $(BIN)/python -m pytest $(addprefix --ignore=,$(BESIDE)); rest=$$?; \
	wait $$beside; beside=$$?; cat build/beside.log; test $$rest -eq 0 && test $$beside -eq 0

chaos: $(DEV)  ## real processes, a hundred random faults, and the same weights in the end (FAULTS=10 SEED=7 for another run)
	$(BIN)/python -m pytest -p no:cacheprovider tests/faults/matrix.py
	$(BIN)/python -m tests.faults.chaos --faults $(or $(FAULTS),100) $(if $(SEED),--seed $(SEED))

test-gpu: $(DEV)  ## what needs an NVIDIA GPU (first: .venv/bin/pip install -e '.[cuda13]', or cuda12)
	$(BIN)/python -m pytest -m gpu tests/gpu

sanitize-gpu: $(DEV)  ## small tests under compute-sanitizer, which comes with the CUDA toolkit
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m pytest -m gpu --timeout 600 tests/gpu/test_memory.py

check: $(DEV)  ## style, types, architecture
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

bench: $(DEV)  ## every benchmark of a machine without a GPU; each prints one table
	@set -e; for file in $(filter-out $(OTHER_BENCHES),$(wildcard bench/bench_*.py)); do $(BIN)/python $$file; done

bench-gpu: $(DEV)  ## the same on an NVIDIA GPU (install the extra first, as for test-gpu)
	@set -e; for name in 1 2 shakespeare; do $(BIN)/python bench/bench_topologies.py --topology $$name; done
	$(BIN)/python bench/bench_gpu_kernels.py
	$(BIN)/python bench/bench_parity.py --text networks/README.md --network networks/tiny.yml

fmt: $(DEV)  ## format and mend what can be mended
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove what make made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
