#!/usr/bin/env bash
# Cross-compiles the kernels for arm64 (NEON) and runs them under emulation. Needs ziglang from PyPI
# and qemu-aarch64 (Debian: qemu-user-static).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${PYTHON:-python3}" -m ziglang c++ -target aarch64-linux-musl -std=c++20 -O2 -static -Ic_api/src/cpu \
    -DMLX_H2O_ISA=baseline c_api/src/cpu/kernels/kernels.cpp c_api/src/cpu/kernels/dispatch.cpp \
    tools/kernel_check.cpp -o "$out/kernel_check"
qemu-aarch64-static "$out/kernel_check"
