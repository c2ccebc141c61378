# SPDX-License-Identifier: Apache-2.0
"""When copies on a GPU run: in the order of their stream, and not on return."""

import numpy as np
import pytest
from block_copy_contract import PATTERN, PlainJob

from kvxfer.blocks import cuda

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 200_000_000  # about a tenth of a second
NUM_BLOCKS, BLOCK_BYTES = 64, 40_000
SIZES = pytest.mark.parametrize("num_items", [8, 4000], ids=["inline", "uploaded"])


@pytest.fixture
def torch(device):
    yield device.torch
    device.torch.cuda.synchronize()


def make_job(device, num_items=NUM_BLOCKS, block_bytes=BLOCK_BYTES):
    return PlainJob(device, num_blocks=NUM_BLOCKS, block_bytes=block_bytes, num_items=num_items)


@SIZES
def test_gpu_copy_has_not_run_on_return_and_has_read_its_items(device, torch, num_items):
    job = make_job(device, num_items, 256)
    stream = torch.cuda.Stream()
    job.copies.gather_items(job.items, job.values, stream=stream)  # loads what is loaded lazily
    stream.synchronize()
    job.values.fill_(PATTERN)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    job.copies.gather_items(job.items, job.values, stream=stream)
    ended = stream.record_event()
    assert not ended.query()
    job.items[:] = 0
    ended.synchronize()
    assert np.array_equal(device.download(job.values), job.content[job.ids].ravel())


@pytest.mark.parametrize("wait", ["same_stream", "event"])
def test_gpu_gather_sees_what_a_slow_writer_wrote_before_it(device, torch, wait):
    job = make_job(device)
    writer = torch.cuda.Stream()
    reader = writer if wait == "same_stream" else torch.cuda.Stream()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(SLEEP_CYCLES)
        job.cache.bitwise_not_()
    if wait == "event":
        reader.wait_event(writer.record_event())
    job.copies.gather_items(job.items, job.values, stream=reader)
    reader.synchronize()
    assert np.array_equal(device.download(job.values), 255 - job.content[job.ids].ravel())


def test_gpu_scatter_leaves_blocks_alone_until_a_slow_reader_has_read_them(device, torch):
    job = make_job(device, 16)
    unique = np.unique(job.ids, return_index=True)[1]
    reader, writer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLEEP_CYCLES)
        seen = job.cache.clone()
    writer.wait_event(reader.record_event())
    job.copies.scatter_items(job.items[unique], job.values, stream=writer)
    torch.cuda.synchronize()
    assert np.array_equal(device.download(seen), job.content.ravel())
    expected = job.content.copy()
    expected[job.ids[unique]] = PATTERN
    assert np.array_equal(device.download(job.cache), expected.ravel())


def test_gpu_copy_on_the_current_stream_waits_for_what_is_queued_there(device, torch):
    job = make_job(device)
    torch.cuda._sleep(SLEEP_CYCLES)
    job.cache.zero_()
    job.copies.gather_items(job.items, job.values)
    assert not device.download(job.values).any()


@SIZES
def test_gpu_memory_that_a_copy_still_writes_is_given_to_nobody_else(device, torch, num_items):
    job = make_job(device, num_items, 512)
    stream = torch.cuda.Stream()
    num_bytes = job.values.numel()
    target = device.empty(num_bytes)
    items = job.items_at(target.data_ptr())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    job.copies.gather_items(items, target, stream=stream)
    del target
    others = [device.empty(num_bytes).fill_(PATTERN) for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((other == PATTERN).all()) for other in others)


def test_gpu_plan_of_a_layout_that_is_gone_outlives_its_copies(device, torch):
    job = make_job(device)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    copies = cuda.CudaCopies(job.layout)
    copies.gather_items(job.items, job.values, stream=stream)
    del copies
    others = [device.empty(4096).fill_(PATTERN) for _ in range(64)]
    torch.cuda.synchronize()
    assert np.array_equal(device.download(job.values), job.content[job.ids].ravel())
    del others


@pytest.mark.parametrize("quota", ["background", "full"])
def test_gpu_copies_beside_a_matmul_leave_both_results_right(device, torch, quota):
    job = make_job(device, 2000, 4096)
    generator = torch.Generator(device=device.name).manual_seed(1)
    left, right = (
        torch.randn((2048, 2048), device=device.name, generator=generator).bfloat16()
        for _ in range(2)
    )
    expected = left @ right
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    products = []
    for _ in range(10):
        products.append(left @ right)
        job.copies.gather_items(job.items, job.values, stream=stream, quota=quota)
    torch.cuda.synchronize()
    assert all(torch.equal(product, expected) for product in products)
    assert np.array_equal(device.download(job.values), job.content[job.ids].ravel())


def test_gpu_pinned_values_are_written_straight_from_the_kernel(device, torch):
    job = make_job(device, 100, 5000)
    pinned = device.upload_pinned(np.full(job.values.numel(), PATTERN, dtype=np.uint8))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    job.copies.gather_items(job.items_at(pinned.data_ptr()), pinned, stream=stream)
    stream.synchronize()
    assert np.array_equal(pinned.numpy(), job.content[job.ids].ravel())
