# make run    sets everything up and trains a CNN on real handwritten digits
# make test   sets everything up, checks style and types, runs all tests
# make test-gpu           tests/gpu on the GPUs there are, with PYTHON as it is: nothing is installed
# make test-gpu-sanitize  every kernel under compute-sanitizer
# make native compiles the host device in place after a change in native/
# make lint   ruff and mypy
# make clean  removes what the others made
#
# PYTHON=python3.13 chooses the interpreter, VENV=folder where it is set up.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SANITIZER ?= compute-sanitizer

BIN := $(VENV)/bin
SETUP := pyproject.toml native/hatch_build.py
comma := ,
# On a machine with an NVIDIA driver `make run` takes the GPUs, so it needs their libraries.
RUN_EXTRAS := cli,data$(if $(shell command -v nvidia-smi),$(comma)cu13)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile --editable

.NOTPARALLEL: # an install compiles the library, so a rule beside it would compile it twice
.PHONY: run test test-installed test-gpu test-gpu-sanitize native lint clean

run: $(VENV)/.run native
	$(BIN)/python -m trlow train --device auto --report report.json $(ARGS)

test: lint test-installed
	$(BIN)/python -m pytest $(ARGS)

# A part of the tests against a wheel, in a folder where the checkout cannot be imported.
test-installed: $(VENV)/.test native
	$(BIN)/python tests/installed.py

test-gpu: native
	$(PYTHON) -m pytest tests/gpu $(ARGS)

# First a mistake of each kind, which has to be found: exit code 3. With padding an overrun into the
# next array is one, too.
MEMCHECK := PYTHONPATH=.:tests $(SANITIZER) --error-exitcode 3 --print-limit 5 --tool memcheck --padding 64
RACECHECK := PYTHONPATH=.:tests $(SANITIZER) --error-exitcode 3 --print-limit 5 --tool racecheck
test-gpu-sanitize: native
	$(MEMCHECK) $(PYTHON) tests/gpu/every_kernel.py --plant overrun; test $$? -eq 3
	$(RACECHECK) $(PYTHON) tests/gpu/every_kernel.py --plant race; test $$? -eq 3
	$(MEMCHECK) $(PYTHON) tests/gpu/every_kernel.py --exact
	$(RACECHECK) $(PYTHON) tests/gpu/every_kernel.py --exact

# Compiles only what changed.
native:
	$(PYTHON) native/build.py

lint: $(VENV)/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) trlow/_native build dist report.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(SETUP) | $(BIN)/python
	$(INSTALL) '.[$(RUN_EXTRAS)]'
	touch $@

$(VENV)/.test: $(SETUP) | $(BIN)/python
	$(INSTALL) '.[dev]'
	touch $@
