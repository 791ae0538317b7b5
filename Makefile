# Start with `make demo`. Every target runs in .venv, which is made when it is missing or out of date.
PYTHON ?= python3
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
# pip compiles one file after the other; compileall uses every core.
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-input -c constraints.txt
# One more than cores: many tests wait for processes.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))')
DOC_TESTS := $(wildcard tests/docs tests/architecture/test_tree.py tests/architecture/test_words.py)
# Benchmarks of a GPU and of millions of entries have targets of their own.
BENCHES := $(filter-out tools/bench_gpu.py tools/bench_scale.py tools/bench_versions.py,$(wildcard tools/bench_*.py))

.PHONY: help setup format lint types imports docs site static check test test-browser test-peers test-slow bench bench-build bench-gpu bench-read bench-scale bench-tokens bench-verify demo native reader dist clean

help:  ## print this list
	@echo "latentcache: make <target>"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# torch goes first and alone: it is nearly all of the download, and pip takes whichever build (CPU or CUDA)
# of the pinned version this machine's index or local files offer, before anything else can ask for another.
.venv/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: latentcache needs Python 3.11 or newer; $(PYTHON) is $$(command -v $(PYTHON) >/dev/null && $(PYTHON) -V 2>&1 || echo not there)" >&2; \
	  echo "fix: make PYTHON=python3.12 $(or $(firstword $(MAKECMDGOALS)),setup)" >&2; exit 1; }
	@echo "setup: making .venv with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv .venv
	@echo "setup: installing $$(grep '^torch' constraints.txt), the largest part"
	@$(PIP) torch
	@echo "setup: installing latentcache and its developer tools"
	@$(PIP) -e ".[dev]"
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true   # files for a newer Python do not compile, and need not
	@touch $@

setup: .venv/.stamp reader  ## create .venv, install the project, compile the reader
	@echo "setup: ready. Next: make demo, make test, or $(BIN)/latentcache build YOUR_IMAGES"

format: .venv/.stamp  ## format the code
	@$(BIN)/ruff format -q .
	@$(BIN)/ruff check -q --fix .

lint: .venv/.stamp  ## check style with ruff
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { echo "fix: make format" >&2; exit 1; }
	@echo "lint: clean"

types: .venv/.stamp  ## check types with mypy
	@$(BIN)/mypy

imports: .venv/.stamp  ## check the import contracts
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/check_circles.py

docs: .venv/.stamp  ## test the pages and the tree
	@$(BIN)/pytest $(DOC_TESTS)

site: .venv/.stamp  ## build the site of docs/ in site/, with search; fails at a broken link
	@$(BIN)/python -c 'import zensical' 2>/dev/null || { echo "site: installing zensical"; $(PIP) zensical; }
	@$(BIN)/zensical build --clean --strict
	@echo "site: ready. Next: $(BIN)/zensical serve, or any web server in site/"

static: lint types imports  ## run lint, types and imports

check: static docs  ## run static and docs
	@echo "check: all clean. Next: make test"

test: .venv/.stamp  ## run the test suite, a few minutes
	@echo "test: running all tests but slow and GPU tests"
	@$(BIN)/pytest -n $(WORKERS) --dist worksteal
	@echo "test: all passed. Next: make demo, make check, or make test-slow"

test-slow: .venv/.stamp  ## run the tests that take minutes each
	@$(BIN)/python -c 'import triton' 2>/dev/null || { echo "test-slow: installing triton (290 MB)"; $(PIP) triton; }
	@TRITON_INTERPRET=1 $(BIN)/pytest -m slow

test-browser: .venv/.stamp  ## open reports in headless Chromium (CHROMIUM=PATH)
	@$(BIN)/python -c 'import playwright' 2>/dev/null || { echo "test-browser: installing playwright"; $(PIP) playwright; }
	@command -v $(or $(CHROMIUM),chromium) >/dev/null || { \
	  echo "error: there is no $(or $(CHROMIUM),chromium)" >&2; \
	  echo "fix: apt-get install chromium, or make test-browser CHROMIUM=/path/to/chromium" >&2; exit 1; }
	@CHROMIUM=$$(command -v $(or $(CHROMIUM),chromium)) $(BIN)/pytest -m browser tests/report

test-peers: .venv/.stamp  ## run the code of other trainers, from checkouts in PEERS=DIR
	@PEERS=$(abspath $(or $(PEERS),peers)) $(BIN)/pytest -m peers tests/peers

bench: .venv/.stamp  ## run all benchmarks but GPU and scale
	@set -e; for tool in $(BENCHES); do echo "bench: $$tool"; $(BIN)/python $$tool; done
	@test -n "$(BENCHES)" || echo "bench: no tools/bench_*.py yet"

bench-build: .venv/.stamp  ## measure builds against the encoder alone and other loops
	@$(BIN)/python tools/bench_build.py

bench-gpu: .venv/.stamp  ## measure encoders and builds on one GPU, ten minutes
	@$(BIN)/python tools/bench_gpu.py

bench-read: .venv/.stamp  ## measure reading: limits, loader, other stores
	@$(BIN)/python tools/bench_read.py

bench-scale: .venv/.stamp  ## measure ROWS=1000000 synthetic entries: time and memory
	@$(BIN)/python tools/bench_scale.py --rows $(or $(ROWS),1000000)

bench-tokens: .venv/.stamp  ## measure tokens: reading, packing, building
	@$(BIN)/python tools/bench_tokens.py

bench-verify: .venv/.stamp  ## measure verify
	@$(BIN)/python tools/bench_verify.py

demo: .venv/.stamp reader  ## build, verify, edit, read and show a small cache
	@$(BIN)/python tools/demo.py

NATIVE := latentcache/store/gather/_gather.so
native: $(NATIVE)  ## compile the fast reader (needs a C compiler)

$(NATIVE): latentcache/store/gather/gather.c
	@$(CC) -O3 -shared -fPIC -o $@.new $< -lm && mv $@.new $@

reader:
	@$(MAKE) -s native 2>/dev/null || \
	  echo "setup: the fast reader is not compiled, loaders read at a third of the speed; install gcc, then run: make native"

dist: .venv/.stamp  ## pack a wheel with the compiled reader, and the sources, into dist/
	@$(BIN)/hatchling build -d dist >/dev/null
	@ls dist/*

clean:  ## delete generated files except .venv
	@rm -rf demo dist site .cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean: done. .venv stays; remove it with: rm -rf .venv"
