# SPDX-License-Identifier: Apache-2.0
"""``csrc/block_copy.h`` is plain enough for every compiler that has to take the same lines."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"
HEADER = CSRC / "block_copy.h"
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-pedantic", "-Werror", "-Wno-unused-function"]

# Calls every function, so that a compiler that drops unused ones still checks them.
USE = """
    unsigned int span = kvx_find_span(spans, num_spans, work);
    kvx_place place = kvx_locate(&spans[span], work);
    const kvx_run *run = &runs[tiles[place.tile].run];
    kvx_offsets at = kvx_unit_offsets(run, tiles[place.tile].first_unit + lane);
    unsigned int word = kvx_word_log2(run->width_log2, items[place.item].value_ptr);
    *out = kvx_page_address(run, items[place.item].block_id) +
           (unsigned long long)((at.page + at.value) << word);
"""
PARAMETERS = """
    const kvx_span *spans, unsigned int num_spans, const kvx_tile *tiles, const kvx_run *runs,
    const kvx_item *items, unsigned int work, unsigned int lane, unsigned long long *out
"""
HOST = f'#include "block_copy.h"\nvoid use({PARAMETERS});\nvoid use({PARAMETERS}) {{{USE}}}\n'
KERNEL = f'#include "block_copy.h"\nextern "C" __global__ void use({PARAMETERS}) {{{USE}}}\n'


def compiler(*names):
    """Return the first of these programs on the PATH; skip the test where there is none."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"none of {', '.join(names)} is on the PATH")


def compile_source(command, text, source):
    source.write_text(text)
    target = source.with_suffix(".o")
    done = subprocess.run(
        [*command, f"-I{CSRC}", "-c", str(source), "-o", str(target)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("standard", ["c99", "c11", "c17"])
def test_header_compiles_as_c(tmp_path, standard):
    command = [compiler("cc", "gcc", "clang"), f"-std={standard}", *WARNINGS]
    compile_source(command, HOST, tmp_path / "use.c")


def test_header_compiles_as_cpp(tmp_path):
    command = [compiler("c++", "g++", "clang++"), "-std=c++17", *WARNINGS]
    compile_source(command, HOST, tmp_path / "use.cpp")


def test_header_compiles_as_cuda(tmp_path):
    command = [compiler("nvcc"), "-std=c++17", "-x", "cu", "-Werror", "all-warnings"]
    compile_source(command, KERNEL, tmp_path / "use.cu")


def test_header_needs_nothing_that_nvrtc_lacks():
    text = HEADER.read_text()
    assert "#include" not in text
    code = "\n".join(
        line for line in text.splitlines() if not line.lstrip().startswith(("*", "/*"))
    )
    for name in ("size_t", "int64_t", "uint32_t", "__int128"):
        assert name not in code
