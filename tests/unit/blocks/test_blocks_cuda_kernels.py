# SPDX-License-Identifier: Apache-2.0
"""Where the kernels come from: the binary of a build, NVRTC, or an error naming what to install."""

import json
import logging
import sys

import cuda_fakes
import pytest
from cuda_fakes import FakeCupy

from kvxfer.blocks import cuda_job, cuda_kernels, cuda_sources
from kvxfer.errors import UnsupportedError


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Let sources and binary be looked for in a package folder of their own."""
    sources = cuda_sources.source_folder()
    for name in cuda_sources.SOURCE_NAMES:
        (tmp_path / name).write_text((sources / name).read_text())
    monkeypatch.setattr(cuda_sources, "PACKAGED", tmp_path)
    return tmp_path


def add_binary(folder, source_sha256=None):
    """Put a binary and its record into a folder; by default it belongs to the sources there."""
    source_sha256 = source_sha256 or cuda_sources.hash_source(cuda_sources.read_source(folder))
    (folder / cuda_sources.BINARY_NAME).write_bytes(b"a fatbin")
    record = json.dumps({"source_sha256": source_sha256})
    (folder / cuda_sources.RECORD_NAME).write_text(record)
    return folder / cuda_sources.BINARY_NAME


def test_sources_are_one_text_without_includes():
    text = cuda_sources.read_source(cuda_sources.source_folder())
    assert "#include" not in text
    assert "kvx_find_span" in text
    assert all(f"{name}(" in text for name in cuda_kernels.KERNEL_NAMES)


def test_sources_bound_a_cta_as_quotas_do():
    text = cuda_sources.read_source(cuda_sources.source_folder())
    assert f"#define KVX_MAX_THREADS {cuda_job.THREADS}\n" in text


def test_sources_that_do_not_include_the_header_are_refused(folders):
    (folders / "block_copy.cu").write_text("/* nothing */\n")
    with pytest.raises(ValueError, match="does not include its header in one line"):
        cuda_sources.read_source(folders)


def test_kernels_come_from_the_binary_of_a_build(folders, monkeypatch):
    _, cupy = cuda_fakes.install(monkeypatch)
    binary = add_binary(folders)
    assert cuda_kernels.load(0).origin == "binary"
    assert cupy.modules == [{"path": str(binary)}]


def test_kernels_are_loaded_once_per_device(folders, monkeypatch):
    _, cupy = cuda_fakes.install(monkeypatch)
    assert cuda_kernels.load(0) is cuda_kernels.load(0)
    assert cuda_kernels.load(1) is not cuda_kernels.load(0)
    assert len(cupy.modules) == 2


def test_kernels_are_compiled_where_no_build_had_nvcc(folders, monkeypatch):
    _, cupy = cuda_fakes.install(monkeypatch)
    assert cuda_kernels.load(0).origin == "nvrtc"
    source = cuda_sources.read_source(folders)
    assert cupy.modules == [{"code": source, "options": ("-std=c++17",)}]


@pytest.mark.parametrize(
    "record", ['{"source_sha256": "0"}', "{", "[]", '{"source_sha256": 1}', None]
)
def test_kernels_of_a_stale_binary_are_not_launched(folders, monkeypatch, caplog, record):
    cuda_fakes.install(monkeypatch)
    add_binary(folders)
    (folders / cuda_sources.RECORD_NAME).unlink()
    if record is not None:
        (folders / cuda_sources.RECORD_NAME).write_text(record)
    with caplog.at_level(logging.WARNING):
        assert cuda_kernels.load(0).origin == "nvrtc"
    assert "was not made of the sources that are here" in caplog.text


@pytest.mark.parametrize("name", cuda_sources.SOURCE_NAMES)
def test_kernels_binary_is_stale_once_a_source_changes(folders, name):
    source = cuda_sources.read_source(folders)
    binary = add_binary(folders)
    assert cuda_sources.find_binary(folders, source) == binary
    with (folders / name).open("a") as file:
        file.write("/* a change */\n")
    assert cuda_sources.find_binary(folders, cuda_sources.read_source(folders)) is None


def test_kernels_of_a_binary_that_does_not_load_are_compiled(folders, monkeypatch, caplog):
    error = RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
    cuda_fakes.install(monkeypatch, FakeCupy(failing={"path": error}))
    add_binary(folders)
    with caplog.at_level(logging.WARNING):
        assert cuda_kernels.load(0).origin == "nvrtc"
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no libnvrtc.so.13"), OSError("no libnvrtc")])
def test_kernels_without_nvrtc_are_an_error_that_says_what_to_install(folders, monkeypatch, error):
    cuda_fakes.install(monkeypatch, FakeCupy(failing={"code": error}))
    with pytest.raises(UnsupportedError, match=r"no libnvrtc.*pip install 'cupy-cuda13x\[ctk\]'"):
        cuda_kernels.load(0)


def test_kernels_that_do_not_compile_are_an_error(folders, monkeypatch):
    cupy = FakeCupy()
    cupy.failing["code"] = cupy.cuda.compiler.CompileException("line 3")
    cuda_fakes.install(monkeypatch, cupy)
    with pytest.raises(UnsupportedError, match="line 3"):
        cuda_kernels.load(0)


@pytest.mark.parametrize(
    ("cuda", "extra"), [("12.9", "cuda12x"), ("13.0", "cuda13x"), (None, "cuda13x")]
)
def test_kernels_without_cupy_are_an_error_that_names_the_extra(monkeypatch, cuda, extra):
    torch, _ = cuda_fakes.install(monkeypatch)
    torch.version.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=rf"need CuPy.*pip install 'kvxfer\[{extra}\]'"):
        cuda_kernels.load(0)
