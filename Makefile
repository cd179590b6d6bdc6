# Everything below works from a fresh clone with Python 3.11+ and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint format clean

demo: $(VENV)/.installed
	$(BIN)/mlx_h2o compare --out out

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On Linux MLX's CPU backend is an extra; on a Mac the wheel has Metal.
# Editable, so that a changed source needs no new installation.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlx-h2o needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[$(if $(filter Linux,$(shell uname -s)),cpu$(comma)dev,dev)]'
	touch $@

clean:
	rm -rf $(VENV) build out .pytest_cache .mypy_cache .ruff_cache .hypothesis
