#!/usr/bin/env bash
# Installs the compiler and the assembler of the kernels, NVRTC and ptxas, from pip packages into
# target/test-tools/cuda. Whoever uses kvfs needs neither: the driver compiles the PTX.
#
#   kernels/install-tools.sh
#
#   KVFS_TEST_PYTHON   a Python with pip (python3)
set -euo pipefail
cd "$(dirname "$0")/.."

# CUDA 13 has left compute_52 behind.
PACKAGES=(nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-nvcc-cu12==12.9.86)

tools=$PWD/target/test-tools/cuda
if [ -x "$tools/nvidia/cuda_nvcc/bin/ptxas" ] &&
    [ -e "$tools/nvidia/cuda_nvrtc/lib/libnvrtc.so.12" ]; then
    exit 0
fi
"${KVFS_TEST_PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps \
    --target "$tools" "${PACKAGES[@]}"
