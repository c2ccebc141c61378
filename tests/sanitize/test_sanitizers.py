# SPDX-License-Identifier: Apache-2.0
"""That the sanitizer run can fail: a fault inside each native module ends the process.

The other tests of ``make test-sanitize`` show that the native code is free of the faults which the
sanitizers see; these show that they see them, in our modules and not only in the runtime.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer

if os.environ.get("KVXFER_SANITIZE", "") != "1":
    pytest.skip("runs on a sanitizer build: make test-sanitize", allow_module_level=True)

NATIVE = Path(kvxfer.__file__).parent / "_native"

READ_PAST_A_BUFFER = """
import ctypes, numpy as np
from kvxfer.blocks import ITEM_DTYPE, BlockLayout, host
layout = BlockLayout.from_tensors([np.zeros((2, 4096), np.uint8)])
malloc = ctypes.CDLL(None).malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
items = np.zeros(1, ITEM_DTYPE)
items["value_ptr"] = malloc({num_bytes})
host.gather_items(layout, items)
"""
SHIFT_BEYOND_THE_WORD = """
from kvxfer._native import block_copy
block_copy.divide(1, 1, {shift})
"""


def run(code):
    """Run ``code`` in a child with this process's build and preloads; return status and errors."""
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return child.returncode, child.stderr


def test_tests_run_on_the_sanitizer_build():
    assert "sanitize" in NATIVE.parts


def test_every_native_module_is_instrumented():
    modules = sorted(NATIVE.glob("*.so"))
    assert [path.name.partition(".")[0] for path in modules] == ["block_copy", "hits", "keys"]
    for path in modules:
        content = path.read_bytes()
        assert b"__asan_report_load" in content, path.name
        assert b"__ubsan_handle_" in content, path.name


def test_a_copy_past_the_end_of_a_value_ends_the_process():
    status, errors = run(READ_PAST_A_BUFFER.format(num_bytes=4095))
    assert status == 99, errors
    assert "AddressSanitizer: heap-buffer-overflow" in errors


def test_the_same_copy_into_a_whole_value_passes():
    assert run(READ_PAST_A_BUFFER.format(num_bytes=4096)) == (0, "")


def test_a_shift_beyond_the_word_ends_the_process():
    status, errors = run(SHIFT_BEYOND_THE_WORD.format(shift=64))
    assert status != 0
    assert "runtime error: shift exponent 64 is too large" in errors


def test_the_same_call_with_a_shift_in_range_passes():
    assert run(SHIFT_BEYOND_THE_WORD.format(shift=63)) == (0, "")
