#!/usr/bin/env bash
# Runs the tests of the Python package that need a real engine, on the CPU: transformers over PyTorch, and MLX-LM, LMCache,
# SGLang's storage layer and vLLM where the interpreter has them (skipped with a line elsewhere; they depend on CUDA or on
# another build of PyTorch, so they are not fetched here).
#
#   mount-scripts/test-engines.sh [--figures DIRECTORY] [ARGUMENTS OF pytest]
#
# Installs pinned wheels into target/test-tools/engines the first time. PyTorch's wheel for Linux brings CUDA along, some GB
# to fetch and to keep; an environment without CUDA had 1.6 GB, which KVFS_ENGINES_PYTHON can name (below).
# KVFS_ENGINES_PYTHON names an interpreter that has both already: it gets the wheel of this tree.
# Then the tests take one to two minutes on two busy cores, with vLLM about eight. Needs root and /dev/fuse.
#
# With --figures the time to the first token (also of vLLM), blocks of vLLM's tiers, and LMCache's own benchmark, are measured as well, with an
# optimised build, below DIRECTORY on a disk.
set -euo pipefail
cd "$(dirname "$0")/.."

PACKAGES=(torch==2.13.0 transformers==5.24.0 numpy==2.4.6 pytest==9.2.0)

figures='' build=(--dev)
if [ "${1-}" = --figures ]; then
    [ $# -ge 2 ] || { echo "usage: mount-scripts/test-engines.sh [--figures DIRECTORY] [ARGUMENTS]" >&2; exit 2; }
    figures=$(realpath "$2") build=()
    shift 2
fi

python=${KVFS_ENGINES_PYTHON-}
if [ -z "$python" ]; then
    tools=$PWD/target/test-tools/engines
    python=$tools/bin/python
    if ! "$python" -c 'import torch, transformers, numpy, pytest' 2>/dev/null; then
        echo "test-engines.sh: fetching ${PACKAGES[*]}: some minutes" >&2
        python3 -m venv "$tools"
        "$python" -m pip install --quiet --disable-pip-version-check "${PACKAGES[@]}"
    fi
fi

wheel=$(mount-scripts/build-wheel.sh ${build[@]+"${build[@]}"})
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"

tests=$PWD/python/tests benches=$PWD/python/benches
# Not where the package's sources lie: what is installed is to be tested.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONDONTWRITEBYTECODE=1 TRANSFORMERS_OFFLINE=1
export KVFS_TEST_DIR=${KVFS_TEST_DIR:-$scratch}
# A module that is skipped as a whole is none that passed: pytest ends with 5 then.
"$python" -m pytest -q -p no:cacheprovider -rs "$tests/test_transformers.py" \
    "$tests/test_transformers_mapped.py" "$tests/test_transformers_windows.py" "$tests/test_mlx.py" "$tests/test_lmcache.py" "$tests/test_sglang.py" \
    "$tests/test_vllm.py" "$tests/test_vllm_tier.py" "$tests/test_vllm_engine.py" "$@"
if [ -n "$figures" ]; then
    "$python" "$benches/first_token.py" "$figures"
    "$python" "$benches/mapped_attention.py" "$figures"
    if "$python" -c 'import mlx_lm' 2>/dev/null; then "$python" "$benches/mlx_first_token.py" "$figures"; fi
    if "$python" -c 'import lmcache' 2>/dev/null; then "$python" "$benches/level2.py" "$figures"; fi
    if "$python" -c 'import vllm' 2>/dev/null; then "$python" "$benches/vllm_first_token.py" "$figures"; fi
    if "$python" -c 'import vllm' 2>/dev/null; then "$python" "$benches/vllm_tier.py" "$figures"; fi
fi
