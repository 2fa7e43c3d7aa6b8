# Short names for what CMake and ctest do. `make` alone lists them.
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 20

# Two test programs share the cores, so threads that wait must sleep instead of spinning.
CTEST = OMP_WAIT_POLICY=passive ctest --output-on-failure --parallel 2

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-asan fuzz cuda format clean

help:
	@echo "make build      build/cpu/tessera, after installing missing system packages"
	@echo "make demo       install, build, train a small model on real text, sample; TEXT=PATH for your own"
	@echo "make test       build and run all tests"
	@echo "make test-asan  the same under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make fuzz       run each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)"
	@echo "make cuda       build the CUDA back end (needs nvcc)"
	@echo "make format     format the sources"
	@echo "make clean      remove build/"

setup:
	@scripts/setup

build: setup
	cmake --preset cpu
	cmake --build build/cpu --target tessera --parallel $(JOBS)

demo:
	@TEXT='$(TEXT)' STEPS='$(STEPS)' scripts/demo

test: setup
	cmake --preset cpu
	cmake --build build/cpu --parallel $(JOBS)
	$(CTEST) --test-dir build/cpu

test-asan: setup
	cmake --preset asan
	cmake --build build/asan --parallel $(JOBS)
	$(CTEST) --test-dir build/asan

fuzz:
	@scripts/setup --ci
	cmake --preset fuzz
	cmake --build build/fuzz --target fuzzers --parallel $(JOBS)
	@FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/fuzz build/fuzz/fuzz

cuda:
	@scripts/setup --cuda
	cmake --preset cuda
	cmake --build build/cuda --target tessera --parallel $(JOBS)

format:
	@scripts/format

clean:
	rm -rf build
