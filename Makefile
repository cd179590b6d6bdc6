# Everything below works from a fresh clone with Python 3.11+ and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
# On Linux MLX's CPU backend is an extra; on a Mac the wheel has Metal.
EXTRAS := $(if $(filter Linux,$(shell uname -s)),cpu$(comma)dev,dev)
# The oldest mlx-lm whose cache protocol is served: it still has meta_state.
OLD_MLX_LM := 0.31.3
CXX_SOURCES := $(wildcard python/src/*.* python/src/kernels/*.*)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-old-mlx-lm sanitize bench lint format clean

demo: $(VENV)/.installed
	$(BIN)/mlx_h2o compare --out out

test: lint test-old-mlx-lm
	$(BIN)/pytest
	$(MAKE) sanitize
	$(BIN)/python tools/check_macos_build.py

bench: $(VENV)/.installed
	$(BIN)/mlx_h2o bench --out out

# The kernels' tests on an instrumented build. (MLX itself is not instrumented, and keeps some of
# what it allocated until the process ends, so leaks are not looked for.)
SANITIZED := build/sanitize
sanitize: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S python -B $(SANITIZED) \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DMLX_H2O_SANITIZE=ON -DMLX_H2O_WIDE=ON
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(SANITIZED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 MLX_H2O_EXTENSION=$$(echo $(SANITIZED)/_ext*.so) \
	    $(BIN)/pytest -p no:cacheprovider tests/test_cpu_kernels.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

# The seams with mlx-lm, on its older protocol. (Its own phi3small crashes with a current MLX.)
test-old-mlx-lm: .compat/mlx_lm
	PYTHONPATH=.compat $(BIN)/pytest tests/test_routing.py tests/test_model_families.py \
	    tests/test_prompt_cache.py -k "not phi3small"

.compat/mlx_lm: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .compat mlx-lm==$(OLD_MLX_LM)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# Editable, so that a changed source needs no new installation.
$(VENV)/.installed: pyproject.toml python/CMakeLists.txt $(CXX_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit("mlx-h2o needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) .compat build out tests/metal/.build .pytest_cache .mypy_cache .ruff_cache .hypothesis
