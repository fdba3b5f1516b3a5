# `make run` and `make test` do all their own set-up: Python >= 3.11, pip and make are enough.
#
#   make run PROMPT="What is 12+30?"      answer a prompt with the embedded model
#   make test                             lint, types, import contracts, tests
#   make test PYTEST_ARGS="-k replay"     the same with a choice of tests
#   make clean                            remove .venv
#
# PYTHON     the interpreter that .venv is made of (default: the first of python3, python3.13, 3.12, 3.11, 3.14
#            that is new enough).
# PIP_FLAGS  extra flags of `pip install`. On Linux the default torch wheel is a CUDA build of several GB; the CPU
#            build is a tenth of that:
#            make run PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PROMPT = 17+25?
PIP_FLAGS =
PYTEST_ARGS =
PYTHON =

# The stamps carry a checksum of what they depend on: a moved folder makes a new .venv (its scripts hold absolute
# paths), changed requirements reinstall, and a fresh checkout with the same content does neither.
here := $(shell pwd | cksum | cut -d' ' -f1)
pins := $(shell cat pyproject.toml constraints.txt hatch_build.py | cksum | cut -d' ' -f1)
CREATED := $(VENV)/.created-$(here)
INSTALLED := $(VENV)/.installed-$(here)-$(pins)
KERNELS := $(VENV)/.kernels-$(here)

.PHONY: run test clean
.DELETE_ON_ERROR:

# Passed through the environment, so that quotes in the prompt reach the program as they are.
run: export PROMPT := $(PROMPT)
run: $(KERNELS)
	$(BIN)/deepinfer run -- "$$PROMPT"

# One thread per process: the tests use small tensors. Two workers, a file each: as many as the cores that are counted on.
test: export OMP_NUM_THREADS := 1
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

clean:
	rm -rf $(VENV)

$(INSTALLED): $(CREATED)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

# Into the user's cache folder, once per source, compiler and CPU. Without a compiler everything runs, only slower.
$(KERNELS): $(INSTALLED) $(wildcard kernels/deepinfer_kernels/cpu/*.cpp kernels/deepinfer_kernels/cpu/*.h)
	@echo "compiling kernels for this CPU"
	@if $(BIN)/deepinfer build-kernels --target cpu >/dev/null; then touch $@; \
	else echo "note: decoding runs without compiled kernels" >&2; fi

# Some distributions ship venv without ensurepip; the pip of the chosen interpreter then installs one.
$(CREATED):
	@set -e; chosen=; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    chosen=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  echo "make: deepinfer needs Python 3.11 or newer; found: $$($(or $(PYTHON),python3) --version 2>&1)" >&2; \
	  echo "hint: install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$chosen" --version) ($$chosen)"; \
	if "$$chosen" -c 'import ensurepip' >/dev/null 2>&1; then \
	  "$$chosen" -m venv --clear $(VENV); \
	else \
	  "$$chosen" -m venv --clear --without-pip $(VENV); \
	  "$$chosen" -m pip --python $(BIN)/python install --disable-pip-version-check pip; \
	fi; \
	touch $@
