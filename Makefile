# Each target sets up what it needs, in .venv, with the versions of constraints.txt.
#   make demo       runtime only, then the race of plain and speculative decoding
#   make test       everything for development, then the tests
#   make test-fast  the tests that take seconds
#   make check      formatting, lint, types, the import rule, prose and size
#   make docs       the documentation as a site, in site/; broken links and unknown names are errors
#   make real       two real pretrained models (350 MB), for tests and benchmarks; REAL=smollm2 only the smaller,
#                   REAL=qwen-7b-header a tokenizer of 151,665 tokens
#   make wheel      wheels with compiled kernels for the platforms WHEELS, in dist/; Zig compiles them (100 MB, in pip's cache)
#   make peers      OpenVINO GenAI, vLLM and llama.cpp, each in an environment of its own, for the race (gigabytes)
#   make bench      one table of all benchmarks (hours; a second start goes on where the first one ended)
# PIP_ARGS goes to pip, for instance --extra-index-url with an index of smaller, CPU-only builds of torch.

SHELL := /bin/sh
VENV ?= .venv
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
endif
PIP_ARGS ?=
# Of src/foretoken/core/native/toolchain.py: those that there are kernels for.
WHEELS ?= linux-x86_64
PEERS ?= openvino vllm llamacpp
REAL ?= smollm2 gemma3
RESULTS ?= benchmarks/results
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -q $(PIP_ARGS) -c constraints.txt
# Byte code for all at once, on all cores: without it every start of Python would compile torch again where it may not
# keep what it compiled, which takes longer than anything else until the first token. A file that is no Python is no error.
COMPILE := @$(BIN)/python -m compileall -q -j 0 $(VENV)/lib src >/dev/null 2>&1 || true
# For the same reason tests may write byte code: pytest would compile every test module again in every process.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast check docs format real wheel peers bench install clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(RUNTIME)
	@$(BIN)/foretoken demo $(ARGS)

test: $(DEV)
	@$(PYTEST) $(ARGS)

test-fast: $(DEV)
	@$(PYTEST) -m "not slow" $(ARGS)

check: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_prose.py
	$(BIN)/python tools/check_size.py

docs: $(DEV)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(DEV)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

real: $(RUNTIME)
	@$(BIN)/python benchmarks/real_models.py $(REAL)

wheel: $(RUNTIME)
	@for platform in $(WHEELS); do \
		FORETOKEN_WHEEL=$$platform $(BIN)/python -m pip wheel --disable-pip-version-check -q $(PIP_ARGS) --no-deps -w dist . || exit 1; \
	done
	@ls -l dist

peers: $(RUNTIME)
	@$(BIN)/python benchmarks/peers/setup.py $(PEERS) $(PIP_ARGS)

bench: $(DEV)
	@mkdir -p $(RESULTS)
	$(BIN)/foretoken bench table --record $(RESULTS)/table.jsonl --output $(RESULTS)/table.json --html $(RESULTS)/table.html $(ARGS)

install: $(DEV)

# torch comes first and alone: named exactly, a "+cpu" build is taken wherever the configured index has one.
$(RUNTIME): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or later is needed and was not found; install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or later is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "== making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); } || { rm -rf $(VENV); echo "make: could not make $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "== installing torch (the largest download, once)"
	@$(PIP) torch==2.13.0
	@echo "== installing foretoken"
	@$(PIP) -e .
	@$(BIN)/python -m foretoken.core.native.toolchain >/dev/null 2>&1 || { \
		echo "== installing Zig, because there is no C++ compiler (90 MB, once)"; \
		$(PIP) -e '.[compiler]' || echo "make: Zig could not be installed; without a C++ compiler models run on torch operators, three times slower" >&2; }
	$(COMPILE)
	@touch $@

$(DEV): $(RUNTIME)
	@echo "== installing the development tools"
	@$(PIP) -e '.[dev]'
	$(COMPILE)
	@touch $@

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
