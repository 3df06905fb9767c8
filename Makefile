# Two commands are enough: `make demo` shows it, `make test` proves it. Both set up what they need.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo test test-all check bench clean
help:  ## what can be typed here
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# torch first: whatever depends on it then finds the build that is pinned
.make/venv: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (torch, paceline)"
	@mkdir -p .make
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt) numpy
	@$(PIP) --editable .
	@touch $@

.make/dev: .make/venv
	@echo "setting up what the tests need"
	@$(PIP) $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['dev'])")
	@touch $@

demo: .make/venv  ## train the bundled digits on two local ranks, and show the result
	@$(BIN)/paceline run --nproc 2 --cpu --experiment demo examples/mnist/train.py --epochs 4

check: .make/dev  ## style, types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

test: check  ## all tests but the slowest cases of each kind
	@tests/system.sh
	@$(BIN)/python -m pytest -q -m "not slow" --reruns 2 --reruns-delay 2 -rsR

test-all: check  ## every test
	@tests/system.sh
	@$(BIN)/python -m pytest -q --reruns 2 --reruns-delay 2 -rsR

bench: .make/dev  ## every benchmark beside its peer
	@for each in $$(grep -l __main__ benchmarks/*.py); do $(BIN)/python $$each || exit 1; done

clean:  ## remove what make made
	rm -rf .make $(VENV) .mypy_cache .ruff_cache .pytest_cache
