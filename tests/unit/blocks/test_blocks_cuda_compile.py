# SPDX-License-Identifier: Apache-2.0
"""nvcc and NVRTC take the kernels for every architecture; the machine code is what was meant."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from kvxfer.blocks import cuda_job, cuda_kernels, cuda_sources

CSRC = Path(__file__).resolve().parents[3] / "csrc"
REGISTERS_PER_MULTIPROCESSOR = 65536
WIDTHS = {16: ".128", 8: ".64", 4: "", 2: ".U16", 1: ".U8"}
NUM_LOADS = 4


def program(name):
    """Return a CUDA program: on the PATH, beside nvcc, or in triton's package; skip without one."""
    folders = [Path(found).resolve().parent for found in [shutil.which("nvcc")] if found]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    for found in (shutil.which(name), *(folder / name for folder in folders)):
        if found and Path(found).exists():
            return str(found)
    pytest.skip(f"{name} is not on the PATH of this machine")


def run_program(command):
    """Run one of NVIDIA's programs, which crash under a preloaded sanitizer, to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return (fatbin, ptxas' report) of one run of nvcc for all architectures that it knows."""
    nvcc = program("nvcc")
    listed = run_program([nvcc, "--list-gpu-code"]).stdout
    known = [each for each in cuda_sources.ARCHITECTURES if f"sm_{each}\n" in listed]
    assert 90 in known
    fatbin = tmp_path_factory.mktemp("kernels") / "block_copy.fatbin"
    done = run_program(
        [
            *(nvcc, "-fatbin", "-std=c++17", "-O3", "-Xptxas", "-v"),
            *("-Werror", "all-warnings", "-o", str(fatbin)),
            *(f"-gencode=arch=compute_{each},code=sm_{each}" for each in known),
            str(CSRC / "block_copy.cu"),
        ]
    )
    return fatbin, read_report(done.stderr), known


def read_report(text):
    """Return {(kernel, architecture): (stack, spilled, registers)} of ``ptxas -v``."""
    entry = re.compile(
        r"Compiling entry function '(?P<kernel>\w+)' for 'sm_(?P<arch>\d+)\w*'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return {
        (found["kernel"], int(found["arch"])): (
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
            int(found["registers"]),
        )
        for found in entry.finditer(text)
    }


def test_kernels_compile_for_every_architecture(compiled):
    _, report, known = compiled
    assert set(report) == {(name, each) for name in cuda_kernels.KERNEL_NAMES for each in known}


def test_kernels_spill_no_register_and_use_no_stack(compiled):
    _, report, _ = compiled
    assert {key: row[:2] for key, row in report.items() if row[:2] != (0, 0)} == {}


def test_kernels_fit_a_multiprocessor_as_often_as_the_full_quota_counts_on(compiled):
    _, report, _ = compiled
    for (name, arch), (_, _, registers) in report.items():
        ctas = cuda_job.ctas_per_multiprocessor(arch // 10)
        assert ctas * cuda_job.THREADS * registers <= REGISTERS_PER_MULTIPROCESSOR, (name, arch)


@pytest.fixture(scope="module")
def machine_code(compiled):
    """Return {(kernel, architecture): instructions} of the fatbin."""
    fatbin, _, _ = compiled
    listing = run_program([program("cuobjdump"), "-sass", str(fatbin)])
    code, key, arch = defaultdict(list), None, None
    for line in listing.stdout.splitlines():
        if found := re.search(r"arch = sm_(\d+)", line):
            arch = int(found[1])
        elif found := re.search(r"Function : (\w+)", line):
            key = (found[1], arch)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)", line):
            code[key].append(found[1])
    return code


@pytest.mark.parametrize("width", WIDTHS, ids="width={}".format)
def test_kernels_load_four_words_of_each_width_before_they_store_them(machine_code, width):
    for key, instructions in machine_code.items():
        moves = [name for name in map(streamed, instructions) if name]
        loads, stores = (f"{kind}{WIDTHS[width]}" for kind in ("LDG", "STG"))
        own = [name for name in moves if name in (loads, stores)]
        assert own == [loads] * NUM_LOADS + [stores] * NUM_LOADS, key


def streamed(instruction):
    """Return kind and width of a load or store that leaves the caches first, else None."""
    kind, *flags = instruction.split(".")
    if kind not in ("LDG", "STG") or "EF" not in flags:
        return None
    width = [flag for flag in flags if flag in ("128", "64", "U16", "U8")]
    return kind + "".join(f".{flag}" for flag in width)


def test_kernels_use_no_local_memory(machine_code):
    local = {
        key: [i for i in code if i.split(".")[0] in ("LDL", "STL")]
        for key, code in machine_code.items()
    }
    assert {key: found for key, found in local.items() if found} == {}


def test_kernels_load_a_run_into_registers_once(machine_code):
    """Beside the words, the machine code loads items, tiles and runs in one place each."""
    for key, instructions in machine_code.items():
        plain = [i for i in instructions if i.startswith("LDG") and "EF" not in i.split(".")]
        assert len(plain) <= 30, key


@pytest.fixture(scope="module")
def nvrtc():
    """Return libnvrtc: the loader's, beside nvcc, or of one of NVIDIA's Python packages."""
    folders = [Path(found).resolve().parents[1] for found in [shutil.which("nvcc")] if found]
    spec = importlib.util.find_spec("nvidia")
    folders += [Path(path) for path in (spec.submodule_search_locations or [])] if spec else []
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    names += [str(path) for folder in folders for path in folder.glob("**/libnvrtc.so*")]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("no libnvrtc on this machine")


@pytest.mark.parametrize("arch", cuda_sources.ARCHITECTURES, ids="sm={}".format)
def test_kernels_compile_with_nvrtc(nvrtc, arch):
    source = cuda_sources.read_source(CSRC)
    program = ctypes.c_void_p()
    handle = ctypes.byref(program)
    assert nvrtc.nvrtcCreateProgram(handle, source.encode(), b"block_copy.cu", 0, None, None) == 0
    texts = (f"--gpu-architecture=sm_{arch}", *cuda_kernels.NVRTC_OPTIONS)
    options = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
    failed = nvrtc.nvrtcCompileProgram(program, len(texts), options)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(handle)
    assert failed == 0, log.value.decode()
    assert "warning" not in log.value.decode()
