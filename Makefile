# Each target sets up .venv from python3, pip and make alone: `make quickstart`, `make test`, `make lint`.
# PYTHON names the interpreter that the environment is made from: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# What `make test` runs, and with how wide vectors: make test ISA=SSE4_2 TESTS=tests/kernels
TESTS ?= tests
ISA ?=
# Which of them: those of a contributor before a commit, and those that take long.
EVERYWHERE := not torch and not slow and not compiled and not triton
MARKED ?= $(EVERYWHERE) and not long
# 1 compiles as users do; otherwise quickly (tests/conftest.py). With narrower vectors it is 1, since
# sums are in another order and products are fused with sums only where programs are optimised.
COMPILE_AS_USERS ?= $(if $(ISA),1,0)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

PIP := $(PYTHON) -m pip --python $(BIN)/python install --quiet
SOLVE := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet
COMPILE := $(BIN)/uv pip compile pyproject.toml $(SOLVE)
GROUP := $(BIN)/uv pip compile $(SOLVE) --group pyproject.toml
# torch is pinned in torch.txt alone, without hashes; these are what its build for GPUs brings.
OF_TORCH := torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas \
	cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse \
	cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)

.DELETE_ON_ERROR:
.PHONY: help quickstart test test-long test-all lint docs clean requirements

help:
	@echo "make quickstart     a graph, prototypes, a circuit and an audit of a pretrained model; four reports"
	@echo "make test           the tests that need no torch, no Triton and no GPU compiler and are not long or slow"
	@echo "  ISA=AVX           the same on narrower vectors, as on older processors (or SSE4_2)"
	@echo "  TESTS=tests/...   some of them"
	@echo "make test-all       the same, and then those that are long"
	@echo "make lint           ruff and pyrefly"
	@echo "make docs           the site of docs/ into site/; a warning is an error"
	@echo "make clean          remove the environment and the caches, keep runs/"
	@echo "make requirements   solve requirements/*.txt again from pyproject.toml"
	@echo "PYTHON=python3.12   names the interpreter, 3.11 or later"

quickstart: $(VENV)/base.stamp
	$(BIN)/python -m tools.quickstart

test: $(VENV)/dev.stamp
	XLA_FLAGS="$(XLA_FLAGS) $(if $(ISA),--xla_cpu_max_isa=$(ISA))" COMPILE_AS_USERS=$(COMPILE_AS_USERS) $(BIN)/python -m pytest \
		-m "$(MARKED)" -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		$(TESTS)

test-long:
	$(MAKE) test MARKED="$(EVERYWHERE) and long"

test-all:
	$(MAKE) test
	$(MAKE) test-long

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

# The message of mkdocs-material on its successor is no warning of ours.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment gets its own pip from the index, so an interpreter without ensurepip will do.
$(VENV)/base.stamp: pyproject.toml requirements/base.txt
	@$(PYTHON) -c "" 2>/dev/null || { \
		echo "$(PYTHON) does not run: install Python 3.11 or later, or name it with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and 3.11 or later is needed: name it with PYTHON=..." >&2; \
		exit 2; }
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { \
		echo "$(PYTHON) has no pip: install it (Debian: apt install python3-pip)" >&2; exit 2; }
	@echo "setting up $(VENV): some 90 packages, 1.2 GB on disk, a few minutes"
	$(PYTHON) -m venv --clear --without-pip $(VENV)
	$(PIP) pip==26.3
	$(PIP) --require-hashes -r requirements/base.txt
	$(PIP) --no-deps --editable .
	touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp requirements/dev.txt
	$(PIP) --require-hashes -r requirements/dev.txt
	touch $@

$(VENV)/docs.stamp: $(VENV)/base.stamp requirements/docs.txt
	$(PIP) --require-hashes -r requirements/docs.txt
	touch $@

requirements: $(VENV)/base.stamp
	$(PIP) uv==0.13.8
	$(COMPILE) --output-file requirements/base.txt
	$(COMPILE) --extra dev --constraint requirements/base.txt --output-file requirements/dev.txt
	$(COMPILE) --extra eval --constraint requirements/dev.txt --output-file requirements/eval.txt
	$(COMPILE) --extra hpo --constraint requirements/dev.txt --output-file requirements/hpo.txt
	$(COMPILE) --extra botorch --constraint requirements/dev.txt --constraint requirements/torch.txt \
		$(addprefix --no-emit-package ,$(OF_TORCH)) --output-file requirements/botorch.txt
	$(GROUP):aot --no-deps --output-file requirements/aot.txt
	$(GROUP):triton --no-deps --output-file requirements/triton.txt
	$(GROUP):circuit_tracer --no-deps --output-file requirements/circuit_tracer.txt
	$(GROUP):docs --constraint requirements/dev.txt --output-file requirements/docs.txt
