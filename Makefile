# kvpilot: `make help` lists the targets. Each of them sets up what it needs from a bare checkout.
#
#   .venv         kvpilot with its development tools
#   .venv-engine  the pinned engines (vLLM on CPU, LMCache), 2.3 GB, from engine/requirements-engine.lock
#   .venv-clients the published clients the tests drive, 0.6 GB, from tests/clients/requirements-clients.lock
#
# PYTHON            interpreter for both (default: python3.11, else python3)
# TORCH_INDEX       index tried for the CPU build of PyTorch where pip's own configuration has none
# KVPILOT_MODELS    folder of the built-in models (default: .models)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK := engine/requirements-engine.lock
CLIENTS_LOCK := tests/clients/requirements-clients.lock

.PHONY: help setup demo test lint bench-tiers bench-gateway clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

setup: .venv/.done .venv-engine/.done ## Make both environments (about a minute with a fast network)
	@echo "setup: done"

demo: setup ## Three coding agents on a real engine, with and without kvpilot: 10 minutes, out/demo.json
	@.venv/bin/kvpilot demo

test: setup .venv-clients/.done ## All tests, on the real vLLM and LMCache and with the real clients
	@KVPILOT_REQUIRE_ENGINE=1 KVPILOT_REQUIRE_CLIENTS=1 .venv/bin/python -m pytest

lint: .venv/.done ## Style and types
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

bench-tiers: setup ## Time to first token from each tier (out/tiers.json)
	@.venv/bin/kvpilot bench tiers --model m16k --contexts 8192,15360 --json out/tiers.json

bench-gateway: setup ## What the gateway adds, beside vllm-router and LiteLLM (out/gateway.json)
	@.venv/bin/kvpilot bench gateway --json out/gateway.json

clean: ## Remove environments, models, state and results
	@[ ! -x .venv/bin/kvpilot ] || .venv/bin/kvpilot down
	rm -rf .venv .venv-engine .venv-clients .models .kvpilot out .pytest_cache .mypy_cache .ruff_cache .hypothesis

# uv installs several times faster than pip; it lives in kvpilot's environment and nowhere else.
.venv/.uv:
	@echo "setup: creating .venv with $$($(PYTHON) --version)"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check uv
	touch $@

.venv/.done: pyproject.toml .venv/.uv
	@echo "setup: kvpilot and its development tools → .venv"
	.venv/bin/uv pip install -q --compile-bytecode --python .venv/bin/python -e '.[dev]'
	touch $@

# --no-deps: the lock is complete, and resolving would bring CUDA builds and caps that the pins exceed.
# torch goes through pip, which knows more places to look for it, beside everything else through uv.
# Not compiled to bytecode: of 22,000 modules the engines import a fifth, and write those on first start.
.venv-engine/.done: $(LOCK) .venv/.uv
	@echo "setup: vLLM and LMCache, pinned → .venv-engine (2.3 GB)"
	command -v g++ >/dev/null || { echo "setup: g++ is missing, vLLM compiles kernels with it: install g++"; exit 1; }
	$(PYTHON) -m venv .venv-engine
	torch=$$(grep '^torch==' $(LOCK))
	pip=(.venv-engine/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-compile)
	( "$${pip[@]}" "$$torch" 2>/dev/null || "$${pip[@]}" "$$torch" --index-url $(TORCH_INDEX) ) &
	grep -v '^torch==' $(LOCK) | .venv/bin/uv pip install -q --python .venv-engine/bin/python --no-deps -r -
	wait $$!
	touch $@

.venv-clients/.done: $(CLIENTS_LOCK) .venv/.uv
	@echo "setup: the published clients the tests drive → .venv-clients (0.6 GB)"
	.venv/bin/uv venv -q --clear --python $(PYTHON) .venv-clients
	.venv/bin/uv pip install -q --python .venv-clients/bin/python --no-deps -r $(CLIENTS_LOCK)
	touch $@
