#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Run a command on the native modules in build/sanitize, under gcc's sanitizers:
#
#   KVXFER_SANITIZE=1 python setup.py build --build-base build/sanitize \
#       --build-temp build/sanitize/temp --build-lib build/sanitize/lib
#   sh scripts/sanitize.sh .venv/bin/pytest tests/sanitize tests/unit/blocks
#
# The first fault ends the process. Leaks are not looked for: the interpreter and its extension
# modules keep memory for the life of the process, so every run would report theirs
# (tests/integration/test_leaks.py looks for ours). The allocator is malloc, which the sanitizer
# watches; Python's own would hide small overflows in its arenas. libstdc++ comes along because
# ASan has to find the exceptions of C++ libraries (libzmq) when the process starts.
set -eu
library() { "${CC:-gcc}" -print-file-name="$1"; }
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
[ -f "$(library libasan.so)" ] || { echo "sanitize.sh: gcc has no libasan.so here" >&2; exit 2; }

# The real names, because libasan.so may be a linker script.
preload="$(readlink -f "$(library libasan.so)") $(readlink -f "$(library libstdc++.so.6)")"
exec env LD_PRELOAD="$preload" KVXFER_SANITIZE=1 PYTHONMALLOC=malloc PYTHONSAFEPATH=1 \
    PYTHONPATH="$root/build/sanitize/lib" \
    ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=1:abort_on_error=0:exitcode=99" \
    UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:exitcode=98" "$@"
