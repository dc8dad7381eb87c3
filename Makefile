# `make chat` and `make test` need git, make, a C++ compiler and Python 3.11 or newer; all else goes into .venv.
# CUDA=1 builds llama.cpp for NVIDIA cards. PYTHON=… names the Python to use.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip -qq install
CUDA_WANTED := $(filter-out 0,$(CUDA))
LLAMA := .venv/.llama$(if $(CUDA_WANTED),-cuda)

.PHONY: help chat test test-fast lint sanitize setup clean
.DELETE_ON_ERROR:

help:
	@echo "make chat      set everything up and talk with the default model (CUDA=1 for NVIDIA)"
	@echo "make test      set everything up and run the tests"
	@echo "make test-fast the quick ones only, for after every save"
	@echo "make lint      check style, format and types"
	@echo "make sanitize  run the tests of the native part with sanitizers (GCC)"
	@echo "make setup     set everything up, no more"
	@echo "make clean     remove what these have made here"

chat: setup
	@$(BIN)/localspec pull
	@$(BIN)/localspec chat

test: .venv/.dev
	@$(BIN)/localspec pull
	$(BIN)/python -m pytest

test-fast: .venv/.dev
	@$(BIN)/python -m pytest -m "not slow"

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

sanitize: .venv/.dev
	@tools/sanitize.sh

setup: .venv/.setup

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/.pip:
	@test -n "$(PYTHON)" || { echo "localspec needs Python 3.11 or newer, and none was found (python3 here: \
	$$(python3 --version 2>&1)); install one or name it with PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(INSTALL) --upgrade pip platformdirs
	@touch $@

$(LLAMA): pyproject.toml tools/build_llama.py | .venv/.pip
	$(BIN)/python tools/build_llama.py $(if $(CUDA_WANTED),--cuda)
	@rm -f .venv/.llama* && touch $@

.venv/.setup: pyproject.toml setup.py $(wildcard localspec/native/*) $(LLAMA)
	$(INSTALL) --editable .
	@touch $@

.venv/.dev: .venv/.setup
	$(INSTALL) --editable '.[dev]'
	@touch $@
