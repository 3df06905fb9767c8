# `make demo` shows what Paceline does, `make test` checks it. Both set up what they need.
SHELL := /bin/bash
# A Python that was compiled without optimization, as pyenv does by default, starts everything a fifth slower than the
# system's, which the tests use instead if it can make a virtual environment and compile extensions.
USABLE := import ensurepip, os, sys, sysconfig; path = sysconfig.get_path("include"); \
	optimized = sys.base_prefix == "/usr" or "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""); \
	sys.exit(sys.version_info < (3, 10) or not os.path.exists(path + "/Python.h") or not optimized)
PYTHON ?= $(shell for each in python3 /usr/bin/python3 python3; do $$each -c '$(USABLE)' 2>/dev/null && break; done; echo $$each)
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 6
EPOCHS ?= 4
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# pip would compile on one core, and all of it. Some packages hold files that no Python 3 can compile.
COMPILE := $(BIN)/python -m compileall -qq -j 0
UNUSED := -x 'transformers/models/(?!auto|gpt2)|/tests/'

.PHONY: help demo test test-all pytest system soak soak-guests check docs bench size clean
help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

# Install torch first, so that everything that depends on it finds the pinned build.
.make/venv: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (torch, paceline)"
	@mkdir -p .make
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt) numpy
	@$(PIP) --editable .
	@$(COMPILE) $(UNUSED) $(VENV)/lib || true
	@touch $@

.make/dev: .make/venv
	@echo "setting up the test tools"
	@$(PIP) $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['dev'])")
	@$(COMPILE) $(UNUSED) $(VENV)/lib || true
	@touch $@

demo: .make/venv  ## train on the bundled digits with two local ranks, and show the result
	@$(BIN)/paceline run --nproc 2 --cpu --experiment demo examples/mnist/train.py --epochs $(EPOCHS)
	@$(BIN)/paceline show
	@$(BIN)/paceline report --light -o demo-report.html

check: .make/dev  ## check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# Most tests wait for something: three workers per core of a small machine. A file stays on one worker, so that its
# fixtures are shared, and a worker stays in a folder of tests/ as long as it can (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --reruns 2 --reruns-delay 2 -rsR

system:
	@tests/system.sh

# Compile first: with PYTHONDONTWRITEBYTECODE, each of a thousand processes would compile Paceline for itself, and each
# rank the module of its test. Pytest has its own files for modules whose asserts it rewrites; collecting writes them.
pytest: .make/dev
	@$(COMPILE) src tests
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -qq --collect-only >/dev/null || true
	@$(PYTEST) $(SELECTED)

# Packages of the system are installed while pip installs those of Python, and types are checked beside the tests.
test:  ## run all tests except the slowest of each kind
	@$(MAKE) --no-print-directory -j2 system .make/dev
	@$(MAKE) --no-print-directory -j2 pytest check SELECTED='-m "not slow"'

test-all:  ## run every test
	@$(MAKE) --no-print-directory -j2 system .make/dev
	@REAL_COMMANDS=1 $(MAKE) --no-print-directory -j2 pytest check

MINUTES ?= 60
RUNS ?= 20
SEED ?= 0
NODES ?= 6
soak: .make/dev  ## break everything around RUNS=20 runs on a sandbox for MINUTES=60, and judge how they end
	@tests/system.sh
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --runs $(RUNS) --seed $(SEED) --nodes $(NODES)

size:  ## count statements, modules and packages against their budgets
	@$(PYTHON) tests/size.py

soak-guests: .make/dev  ## end guest scripts in every way, 200 times under load
	@$(BIN)/python tests/guests/soak.py

docs: .make/dev  ## write docs/reference from the code, and build the documentation site
	@$(BIN)/python docs/site/reference.py
	@$(BIN)/python docs/site/llms.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "open site/index.html in a browser"

bench: .make/dev  ## run every benchmark next to its peer
	@for each in $$(grep -l __main__ benchmarks/*.py); do $(BIN)/python $$each || exit 1; done

clean:  ## remove what make created
	rm -rf .make site $(VENV) .mypy_cache .ruff_cache .pytest_cache
