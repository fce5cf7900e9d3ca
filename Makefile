# Everything a developer types. Each target makes the environment (.venv) that it needs.
#   make test TESTS=tests/operations/plan_test.py ARGS="-k overflow"    one file, one test
#   make example ARGS="--help"                               the example's own options
#   JAX_EP_CUDA=ON make test     with CUDA kernels, which are left out where there is no GPU

TESTS ?= tests
JOBS ?= 2
GPUS ?= $(shell nvidia-smi -L 2>/dev/null | wc -l)
ARGS ?=
CC_ARGS ?=
CC_FILES = find ffi tests/cpp -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'

.DEFAULT_GOAL := help
.PHONY: help environment example test slow_test cc_test cc_build gpu_test docs wheel release lint format ci clean

help:  ## this list
	@sed -n 's/^\([a-z_]*\):.*  ## /  make \1#/p' Makefile | awk -F '#' '{printf "%-16s %s\n", $$1, $$2}'

example: environment  ## train a mixture-of-experts language model on this machine's devices
	.venv/bin/python examples/train_moe_lm.py $(ARGS)

# A chosen test file runs alone, slow tests included; otherwise the C++ tests come first.
whole := $(filter tests,$(TESTS))

test: environment $(if $(whole),cc_test)  ## run the tests (TESTS=one/file.py, JOBS=processes, ARGS=for pytest)
	.venv/bin/pytest $(TESTS) -n $(JOBS) --dist worksteal $(if $(whole),-m "not slow") $(ARGS)

slow_test: environment cc_build  ## run the tests that `make test` leaves to CI, twice as long
	.venv/bin/ctest --test-dir build/cc_test -L slow $(CC_ARGS) -j $(JOBS) --output-on-failure
	.venv/bin/pytest tests -n $(JOBS) --dist worksteal -m slow $(ARGS)

cc_test: environment cc_build  ## run the C++ tests alone
	.venv/bin/ctest --test-dir build/cc_test -LE slow -j $(JOBS) --output-on-failure

cc_build: environment
	@.venv/bin/cmake -S . -B build/cc_test -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -DJAX_EP_CUDA=OFF -DJAX_EP_BUILD_MODULE=OFF -DJAX_EP_BUILD_TESTS=ON
	@.venv/bin/cmake --build build/cc_test -- --quiet

gpu_test: environment  ## run the tests of this machine's GPUs, and write tests/gpu_record.json (GPUS=1, 2 or 4)
	PYTHON=.venv/bin/python tools/gpu_tests.sh $(GPUS)

docs: environment  ## build the site of docs/ and the docstrings into build/docs
	.venv/bin/sphinx-build -c docs/site -d build/docs_cache -W --keep-going -q . build/docs
	@echo "[jax_ep] built build/docs/index.html"

lint: environment  ## check formatting and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(CC_FILES) | xargs .venv/bin/clang-format --dry-run -Werror
	.venv/bin/mypy
	.venv/bin/python tools/check_vocabulary.py

format: environment  ## rewrite the sources in the project's format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	$(CC_FILES) | xargs .venv/bin/clang-format -i

wheel:  ## build the wheel into dist/
	tools/environment.sh wheel

# The release's kernels are those of the wheel, which CI tests.
release: export JAX_EP_CUDA = ON
release: wheel  ## build the files of a release into dist/release, check them, and install them
	$$(tools/find_python.sh) tools/release.py

environment:
	@tools/environment.sh

ci:  ## run everything that is checked before a change lands (40 minutes)
	bash .ci/run

clean:  ## remove what the other targets made
	rm -rf .venv build dist
