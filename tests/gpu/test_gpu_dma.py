# SPDX-License-Identifier: Apache-2.0
"""Batches of a GPU's copy engine: by the driver's call and one by one, in the order of a stream."""

import numpy as np
import pytest

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, cuda_dma
from kvxfer.blocks.cuda_dma import CopyEngine, CopyEngineError
from kvxfer.blocks.cuda_fragments import Fragments

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 200_000_000  # about a tenth of a second
NUM_LAYERS, NUM_BLOCKS, PAGE_BYTES = 5, 64, 20_000
BLOCKS = [7, 3, 4, 63, 20, 0]
PATTERN = 0xA5


@pytest.fixture(params=["batch", "one by one"])
def engine(request, device, monkeypatch):
    if request.param == "batch" and cuda_dma.find_batch() is None:
        pytest.skip("this driver has no batched copies")
    if request.param == "one by one":
        monkeypatch.setattr(cuda_dma, "find_batch", lambda: None)
    yield CopyEngine(device.name)
    device.torch.cuda.synchronize()


class Job:
    """Pages of layers on the GPU, and pinned values of some blocks."""

    def __init__(self, device):
        torch = device.torch
        rng = np.random.default_rng(9)
        shape = (NUM_LAYERS, NUM_BLOCKS, PAGE_BYTES)
        self.content = rng.integers(0, 256, shape, dtype=np.uint8)
        self.cache = device.upload(self.content).view(shape)
        layout = BlockLayout.from_tensors(list(self.cache))
        values = np.full((len(BLOCKS), NUM_LAYERS, PAGE_BYTES), PATTERN, dtype=np.uint8)
        self.pinned = device.upload_pinned(values).view(values.shape)
        self.values = self.pinned.numpy()
        items = np.zeros(len(BLOCKS), dtype=ITEM_DTYPE)
        items["block_id"] = BLOCKS
        start, size = self.pinned.data_ptr(), layout.value_bytes
        items["value_ptr"] = start + np.arange(len(BLOCKS), dtype=np.uint64) * np.uint64(size)
        end = start + values.nbytes
        fragments = Fragments(layout)
        self.copies = {
            way: fragments.copies(items, (start, end), to_value=way == "out")
            for way in ("out", "in")
        }
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    def expected(self):
        return self.content[:, BLOCKS].swapaxes(0, 1)


def forget(copies):
    """Overwrite what a call was given, as whoever gets its memory next does."""
    for column in (copies.targets, copies.sources, copies.sizes):
        column[...] = 0


def test_gpu_batch_out_is_behind_its_stream_and_has_read_its_addresses(device, engine):
    torch, job = device.torch, Job(device)
    with torch.cuda.stream(job.stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        job.cache.bitwise_not_()  # the forward pass, not run yet
    engine.copy(job.copies["out"], job.stream)
    forget(job.copies["out"])
    ended = job.stream.record_event()
    assert not ended.query()
    with torch.cuda.stream(job.stream):
        job.cache.zero_()  # the blocks' next use
    ended.synchronize()
    assert np.array_equal(job.values, 255 - job.expected())


def test_gpu_batch_in_is_behind_its_stream_and_writes_nothing_else(device, engine):
    torch, job = device.torch, Job(device)
    job.values[...] = 255 - job.expected()
    with torch.cuda.stream(job.stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        before = job.cache.clone()  # the step before, not run yet
    engine.copy(job.copies["in"], job.stream)
    forget(job.copies["in"])
    ended = job.stream.record_event()
    assert not ended.query()
    ended.synchronize()
    expected = job.content.copy()
    expected[:, BLOCKS] = 255 - expected[:, BLOCKS]
    assert np.array_equal(before.cpu().numpy(), job.content)
    assert np.array_equal(job.cache.cpu().numpy(), expected)


def test_gpu_batches_beside_a_matmul_leave_both_results_right(device, engine):
    torch, job = device.torch, Job(device)
    generator = torch.Generator(device=device.name).manual_seed(1)
    left = torch.randn((2048, 2048), device=device.name, generator=generator).bfloat16()
    expected = left @ left
    torch.cuda.synchronize()
    products = []
    for _ in range(10):
        products.append(left @ left)
        engine.copy(job.copies["out"], job.stream)
    torch.cuda.synchronize()
    assert all(torch.equal(product, expected) for product in products)
    assert np.array_equal(job.values, job.expected())


def test_gpu_batch_on_the_default_stream_is_made_of_single_copies(device, engine):
    job = Job(device)
    engine.copy(job.copies["out"], device.torch.cuda.default_stream())
    device.torch.cuda.synchronize()
    assert np.array_equal(job.values, job.expected())


def test_gpu_batch_that_is_refused_is_an_error_and_ends_nothing(device):
    batch = cuda_dma.find_batch()
    if batch is None:
        pytest.skip("this driver has no batched copies")
    job = Job(device)
    with pytest.raises(CopyEngineError, match=r"of 30 copies.*\(CUDA_ERROR_INVALID_VALUE\)"):
        batch.copy(job.copies["out"], cuda_dma.REFUSED_STREAMS[0])
    CopyEngine(device.name).copy(job.copies["out"], job.stream)
    job.stream.synchronize()
    assert np.array_equal(job.values, job.expected())
