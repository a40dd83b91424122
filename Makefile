# Every target sets up .venv first (once): `make demo` and `make test` are all that a fresh clone needs.
PYTHON ?= python3
PY := .venv/bin/python
WORKERS ?= auto

.PHONY: help setup demo test test-full lint build check kernels gpu-check bench-cpu docs docs-test wheel clean

help:
	@echo "make demo        train a small language model with generated optimizers beside torch's AdamW"
	@echo "make test        lint, types and the tests of every day"
	@echo "make test-full   also the slow tests and the whole product of rules and plans"
	@echo "make build       generate generated/ again from specs/; make check only compares"
	@echo "make kernels     instructions per element of every Triton kernel (no GPU needed)"
	@echo "make gpu-check   tests and benchmarks on this machine's GPU"
	@echo "make bench-cpu   benchmarks on this machine's CPU, beside the peers that are installed"
	@echo "make docs        build the documentation site, build/site; make docs-test reads it in Chromium"
	@echo "make wheel       build dist/*.whl"

setup:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || \
	  { echo "optgen needs Python 3.11 or newer; make PYTHON=python3.12 $(MAKECMDGOALS) names another one"; exit 2; }
	@$(PYTHON) tools/setup_env.py
	@$(MAKE) --silent $(TYPES)

# What type checkers read of the ready-made optimizers; git ignores it.
TYPES := optgen/optim/__init__.pyi
$(TYPES): $(wildcard specs/*.py) optgen/backends/wrapper.py optgen/backends/templates/optim.pyi.j2
	@$(PY) tools/write_types.py && touch $@

demo: setup
	@$(PY) -m tools.demo $(ARGS)

# The tests start hundreds of processes: where these keep what Python compiles, they are a tenth faster.
demo test test-full: export PYTHONDONTWRITEBYTECODE :=

test: setup
	$(PY) -m ruff check .
	$(PY) -m pytest -rfEs -n $(WORKERS) --dist worksteal -m "not slow and not full" $(ARGS)

test-full: setup
	$(PY) -m ruff check .
	$(PY) -m pytest -rfEs -n $(WORKERS) --dist worksteal --hypothesis-profile=full $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

build: setup
	$(PY) -m optgen build

check: setup
	$(PY) -m optgen build --check

kernels: setup
	$(PY) tools/kernel_stats.py $(ARGS)

gpu-check: setup
	$(PY) tools/gpu_check.py $(ARGS)

bench-cpu: setup
	@$(PY) -m tools.bench cpu $(ARGS)

docs: setup
	@$(PY) tools/docs.py

docs-test: setup
	@$(PY) tools/docs.py test

wheel:
	$(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf dist demo_out .mypy_cache .ruff_cache .pytest_cache .hypothesis
