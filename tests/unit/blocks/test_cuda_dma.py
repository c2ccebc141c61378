# SPDX-License-Identifier: Apache-2.0
"""Batches of copies as a driver gets them: by a library with its functions that copies at once.

The library is compiled here, against NVIDIA's header where there is one: the compiler then compares
its functions with the driver's.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import dma_fakes
import numpy as np
import pytest
from cuda_fakes import FakeStream
from dma_fakes import STREAM, FakeRuntime

from kvxfer.blocks import cuda_dma
from kvxfer.blocks.cuda_dma import CopyEngine, CopyEngineError, find_batch
from kvxfer.blocks.cuda_fragments import Copies

DRIVER_SOURCE = r"""
#include <string.h>
#ifdef WITH_HEADER
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#else
#include <stddef.h>
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;
#define CUDAAPI
#endif

CUstream stream_of_call;
unsigned int flags_of_call;
int num_calls, refused = -1;

static CUresult copy(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                     CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                     size_t *failIdx, CUstream hStream) {
    size_t idx;
    ++num_calls;
    stream_of_call = hStream;
    flags_of_call = attrs->flags;
    if (count == 0 || numAttrs != 1 || attrsIdxs[0] != 0 || attrs->srcAccessOrder != 1) return 999;
    for (idx = count; idx-- > 0;) {
        if ((int)idx == refused) {
            if (failIdx) *failIdx = idx;
            return 1;
        }
        memcpy((void *)dsts[idx], (void *)srcs[idx], sizes[idx]);
    }
    return 0;
}

#ifdef OLDER
CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                                    size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
                                    size_t numAttrs, size_t *failIdx, CUstream hStream) {
    return copy(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream);
}
#endif
#ifdef NEWER
CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                                       size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs,
                                       size_t numAttrs, CUstream hStream) {
    return copy(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, NULL, hStream);
}
#endif
CUresult CUDAAPI cuGetErrorName(CUresult error, const char **pStr) {
    if (error != 1) return 1;
    *pStr = "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
"""
DRIVERS = {"12.8": ["-DOLDER"], "13.0": ["-DOLDER", "-DNEWER"], "12.4": []}
NAMES = {"12.8": "cuMemcpyBatchAsync", "13.0": "cuMemcpyBatchAsync_v2"}


def header_options():
    """Return what makes the compiler find NVIDIA's header, or nothing."""
    folders = [Path(nvcc).resolve().parents[1] for nvcc in [shutil.which("nvcc")] if nvcc]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia")
    for folder in folders:
        if (folder / "include" / "cuda.h").exists():
            return ["-DWITH_HEADER", f"-I{folder / 'include'}"]
    return []


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Return {version: path} of the libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on the PATH of this machine")
    folder = tmp_path_factory.mktemp("drivers")
    source = folder / "driver.c"
    source.write_text(DRIVER_SOURCE)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    paths = {version: folder / f"libcuda-{version}.so" for version in DRIVERS}
    for version, options in DRIVERS.items():
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Wno-unused-function", "-Werror"]
        command += [*options, *header_options(), str(source), "-o", str(paths[version])]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    return {version: str(path) for version, path in paths.items()}


@pytest.fixture(autouse=True)
def no_driver_found_yet():
    find_batch.cache_clear()
    yield
    find_batch.cache_clear()


@pytest.fixture(params=NAMES)
def version(request):
    return request.param


@pytest.fixture
def driver(drivers, version):
    """Return a driver with a batched copy, which nothing was asked of."""
    library = ctypes.CDLL(drivers[version])
    for name, value in (("num_calls", 0), ("refused", -1)):
        ctypes.c_int.in_dll(library, name).value = value
    return library


@pytest.fixture
def gpu(monkeypatch):
    return dma_fakes.install(monkeypatch)


def use_driver(monkeypatch, path):
    monkeypatch.setattr(cuda_dma, "find_batch", lambda: find_batch(path))


class Batch:
    """Pieces of two arrays, each from the one to the other; the copies keep neither alive."""

    def __init__(self, sizes=(5, 1, 4096)):
        self.source = np.random.default_rng(2).integers(0, 256, sum(sizes), dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        starts = np.cumsum([0, *sizes[:-1]], dtype=np.uint64)
        self.copies = Copies(
            np.uint64(self.target.ctypes.data) + starts,
            np.uint64(self.source.ctypes.data) + starts,
            np.array(sizes, dtype=np.uint64),
        )

    def is_done(self):
        return np.array_equal(self.target, self.source)


def test_driver_takes_a_batch_in_one_call_on_the_stream(monkeypatch, gpu, drivers, version, driver):
    use_driver(monkeypatch, drivers[version])
    batch = Batch()
    CopyEngine("cuda:0").copy(batch.copies, FakeStream(cuda_stream=STREAM))
    assert batch.is_done()
    assert ctypes.c_int.in_dll(driver, "num_calls").value == 1
    assert ctypes.c_void_p.in_dll(driver, "stream_of_call").value == STREAM
    assert ctypes.c_uint.in_dll(driver, "flags_of_call").value == cuda_dma.OVERLAP_WITH_COMPUTE
    assert gpu.cupy.cuda.runtime.calls == []


def test_newest_form_of_the_call_is_taken(drivers, version, caplog):
    assert find_batch(drivers[version]).name == NAMES[version]
    with caplog.at_level("INFO"):
        assert find_batch(drivers["12.4"]) is None
        assert find_batch("libnone.so") is None
    assert "older than CUDA 12.8" in caplog.text
    assert "libnone.so cannot be loaded" in caplog.text


def test_what_a_driver_refuses_is_an_error_that_says_what(
    monkeypatch, gpu, drivers, version, driver
):
    use_driver(monkeypatch, drivers[version])
    ctypes.c_int.in_dll(driver, "refused").value = 1
    batch = Batch()
    at_fault = ", copy 1 at fault" if version == "12.8" else ""
    with pytest.raises(CopyEngineError) as raised:
        CopyEngine("cuda:0").copy(batch.copies, FakeStream(cuda_stream=STREAM))
    assert str(raised.value) == (
        f"{NAMES[version]} of 3 copies, 4102 bytes{at_fault}, returned 1 (CUDA_ERROR_INVALID_VALUE)"
    )


def test_status_without_a_name_is_told_as_a_number(drivers, version, driver):
    batch = find_batch(drivers[version])
    nothing = Batch(()).copies
    with pytest.raises(CopyEngineError, match=r"returned 999 \(an unknown error\)"):
        batch.copy(nothing, STREAM)


@pytest.mark.parametrize("stream", [0, 1], ids=["null", "legacy"])
def test_streams_that_a_batch_is_refused_on_get_single_copies(
    monkeypatch, gpu, drivers, version, driver, stream
):
    use_driver(monkeypatch, drivers[version])
    batch = Batch()
    CopyEngine("cuda:0").copy(batch.copies, FakeStream(cuda_stream=stream))
    assert batch.is_done()
    assert ctypes.c_int.in_dll(driver, "num_calls").value == 0
    assert gpu.cupy.cuda.runtime.calls == [(FakeRuntime.memcpyDefault, stream)] * 3


def test_older_driver_gets_single_copies_on_the_stream(gpu, caplog):
    batch = Batch()
    with caplog.at_level("INFO"):
        CopyEngine("cuda:0").copy(batch.copies, FakeStream(cuda_stream=STREAM))
    assert batch.is_done()
    assert gpu.cupy.cuda.runtime.calls == [(FakeRuntime.memcpyDefault, STREAM)] * 3
    assert "one by one" in caplog.text


def test_single_copy_that_is_refused_is_named(gpu):
    batch = Batch()
    gpu.cupy.cuda.runtime.refused = 1
    with pytest.raises(CopyEngineError, match=r"copy 1 of 3, 1 bytes, was refused on cuda:0"):
        CopyEngine("cuda:0").copy(batch.copies, FakeStream(cuda_stream=STREAM))


def test_empty_batch_reaches_no_driver(monkeypatch, gpu, drivers, version, driver):
    use_driver(monkeypatch, drivers[version])
    CopyEngine("cuda:0").copy(Batch(()).copies, FakeStream(cuda_stream=STREAM))
    assert ctypes.c_int.in_dll(driver, "num_calls").value == 0


def test_copies_are_queued_with_their_device_current(gpu):
    engine = CopyEngine("cuda:3")
    seen = []
    gpu.cupy.cuda.runtime.memcpyAsync = lambda *_: seen.append(gpu.cupy.current_device())
    engine.copy(Batch((8,)).copies, FakeStream(cuda_stream=STREAM))
    assert seen == [3]
