# SPDX-License-Identifier: Apache-2.0
"""The contract of CUDA copies on a GPU, by the kernels of the build and by those of NVRTC."""

import numpy as np
import pytest
from block_copy_contract import PATTERN, BlockCopyContract

from kvxfer.blocks import BlockLayout, cuda, cuda_kernels, cuda_sources, gather
from kvxfer.errors import UnsupportedError

pytestmark = pytest.mark.gpu


class TestGpuCopies(BlockCopyContract):
    pass


@pytest.fixture
def compiled_now(device, monkeypatch):
    """Let the kernels be compiled by NVRTC, where it is installed."""
    monkeypatch.setattr(cuda_kernels, "_loaded", {})
    monkeypatch.setattr(cuda_sources, "find_binary", lambda folder, source: None)
    try:
        return cuda_kernels.load(0)
    except UnsupportedError as error:
        pytest.skip(f"NVRTC is not there: {error.__cause__}")


def test_gpu_kernels_of_nvrtc_copy_as_those_of_the_build(device, compiled_now):
    content = np.random.default_rng(1).integers(0, 256, (7, 9000), dtype=np.uint8)
    cache = device.rows(device.upload(content), 7)
    out = device.rows(device.upload(np.full_like(content, PATTERN)), 7)
    order = np.random.default_rng(2).permutation(7)
    assert compiled_now.origin == "nvrtc"
    gather(BlockLayout.from_tensors([cache]), order, out)
    assert np.array_equal(device.download(out), content[order])


def test_gpu_kernels_of_the_build_load(device):
    folder = cuda_sources.binary_folder()
    source = cuda_sources.read_source(cuda_sources.source_folder())
    if cuda_sources.find_binary(folder, source) is None:
        pytest.skip("this build had no nvcc")
    assert cuda_kernels.load(0).origin == "binary"


def test_gpu_layouts_of_tensors_of_any_dtype_are_gathered(device):
    torch = device.torch
    cache = torch.randn(6, 16, 8, 64, device=device.name).bfloat16()
    layout = BlockLayout.from_tensors([cache])
    out = torch.empty((2, layout.value_bytes), dtype=torch.uint8, device=device.name)
    gather(layout, torch.tensor([4, 1]), out)
    assert torch.equal(out.view(torch.bfloat16).view(2, 16, 8, 64), cache[[4, 1]])
    assert isinstance(cuda.copies_of(layout), cuda.CudaCopies)
