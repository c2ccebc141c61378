# SPDX-License-Identifier: Apache-2.0
"""Which fragments the copy engine moves, and how start-up finds that out; no GPU needed."""

from types import SimpleNamespace

import cuda_fakes
import dma_fakes
import numpy as np
import pytest
from cuda_fakes import FakeTensor

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, StagingPool
from kvxfer.blocks.cuda_calibration import SMALLEST_FRAGMENT_BYTES, calibrate
from kvxfer.blocks.cuda_dma import CopyEngineError
from kvxfer.blocks.cuda_mover import NEVER_BYTES, USUAL_DMA_BYTES, CudaMover
from kvxfer.blocks.cuda_queues import TorchQueues

NUM_BLOCKS, BLOCK_BYTES = 40, 64 << 10
SLOT_BYTES = 1 << 20


@pytest.fixture
def gpu(monkeypatch):
    return dma_fakes.install(monkeypatch)


class Rank:
    """A cache on the fake GPU whose blocks are one fragment each, and a mover over it."""

    def __init__(self, gpu, *, block_bytes=BLOCK_BYTES, **thresholds):
        gpu.cuda.Stream = dma_fakes.NumberedStream
        memory = cuda_fakes.aligned(NUM_BLOCKS * block_bytes).reshape(NUM_BLOCKS, -1)
        self.content = np.random.default_rng(3).integers(0, 256, memory.shape, dtype=np.uint8)
        memory[...] = self.content
        self.cache = FakeTensor(memory)
        self.layout = BlockLayout.from_tensors([self.cache])
        self.staging = StagingPool(3, SLOT_BYTES)
        self.mover = CudaMover(
            TorchQueues(self.layout),
            self.staging,
            num_pack_lanes=1,
            num_unpack_lanes=1,
            device_bytes=2 * SLOT_BYTES,
            **thresholds,
        )

    def job(self, blocks, slot):
        size = self.content.shape[1]
        items = np.zeros(len(blocks), dtype=ITEM_DTYPE)
        items["block_id"] = blocks
        items["value_ptr"] = slot.ptr + np.arange(len(blocks), dtype=np.uint64) * np.uint64(size)
        return items, slot, len(blocks) * size, self.mover.mark()


@pytest.mark.parametrize("from_bytes", [1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_copy_engine_moves_large_fragments_there_and_back(gpu, from_bytes):
    rank = Rank(gpu, dma_from_bytes=from_bytes)
    with rank.staging.acquire(0) as slot:
        rank.mover.pack(*rank.job([7, 3, 39], slot)).wait()
        rank.mover.unpack(*rank.job([0, 1, 2], slot))
    assert np.array_equal(rank.cache.array[:3], rank.content[[7, 3, 39]])
    assert np.array_equal(rank.cache.array[3:], rank.content[3:])
    by_engine = from_bytes <= BLOCK_BYTES
    assert len(gpu.cupy.cuda.runtime.calls) == (3 + 1 if by_engine else 0)
    assert len(gpu.cupy.launches) == (0 if by_engine else 2)


def test_copy_engine_needs_no_device_memory(gpu):
    gpu.free_bytes = 4096  # for the plan
    rank = Rank(gpu, dma_from_bytes=1)
    with rank.staging.acquire(0) as slot:
        rank.mover.pack(*rank.job([5], slot)).wait()
        assert bytes(slot.buffer[:BLOCK_BYTES]) == rank.content[5].tobytes()
    assert gpu.cupy.launches == []


@pytest.mark.parametrize("kind", ["pack", "unpack"])
def test_kernels_copy_all_that_comes_after_a_batch_that_was_refused(gpu, kind):
    """On the same lanes: there is one of each kind."""
    rank = Rank(gpu, dma_from_bytes=1)
    gpu.cupy.cuda.runtime.refused = 0
    with rank.staging.acquire(0) as slot:
        with pytest.raises(CopyEngineError):
            getattr(rank.mover, kind)(*rank.job([1], slot))
        rank.mover.pack(*rank.job([2], slot)).wait()
        assert bytes(slot.buffer[:BLOCK_BYTES]) == rank.content[2].tobytes()
        rank.mover.unpack(*rank.job([3], slot))
    assert np.array_equal(rank.cache.array[3], rank.content[2])
    assert gpu.cupy.cuda.runtime.calls == []


def clock_of(mover, by_engine_s):
    """Return a clock by which a kernel takes a second, the copy engine ``by_engine_s``."""
    state = SimpleNamespace(now=0.0, calls=0)

    def clock():
        state.calls += 1
        if state.calls % 2 == 0:
            state.now += by_engine_s if mover.dma_from_bytes == 1 else 1.0
        return state.now

    return clock


@pytest.mark.parametrize(
    ("by_engine_s", "expected"),
    [(0.5, BLOCK_BYTES), (1.0, BLOCK_BYTES), (1.1, BLOCK_BYTES + 1)],
    ids=["faster", "a tie", "slower"],
)
def test_calibration_gives_fragments_to_the_faster(gpu, caplog, by_engine_s, expected):
    rank = Rank(gpu)
    with caplog.at_level("INFO"):
        calibrate(rank.mover, rank.layout, rank.staging, clock_of(rank.mover, by_engine_s))
    assert rank.mover.dma_from_bytes == expected
    assert f"by the copy engine from {expected} bytes on" in caplog.text
    assert np.array_equal(rank.cache.array, rank.content)
    assert rank.staging.num_free == 3


def test_calibration_measures_copies_that_do_not_merge(gpu):
    rank = Rank(gpu)
    calibrate(rank.mover, rank.layout, rank.staging, clock_of(rank.mover, 1.0))
    num_blocks = SLOT_BYTES // BLOCK_BYTES
    assert len(gpu.cupy.cuda.runtime.calls) % num_blocks == 0
    assert len(gpu.cupy.cuda.runtime.calls) >= 2 * num_blocks


def test_calibration_without_large_fragments_measures_none(gpu):
    rank = Rank(gpu, block_bytes=SMALLEST_FRAGMENT_BYTES // 2)
    calibrate(rank.mover, rank.layout, rank.staging)
    assert rank.mover.dma_from_bytes == USUAL_DMA_BYTES
    assert gpu.cupy.cuda.runtime.calls == []


def test_copy_engine_that_does_not_work_leaves_everything_to_kernels(gpu, caplog):
    rank = Rank(gpu)
    gpu.cupy.cuda.runtime.refused = 5
    calibrate(rank.mover, rank.layout, rank.staging)
    assert rank.mover.dma_from_bytes == NEVER_BYTES
    assert "kernels copy everything: copy 5 of" in caplog.text
    with rank.staging.acquire(0) as slot:
        rank.mover.pack(*rank.job([2], slot)).wait()
        assert bytes(slot.buffer[:BLOCK_BYTES]) == rank.content[2].tobytes()
