#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check the copies on this machine's GPU: build the native modules and the kernels in place, run
# tests/gpu, print the table of benchmarks/ratios_gpu.py. At most GPU_CHECK_SECONDS (360) in all.
#
#   bash scripts/gpu_check.sh                     with python3; PYTHON=... for another
#   bash scripts/gpu_check.sh --dry-run           say what would run
#   KVXFER_BENCH_SMOKE=1 bash scripts/gpu_check.sh    small sizes, times that mean nothing
#
# Needs torch, CuPy, NumPy, Cython, setuptools, pytest, pytest-benchmark, pytest-timeout and
# hypothesis in that Python, and a C compiler; nvcc where it is there. No vLLM, nothing from a
# network. Without a GPU it says so and exits with 0. What it prints is in build/gpu_check.txt too.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
LIMIT="${GPU_CHECK_SECONDS:-360}"
DRY_RUN="${1:-}"
failed=0

no_gpu() {
    "$PYTHON" - <<'PROBE'
import importlib.util
for name in ("torch", "cupy"):
    if importlib.util.find_spec(name) is None:
        raise SystemExit(f"{name} is not installed for this Python")
import torch
if not torch.cuda.is_available():
    raise SystemExit("torch finds no CUDA device")
PROBE
}

# Run a step with what is left of the time; go on after a failure, so that one run shows all.
step() {
    local name="$1" left=$((LIMIT - SECONDS))
    shift
    echo "== $name: $*"
    if [ "$DRY_RUN" = "--dry-run" ]; then return; fi
    if [ "$left" -le 0 ]; then
        echo "== $name: not run, the $LIMIT seconds are over"
        failed=1
        return
    fi
    timeout --kill-after=5 "$left" "$@"
    local status=$?
    echo "== $name: exit $status after $SECONDS s"
    [ "$status" -eq 0 ] || failed=1
}

check() {
    local reason
    if ! reason="$(no_gpu 2>&1)"; then
        echo "gpu_check: no GPU here, nothing was run: ${reason##*$'\n'}"
        [ "$DRY_RUN" = "--dry-run" ] || return 0
        echo "gpu_check: on a machine with one, these would run:"
    fi
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max --format=csv,noheader
    fi
    # the metadata that kvxfer reads its version from, without an installation
    step build "$PYTHON" setup.py --quiet egg_info build_ext --inplace --parallel 4
    # warnings of this machine's releases are not what is looked for here
    step tests "$PYTHON" -m pytest tests/gpu -q -W default -p no:cacheprovider --benchmark-disable
    step ratios "$PYTHON" benchmarks/ratios_gpu.py
    [ "$DRY_RUN" = "--dry-run" ] && return 0
    echo "gpu_check: $SECONDS s, $([ "$failed" -eq 0 ] && echo passed || echo FAILED)"
    return "$failed"
}

mkdir -p build
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 KVXFER_REQUIRE_GPU=1
check 2>&1 | tee build/gpu_check.txt
exit "${PIPESTATUS[0]}"
