# `make run PROMPT="..."` and `make test` work on a fresh machine: Python >= 3.11, a C++ compiler, make, a package index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; `make PYTHON=/path/to/python3 ...` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PROMPT ?= What is a prime number? Answer in two sentences.
ARGS ?=
# Kernels take a gigabyte or two of memory each while they are compiled for the sanitisers.
JOBS ?= 2

# Instruction-set levels of the kernels that `run`, `install` and `bench` build: native (what this machine needs), all, or
# a list such as avx2,avx512. What was chosen stays until another is. The tests build all.
ifeq ($(origin LEVELS),undefined)
LEVELS := $(or $(patsubst $(VENV)/stamp-core-%,%,$(firstword $(wildcard $(VENV)/stamp-core-*))),native)
endif

NATIVE := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(wildcard src/powerinfer/csrc/*)

# Container images often set it, and then every process that a test starts would compile Python's files anew: torch's, too,
# which are installed without compiled ones.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-all test-rest test-bench test-bench-if-changed test-deferred mutations check check-types check-text \
	fuzz bench install docs clean \
	test-compile compiled test-native test-neon test-asan test-tsan fuzz-asan test-clients test-converter

help:
	@echo 'make run PROMPT="..."   answer a prompt with the default model (fetched on first use; ARGS="-m FILE ..." for more flags)'
	@echo 'make install            installs without running (LEVELS=all, or LEVELS=avx2,avx512: kernels of other machines, too)'
	@echo 'make test               all tests, a process per core (ARGS="-k name" for some, ARGS="-n 0" for one process)'
	@echo 'make test-all           everything below and more, with a table of what ran'
	@echo 'make test-rest          the cases of which `test` runs a sample, the others'
	@echo 'make mutations          plants a fault for each guarantee of docs/design.md, which its tests must find (ARGS=TEXT: some)'
	@echo 'make test-bench         the tests of the scripts in benchmarks/ and runs/'
	@echo 'make test-deferred      the tests of GPU code on a device that works later, in the order of two seeds'
	@echo 'make check              ruff, mypy, clang-format, and tables of simulations'
	@echo 'make fuzz               all damaged model files against the readers, four times as many as `test`'
	@echo 'make test-compile       every Triton kernel with every type, compiled for four GPUs; `test` compiles some of them, for two'
	@echo 'make compiled           records what Triton makes of the kernels, so that `test` compiles only those that changed since'
	@echo 'make test-native        the kernels of every level that runs here, without Python'
	@echo 'make test-neon          the same for 64-bit Arm, by a cross compiler and an emulator'
	@echo 'make test-asan          the same under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make test-tsan          the pool of threads, flags, and who answers them, under ThreadSanitizer'
	@echo 'make test-converter     files of llama.cpp'\''s own converter, of every family, against transformers'
	@echo 'make test-clients       real clients (agents, too) against the server, installed with pip and npm (ARGS="codex": some)'
	@echo 'make fuzz-asan          damaged model files through a whole forward pass, under the sanitisers'
	@echo 'make docs               the site of the documents, in build/site'
	@echo 'make bench              measure this machine with the default model'
	@echo 'make clean              remove .venv and the build'

# The package is installed in editable form: Python files are used where they lie, the native module is rebuilt (only what changed)
# when a stamp is older than its sources. cmake and ninja come from the package index where the system has none.
$(VENV)/stamp-build-tools:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one or set PYTHON=" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install 'scikit-build-core>=1.1,<2' 'nanobind>=3.1,<4' 'cmake>=3.20' ninja
	@touch $@

INSTALL := PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-build-isolation --config-settings=cmake.define.POWERINFER_LEVELS

$(VENV)/stamp-core-$(LEVELS): $(VENV)/stamp-build-tools $(NATIVE)
	@echo "building powerinfer with kernels of: $(LEVELS) (one to three minutes the first time)"
	@$(INSTALL)=$(LEVELS) --editable .
	@rm -f $(VENV)/stamp-core-* $(VENV)/stamp-dev && touch $@

# What the package's test and check extras need, and the extras that these name.
REQUIREMENTS := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = [line for name in ("test", "check", "ray", "serve") for line in project["optional-dependencies"][name]]; \
	print(*project["dependencies"], *(line for line in extras if not line.startswith("powerinfer[")), sep="\n")

# For `test`, `check` and `fuzz`: the package with what they need, in one installation, which serves `run` too.
# torch before the others: nothing below may change its version. All of them while the package is built, which they leave a core.
$(VENV)/stamp-dev: $(VENV)/stamp-build-tools $(NATIVE)
	@echo "installing what the tests need, and building powerinfer (a few minutes the first time)"
	@$(INSTALL)=all --no-compile --no-deps --editable . & built=$$!; status=0; \
		{ $(PIP) install --no-compile torch==2.13.0 && \
			$(PIP) install --no-compile -r <($(BIN)/python -c '$(REQUIREMENTS)'); } || status=$$?; \
		wait $$built || status=$$?; exit $$status
	@rm -f $(VENV)/stamp-core-* && touch $@ $(VENV)/stamp-core-all

# Compiles what the tests import, once for all processes.
$(VENV)/stamp-collected: $(VENV)/stamp-dev
	@$(BIN)/python -m pytest -q --collect-only --ignore tests/bench >/dev/null
	@touch $@

install: $(VENV)/stamp-core-$(LEVELS)

run: $(VENV)/stamp-core-$(LEVELS)
	@$(BIN)/powerinfer run "$$PROMPT" $(ARGS)
run: export PROMPT := $(PROMPT)

PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
test: $(VENV)/stamp-collected
	@$(PYTEST) --ignore tests/bench $(ARGS)

# The cases of tests marked as sampled that `test` leaves out (tests/samples.py).
test-rest: $(VENV)/stamp-collected
	@$(PYTEST) --ignore tests/bench --cases rest $(ARGS)

# The scripts and their tests as a hash. tests/bench/VERIFIED holds the hash for which all of them passed: so every checkout can tell
# whether they changed since, whatever its history.
BENCH_HASH := find benchmarks runs tests/bench -type f ! -name '*.pyc' ! -name VERIFIED | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum
test-bench: $(VENV)/stamp-dev
	@hash=$$($(BENCH_HASH)); $(PYTEST) tests/bench $(ARGS); $(if $(ARGS),,echo "$$hash" > tests/bench/VERIFIED)

test-bench-if-changed:
	@if [ "$$($(BENCH_HASH))" = "$$(cat tests/bench/VERIFIED)" ]; then echo 'unchanged since make test-bench passed: benchmarks, runs, tests/bench'; \
		else $(MAKE) --no-print-directory test-bench; fi

# Streams, events and pinned memory of split models (docs/hybrid.md): longer than `test` should be.
DEFERRED := hybrid hybrid_experts stage streamed gpu_layers gpu_wiring host_calls flags gpu_delta split_experts_on_disk split_neurons_on_disk unlike_layers topk embeddings gpu_draft_model
test-deferred: $(VENV)/stamp-dev
	@$(PYTEST) --cases all --deferred 1 --deferred 2 -k deferred $(DEFERRED:%=tests/test_%.py) $(ARGS)

mutations: $(VENV)/stamp-dev
	@$(BIN)/python tests/mutations/run.py $(ARGS)

# Everything, one target after the other, and a table of what ran. A target that lacks a tool says so in build/not-run.
EVERY := check test test-rest test-bench test-deferred fuzz test-compile test-native test-neon test-asan test-tsan fuzz-asan test-clients test-converter mutations
test-all:
	@table=""; status=0; for target in $(EVERY); do \
		rm -f build/not-run; begin=$$SECONDS; code=0; $(MAKE) --no-print-directory $$target || code=$$?; result=passed; \
		if [ $$code -ne 0 ]; then \
			if [ -e build/not-run ]; then result="not run: $$(cat build/not-run)"; else result=FAILED; status=1; fi; fi; \
		table+=$$(printf '%-14s %6d s  %s' $$target $$((SECONDS - begin)) "$$result")$$'\n'; done; \
	printf '\n%s' "$$table"; exit $$status

# Two at a time, for most of them use one core.
check: $(VENV)/stamp-dev
	@$(MAKE) --no-print-directory --output-sync -j 2 check-types check-text $(VENV)/stamp-collected

check-types: $(VENV)/stamp-dev
	@$(BIN)/mypy

check-text: $(VENV)/stamp-dev
	@$(BIN)/ruff check .
	@$(BIN)/clang-format --dry-run -Werror src/powerinfer/csrc/*.cpp src/powerinfer/csrc/*.h tests/native/*.cpp tests/native/*.h benchmarks/lib/*.cpp
	@for made in pcs_table drafts step_picture; do $(BIN)/python -m benchmarks.placement.$$made --check; done

fuzz: $(VENV)/stamp-dev
	@POWERINFER_FUZZ=all $(BIN)/python -m pytest tests/test_fuzz.py tests/test_fuzz_folders.py $(ARGS)

test-compile: $(VENV)/stamp-dev
	@POWERINFER_COMPILE=all $(PYTEST) tests/test_gpu_compile.py $(ARGS)

compiled: $(VENV)/stamp-dev
	@POWERINFER_COMPILE=record $(BIN)/python -m pytest -q tests/test_gpu_compile.py $(ARGS)

# Without Python but for its cmake. `LEVELS=avx2` builds and tests some levels; the default is every one that the compiler knows.
NATIVE_LEVELS := $(if $(filter command line,$(origin LEVELS)),$(LEVELS),all)
NATIVE_TESTS = PATH="$(abspath $(BIN)):$$PATH" && cmake -G Ninja -S . -B build/native-test/$@ -DPOWERINFER_TESTS=ON -DPOWERINFER_LEVELS="$(NATIVE_LEVELS)" $(1) >/dev/null && \
	cmake --build build/native-test/$@ --parallel $(JOBS) && ctest --test-dir build/native-test/$@ --parallel $(JOBS) --output-on-failure

test-native: $(VENV)/stamp-build-tools
	@$(call NATIVE_TESTS)

test-neon: $(VENV)/stamp-build-tools
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool >/dev/null || { \
		mkdir -p build; echo "$$tool is missing; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user" | tee build/not-run >&2; exit 1; }; done
	@$(call NATIVE_TESTS,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
		-DCMAKE_EXE_LINKER_FLAGS=-static -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-cpu;max")

test-asan: $(VENV)/stamp-build-tools
	@$(call NATIVE_TESTS,-DPOWERINFER_SANITIZE=ON)

# The pool alone: threads of a program that are late read what others write, and what they make of that goes nowhere.
test-tsan:
	@mkdir -p build/tsan && for test in pool flags; do $(CXX) -std=c++17 -O1 -g1 -fsanitize=thread -Wno-tsan -Isrc/powerinfer/csrc \
		tests/native/test_$$test.cpp src/powerinfer/csrc/{pool,host_flags,host_calls,answering_thread}.cpp -pthread -o build/tsan/test_$$test && build/tsan/test_$$test || exit 1; done

# The converter is fetched once, by its hash, into the tests' cache.
test-converter: $(VENV)/stamp-dev
	@POWERINFER_CONVERTER=1 $(BIN)/python -m pytest -q tests/test_converter.py $(ARGS)

# Installed under build/clients, once; the jobs need no network. Their model is a stand-in with SmolLM2's tokenizer.
test-clients: $(VENV)/stamp-dev
	@$(BIN)/python tests/clients/run.py $(ARGS)

# Beside the package, so that the module under .venv stays fast. Python itself is not sanitised: the runtime comes in by LD_PRELOAD.
fuzz-asan: $(VENV)/stamp-dev
	@PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/asan -G Ninja -DPOWERINFER_SANITIZE=ON -DPython_EXECUTABLE="$(abspath $(BIN)/python)" >/dev/null
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build build/asan --parallel $(JOBS)
	@LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		PYTHONPATH=src:. $(BIN)/python tests/fuzz_native.py --module build/asan $(ARGS)

# Neither the package nor what the tests need; a link that leads nowhere is an error.
docs: $(VENV)/stamp-docs
	@$(BIN)/properdocs --quiet build --strict
	@echo 'build/site/index.html'

$(VENV)/stamp-docs: $(VENV)/stamp-build-tools pyproject.toml
	@$(PIP) install $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

bench: $(VENV)/stamp-core-$(LEVELS)
	@$(BIN)/powerinfer bench $(ARGS)

clean:
	rm -rf $(VENV) build dist src/powerinfer/_native.pyi
